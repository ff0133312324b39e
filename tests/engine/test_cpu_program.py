"""Compiled loops of a processor on disk: where they are kept, loaded again, damaged, and not to be kept."""

import os
from typing import Any

import numba
import pytest
from numba.core.caching import FunctionCache

from largeprompt import _compiled
from largeprompt.engine._within import outermost

config: Any = numba.config


def doubled(x):
    return 2 * x


def loaded():
    """Whether a loop that is called for the first time was on disk; it does the same either way."""
    loop = outermost()(doubled)
    assert loop(3.0) == 6.0
    return bool(loop.stats.cache_hits)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LARGEPROMPT_CACHE", str(tmp_path))
    monkeypatch.setattr(config, "CACHE_DIR", "")
    return tmp_path


def test_a_loop_is_kept_in_the_cache_folder_and_loaded_by_the_next_process(folder):
    assert not loaded()
    assert loaded()
    ((_, size, file),) = _compiled.programs(folder)
    assert size == file.stat().st_size > 0
    assert file.is_relative_to(folder / "engine")
    assert config.CACHE_DIR == ""  # other loops of this process go where they did


@pytest.mark.parametrize("ending", ["nbc", "nbi"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_loop_whose_file_is_damaged_is_compiled_and_kept_again(folder, ending, share):
    assert not loaded()
    (file,) = folder.rglob(f"*.{ending}")
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    assert not loaded()
    assert loaded()


def test_a_loop_that_was_dropped_is_compiled_and_kept_again(folder):
    assert not loaded()
    (folder / "xla-looked-at").unlink()
    _compiled.drop_oldest(folder, limit=0)
    assert _compiled.programs(folder) == []
    assert not loaded()
    assert loaded()


def test_no_loop_is_kept_where_that_is_turned_off(folder, monkeypatch):
    monkeypatch.setenv("LARGEPROMPT_CACHE", "off")
    assert not loaded()
    assert not loaded()
    assert os.listdir(folder) == []


def test_a_folder_of_numba_itself_comes_first(folder, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("numba")
    monkeypatch.setattr(config, "CACHE_DIR", str(other))
    assert not loaded()
    assert loaded()
    assert os.listdir(folder) == []
    assert len(list(other.rglob("*.nbc"))) == 1


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_loops_run_where_none_can_be_kept(folder, monkeypatch, error):
    def fail(*_):
        raise error("no space left")

    monkeypatch.setattr(FunctionCache, *{OSError: ("_save_overload", fail), RuntimeError: ("__init__", fail)}[error])
    assert not loaded()
    assert not loaded()
