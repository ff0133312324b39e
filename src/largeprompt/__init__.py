"""Attention as a map on measures: finite prompts, their infinite-prompt limit, and how fast one reaches the other."""

from importlib import import_module
from typing import TYPE_CHECKING

# Imported on first use, by `__getattr__`: JAX and the rest take seconds, and a command must hear Ctrl-C before.
if TYPE_CHECKING:
    from . import attention as attention
    from . import concentration as concentration
    from . import dynamics as dynamics
    from . import icl as icl
    from . import measures as measures
    from . import models as models
    from ._compiled import compile_quickly as compile_quickly
    from ._compiled import keep_compiled as keep_compiled
    from ._precision import use_float64 as use_float64
    from .attention import Head as Head
    from .attention import Lengths as Lengths
    from .attention import LinearAttention as LinearAttention
    from .attention import MultiHead as MultiHead
    from .attention import ReLUAttention as ReLUAttention
    from .attention import SigmoidAttention as SigmoidAttention
    from .attention import SoftmaxAttention as SoftmaxAttention
    from .attention import chain_rule as chain_rule
    from .attention import depth as depth
    from .attention import nonlinearity as nonlinearity
    from .attention import output_stderr as output_stderr
    from .attention import particles as particles
    from .attention import pushforward as pushforward
    from .attention import relative_nonlinearity as relative_nonlinearity
    from .attention import with_query as with_query
    from .measures import AbstractMeasure as AbstractMeasure
    from .measures import Affine as Affine
    from .measures import Cube as Cube
    from .measures import Empirical as Empirical
    from .measures import FromCGF as FromCGF
    from .measures import FromSampler as FromSampler
    from .measures import Gaussian as Gaussian
    from .measures import Mixture as Mixture
    from .measures import Product as Product
    from .measures import Rademacher as Rademacher
    from .measures import Sphere as Sphere

__version__ = "0.1.0.dev0"

_LAYERS = ("attention", "concentration", "dynamics", "icl", "measures", "models")
_NAMES = {
    "_compiled": ("compile_quickly", "keep_compiled"),
    "_precision": ("use_float64",),
    "attention": (
        "Head", "Lengths", "LinearAttention", "MultiHead", "ReLUAttention", "SigmoidAttention", "SoftmaxAttention",
        "chain_rule", "depth", "nonlinearity", "output_stderr", "particles", "pushforward", "relative_nonlinearity",
        "with_query",
    ),
    "measures": (
        "AbstractMeasure", "Affine", "Cube", "Empirical", "FromCGF", "FromSampler", "Gaussian", "Mixture", "Product",
        "Rademacher", "Sphere",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_LAYERS, *_HOME]


if not TYPE_CHECKING:  # else every misspelt name would pass for one of these

    def __getattr__(name: str) -> object:
        if name in _LAYERS:
            return import_module(f".{name}", __name__)
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(f".{_HOME[name]}", __name__), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
