import pytest

from largeprompt import lab


@pytest.fixture
def store(tmp_path):
    return lab.Store(tmp_path / "runs")
