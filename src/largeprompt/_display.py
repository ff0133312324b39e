"""How objects and results look to a person: their numbers as text, as HTML in a notebook, and as a picture."""

import abc
import dataclasses
import html
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import numpy as np
import wadler_lindig as wl

from ._checks import is_traced

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from xarray import Dataset as Dataset

_WIDTH = 100  # letters of a line
_ROW, _ENTRIES = 12, 100  # an array with longer rows or more entries is summarised
_ENDS = 6  # rows of a long table that are shown at either end


class AbstractShown(eqx.Module):
    """A module that prints its numbers; `_shown` are the names and values that it prints."""

    def _shown(self) -> dict[str, Any]:
        public = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.name.startswith("_")}
        return {name: value for name, value in public.items() if value is not None}

    def __repr__(self) -> str:
        return wl.pformat(self, width=_WIDTH, custom=_document)

    def _repr_html_(self) -> str | None:
        return _html(self) if self._is_concrete() else None

    def _is_concrete(self) -> bool:
        return all(
            isinstance(leaf, np.ndarray | np.generic | float | int | str) or is_known(leaf)
            for leaf in jax.tree.leaves(eqx.filter(self, lambda leaf: not callable(leaf)))
        )


class AbstractTable(AbstractShown):
    """A result with one row for each prompt length or time: it prints as a table, and plots."""

    @abc.abstractmethod
    def to_dataset(self) -> "Dataset":
        """The result as an xarray dataset; what has no row is in its attributes."""

    @abc.abstractmethod
    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the result on `ax`, or on new axes."""

    def __repr__(self) -> str:
        if not self._is_concrete():
            return super().__repr__()
        title, names, rows = self._rows()
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [names, *rows]
        ]
        return "\n".join([title, *lines])

    def _repr_html_(self) -> str | None:
        if not self._is_concrete():
            return None
        title, names, rows = self._rows()
        cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<p>{html.escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _rows(self) -> tuple[str, list[str], list[list[str]]]:
        """A title, the names of the columns and the rows: of every variable along the first dimension alone."""
        data = self.to_dataset()
        along = str(next(iter(data.sizes)))
        columns = {along: data[along].values} | {
            str(name): variable.values for name, variable in data.data_vars.items() if variable.dims == (along,)
        }
        facts = ", ".join(f"{name}: {_plain(value)}" for name, value in data.attrs.items() if value not in ("", None))
        rows = [[_plain(value) for value in row] for row in zip(*columns.values(), strict=True)]
        if len(rows) > 2 * _ENDS + 1:
            rows = [*rows[:_ENDS], ["…"] * len(columns), *rows[-_ENDS:]]
        return f"{type(self).__name__} ({facts})", list(columns), rows


def dataset(along: str, at: Any, variables: Mapping[str, Any], facts: Mapping[str, Any]) -> "Dataset":
    """A dataset of arrays along one dimension; a variable may be given as (second dimension, array), or be None."""
    import xarray as xr  # a second of imports that only a reader of results needs

    def variable(name: str, value: Any) -> tuple[tuple[str, ...], np.ndarray]:
        second, array = value if isinstance(value, tuple) else (None, value)
        array = np.asarray(array)
        own = (second,) if second else tuple(f"{name}_{i}" for i in range(1, array.ndim))
        return (along, *own), array

    at = np.asarray(at)
    # whole numbers past 2^63 are objects, which no file format keeps
    coordinate = at.astype(float) if at.dtype == object else at
    found = {name: variable(name, value) for name, value in variables.items() if value is not None}
    return xr.Dataset(found, coords={along: coordinate}, attrs=dict(facts))


def named_arrays(tree: Any) -> dict[str, Any]:
    """The arrays of a module by their names, such as `U` or `heads_0_K`."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {"_".join(re.findall(r"\w+", jax.tree_util.keystr(path))): leaf for path, leaf in leaves}


def length_axes(ax: "Axes | None", quantity: str) -> "Axes":
    """Logarithmic axes of mean squares by prompt length: those given, or new ones."""
    ax = axes(ax)
    ax.set(xscale="log", yscale="log", xlabel="prompt length L", ylabel=f"mean square deviation, {quantity}")
    return ax


def time_axes(ax: "Axes | None", times: Any, of: str) -> "Axes":
    """Axes of what falls along a flow: those given, or new ones; times are logarithmic where they span decades."""
    ax = axes(ax)
    positive = np.asarray(times)[np.asarray(times) > 0]
    ax.set(yscale="log", xlabel="time", ylabel=of)
    if positive.size and positive.max() > 30 * positive.min():
        ax.set_xscale("log")
    return ax


def heat_map(
    ax: "Axes",
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float] | None = None,
) -> Any:
    """Positive numbers as cells with their values, coloured by their logarithm; the image, for a bar of colours.

    A number beyond the `limits`, by default the least and greatest finite one, has the colour at that end; what is no
    number is grey.
    """
    from matplotlib.colors import LogNorm

    low, high = color_limits([values]) if limits is None else limits
    values = np.asarray(values, float)
    cells = np.ma.masked_invalid(np.clip(values, low, high))
    image = ax.imshow(cells, cmap="viridis", norm=LogNorm(low, high), aspect="auto", origin="lower")
    ax.set_facecolor("0.85")
    for name, labels in (("x", columns), ("y", rows)):
        ax.set(**{f"{name}ticks": range(len(labels)), f"{name}ticklabels": labels})
    ax.tick_params(length=0)
    for (i, j), value in np.ndenumerate(values):
        dark = np.isfinite(value) and np.log(np.clip(value, low, high) / low) < 0.6 * np.log(high / low)
        ax.text(j, i, cell_text(value), ha="center", va="center", color="white" if dark else "black", fontsize="small")
    return image


def color_limits(tables: Sequence[np.ndarray]) -> tuple[float, float]:
    """The least and greatest of all positive finite numbers, apart from each other."""
    found = np.concatenate([np.zeros(0), *(np.ravel(np.asarray(table, float)) for table in tables)])
    found = found[np.isfinite(found) & (found > 0)]
    low, high = (float(found.min()), float(found.max())) if found.size else (1.0, 1.0)
    return low, max(high, 1.01 * low)


def length_text(L: float) -> str:
    """A prompt length for a table or an axis."""
    return "∞" if np.isposinf(L) else f"{L:g}".replace("e+0", "e").replace("e+", "e") if L >= 1e6 else str(int(L))


def cell_text(value: float) -> str:
    """The number in a cell, in three digits."""
    if not np.isfinite(value):
        return "–" if np.isnan(value) else "∞"
    return f"{value:.2f}" if 0.1 <= value < 9.995 else f"{value:.3g}"


def axes(ax: "Axes | None") -> "Axes":
    """Those given, or new ones."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # only where a picture is drawn

    return plt.subplots(layout="constrained")[1]


def is_known(value: Any) -> bool:
    """Whether a value is an array with numbers: JAX puts tracers and other placeholders in its place."""
    return isinstance(value, jax.Array) and not is_traced(value) and not value.is_deleted()


def _plain(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def _document(value: Any) -> wl.AbstractDoc | None:
    """How a value is printed; None leaves it to the printer, which shows a traced array by its shape."""
    if _has_own_text(value):
        return wl.TextDoc(repr(value))
    if isinstance(value, AbstractShown):
        parts = wl.named_objs(value._shown().items(), indent=2, custom=_document)
        return wl.bracketed(wl.TextDoc(f"{type(value).__name__}("), parts, wl.comma, wl.TextDoc(")"), indent=2)
    if isinstance(value, float):
        return wl.TextDoc(_number(value))
    if _is_numeric(value):
        array = np.asarray(value)
        return _nested(array.tolist()) if _is_small(array) else wl.TextDoc(f"{_shape(array)} {_extent(array)}".strip())
    return None


def _has_own_text(value: Any) -> bool:
    """Whether an object's class defines how it prints."""
    own = isinstance(value, AbstractShown) and type(value).__repr__ is not AbstractShown.__repr__
    return own and not isinstance(value, AbstractTable)


def _is_numeric(value: Any) -> bool:
    """Whether a value is an array of numbers that are known."""
    return (isinstance(value, np.ndarray) or is_known(value)) and any(
        np.issubdtype(value.dtype, kind) for kind in (np.floating, np.integer, np.bool_)
    )


def _is_small(array: np.ndarray) -> bool:
    return 0 < array.size <= _ENTRIES and array.shape[-1:] <= (_ROW,)


def _shape(value: Any) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _extent(array: np.ndarray) -> str:
    return f"from {array.min():.4g} to {array.max():.4g}" if array.size else ""


def _number(value: Any, digits: int = 6) -> str:
    return f"{value + 0.0:.{digits}g}" if isinstance(value, float) else str(value)  # + 0.0: no minus before a 0


def _nested(value: Any) -> wl.AbstractDoc:
    """Nested lists: a row is never broken."""
    if not isinstance(value, list):
        return wl.TextDoc(_number(value))
    if not isinstance(value[0], list):
        return wl.TextDoc("[" + ", ".join(map(_number, value)) + "]")
    return wl.bracketed(wl.TextDoc("["), [_nested(row) for row in value], wl.comma, wl.TextDoc("]"), indent=1)


def _html(value: Any) -> str:
    """A value as HTML, without colours: a notebook may be light or dark."""
    if isinstance(value, AbstractTable):
        return value._repr_html_() or ""
    if isinstance(value, AbstractShown) and not _has_own_text(value):
        rows = "".join(_field(name, each) for name, each in value._shown().items())
        return f"<div><b>{html.escape(type(value).__name__)}</b><table>{rows}</table></div>"
    if isinstance(value, tuple | list) and any(isinstance(each, AbstractShown) for each in value):
        return "".join(map(_html, value))
    if _is_numeric(value):
        array = np.asarray(value)
        return _grid(array.tolist(), array.ndim) if _is_small(array) else _extent(array)
    return html.escape(wl.pformat(value, width=_WIDTH, custom=_document))


def _field(name: str, value: Any) -> str:
    kind = _shape(value) if _is_numeric(value) and value.ndim else ""
    left = 'style="text-align: left; vertical-align: baseline"'
    return f"<tr><th {left}>{html.escape(name)}</th><td {left}>{kind}</td><td {left}>{_html(value)}</td></tr>"


def _grid(value: Any, axes: int) -> str:
    """Numbers as a small table between two lines: a vector as one row, matrices one below the other."""
    if axes == 0:
        return _number(value, 4)
    if axes > 2:
        return "".join(_grid(each, axes - 1) for each in value)
    rows = value if axes == 2 else [value]
    cells = ("".join(f"<td>{_number(each, 4)}</td>" for each in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<table style="border: solid; border-width: 0 1px; margin: 0 0 4px; text-align: right">{body}</table>'
