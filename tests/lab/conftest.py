import pytest
import stand_in

from largeprompt import lab
from largeprompt.lab import _run


@pytest.fixture
def quick(monkeypatch):
    """Runs are carried out by a trainer that compiles nothing."""
    monkeypatch.setattr(_run, "trainer_for", stand_in.trainer_for)


@pytest.fixture
def store(tmp_path):
    return lab.Store(tmp_path / "runs")
