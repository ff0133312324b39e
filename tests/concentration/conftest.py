"""Intervals of measured deviations are resampled less often than for a user."""

import pytest

from largeprompt.concentration import _reliability


@pytest.fixture(autouse=True)
def fewer_resamples(request, monkeypatch):
    """Resampling every length of every measurement takes longer than drawing most prompts; few tests ask for it."""
    if "all_resamples" not in request.fixturenames:
        monkeypatch.setattr(_reliability, "_RESAMPLES", 50)


@pytest.fixture
def all_resamples():
    """For tests of the interval itself."""
