import sys

import pytest

from largeprompt import cli


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """The command line without a process of its own, which takes seconds to start: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["largeprompt", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return run
