"""The command line: thin, no mathematics."""

import os
import sys

from . import _concentration as _concentration
from . import _learning as _learning
from . import _paper as _paper
from . import _runs as _runs
from . import _sweep as _sweep
from . import _train as _train
from ._app import app, errors
from ._output import interrupts_brought_back


def main() -> None:
    """Run the command line; what a user did wrong is one line on the error stream, never a traceback."""
    try:
        with interrupts_brought_back():
            app()
    except (ValueError, OSError) as error:
        errors.print(f"largeprompt: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code != 130:
            raise
        # Ctrl-C, as the command-line library reports it. Leave at once: XLA's threads may be at work, and taking the
        # interpreter down around them crashes.
        errors.print("largeprompt: interrupted; files already written are whole", highlight=False)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
