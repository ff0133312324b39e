"""Results at addresses of fsspec: found again, resumed, set aside and listed as in a folder."""

import dataclasses
import pickle
import sys
import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from largeprompt import lab

pytestmark = pytest.mark.usefixtures("quick")
RUN = lab.Run(L=4, d=2, attention="linear", rate=1e-2, steps=300, record=lab.Record(points=12))


class Plain(MemoryFileSystem):
    """A kind of which nothing is known: half-written objects must be expected."""

    protocol = "plain"
    store, pseudo_dirs = {}, [""]


fsspec.register_implementation("plain", Plain, clobber=True)


@pytest.fixture(params=["memory://runs", "plain://deep/runs/"])
def remote(request):
    """Empty, whatever else this process has kept in memory."""
    for kind in (MemoryFileSystem, Plain):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    return lab.store_at(request.param)


class Stopping(lab.Progress):
    def __init__(self):
        self.stop, self.messages = threading.Event(), []

    def step(self, name, done, note=""):
        if done >= 150:
            self.stop.set()

    def warn(self, message):
        self.messages.append(message)


def interrupted(store):
    progress = Stopping()
    with pytest.raises(lab.Interrupted):
        lab.train(RUN, store, progress=progress, stop=progress.stop)


def test_a_result_at_an_address_is_the_bytes_of_one_in_a_folder(remote, store):
    kept = lab.train(RUN, store)
    assert lab.train(RUN, remote).identical(kept)
    assert remote._read(f"{RUN.key}.nc") == store.path(RUN.key).read_bytes()
    assert lab.train(RUN, remote).identical(kept)
    assert remote.log(RUN.key)["sittings"] == 1
    assert sorted(remote._names()) == [f"{RUN.key}.json", f"{RUN.key}.nc"]


def test_an_interrupted_run_at_an_address_goes_on_from_its_checkpoint(remote, store):
    interrupted(remote)
    found = remote.status(RUN.key)
    assert (found.stage, found.run) == ("begun", RUN.resolved)  # nobody can tell whether someone is at it
    assert found.step >= 150
    (status,) = lab.statuses(remote, [RUN], running=set())
    assert (status.stage, status.step) == ("interrupted", found.step)
    assert lab.statuses(remote, [RUN], running={RUN.key})[0].stage == "running"
    assert lab.train(RUN, remote).identical(lab.train(RUN, store))
    assert remote.log(RUN.key)["sittings"] == 2
    assert not remote.begun_of([RUN.key])


@pytest.mark.parametrize("kind", ["nc", "checkpoint"])
def test_a_damaged_object_is_named_and_set_aside(remote, kind):
    interrupted(remote)
    if kind == "nc":
        lab.train(RUN, remote)
    name = f"{RUN.key}.{kind}"
    content = remote._read(name)
    for n in (1, 2):
        remote._write(name, content[:-50])
        progress = Stopping()
        lab.train(RUN, remote, progress=progress)
        (message,) = progress.messages
        assert f"{remote.location}/{name} is damaged" in message
        assert f"kept as {name}.damaged-{n}" in message
        if kind == "checkpoint":
            remote._delete(f"{RUN.key}.nc")
    assert remote._read(f"{name}.damaged-1") == content[:-50]


def test_runs_at_an_address_are_listed_found_and_removed(remote):
    assert remote.run_keys() == []
    runs = [dataclasses.replace(RUN, steps=n) for n in (0, 1)]
    lab.sweep(runs, remote)
    hashes = sorted(run.key for run in runs)
    assert remote.run_keys() == hashes
    assert remote.finished_of([*hashes, "0" * 64]) == set(hashes)
    assert remote.finished_of([*hashes, *(f"{n:064}" for n in range(2000))]) == set(hashes)  # by one listing
    assert remote.find(hashes[0][:20]) == hashes[0]
    remote.remove(hashes[0])
    assert list(remote._names()) == [f"{hashes[1]}.json", f"{hashes[1]}.nc"]


def test_a_failure_is_kept_until_there_is_a_result(remote):
    remote.fail(RUN, "RuntimeError: no", "a machine")
    assert remote.status(RUN.key).stage == "failed"
    assert lab.counted(lab.statuses(remote)) == {"failed": 1}
    lab.train(RUN, remote)
    assert remote.failure(RUN.key) == {}
    assert lab.counted(lab.statuses(remote)) == {"finished": 1}


def test_a_store_travels_as_its_place(remote, tmp_path, monkeypatch):
    lab.train(RUN, remote)
    assert pickle.loads(pickle.dumps(remote)).finished(RUN.key)
    monkeypatch.chdir(tmp_path)
    there = pickle.dumps(lab.Store("here"))
    monkeypatch.chdir("/")
    assert pickle.loads(there).folder == tmp_path / "here"


def test_what_is_no_address_is_a_folder(tmp_path, monkeypatch):
    assert lab.store_at(tmp_path).location == str(tmp_path)
    kept = lab.store_at(f"file://{tmp_path}/a")
    assert isinstance(kept, lab.Store)
    assert kept.folder == tmp_path / "a"
    monkeypatch.setenv("LARGEPROMPT_STORE", "memory://there")
    assert lab.store_at().location == "memory://there"
    with pytest.raises(ValueError, match=r"the store is 'memory://there'; it must be a folder here"):
        lab.Store()
    with pytest.raises(ValueError, match=r"a folder as an address is file:///absolute/path"):
        lab.store_at("file://runs")


@pytest.mark.parametrize(
    ("address", "message"), [("nonsense://runs", "Protocol not known: nonsense"), ("s3://bucket/runs", "s3fs")]
)
def test_an_address_of_an_unknown_kind_is_one_line(address, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises((ValueError, OSError), match=message):
        lab.store_at(address)


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"addresses need fsspec: pip install 'largeprompt\[cluster\]'"):
        lab.store_at("memory://runs")


def test_errors_of_a_service_are_errors_of_reading_and_writing(remote, monkeypatch):
    class Odd(Exception):
        pass

    def refuse(*_, **__):
        raise Odd("no credentials\nsecond line")

    monkeypatch.setattr(type(remote._files), "cat_file", refuse)
    with pytest.raises(OSError, match=r"^\w+://.*runs: Odd: no credentials$"):
        remote.load_checkpoint(RUN.key)
