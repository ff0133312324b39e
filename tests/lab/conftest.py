import pytest

import stand_in
from largeprompt import engine, lab


@pytest.fixture
def quick(monkeypatch):
    """Runs are done by a trainer that compiles nothing."""
    monkeypatch.setattr(engine, "trainer_for", stand_in.trainer_for)


@pytest.fixture
def store(tmp_path):
    return lab.Store(tmp_path / "runs")
