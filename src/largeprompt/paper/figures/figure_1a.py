"""Figures 1a and 5a: the outputs of softmax and linear attention before training, by prompt length."""

from typing import ClassVar

from largeprompt.paper.settings import ANISOTROPIC

from .at_start import AbstractGap


class OutputGap(AbstractGap):
    """The mean squared difference of the predictions, on the same prompts."""

    quantity: ClassVar[str] = "output"
    what: ClassVar[str] = "outputs"
    symbol: ClassVar[str] = "E(T_softmax − T_linear)²"
    power: ClassVar[str] = "1/L"


FIGURES = (OutputGap("1a"), OutputGap("5a", ANISOTROPIC))
