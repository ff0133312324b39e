"""A process that has everything imported, and forks a child for each request: a scheduler, a worker, a driver.

A request is a line of JSON: the `command` (`dask_scheduler`, `dask_worker` or `largeprompt`), its `arguments`, and a
file `log` for what it prints. The answer is the child's process id; when it has ended, `PID STATUS` follows.
"""

import json
import os
import sys
import threading
import warnings

import stand_in_worker  # noqa: F401  # what the workers train with
from distributed.cli import dask_scheduler, dask_worker

from largeprompt import cli

COMMANDS = {"dask_scheduler": dask_scheduler.main, "dask_worker": dask_worker.main, "largeprompt": cli.main}


def child(request):
    os.setsid()  # a group of its own, for a Ctrl-C of its own
    with open(request["log"], "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = [request["command"], *request["arguments"]]
    status = 1
    try:
        COMMANDS[request["command"]]()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
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
    warnings.simplefilter("ignore")  # JAX warns of forks; nothing of it has run here yet
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
        print(pid, flush=True)
        threading.Thread(target=reap, args=(pid,), daemon=True).start()


if __name__ == "__main__":
    main()
