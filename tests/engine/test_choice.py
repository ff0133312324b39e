"""Which trainer carries a training out, and what is refused before anything is compiled."""

import itertools
import math
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from engine_catalogue import KMS, flat, pair, uv
from largeprompt import _device, engine
from largeprompt._device import Device
from largeprompt.dynamics import Training
from largeprompt.engine._gpu_shapes import BLOCKS, MOST_PARTS, KernelShape, LayerShape
from largeprompt.engine._tokens import SUMS
from largeprompt.icl import LinearRegression, RegressionOn, _prompt, kms

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
    for L in (2**32, 10**12, 10**23, 1e300):
        assert engine.trainer_for(Training(KMS, L), (LINEAR,)).name == "fused"


def test_prompts_of_softmax_attention_that_no_engine_can_read_are_refused_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr(_prompt, "machine_memory", lambda: 16e9)
    heads = [lp.Head(np.eye(3), np.eye(3), np.ones((1, 3))) for _ in range(8)]
    for L, layers in ((10**12, (SOFTMAX,)), (10**23, (SOFTMAX, LINEAR)), (2**31, (lp.MultiHead(heads),))):
        for name in ("auto", "reference"):
            with pytest.raises(
                ValueError, match=r"^L is .*; a prompt of that many tokens takes .* GB, and this machine"
            ):
                engine.trainer_for(Training(KMS, L), layers, engine=name)
        reason = "the tokens of softmax attention are counted below"
        with pytest.raises(ValueError, match=reason):
            engine.trainer_for(Training(KMS, L), layers, engine="fused")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(_device, "gpu_refusal", lambda library: "CUDA finds no device and driver")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_processor_is_chosen_and_a_gpu_that_is_asked_for_is_refused():
    for device in ("auto", "cpu"):
        assert _device.resolve_device(device, "cuda") == "cpu"
        assert type(engine.trainer_for(Training(KMS, 5), (SOFTMAX,), device=device)) is engine.FusedTrainer
    message = r"^device is 'gpu' and there is no GPU: CUDA finds no device and driver; 'auto' takes one where there is"
    with pytest.raises(ValueError, match=message):
        engine.trainer_for(Training(KMS, 5), (SOFTMAX,), device="gpu")


@pytest.mark.usefixtures("no_gpu")
def test_the_trainer_of_a_gpu_without_one_says_why():
    with pytest.raises(
        ValueError, match=r"^the fused engine does not apply on a GPU: CUDA finds no device and driver$"
    ):
        engine.GpuTrainer(Training(KMS, 5), (SOFTMAX,))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_fused_engine_refuses_it_refuses_on_a_gpu(name, monkeypatch):
    monkeypatch.setattr(_device, "gpu_refusal", lambda library: None)
    task, layers, reason = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(reason)):
        engine.trainer_for(Training(task, 5), layers, engine="fused", device="gpu")
    assert engine.trainer_for(Training(task, 5), layers, device="gpu").name == "reference"


def test_with_a_gpu_its_trainer_is_chosen_unless_the_processor_is_asked_for(monkeypatch):
    monkeypatch.setattr(_device, "gpu_refusal", lambda library: None)
    chosen = {
        device: type(engine.trainer_for(Training(KMS, 5), (SOFTMAX,), device=device)) for device in get_args(Device)
    }
    assert chosen == {"auto": engine.GpuTrainer, "cpu": engine.FusedTrainer, "gpu": engine.GpuTrainer}


def raising(error):
    def fails():
        raise error

    return fails


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (raising(ImportError("no module")), "numba-cuda is not installed (it comes with largeprompt[cuda])"),
        (
            raising(RuntimeError("Failure finding libcudart.so\nand a second line")),
            "numba-cuda cannot be imported: Failure finding libcudart.so (largeprompt[cuda] installs what it needs)",
        ),
        (
            lambda: SimpleNamespace(is_available=raising(RuntimeError("CUDA_ERROR_UNKNOWN (999)\nand a second line"))),
            "CUDA does not answer: CUDA_ERROR_UNKNOWN (999)",
        ),
        (lambda: SimpleNamespace(is_available=lambda: False), "CUDA finds no device and driver"),
        (lambda: SimpleNamespace(is_available=lambda: True), None),
    ],
)
def test_why_there_is_no_gpu_is_one_line_whatever_a_driver_says(monkeypatch, cuda, reason):
    monkeypatch.setattr(_device, "numba_cuda", cuda)
    assert _device.gpu_refusal("cuda") == reason


@pytest.mark.parametrize("device", ["tpu", "", "GPU"])
def test_an_unknown_device_is_refused(device, as_a_stranger):
    message = f"device is {device!r}; it must be one of 'auto', 'cpu', 'gpu'"
    with pytest.raises(ValueError, match=re.escape(message)):
        _device.resolve_device(device, "cuda")
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.trainer_for(Training(KMS, 5), (SOFTMAX,), device=device)


def test_an_unknown_engine_is_refused(as_a_stranger):
    with pytest.raises(ValueError, match=r"engine is 'torch'; it must be one of 'auto', 'fused', 'reference'"):
        engine.trainer_for(Training(KMS, 5), (SOFTMAX,), engine="torch")  # pyrefly: ignore[bad-argument-type]


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


def test_a_block_of_any_kind_shares_less_than_a_gpu_lets_it():
    """Weights, laws, what threads hand over and readings: 48 KB without asking the driver for more."""
    for d, number, rank, values in itertools.product(
        (1, 2, 5, 17, 20, 64, 73, 74, 100, 200), (1, 2, 8), (1, 2, 7, 9, None), (1, 3, None)
    ):
        usual = max(1, (d + 1) // number)
        heads = LayerShape(number, rank or usual, values or usual, True, True)
        for layers, prompts in itertools.product(((heads, heads), (heads, None), (None, heads)), (32, 96, 128)):
            kind = KernelShape(d, *layers, prompts)
            law = 8 * ((d + 1) * (2 * d + 1) + d) + 8 * d * d
            weights = sum(layer.bytes(d + 1) for layer in kind.layers) + law if kind.on_chip else 0
            fixed = weights + 4 * prompts * max(kind.drawn_rows, 1) + 12 + 8
            assert kind.fixed_bytes == fixed
            assert fixed + kind.shared_bytes(MOST_PARTS) <= 48 * 1024
            for blocks in BLOCKS:
                spread = kind._replace(blocks=blocks)
                if kind.can_spread:
                    assert spread.fixed_bytes + spread.shared_bytes(spread.readers) <= 48 * 1024
                    assert spread.own * spread.blocks == prompts
                    assert spread.readers >= len(SUMS)
                    assert spread.helper < spread.readers


@pytest.mark.parametrize("marks", [(0, 1), (2, 2), (3, 1), (4, 11)])
def test_marks_must_increase_from_the_state_to_the_stop(marks):
    training = Training(KMS, 5, batch=4)
    start = engine.FusedTrainer(training, (SOFTMAX,)).start()
    with pytest.raises(ValueError, match=re.escape(f"marks are {marks}; they must increase from above 0 to 10")):
        engine.GpuBatch([engine.GpuRun(training, start, 10, marks)])


def test_the_kernel_of_a_gpu_is_there_beside_a_numpy_without_row_stack():
    reason = _device.gpu_refusal("cuda") or ""
    if "numba-cuda" in reason:
        pytest.skip(reason)
    program = """
import numpy
import largeprompt.engine  # with SciPy and Numba, which take all that their NumPy has
vars(numpy).pop("row_stack", None)
import largeprompt.engine._gpu_kernel, numba.cuda.np.arrayobj
print("row_stack" in vars(numpy))
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
