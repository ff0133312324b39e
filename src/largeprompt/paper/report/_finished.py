"""A finished reproduction, read from its folder."""

import contextlib
import dataclasses
import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xarray as xr

from largeprompt.paper.chart import Chart
from largeprompt.paper.claims import CLAIMS, ROLES, VERDICTS
from largeprompt.paper.figures import AbstractFigure
from largeprompt.paper.files import read_json

FORMATS = ("svg", "pdf", "csv", "nc")
_ACCOUNT = (
    *("preset", "command", "options", "began", "seconds", "figures", "settings", "versions"),
    *(f"{part}.{name}" for part in ("runs", "pieces") for name in ("count", "core_seconds")),
    *(f"machine.{name}" for name in ("processor", "cores", "system", "python")),
)
_CHOICE = ("preset", "seeds", "conventions")  # what all parts of a folder have in common


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """A figure with its data: how it is drawn, what it says, the command that makes it, the claims it bears on."""

    key: str
    name: str
    title: str
    look: str
    chart: Chart
    told: list[str]
    command: str
    claims: list[str]

    @property
    def anchor(self) -> str:
        """Its place on the page."""
        return f"figure-{self.key}"

    def file(self, form: str) -> str:
        """Its file in one of the formats, as seen from the report."""
        return f"../figures/figure-{self.key}.{form}"


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
    """What ran, what was found, the figures."""

    run: dict[str, Any]
    ledger: dict[str, Any]
    figures: list[Drawn]

    @property
    def claims(self) -> list[dict[str, Any]]:
        """The lines of the ledger."""
        return self.ledger["claims"]

    @property
    def errata(self) -> list[dict[str, Any]]:
        """The errata with their evidence."""
        return self.ledger.get("errata", [])

    def judged(self, verdict: str, role: str | None = None) -> list[dict[str, Any]]:
        """The claims of one verdict, all or those of one role."""
        return [claim for claim in self.claims if claim["verdict"] == verdict and role in (None, claim["role"])]


def read(folder: Path, figures: Mapping[str, AbstractFigure]) -> Finished:
    """A finished reproduction; an error names what is missing and the command that makes it."""
    run = _load(folder, "run.json", _ACCOUNT)
    ledger = _load(folder, "ledger.json", ("rule", "claims"))
    _same_choice(folder, "ledger.json", ledger.get("choice"), run)
    for claim in ledger["claims"]:
        if claim["verdict"] not in VERDICTS:
            raise ValueError(
                f"{folder / 'ledger.json'}: {claim['key']} is judged {claim['verdict']!r}, not one of {VERDICTS}"
            )
        known = CLAIMS[claim["key"]].role if claim["key"] in CLAIMS else "test"
        claim.setdefault("role", known)  # a ledger of an earlier version does not say it
        if claim["role"] not in ROLES:
            raise ValueError(
                f"{folder / 'ledger.json'}: {claim['key']} is {claim['role']!r}, not one of {tuple(ROLES)}"
            )
    ledger["claims"].sort(key=_natural)
    unknown = [key for key in run["figures"] if key not in figures]
    if unknown:
        raise ValueError(f"{folder / 'run.json'}: unknown figure {unknown[0]!r}; known are {', '.join(figures)}")
    keys = [key for key in figures if key in run["figures"]]
    return Finished(run, ledger, [_drawn(folder, figures[key], run, ledger) for key in keys])


def _natural(claim: dict[str, Any]) -> list[tuple[int, str]]:
    """C2 before C10."""
    return [(int(part or 0) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", claim["key"])]


def _load(folder: Path, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    path, out = folder / name, f"--out {shlex.quote(str(folder))}"
    remedy = f"`largeprompt reproduce {out}` makes it"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {remedy}")
    found = read_json(path)
    if isinstance(found, dict) and found.get("finished") is False:
        raise ValueError(f"{path} is of a job that is not finished; `largeprompt reproduce --resume {out}` goes on")
    for field in fields:
        part = found
        for name in field.split("."):
            if not isinstance(part, dict) or name not in part:
                raise ValueError(f"{path} has no {field!r}; {remedy}")
            part = part[name]
    return found


def _same_choice(folder: Path, name: str, choice: Any, run: dict[str, Any]) -> None:
    """Refuse a part that other settings made; one that does not say is refused too, if the run says."""
    if "choice" not in run:
        return
    if not isinstance(choice, dict) or any(choice.get(key) != run["choice"].get(key) for key in _CHOICE):
        command = f"{run['command']} --out {shlex.quote(str(folder))}"
        raise ValueError(f"{folder / name} was made with other settings than run.json; `{command}` makes it anew")


@contextlib.contextmanager
def _naming(path: Path, command: str) -> Iterator[None]:
    """A damaged file raises errors of many kinds, none of which says more than this."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} is damaged, or no NetCDF file; `{command}` makes it again") from error


def _drawn(folder: Path, figure: AbstractFigure, run: dict[str, Any], ledger: dict[str, Any]) -> Drawn:
    command = shlex.join(["largeprompt", "figure", figure.key, *run["options"]])
    for form in FORMATS:
        path = folder / "figures" / f"figure-{figure.key}.{form}"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; `{command}` makes it")
    path = folder / "figures" / f"figure-{figure.key}.nc"
    with _naming(path, command):
        data = xr.load_dataset(io.BytesIO(path.read_bytes()), engine="scipy", decode_times=False)
        choice = json.loads(data.attrs.get("choice", "null"))
    _same_choice(folder, f"figures/{path.name}", choice, run)
    with _naming(path, command):
        chart, told = figure.chart(data), figure.told(data)
    return Drawn(
        key=figure.key,
        name=figure.name,
        title=figure.title,
        look=figure.look,
        chart=chart,
        told=told,
        command=command,
        claims=[claim["key"] for claim in ledger["claims"] if figure.key in claim["figures"]],
    )
