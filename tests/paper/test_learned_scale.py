"""Claims F4 and S4 on a small computation and on doctored ones."""

import numpy as np

from largeprompt.paper import Choice
from largeprompt.paper.experiments import CLAIMS
from largeprompt.paper.experiments.learned_scale import SCALES, LearnedScales


def made_up(in_L=1 / 3, in_slope=0.6, in_noise=-0.3, error=0.03):
    """Scales that are powers of what is varied."""
    (computation,) = SCALES.needs(Choice("smoke"))
    assert isinstance(computation, LearnedScales)
    settings = computation.settings()
    L, slope, noise = (np.array([one[name] for one in settings], float) for name in ("L", "slope", "noise"))
    scale = 10 * (L / 128) ** in_L * (slope / 2) ** in_slope * (noise / 0.4) ** in_noise
    return computation.table(list(zip(scale, np.full(len(scale), error), strict=True)))


def verdict(key, data):
    return CLAIMS[key].entry({"scales": data})["verdict"]


def test_scales_that_follow_slope_noise_and_length_hold():
    assert verdict("F4", made_up()) == "holds"
    assert verdict("S4", made_up(error=0.01)) == "holds"


def test_scales_that_do_not_follow_are_reported_as_such():
    assert verdict("F4", made_up(in_slope=-0.6)) == "does not hold"
    assert verdict("F4", made_up(in_noise=0.3)) == "does not hold"
    assert verdict("F4", made_up(in_noise=0.0)) == "not settled at this preset"
    assert verdict("S4", made_up(in_L=0.6)) == "does not hold"
    assert verdict("S4", made_up(error=0.5)) == "not settled at this preset"


def test_a_small_computation_finds_a_scale_for_every_setting():
    data = LearnedScales(2**5, lengths=(128,), slopes=(2.0,), noises=(0.4,)).compute()
    assert set(data.varied.values) == {"L", "slope", "noise"}
    assert ((data.scale > 0.5) & (data.scale < 100)).all()
    assert (data.error > 0).all()
