from typing import ClassVar

import jax

from ._elementwise import AbstractElementwise


class ReLUAttention(AbstractElementwise):
    r"""ReLU attention, weights $\varphi(s) = \max(s, 0)$; `normalised`, it reads 0 where no score is positive.

    Its reading, slope, influence function and 1/L constants are those of `AbstractElementwise`.
    """

    kind: ClassVar[str] = "relu"
    breaks: ClassVar[tuple[float, ...]] = (0.0,)

    def weight(self, s):
        return jax.nn.relu(s)
