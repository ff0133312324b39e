"""Schedulers, workers and drivers: a request is a `command` (one of COMMANDS) and its `arguments`."""

import os
import sys

import stand_in_worker  # noqa: F401  # what the workers train with
from distributed.cli import dask_scheduler, dask_worker
from forks import serve

from largeprompt import cli
from largeprompt.cli import _commands  # noqa: F401  # once here, and not in every child

COMMANDS = {"dask_scheduler": dask_scheduler.main, "dask_worker": dask_worker.main, "largeprompt": cli.main}


def work(request):
    os.setsid()  # a group of its own, for a Ctrl-C of its own
    sys.argv = [request["command"], *request["arguments"]]
    COMMANDS[request["command"]]()


if __name__ == "__main__":
    serve(work)
