"""Sweeps that can be killed, one every second: a request is `settings` for `lab.sweep`, or `arguments` for the command.

What they compile is kept in the folder given.
"""

import importlib
import sys
from pathlib import Path

import jax
from forks import serve

import largeprompt
from largeprompt import cli, engine, lab
from largeprompt.cli import _commands  # noqa: F401  # once here, and not in every child


class Aloud(lab.Progress):
    """Says when it works, and which runs it has done."""

    def step(self, name, done, note=""):
        key = name.split()[0]
        if name != "training" and done % 300 == 0 and key not in self.__dict__:  # a step with a risk: all is compiled
            self.__dict__[key] = True
            print("working", key, flush=True)

    def close(self, name, outcome=""):
        if name != "training":
            print("done" if outcome == "finished" else outcome, name.split()[0], flush=True)

    def warn(self, message):
        print("noticed", message, flush=True)


def work(request):
    if "arguments" in request:
        sys.argv = ["largeprompt", *request["arguments"]]
        cli.main()
    else:
        store, options = lab.Store(request["store"]), {"checkpoint_seconds": request.get("checkpoint_seconds", 30.0)}
        lab.sweep(lab.runs_from(request["settings"]), store, jobs=1, progress=Aloud(), **options)


def main():
    largeprompt.use_float64()
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # what is tested is how runs are kept, whatever the engine: this one has nothing to compile
    sys.path.insert(0, str(Path(__file__).parents[1]))
    engine.trainer_for = importlib.import_module("stand_in").trainer_for
    serve(work)


if __name__ == "__main__":
    main()
