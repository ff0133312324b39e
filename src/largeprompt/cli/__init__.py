"""The command line: thin, no mathematics."""

from ._interrupts import interrupts  # and nothing else: what takes seconds to import comes when interrupts are heard


def main() -> None:
    """Run the command line: an interrupt is one line on the error stream, and so is what a user did wrong."""
    with interrupts.heard():
        from ._commands import run

        run()
