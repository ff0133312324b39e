"""Laws of tokens, layers and tasks as data: what the tables of a settings file stand for."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from largeprompt.attention import AbstractLayer, Head, known_kinds
from largeprompt.icl import LinearRegression, root
from largeprompt.measures import (
    AbstractMeasure,
    Affine,
    Cube,
    Empirical,
    Gaussian,
    Mixture,
    Product,
    Rademacher,
    Sphere,
)

from ._settings import Table, inlined, short


def measure_from(
    settings: Any, folder: Path | str = ".", *, where: str = "measure", dim: int | None = None
) -> AbstractMeasure:
    """The law of tokens that a table describes; `dim` is the dimension it must have, where that is known."""
    mu = _measure(Table(where, inlined(where, settings, folder)), dim)
    if dim is not None and mu.dim != dim:
        raise ValueError(f"{where} has tokens of dimension {mu.dim}; they must be of dimension {dim}")
    return mu


def _measure(table: Table, dim: int | None = None) -> AbstractMeasure:
    return _MEASURES[table.choice("kind", _MEASURES)](table, dim)


def _gaussian(table: Table, dim: int | None) -> Gaussian:
    table.holds("kind", "mean", "cov", "dim")
    mean = table.array("mean", None) if "mean" in table else None
    size = table.size("dim", dim if mean is None else len(mean))
    if mean is not None and len(mean) != size:
        raise ValueError(f"{table.at('mean')} has {len(mean)} entries; dim is {size}")
    cov = table.covariance("cov", "dim", size)
    with table.naming():
        return Gaussian(np.zeros(len(cov)) if mean is None else mean, cov)


def _mixture(table: Table, dim: int | None) -> Mixture:
    table.holds("kind", "weights", "components")
    components = [_measure(part, dim) for part in table.tables("components")]
    weights = table.array("weights", None)
    with table.naming():
        return Mixture(weights, components)


def _coordinates(name: str, law: Callable[[Any], AbstractMeasure], unit: float) -> Callable:
    """A law of independent coordinates: of the sizes given, or of the covariance given."""

    def build(table: Table, dim: int | None) -> AbstractMeasure:
        table.holds("kind", name, "cov", "dim")
        if name not in table:
            return _with_covariance(table, dim, lambda size: law(np.full(size, unit)))
        sizes = table.value(name)
        size = table.size("dim", dim)
        several = isinstance(sizes, list | tuple) or np.ndim(sizes) > 0
        many = table.array(name, None) if several else np.full(size or 1, table.number(name, 1.0))
        if size is not None and len(many) != size:
            raise ValueError(f"{table.at(name)} has {len(many)} entries; dim is {size}")
        _refuse_both(table, name)
        with table.naming():
            return law(many)

    return build


def _sphere(table: Table, dim: int | None) -> AbstractMeasure:
    table.holds("kind", "radius", "cov", "dim")
    if "radius" not in table:
        return _with_covariance(table, dim, lambda size: Sphere(math.sqrt(size), size))
    _refuse_both(table, "radius")
    size = table.size("dim", dim)
    if size is None:
        raise ValueError(f"{table.at('dim')} is missing; the radius does not say the dimension")
    radius = table.number("radius", 1.0, at_least=0)
    return Sphere(radius, size)


def _refuse_both(table: Table, name: str) -> None:
    if "cov" in table:
        raise ValueError(f"{table.where} has {name} and cov; it must have one of them")


def _with_covariance(table: Table, dim: int | None, unit: Callable[[int], AbstractMeasure]) -> AbstractMeasure:
    """The linear image with the covariance asked for of a law of independent coordinates of variance one."""
    cov = table.covariance("cov", "dim", table.size("dim", dim))
    mu = unit(len(cov))
    return mu if bool((cov == jnp.eye(len(cov))).all()) else Affine(root(cov), np.zeros(len(cov)), mu)


def _empirical(table: Table, dim: int | None) -> Empirical:
    table.holds("kind", "tokens", "weights")
    tokens = table.array("tokens", None, dim)
    weights = table.array("weights", None) if "weights" in table else None
    with table.naming():
        return Empirical(tokens, weights)


def _affine(table: Table, dim: int | None) -> Affine:
    table.holds("kind", "A", "b", "of")
    A = table.array("A", dim, None)
    b = table.array("b", len(A)) if "b" in table else np.zeros(len(A))
    mu = _measure(Table(table.at("of"), table.value("of")), A.shape[1])
    with table.naming():
        return Affine(A, b, mu)


def _product(table: Table, dim: int | None) -> Product:
    table.holds("kind", "factors")
    return Product(*[_measure(part) for part in table.tables("factors")])


_MEASURES: dict[str, Callable[[Table, int | None], AbstractMeasure]] = {
    "gaussian": _gaussian,
    "mixture": _mixture,
    "rademacher": _coordinates("scale", Rademacher, 1.0),
    "cube": _coordinates("half_width", Cube, math.sqrt(3)),
    "sphere": _sphere,
    "empirical": _empirical,
    "affine": _affine,
    "product": _product,
}


def task_from(settings: Any, folder: Path | str = ".", *, where: str = "measure") -> LinearRegression:
    """The regression that a table describes; by default, as in the paper's experiments, Ω = I/d and noise 0.1."""
    table = Table(where, inlined(where, settings, folder))
    table.choice("kind", ("regression",))
    table.holds("kind", "sigma", "d", "noise", "omega", "query_sigma")
    Sigma = table.covariance("sigma", "d", table.size("d"))
    d, noise = len(Sigma), table.number("noise", 0.1, at_least=0)
    Omega = table.covariance("omega", "d", d) if "omega" in table else np.eye(d) / d
    query_Sigma = table.covariance("query_sigma", "d", d) if "query_sigma" in table else None
    return LinearRegression(Sigma, noise, Omega, query_Sigma)


_INITS = ("pytorch", "identity")


def layer_from(settings: Any, dim: int, folder: Path | str = ".", *, where: str = "layer") -> AbstractLayer:
    """The layer on tokens of dimension `dim` that a table describes: by its matrices, or by how it starts."""
    table = Table(where, inlined(where, settings, folder))
    kind = table.choice("kind", known_kinds(), "softmax")
    if "init" in table:
        return _initial(table, dim, kind)
    if "U" in table:
        if "scale" in table:
            value = short(table.settings["scale"])
            raise ValueError(f"{table.at('scale')} is {value}; a layer given by U and V has none, U holds it")
        table.holds("U", "V", "kind")
        return known_kinds()[kind](table.array("U", dim, dim), table.array("V", None, dim))
    if "K" not in table:
        raise ValueError(
            f"{where} has {', '.join(table.settings) or 'nothing'}; it must have init, or U and V, or K, Q and V"
        )
    table.holds("K", "Q", "V", "O", "scale", "kind")
    K, V = table.array("K", None, dim), table.array("V", None, dim)
    O = table.array("O", None, len(V)) if "O" in table else None
    return Head(K, table.array("Q", len(K), dim), V, O, table.number("scale", 1.0), kind)


def _initial(table: Table, dim: int, kind: str) -> AbstractLayer:
    scale = table.number("scale", 1.0)
    if table.choice("init", _INITS) == "identity":
        table.holds("init", "scale", "kind")
        return known_kinds()[kind](scale * jnp.eye(dim), jnp.eye(dim))
    table.holds("init", "seed", "head_dim", "outputs", "scale", "kind")
    seed = table.count("seed", 0, at_least=0, below=2**32) or 0
    sizes: Any = {"head_dim": table.size("head_dim"), "outputs": table.size("outputs")}
    return Head.pytorch_default(jax.random.key(seed), dim, **sizes, scale=scale, kind=kind)
