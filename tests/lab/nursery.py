"""A process that has everything imported and forks a child for each request, so that one can be killed every second.

A request is a line of JSON: `settings` for `lab.sweep`, or `arguments` for the command line; `log` is a file for what
the child prints. The answer is the child's process id; when it has ended, `PID STATUS` follows.
"""

import importlib
import json
import os
import sys
import threading
import warnings
from pathlib import Path

import jax

import largeprompt
from largeprompt import cli, engine, lab


class Aloud(lab.Watcher):
    """Says when it works, and which runs it has carried out."""

    def moved(self, run, step, speed, risk):
        if step % 300 == 0 and run.hash not in self.__dict__:  # a step with a risk: by then all is compiled
            self.__dict__[run.hash] = True
            print("working", run.hash, flush=True)

    def ended(self, run, found):
        print("found" if found else "done", run.hash, flush=True)

    def noticed(self, message):
        print("noticed", message, flush=True)


def carry_out(request):
    if "arguments" in request:
        sys.argv = ["largeprompt", *request["arguments"]]
        cli.main()
    else:
        store, options = lab.Store(request["store"]), {"checkpoint_seconds": request.get("checkpoint_seconds", 30.0)}
        lab.sweep(lab.runs_from(request["settings"]), store, jobs=1, watcher=Aloud(), **options)


def child(request):
    with open(request["log"], "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    status = 1
    try:
        carry_out(request)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        print(repr(error), flush=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def reap(pid):
    _, status = os.waitpid(pid, 0)
    print(pid, os.waitstatus_to_exitcode(status), flush=True)


def main():
    largeprompt.use_float64()
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    warnings.simplefilter("ignore")  # JAX warns of forks; nothing of it has run here yet
    # what is tested is how runs are kept, whatever the engine: this one has nothing to compile
    sys.path.insert(0, str(Path(__file__).parents[1]))
    engine.trainer_for = importlib.import_module("stand_in").trainer_for
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
        print(pid, flush=True)
        threading.Thread(target=reap, args=(pid,), daemon=True).start()


if __name__ == "__main__":
    main()
