"""Results on disk: kept once, found again bit for bit, and never used when damaged."""

import dataclasses
import errno
import hashlib
import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import stand_in
from largeprompt import engine, lab
from largeprompt.icl import risk
from largeprompt.lab import _session

pytestmark = pytest.mark.usefixtures("quick")
RUN = lab.Run(L=4, d=2, attention="linear", rate=1e-2, steps=300, record=lab.Record(points=12, every=100))
PAIR = dataclasses.replace(RUN, L=math.inf, attention="pair")


class StopAt(lab.Progress):
    """Asks for an end once the run has come to a step."""

    def __init__(self, step):
        self.last, self.stop, self.messages, self.outcomes = step, threading.Event(), [], []

    def step(self, name, done, note=""):
        if done >= self.last:
            self.stop.set()

    def close(self, name, outcome=""):
        self.outcomes.append(outcome)

    def warn(self, message):
        self.messages.append(message)


def interrupted_at(step, store, run=RUN):
    progress = StopAt(step)
    with pytest.raises(lab.Interrupted):
        lab.train(run, store, progress=progress, stop=progress.stop)
    return store.path(run.key, "checkpoint")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run without an interrupt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "trainer_for", stand_in.trainer_for)
        return lab.train(RUN, lab.Store(tmp_path_factory.mktemp("whole")))


def test_a_finished_run_is_found_bit_for_bit_and_not_run_twice(store, whole, monkeypatch):
    lab.train(RUN, store)
    monkeypatch.setattr(_session, "RunSession", None)
    progress = StopAt(0)
    assert lab.train(RUN, store, progress=progress).identical(whole)
    assert progress.outcomes == ["found"]
    assert sorted(path.name for path in store.folder.iterdir()) == [f"{RUN.key}.json", f"{RUN.key}.nc"]


@dataclasses.dataclass(frozen=True)
class Squares:
    """An experiment: settings, a key, and a dataset that holds its settings."""

    upto: int

    @property
    def canonical(self):
        return json.dumps({"kind": "Squares", **dataclasses.asdict(self)})

    @property
    def key(self):
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    def data(self):
        values = {"square": ("n", np.arange(self.upto) ** 2), "even": ("n", np.arange(self.upto) % 2 == 0)}
        return xr.Dataset(values, attrs={"experiment": self.canonical, "sizes": [1, 2]})


def test_an_experiment_is_kept_beside_runs_and_is_none_of_them(store):
    squares = Squares(4)
    assert store.load(squares.key) is None
    with store.claim(squares.key) as alone:
        assert alone
        kept = store.save(squares, squares.data(), {"seconds": 2.0})
    assert store.load(squares.key).identical(kept)
    assert kept.square.values.tolist() == [0, 1, 4, 9]
    assert kept.even.dtype == bool
    assert store.log(squares.key)["seconds"] == 2.0
    assert (store.finished(squares.key), store.run_keys(), store.kinds()) == (True, [], {})
    with pytest.raises(ValueError, match="no run in"):
        store.find(squares.key)


def test_an_experiment_is_kept_under_its_own_key_only(store):
    with pytest.raises(ValueError, match=f"^the dataset of {Squares(5).key[:12]} must hold its canonical settings"):
        store.save(Squares(5), Squares(4).data(), {})
    store.save(Squares(4), Squares(4).data(), {})
    store.path(Squares(4).key).rename(store.path(Squares(5).key))
    with pytest.raises(lab.Damaged, match=f"holds the experiment {Squares(4).key[:12]}, not {Squares(5).key[:12]}"):
        store.load(Squares(5).key)


def test_the_file_of_a_run_holds_its_settings_seeds_and_version(store, whole):
    lab.train(RUN, store)
    with xr.open_dataset(store.path(RUN.key), engine="scipy") as data:
        assert lab.run_of(data) == RUN.resolved
        assert data.attrs["hash"] == RUN.key
        assert "steps = 300" in data.attrs["toml"]
        assert (data.attrs["weight_seed"], data.attrs["data_seed"]) == ("0", "0")
    assert store.log(RUN.key)["sittings"] == 1


def test_recorded_risks_are_those_of_the_recorded_parameters(whole):
    for i in (0, 5, -1):
        layer = lab.layer_at(whole, "linear", i)
        assert float(risk(layer, RUN.task(), 4).value) == pytest.approx(float(whole.risk[0, i]), rel=1e-12)
    assert whole.step.values.tolist() == RUN.record.steps(300).tolist()


def test_a_pair_records_how_far_its_members_are_apart(store):
    data = lab.train(
        dataclasses.replace(PAIR, record=lab.Record(("norms", "distances", "parameters", "circuits"), 4)), store
    )
    softmax, linear = (lab.layer_at(data, member) for member in ("softmax", "linear"))
    apart = math.sqrt(sum(np.sum((getattr(softmax, name) - getattr(linear, name)) ** 2) for name in "KQVO"))
    assert float(data.distance[-1]) == pytest.approx(apart)
    assert float(data.distance[0]) == 0
    assert float(data.from_start[0, 0]) == 0
    np.testing.assert_allclose(data.QK.sel(member="softmax")[-1], softmax.K.T @ softmax.Q)
    np.testing.assert_allclose(data.OV.sel(member="linear")[-1], linear.O @ linear.V)
    assert float(data.norms.sel(matrix="K", member="linear")[-1]) == pytest.approx(np.linalg.norm(linear.K))


@pytest.mark.parametrize("kind", ["sigmoid", "normalised-relu"])
def test_any_kind_of_attention_is_trained_recorded_and_read_back(kind, store):
    run = dataclasses.replace(RUN, attention=kind, steps=2, record=lab.Record(("parameters", "circuits"), 2, draws=64))
    data = lab.train(run, store)
    assert store.load(run.key).identical(data)
    layer = lab.layer_at(data, kind)
    assert (run.members, layer.kind) == ((kind,), kind)
    assert np.isnan(float(data.optimum[0]))
    assert float(data.attainable[0]) == pytest.approx((1 + 0.1) / 2)  # predicting 0, which every kind can
    np.testing.assert_allclose(data.QK.sel(member=kind)[-1], layer.K.T @ layer.Q)
    risks = lab.risks_by_length(lab.trained(store, run.key), [5], rtol=0.05)
    assert np.isnan(risks.optimum.values).all()
    assert (risks.risk > 0).all()


def test_heads_are_an_axis_of_the_matrices(store):
    run = dataclasses.replace(RUN, heads=3, head_dim=None, steps=2, record=lab.Record(points=2, draws=64))
    data = lab.train(run, store)
    assert data.K.dims == ("member", "step", "head", "inner", "token")
    assert lab.layer_at(data, "linear").heads[2].O.shape == (3, 1)
    assert float(data.risk_stderr[0, 0]) == 0
    assert store.load(run.key).identical(data)


@pytest.mark.parametrize("step", [0, 1, 7, 150, 299])
def test_an_interrupted_run_ends_as_if_it_had_not_been(step, store, whole):
    path = interrupted_at(step, store)
    found = store.status(RUN.key)
    assert (found.stage, found.run) == ("interrupted", RUN.resolved)
    assert step <= found.step <= 300
    assert lab.train(RUN, store).identical(whole)
    assert not path.exists()
    assert store.log(RUN.key)["sittings"] == 2


def damage_empty(path, store):
    path.write_bytes(b"")


def damage_cut(path, store):
    path.write_bytes(path.read_bytes()[:-100])


def damage_flip(path, store):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_text(path, store):
    path.write_text("not a checkpoint\n")


def damage_foreign(path, store):
    other = dataclasses.replace(RUN, data_seed=9)
    if path.suffix == ".nc":
        lab.train(other, store)
        store.path(other.key).rename(path)
    else:
        interrupted_at(1, store, other).rename(path)


DAMAGES = [damage_empty, damage_cut, damage_flip, damage_text, damage_foreign]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_run_begins_anew(damage, store, whole):
    path = interrupted_at(150, store)
    damage(path, store)
    content = path.read_bytes()
    progress = StopAt(math.inf)
    assert lab.train(RUN, store, progress=progress).identical(whole)
    (message,) = progress.messages
    kept = path.with_name(path.name + ".damaged-1")
    assert path.name in message
    assert kept.name in message
    assert kept.read_bytes() == content


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_result_is_named_and_set_aside_and_the_run_is_done_again(damage, store, whole):
    lab.train(RUN, store)
    path = store.path(RUN.key)
    damage(path, store)
    content = path.read_bytes()
    with pytest.warns(UserWarning, match=r"kept as \w+\.nc\.damaged-1"):
        assert lab.train(RUN, store).identical(whole)
    damage(path, store)
    with pytest.warns(UserWarning, match=r"kept as \w+\.nc\.damaged-2"):
        lab.train(RUN, store)
    assert path.with_name(path.name + ".damaged-1").read_bytes() == content


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_stops_the_run_and_what_was_kept_is_good(store, whole, monkeypatch):
    interrupted_at(150, store)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        message = r"No space left on device: run \w{12} is kept up to step \d+ in .*runs, and goes on from there"
        with pytest.raises(OSError, match=message):
            lab.train(RUN, store, checkpoint_seconds=0.0)
    assert [path.name for path in store.folder.iterdir()] == [f"{RUN.key}.checkpoint"]
    with monkeypatch.context() as patch:
        patch.setattr(xr.Dataset, "to_netcdf", full)
        with pytest.raises(OSError, match="No space left"):
            lab.train(RUN, store)
    assert lab.train(RUN, store).identical(whole)


def test_a_store_that_cannot_be_written_is_an_error_before_any_step():
    with pytest.raises(OSError, match="/dev/null"):
        lab.train(RUN, lab.Store("/dev/null/here"))


def test_divergence_is_recorded_with_its_step_and_nothing_after_it(store):
    run = dataclasses.replace(PAIR, rate=5.0, steps=100)
    data = lab.train(run, store)
    at = int(data.diverged[0])
    assert 0 < at < 100
    assert list(data.verdict.values) == ["diverged", "diverged"]
    known = np.isfinite(data.risk.values)
    assert np.array_equal(known, np.broadcast_to(data.step.values <= at, known.shape))
    assert np.array_equal(np.isfinite(data.K.values[:, :, 0, 0]), known)
    interrupted = lab.Store(store.folder / "again")
    interrupted_at(at + 20, interrupted, run)
    assert lab.train(run, interrupted).identical(data)


@pytest.mark.parametrize(
    "settings", [{"steps": 0}, {"L": 1}, {"steps": 1}, {"d": 1, "head_dim": None, "outputs": None}]
)
def test_the_smallest_runs_are_runs(settings, store):
    data = lab.train(dataclasses.replace(RUN, **settings), store)
    assert np.isfinite(data.risk.values).all()
    assert data.step.values[-1] == settings.get("steps", 300)


def test_runs_are_found_by_the_beginning_of_their_hash(store):
    addresses = ["ab" + "0" * 62, "ac" + "0" * 62, "b" + "0" * 63]
    store.folder.mkdir()
    for address in addresses:
        store.path(address).touch()
    (store.folder / "notes.nc").touch()
    assert store.run_keys() == addresses
    assert store.find("b") == addresses[2]
    with pytest.raises(ValueError, match=r"2 runs in .* begins with 'a': ab0000000000, ac0000000000"):
        store.find("a")
    with pytest.raises(ValueError, match=r"no run in .* begins with 'dd'; see largeprompt runs list"):
        store.find("dd")
    with pytest.raises(ValueError, match="no run in"):
        store.find("")


def test_a_store_prints_where_it_is_and_what_it_holds(store, tmp_path):
    lab.train(RUN, store)
    interrupted_at(20, store, dataclasses.replace(RUN, L=5))
    assert repr(store) == f"Store({store.location!r}: 1 finished, 1 with a checkpoint)"
    assert repr(lab.Store(tmp_path / "none")) == f"Store({str(tmp_path / 'none')!r}: no such folder yet)"


def test_a_run_that_is_being_worked_on_is_not_removed(store):
    lab.train(RUN, store)
    with store.claim(RUN.key) as alone:
        assert alone
        with store.claim(RUN.key) as twice:
            assert not twice
        with pytest.raises(ValueError, match="is being worked on"):
            store.remove(RUN.key)
    store.remove(RUN.key)
    assert list(store.folder.iterdir()) == []


def test_half_written_files_of_a_killed_process_are_cleared_away(store):
    interrupted_at(1, store)
    half = store.folder / f".{RUN.key}-xyz.checkpoint"
    half.touch()
    lab.train(RUN, store)
    assert not half.exists()


def test_a_checkpoint_that_outlived_its_run_is_cleared_away(store, whole):
    content = interrupted_at(150, store).read_bytes()
    lab.train(RUN, store)
    store.path(RUN.key, "checkpoint").write_bytes(content)
    assert lab.train(RUN, store).identical(whole)
    assert not store.path(RUN.key, "checkpoint").exists()


def test_how_the_work_went_is_kept_apart(store):
    lab.train(RUN, store)
    log = json.loads(store.path(RUN.key, "json").read_text())
    assert set(log) == {"seconds", "gpu_seconds", "sittings", "machine", "device", "versions", "finished"}
    assert log["gpu_seconds"] == 0.0 < log["seconds"]


def test_float32_is_refused(monkeypatch):
    import jax

    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(ValueError, match="use_float64"):
            RUN.trainer()
    finally:
        jax.config.update("jax_enable_x64", True)


def test_a_result_of_an_earlier_version_is_judged_again_by_what_it_recorded(store):
    data = lab.train(RUN, store)
    narrow = dataclasses.replace(RUN, head_dim=1, steps=100_000)
    least = lab.yardstick(narrow, "linear").optimum
    steps = np.linspace(0, narrow.steps, data.sizes["step"])
    old = data.drop_vars("attainable").assign_coords(step=steps)
    old = old.assign(risk=(data.risk.dims, np.full(data.risk.shape, least)), verdict=(("member",), ["trapped"]))
    store.save(narrow, old.assign_attrs(run=narrow.canonical, hash=narrow.key), {})
    found = store.load(narrow.key)
    assert float(data.optimum[0]) < least - 0.01  # of a head that is wide enough, which the old result holds
    assert (str(found.verdict.values[0]), float(found.optimum[0]), float(found.excess[0])) == ("converged", least, 0.0)
    assert found.risk.equals(old.risk)
    assert store.load(RUN.key).identical(data)
