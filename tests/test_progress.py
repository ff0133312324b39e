"""The one protocol by which long computations report their progress."""

import pytest

from largeprompt._progress import Progress


class Kept(Progress):
    def __init__(self):
        self.calls = []

    def start(self, name, total):
        self.calls.append(("start", name, total))

    def step(self, name, done, note=""):
        self.calls.append(("step", name, done, note))

    def close(self, name, outcome=""):
        self.calls.append(("close", name, outcome))


def test_a_task_starts_adds_up_its_work_and_closes():
    progress = Kept()
    with progress.task("risks", 3) as advance:
        advance(1, "L = 5")
        advance(2)
    assert progress.calls == [
        ("start", "risks", 3),
        ("step", "risks", 1, "L = 5"),
        ("step", "risks", 3, ""),
        ("close", "risks", "finished"),
    ]


def test_a_task_that_fails_is_closed_as_failed():
    progress = Kept()
    with pytest.raises(OSError, match="full"), progress.task("risks", 3):
        raise OSError("the disk is full")
    assert progress.calls[-1] == ("close", "risks", "failed")


def test_progress_is_silent_but_for_warnings():
    with Progress().task("risks", 3) as advance:
        advance()
    with pytest.warns(UserWarning, match="is damaged"):
        Progress().warn("a file is damaged")
