"""Figures 1b and 5b: the gradients of the risks of softmax and linear attention before training, by prompt length."""

from typing import ClassVar

from largeprompt.paper.settings import ANISOTROPIC

from .at_start import AbstractGap


class GradientGap(AbstractGap):
    """The squared distance of the gradients of the risks in K, Q, V and O."""

    quantity: ClassVar[str] = "risk-gradient"
    what: ClassVar[str] = "gradients of the risks"
    symbol: ClassVar[str] = "‖∇R_softmax − ∇R_linear‖²"
    power: ClassVar[str] = "1/L²"


FIGURES = (GradientGap("1b"), GradientGap("5b", ANISOTROPIC))
