from typing import ClassVar

import jax

from ._elementwise import AbstractElementwise


class SigmoidAttention(AbstractElementwise):
    r"""Sigmoid attention, weights $\varphi(s) = 1/(1+e^{-s})$ that need not add up to 1 unless `normalised`.

    Its reading, slope, influence function and 1/L constants are those of `AbstractElementwise`.
    """

    kind: ClassVar[str] = "sigmoid"
    # no kinks: it changes between these scores and is flat beyond, on whatever scale the scores vary
    breaks: ClassVar[tuple[float, ...]] = (-16.0, -4.0, 4.0, 16.0)

    def weight(self, s):
        return jax.nn.sigmoid(s)
