"""A chart as data: panels of series, or maps of numbers, which a page and a picture are both drawn from."""

import dataclasses
from typing import Any, Literal

import numpy as np

from largeprompt._display import color_limits

# Okabe and Ito's palette: distinct for every kind of colour vision, on light and on dark paper. INK is the text's own.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
INK, GREY = "ink", "grey"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK)
OF_ATTENTION = {"softmax": BLUE, "linear": VERMILION}

# From viridis, without its ends: an order that shows in grey and in every kind of colour vision.
_SEQUENCE = ("#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#9fda3a", "#d8c61f")

Role = Literal["measured", "seed", "theory", "bound"]
Dash = Literal["solid", "dash", "dot"]


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """One curve or cloud of points.

    `role` says what a reader may hide: what was measured, one seed of it, theory, a bound. `low` and `high` are a band
    around a line, error bars around points. `mark` is a matplotlib marker (o, s, x, ^, v, D) for points, empty for a
    line alone. Series of one `label` share their place in the legend. Points that are not finite are gaps.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    role: Role = "measured"
    colour: str = INK
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    line: bool = True
    mark: str = ""
    dash: Dash = "solid"
    width: float = 1.4
    in_legend: bool = True

    def __post_init__(self):
        for name in ("x", "y", "low", "high"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, np.asarray(value, float))
        sizes = {len(value) for value in (self.x, self.y, self.low, self.high) if value is not None}
        if len(sizes) != 1:
            raise ValueError(
                f"{self.label}: x, y and its limits have {sorted(sizes)} points; they must have equally many"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Panel:
    """Series on one pair of axes; `remarks` are a line or two of text inside it."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_log: bool = True
    y_log: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether x is a few whole numbers, as of heads, between which there are no ticks."""
        x = np.concatenate([series.x for series in self.series]) if self.series and not self.x_log else np.full(1, 0.5)
        return bool((x == np.round(x)).all() and np.ptp(x) <= 8)


@dataclasses.dataclass(frozen=True, eq=False)
class HeatMap:
    """Positive numbers as coloured cells, with names for `rows` and `columns`; `scale` says what a number is.

    All maps of a chart have their colours in common.
    """

    title: str
    x_label: str
    y_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: np.ndarray
    scale: str
    remarks: tuple[str, ...] = ()
    series: tuple[Series, ...] = ()
    x_log: bool = False
    y_log: bool = False

    def __post_init__(self):
        object.__setattr__(self, "values", np.asarray(self.values, float))
        if self.values.shape != (len(self.rows), len(self.columns)):
            raise ValueError(
                f"{self.title}: the values have shape {self.values.shape}; there are {len(self.rows)} rows and "
                f"{len(self.columns)} columns"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Chart:
    """Panels side by side, `columns` of them in a row; those of one row have the y-axis in common if `share_y`."""

    panels: tuple[Panel | HeatMap, ...]
    columns: int = 3
    share_y: bool = True


def level(label: str, value: float, x: Any, **style: Any) -> Series:
    """A horizontal line from the first to the last of x."""
    ends = np.asarray([np.min(x), np.max(x)], float)
    shown: dict[str, Any] = {"role": "theory", "width": 1.0, **style}
    return Series(label, ends, np.full(2, float(value)), **shown)


def sequence(n: int) -> tuple[str, ...]:
    """Colours in order, from dark to light; past their number they begin again."""
    if n < 2:
        return _SEQUENCE[:n]
    places = [round(i * (len(_SEQUENCE) - 1) / (n - 1)) for i in range(n)] if n <= len(_SEQUENCE) else range(n)
    return tuple(_SEQUENCE[place % len(_SEQUENCE)] for place in places)


def over_seeds(values: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the first axis, and the least and greatest: the band over seeds. A seed that is NaN does not count."""
    values = np.asarray(values, float)
    return np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0)


def heat_limits(chart: Chart) -> tuple[float, float]:
    """The numbers at the two ends of the colours that all heat maps of a chart share."""
    return color_limits([panel.values for panel in chart.panels if isinstance(panel, HeatMap)])
