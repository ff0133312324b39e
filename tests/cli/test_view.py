"""The progress of long computations, on a terminal and elsewhere."""

import io
import time

import pytest
from rich.console import Console

from largeprompt.cli import _view
from largeprompt.cli._view import View


@pytest.fixture
def terminal(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(_view, "errors", screen)
    return screen


@pytest.mark.usefixtures("terminal")
def test_each_piece_of_work_has_a_bar_until_it_ends():
    with View() as view:
        view.start("training", 200)
        for name in ("first", "second"):
            view.start(name, 100)
            view.step(name, 50, "1234/s, risk 0.2500")
        view.close("first", "finished")
        view.step("training", 150, "1 of 2 runs")
        shown = [(task.description, task.completed, task.fields["note"]) for task in view._bars.tasks]
    assert shown == [("training", 150, "1 of 2 runs"), ("second", 50, "1234/s, risk 0.2500")]


@pytest.mark.usefixtures("terminal")
def test_pieces_of_one_name_end_one_after_the_other():
    with View() as view:
        with view.task("risks", 4) as first, view.task("risks", 2) as second:
            second(1)
            first(1)
        assert not view._bars.tasks
        view.start("risks", 4)
        view.start("risks", 4)
        view.close("risks", "finished")
        view.step("risks", 3)
        assert [task.completed for task in view._bars.tasks] == [3]


def test_a_terminal_shows_what_is_done_the_time_left_and_a_note(terminal):
    with View() as view:
        view.start("sweep", 40)
        view.step("sweep", 10, "15 of 40 runs, 1 failed, 3 workers")
    shown = terminal.file.getvalue()
    assert "sweep" in shown
    assert "25%" in shown
    assert "15 of 40 runs, 1 failed, 3 workers" in shown


def test_short_work_is_silent_where_there_is_no_terminal(capsys):
    with View() as view:
        view.start("training", 100)
        view.step("training", 50)
        view.close("training")
    assert capsys.readouterr() == ("", "")


def test_long_work_prints_a_line_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(_view, "_FIRST", 0.01)
    with View() as view, view.task("least risks", 4) as advance:
        advance(1, "L = 5")
        while not (said := capsys.readouterr().err):
            time.sleep(0.01)
    assert said.startswith("largeprompt: least risks: 25 % done after 0 s, L = 5; about ")
    assert said.endswith(" s left\n")


def test_a_warning_is_one_line(capsys):
    View().warn("the scheduler has no workers; waiting for some")
    assert capsys.readouterr().err == "largeprompt: the scheduler has no workers; waiting for some\n"
