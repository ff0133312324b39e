"""All commands."""

import sys

from . import _concentration as _concentration
from . import _learning as _learning
from . import _paper as _paper
from . import _runs as _runs
from . import _sweep as _sweep
from . import _train as _train
from ._app import app, errors
from ._interrupts import interrupts


def run() -> None:
    """Run the command that was given; what a user did wrong is one line on the error stream, never a traceback."""
    try:
        app()
    except (ValueError, OSError, MemoryError) as error:
        if interrupts.number is not None:  # an interrupt that some library has turned into an error of its own
            interrupts.leave()
        errors.print(f"largeprompt: {in_one_line(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code != 130:
            raise
        interrupts.leave()  # Ctrl-C, as the command-line library reports it


def in_one_line(error: Exception) -> str:
    """What went wrong, with the file that it is about before what the system says of it."""
    if isinstance(error, OSError) and error.strerror is not None:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*names[-1:], error.strerror])
    return " ".join(str(error).split()) or type(error).__name__
