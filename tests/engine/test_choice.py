"""Which trainer carries a training out, and what is refused before anything is compiled."""

import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from engine_catalogue import KMS, flat, pair, uv
from largeprompt import engine
from largeprompt.dynamics import Training
from largeprompt.icl import LinearRegression, RegressionOn, kms

HUBER = KMS.with_loss(lambda prediction, target: jnp.sum(jnp.sqrt(1 + (prediction - target) ** 2)))
TWO_TARGETS = LinearRegression(kms(2, 0.5), 0.1, targets=2)
SOFTMAX, LINEAR = pair(3)
UNLIKE = lp.MultiHead([lp.Head(np.eye(3), np.eye(3), np.ones((1, 3)), scale=scale) for scale in (1.0, 0.5)])
MIXED = lp.MultiHead([lp.Head(np.eye(3), np.eye(3), np.ones((1, 3)), kind=kind) for kind in ("softmax", "linear")])
REFUSED = {
    "a loss of one's own": (HUBER, (SOFTMAX,), "the task is WithLoss"),
    "other covariates": (RegressionOn(lp.Rademacher([1.0, 2.0]), 0.1), (LINEAR,), "the task is RegressionOn"),
    "two targets": (TWO_TARGETS, (lp.SoftmaxAttention(np.eye(4), np.ones((2, 4))),), "the task has 2 targets"),
    "two softmax layers": (KMS, (SOFTMAX, uv(lp.SoftmaxAttention, 1, 3)), "the layers are softmax, softmax"),
    "mixed heads": (KMS, (MIXED,), "mixes softmax and linear heads"),
    "heads of two scales": (KMS, (UNLIKE,), "differ in shape or scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_fused_engine_says_why_it_does_not_apply(name):
    task, layers, reason = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(reason)):
        engine.trainer_for(Training(task, 5), layers, engine="fused")


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_fused_engine_refuses_the_reference_trains(name):
    task, layers, _ = REFUSED[name]
    trainer = engine.trainer_for(Training(task, 5, batch=4), layers)
    assert trainer.name == "reference"
    end = trainer.advance(trainer.start(), 2)
    assert (end.step, end.diverged) == (2, (None,) * len(layers))
    for layer, start in zip(end.layers, layers, strict=True):
        assert np.all(np.isfinite(flat(layer)))
        assert np.any(flat(layer) != flat(start))


def test_the_fused_engine_is_chosen_where_it_applies():
    for layers in ((SOFTMAX,), (LINEAR,), (SOFTMAX, LINEAR), (LINEAR, SOFTMAX)):
        assert engine.trainer_for(Training(KMS, 5), layers).name == "fused"
        assert engine.trainer_for(Training(KMS, 5), layers, engine="reference").name == "reference"
    assert engine.trainer_for(Training(KMS, math.inf), (SOFTMAX,)).name == "fused"
    assert engine.trainer_for(Training(KMS, 2**32), (SOFTMAX,)).name == "reference"


def test_an_unknown_engine_is_refused(as_a_stranger):
    with pytest.raises(ValueError, match=r"engine is 'torch'; it must be one of 'auto', 'fused', 'reference'"):
        engine.trainer_for(Training(KMS, 5), (SOFTMAX,), engine="torch")  # pyright: ignore[reportArgumentType]


def test_layers_that_do_not_read_the_tasks_tokens_are_refused():
    for name in ("fused", "reference"):
        with pytest.raises(ValueError, match="the layer reads tokens of dimension 4"):
            engine.trainer_for(Training(KMS, 5), (uv(lp.SoftmaxAttention, 1, 4),), engine=name)


BAD: list[tuple[str, dict]] = [
    ("batch is 0; it must be at least 1", {"batch": 0}),
    ("batch is 2.5; it must be a whole number", {"batch": 2.5}),
    ("rate is 0; it must be above 0", {"rate": 0.0}),
    ("rate is -0.1; it must be above 0", {"rate": -0.1}),
    ("rate is nan; every entry must be finite", {"rate": math.nan}),
    ("rate is inf; every entry must be finite", {"rate": math.inf}),
    ("loss_factor is 0; it must be above 0", {"loss_factor": 0.0}),
    ("seed is -1; it must be at least 0", {"seed": -1}),
    ("seed is 9223372036854775808; it must be below 2**63", {"seed": 2**63}),
    ("L is 0; a prompt length is a whole number of at least 1", {"L": 0}),
    ("L is nan; a prompt length is a whole number of at least 1", {"L": math.nan}),
    ("task is of type str; it must be a task", {"task": "regression"}),
]


@pytest.mark.parametrize(("message", "wrong"), BAD, ids=[message.split(";")[0] for message, _ in BAD])
def test_training_refuses_what_makes_no_sense(message, wrong, as_a_stranger):
    with pytest.raises(ValueError, match=re.escape(message)):
        Training(**{"task": KMS, "L": 5} | wrong)
