"""Results are in the precision asked for, whatever was imported or computed before."""

import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from largeprompt.lab import Run
from largeprompt.lab._history import risks
from largeprompt.lab._yardstick import yardstick
from largeprompt.paper import Choice

# imports of everything, and then work in float32 before that in float64, in the order that the docs show
PROGRAM = """
import importlib, json, pkgutil, sys
import jax, largeprompt
from largeprompt._device import gpu_refusal
left_out = ["largeprompt.models.compression._press"]  # needs kvpress
if "numba-cuda" in (gpu_refusal("cuda") or ""):  # which is not there, or cannot be imported
    left_out += ["largeprompt.engine._cuda", "largeprompt.engine._gpu"]
for module in pkgutil.walk_packages(largeprompt.__path__, "largeprompt."):
    if not module.name.startswith(tuple(left_out)):
        importlib.import_module(module.name)
arrays = [array.shape for array in jax.live_arrays()]
sys.path.insert(0, "tests")
from test_precision import numbers
before = numbers()
largeprompt.use_float64()
print(json.dumps([arrays, before, numbers()]))
"""

SIGMA = ((1.0, 0.1), (0.1, 1.0))


def numbers():
    """What a preset's run and a user's hold and compute, and in which type."""
    preset = Choice("smoke").runs("kms:0.5", (10,))[0]
    own = Run(L=20, sigma=SIGMA, start="structured:0.3", parameters="UV", attention="linear")
    function: Any = risks(own)[0]
    arrays = [preset.task().Sigma, preset.layers()[0].K, own.task().noise, own.layers()[0].U, function.task.Sigma]
    optimum = yardstick(own, "linear").optimum
    values = [
        *(float(array.ravel()[-2:][0]) for array in arrays),
        float(function.value_and_error(own.layers()[0])[0]),
        optimum,
    ]
    return {"types": [str(array.dtype) for array in arrays], "values": values}


@pytest.fixture(scope="module")
def found(environment, pytestconfig):
    """The arrays that imports make, the numbers before float64 is asked for, and those from there on."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        cwd=pytestconfig.rootpath,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_any_module_makes_no_jax_array(found):
    assert found[0] == []


def test_float64_after_imports_and_float32_work_is_float64_from_there_on(found):
    _, before, after = found
    expected = numbers()
    assert set(before["types"]) == {"float32"}
    assert set(after["types"]) == set(expected["types"]) == {"float64"}
    np.testing.assert_allclose(after["values"], expected["values"], rtol=1e-13)
    assert np.any(np.array(before["values"]) != np.array(expected["values"]))


@pytest.mark.parametrize("given", [SIGMA, np.array(SIGMA), [[1, 0.1], [0.1, 1]]], ids=["tuples", "array", "lists"])
def test_a_run_keeps_the_numbers_given_in_either_precision(given):
    settings: Any = {"sigma": given, "start": {"alpha": 0.3}, "parameters": "UV", "engine": "reference"}
    with jax.enable_x64(False):
        narrow = Run(**settings)
    wide = Run(**settings)
    assert narrow == wide
    assert narrow.key == wide.key
    assert narrow.sigma == SIGMA
