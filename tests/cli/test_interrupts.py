"""Ctrl-C and SIGTERM: one line and an exit status, from the first import to the last file."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from largeprompt.cli._interrupts import interrupts

# Sends its own process a signal when a module is about to be imported. A shell's background job, which these tests may
# be, ignores interrupts, and so would what it starts.
AT_IMPORT = """
import os, signal, sys
number, module = int(sys.argv.pop(1)), sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, path, target=None):
        if name == module:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder())
from largeprompt.cli import main
main()
"""


@pytest.mark.parametrize(
    ("number", "module", "arguments"),
    [
        (signal.SIGINT, "typer", ("--help",)),
        (signal.SIGINT, "jax", ("runs", "list")),
        (signal.SIGTERM, "numpy", ("optima",)),
        (signal.SIGTERM, "largeprompt.lab", ("train",)),
    ],
)
def test_a_signal_during_any_import_is_one_line(number, module, arguments, tmp_path):
    command = [sys.executable, "-c", AT_IMPORT, str(int(number)), module, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.stderr == "largeprompt: interrupted; files already written are whole\n"
    assert (run.returncode, run.stdout) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []


class Dropping:
    """Drops what is raised in it, as every callback of the garbage collector does."""

    def __del__(self):
        press()


class Left(BaseException):
    """Instead of the end of the process."""


@pytest.fixture
def said(monkeypatch):
    """What is written at the end of the process, and its status."""
    found = []

    def leave(status):
        found.append(status)
        raise Left

    monkeypatch.setattr(os, "write", lambda handle, text: found.append(text.decode()))
    monkeypatch.setattr(os, "_exit", leave)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield found
    signal.signal(signal.SIGINT, before)


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)
    time.sleep(0)


def work():
    for _ in range(6000):
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_where_nothing_is_to_be_kept_a_signal_ends_the_process_at_once(number, said):
    with pytest.raises(Left), interrupts.heard():
        press(number)
    assert said == ["largeprompt: interrupted; files already written are whole\n", 128 + number]


def dropped_by_a_callback():
    one = Dropping()
    del one


def dropped_by_an_except():
    with contextlib.suppress(BaseException):  # as an `except:` does around many an import
        press()


def dropped_inside_another_except():
    try:
        raise ValueError
    except ValueError:
        dropped_by_an_except()
        work()


@pytest.mark.parametrize("drop", [dropped_by_a_callback, dropped_by_an_except, dropped_inside_another_except])
def test_an_interrupt_that_was_dropped_comes_again(drop, said, capsys):
    def dropped():
        drop()
        work()

    with interrupts.heard(), pytest.raises(KeyboardInterrupt), interrupts.raised():
        dropped()
    assert said == []
    assert capsys.readouterr().err == ""


def test_an_interrupt_that_is_dropped_at_the_very_end_still_ends_the_process(said):
    with pytest.raises(Left), interrupts.heard(), interrupts.raised():
        dropped_by_an_except()
    assert said[-1] == 130


def test_an_interrupt_that_is_being_handled_does_not_come_again(said):
    cleared = []

    def put_in_order():
        try:
            press()
            work()
        except KeyboardInterrupt:
            try:
                raise RuntimeError("another") from None
            finally:
                time.sleep(0.35)  # longer than it takes to come again
                press()  # and a second one at the same moment is the same wish
                cleared.append(True)

    with interrupts.heard(), pytest.raises(RuntimeError, match="another"), interrupts.raised():
        put_in_order()
    assert cleared == [True]


def test_a_signal_that_was_ignored_stays_ignored(said):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.heard():
        press()
    assert said == []


def test_handlers_are_put_back(said):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers], sys.unraisablehook
    with interrupts.heard():
        assert signal.getsignal(signal.SIGTERM) not in before[0]
    assert ([signal.getsignal(number) for number in numbers], sys.unraisablehook) == before


def test_what_else_a_callback_drops_is_reported_as_ever(monkeypatch):
    class Failing:
        def __del__(self):
            raise ValueError("an unlucky end")

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    with interrupts.heard():
        one = Failing()
        del one
    assert [str(dropped.exc_value) for dropped in reported] == ["an unlucky end"]
