"""All commands."""

import sys

from . import _compress as _compress
from . import _concentration as _concentration
from . import _doctor as _doctor
from . import _generalise as _generalise
from . import _influence as _influence
from . import _inspect as _inspect
from . import _learning as _learning
from . import _paper as _paper
from . import _rows as _rows
from . import _runs as _runs
from . import _sweep as _sweep
from . import _train as _train
from ._app import app
from ._interrupts import interrupts
from ._output import complain, in_one_line


def run() -> None:
    """Run the command that was given; what a user did wrong is one line on the error stream, never a traceback."""
    try:
        app()
    except (ValueError, OSError, MemoryError) as error:
        if interrupts.number is not None:  # an interrupt that some library has turned into an error of its own
            interrupts.leave()
        complain(in_one_line(error))
        sys.exit(2)
    except SystemExit as end:
        if end.code != 130:
            raise
        interrupts.leave()  # Ctrl-C, as the command-line library reports it
