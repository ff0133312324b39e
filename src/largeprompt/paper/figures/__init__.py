"""Every figure of the paper, and two of our own, as descriptions: one module each."""

from ._figure import AbstractFigure as AbstractFigure
from ._figure import Results as Results

_MODULES = ()
FIGURES: dict[str, AbstractFigure] = {figure.key: figure for module in _MODULES for figure in module.FIGURES}
"""By key, in the paper's order: 1a … 8, then our own."""
