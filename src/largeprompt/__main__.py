"""`python -m largeprompt`: the command line."""

from largeprompt.cli import main

if __name__ == "__main__":
    main()
