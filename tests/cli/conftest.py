import sys
from pathlib import Path

import pytest

from largeprompt import cli
from model_prompts import TEXT


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """The command line without a process of its own, which takes seconds to start: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("largeprompt.cli._view._FIRST", 3600.0)  # on a slow machine too, no lines of progress

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["largeprompt", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def text(command):
    """A text file in the folder of the test."""
    Path("text.txt").write_text(TEXT)
    return "text.txt"
