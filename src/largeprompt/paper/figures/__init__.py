"""Every figure of the paper, and two of our own, as descriptions: one module each."""

from . import figure_1a, figure_1b, figure_2, figure_3, figure_4, flows, laws
from ._figure import AbstractFigure as AbstractFigure
from ._figure import Results as Results

_MODULES = (figure_1a, figure_1b, figure_2, figure_3, figure_4, laws, flows)
_ALL = (figure for module in _MODULES for figure in module.FIGURES)
FIGURES: dict[str, AbstractFigure] = {
    figure.key: figure for figure in sorted(_ALL, key=lambda figure: (figure.key.isalpha(), figure.key))
}
"""By key, in the paper's order: 1a … 8, then our own."""
