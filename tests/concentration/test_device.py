"""Where measurements are made: found, refused, and without bearing on their numbers."""

import contextlib
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from largeprompt import engine
from largeprompt.concentration import _deviation, _memory, deviation, prompt_length_for
from largeprompt.engine._prompt_sums_jax import prompt_sums_by_jax
from refusals import assert_refused

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be trusted")  # few prompts do here
D = 3
SOFTMAX = lp.SoftmaxAttention(0.3 * catalogue.matrix(0, D, D), catalogue.matrix(1, 2, D))
GAUSSIAN = lp.Gaussian(catalogue.matrix(6, D), catalogue.covariance(7, D))


def measured(device: Any = "auto", layer=SOFTMAX, mu: Any = GAUSSIAN, name: str = "output") -> np.ndarray:
    found = deviation(layer, mu, None, [9, 40], name, jax.random.key(1), replicates=50, device=device)
    return found.mean_square


def test_prompts_do_not_depend_on_how_many_are_held_at_once(monkeypatch):
    """A GPU holds more of them, whole or in pairs with their law."""
    identity, task = lp.SoftmaxAttention(0.2 * np.eye(D), np.eye(D)), lp.icl.LinearRegression(np.eye(D - 1))
    for layer, mu, name in ((SOFTMAX, lp.Cube(np.ones(D)), "U"), (identity, task, "risk")):
        found = []
        for room in (2**14, 2**21):
            monkeypatch.setattr(_memory, "_PROMPTS", {"cpu": room})
            found.append(measured("auto", layer, mu, name))
        np.testing.assert_allclose(*found, rtol=1e-9)


def test_a_device_that_is_not_there_is_refused(as_a_stranger):
    np.testing.assert_array_equal(measured("auto"), measured("cpu"))
    assert_refused(lambda: measured("gpu"), "device is 'gpu' and there is no GPU: JAX sees cpu alone")
    tpu: Any = "tpu"
    for call in (lambda: measured(tpu), lambda: prompt_length_for(0.1, SOFTMAX, GAUSSIAN, device=tpu)):
        assert_refused(call, "device is 'tpu'; it must be one of 'auto', 'cpu', 'gpu'")


@pytest.mark.parametrize("name", ["output", "gradient"])
def test_gaussian_prompts_are_the_same_on_a_gpu(monkeypatch, name):
    """To float32's rounding: what JAX would draw there, drawn by JAX here."""
    drawn = []

    def by_jax(*arguments, device, **options):
        drawn.append(device)
        return prompt_sums_by_jax(*arguments, platform="cpu", **options)

    plain = measured("cpu", name=name)
    monkeypatch.setattr(_deviation, "on_device", lambda device: contextlib.nullcontext(device))
    monkeypatch.setattr(engine, "gaussian_prompt_sums", by_jax)
    np.testing.assert_allclose(measured("gpu", name=name), plain, rtol=1e-4)
    assert drawn == ["gpu", "gpu"]


def test_what_a_measurement_computes_is_computed_on_its_device():
    """Seen from a process whose default is the second of two devices, since here there is no GPU."""
    script = """
import jax, jax.numpy as jnp
from largeprompt.concentration._deviation import on_device
first, second = jax.devices()
jax.config.update("jax_default_device", second)
made_before = jnp.ones(3)
with on_device("cpu") as found:
    assert (found, jax.jit(jnp.sin)(made_before).device) == ("cpu", first)
assert jax.jit(jnp.sin)(made_before).device == second
"""
    two = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", script], check=True, env=two, timeout=120)
