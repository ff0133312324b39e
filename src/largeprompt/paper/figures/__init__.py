"""Every figure of the paper, and two of our own, as descriptions: one module each."""

from . import figure_2, figure_3, figure_4
from ._figure import AbstractFigure as AbstractFigure
from ._figure import Results as Results

_MODULES = (figure_2, figure_3, figure_4)
_ALL = (figure for module in _MODULES for figure in module.FIGURES)
FIGURES: dict[str, AbstractFigure] = {
    figure.key: figure for figure in sorted(_ALL, key=lambda figure: (figure.key.isalpha(), figure.key))
}
"""By key, in the paper's order: 1a … 8, then our own."""
