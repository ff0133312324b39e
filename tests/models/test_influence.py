"""Influences are derivatives, and they predict what happens when a group is left out."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from scipy import stats

from largeprompt import models
from largeprompt.models import sensitivity as package
from largeprompt.models.sensitivity import influence, left_out
from weighted_prompts import Mean, Network, SoftmaxHead, network

mpl.use("Agg")


def head(n: int = 40) -> SoftmaxHead:
    rng = np.random.default_rng(3)
    return SoftmaxHead(rng.normal(size=(n, 3)), rng.normal(size=3))


def weights_of(prompt: SoftmaxHead) -> np.ndarray:
    return prompt.scores.softmax(dim=0).numpy()


def test_the_influence_on_a_softmax_head_is_the_closed_form():
    prompt = head()
    w, rows = weights_of(prompt), prompt.rows.numpy()
    found = influence(prompt)
    assert found.estimate == pytest.approx(w @ rows)
    assert found.values == pytest.approx((w[:, None] * (rows - w @ rows)).T, abs=1e-7)


def test_leaving_a_token_out_of_a_softmax_head_is_the_closed_form():
    prompt = head()
    w, rows = weights_of(prompt), prompt.rows.numpy()
    truth = -(w / (1 - w))[:, None] * (rows - w @ rows)
    assert left_out(prompt) == pytest.approx(truth.T, abs=1e-6)
    assert left_out(prompt, [5, 2], batch=1) == pytest.approx(truth[[5, 2]].T, abs=1e-6)


def test_influences_through_a_network_are_finite_differences():
    prompt, step = network(0), 1e-3
    found = influence(prompt).values
    shifts = step * torch.eye(prompt.groups)
    truth = (prompt(shifts) - prompt(-shifts)).T.numpy() / (2 * step)
    assert found == pytest.approx(truth, abs=1e-5)


def test_the_integral_over_one_group_s_weight_is_the_change_when_it_is_left_out():
    prompt, i = network(0), 4
    nodes, shares = np.polynomial.legendre.leggauss(30)
    change = 0.0
    for node, share in zip((nodes + 1) / 2, shares / 2, strict=True):
        at = torch.zeros(1, prompt.groups)
        at[0, i] = float(np.log(node))
        at.requires_grad_()
        (slope,) = torch.autograd.grad(prompt(at)[0, 0], at)
        change -= share * float(slope[0, i]) / node
    assert change == pytest.approx(float(left_out(prompt, [i])[0, 0]), rel=1e-4)


def test_the_path_of_all_weights_adds_up_to_the_change_from_an_empty_prompt():
    prompt = network(0, always=3)
    found = influence(prompt, along=256, batch=100)
    with torch.no_grad():
        empty = prompt(torch.full((1, prompt.groups), -torch.inf))[0].numpy()
    assert found.values.sum(axis=1) == pytest.approx(found.estimate - empty, abs=5e-3)
    assert found.values != pytest.approx(influence(prompt).values, rel=0.1)


def correlations(prompt: Network, rng: np.random.Generator) -> tuple[float, float]:
    """Rank correlations of what leaving out does with its prediction, and with the same predictions permuted."""
    truth, predicted = left_out(prompt), influence(prompt).left_out
    permuted = rng.permuted(predicted, axis=1)
    return _rank_correlation(truth, predicted), _rank_correlation(truth, permuted)


def _rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    ranks = [stats.rankdata(x, axis=1) for x in (one, other)]
    return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(*ranks, strict=True)]))


def test_influences_predict_leaving_out_and_permuted_ones_do_not():
    rng = np.random.default_rng(0)
    own, permuted = zip(*(correlations(network(seed, n=60), rng) for seed in range(5)), strict=True)
    assert min(own) > 0.9
    assert abs(np.mean(permuted)) < 5 / np.sqrt(5 * 3 * 59)


def test_rows_that_are_equal_have_equal_influence_and_a_copy_halves_it():
    rows = np.random.default_rng(0).normal(size=(20, 2))
    twice = np.concatenate([rows, rows])
    found, alone = influence(Mean(twice)).values, influence(Mean(rows)).values
    assert found[:, :20] == pytest.approx(found[:, 20:])
    assert found[:, :20] == pytest.approx(alone / 2)


def test_names_are_those_of_the_package_above_too():
    names = [name for name in dir(package) if not name.startswith("_")]
    assert {"error_bars", "ErrorBars", "weighted", "learning_curve"} < set(names)
    for name in names:
        assert getattr(models, name) is getattr(package, name)
        assert name in dir(models)


def test_the_largest_groups_come_first_in_words_and_data():
    found = influence(head()).named([f"row {i}" for i in range(40)], ["a", "b", "c"])
    largest = int(np.argmax(np.abs(found.values[1])))
    assert found.top(3, output=1)[0] == largest
    assert len(found.top(7)) == 7
    first = repr(found).splitlines()[2].split()[:2]
    assert first == ["row", str(found.top(1)[0])]
    data = found.to_dataset()
    assert float(data["influence"].sel(group=f"row {largest}", output="b")) == found.values[1, largest]
    assert float(data["left_out"].sel(group=f"row {largest}", output="b")) == -found.values[1, largest]
    assert len(found.plot(output=1).patches) == 20


class Broken(Mean):
    """Outputs that are not what they should be."""

    def __init__(self, change):
        super().__init__(np.ones((5, 2)))
        self.change = change

    def __call__(self, log_weights):
        return self.change(super().__call__(log_weights))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[0], r"outputs have shape \(2,\) for 1 rows"),
        (lambda x: x * torch.nan, "output 0 is nan"),
        (lambda x: x.detach(), "do not depend on its log-weights"),
        (lambda x: x.detach().numpy(), "outputs are of type ndarray; give a tensor of PyTorch"),
        (lambda x: (x - x.detach()).abs().sqrt(), "a derivative in a log-weight is not finite"),
    ],
)
def test_outputs_that_are_wrong_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        influence(Broken(change))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: influence(p, along=-1), "along is -1; it must be at least 0"),
        (lambda p: influence(p, along=4), "along is 4, but only ratios of weights matter to this prompt"),
        (lambda p: influence(p, batch=0), "batch is 0; it must be at least 1"),
        (lambda p: left_out(p, [40]), "must be whole numbers from 0 to 39"),
        (lambda p: left_out(p, [1.5]), r"groups are \[1.5\]; they must be whole numbers"),  # pyrefly: ignore[bad-argument-type]
        (lambda p: influence(p).top(3, output=7), "output is 7; it must be from 0 to"),
        (lambda p: influence(object()), "prompt.groups is None; it must be a whole number"),  # pyrefly: ignore[bad-argument-type]
        (lambda p: influence(p).named(["one"]), "there are 1 names of groups for 40 groups"),
    ],
)
def test_what_is_asked_wrongly_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(head())
