"""A finished reproduction: its folder, how it went, its ledger and its datasets, as made or as read from disk."""

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

from largeprompt.paper.claims import ROLES, VERDICTS
from largeprompt.paper.experiment import Experiment
from largeprompt.paper.experiments import CLAIMS
from largeprompt.paper.files import read_json

RUN, LEDGER = "run.json", "ledger.json"
FORMATS = ("svg", "pdf", "csv", "nc")
_ACCOUNT = (
    *("preset", "command", "options", "began", "seconds", "figures", "settings", "versions"),
    *(f"{part}.{name}" for part in ("runs", "pieces") for name in ("count", "core_seconds")),
    *(f"machine.{name}" for name in ("processor", "cores", "system", "python")),
)
_CHOICE = ("preset", "seeds", "conventions")  # what all parts of a folder have in common


@dataclasses.dataclass(frozen=True, eq=False)
class Reproduction:
    """A finished job: how it went (`account`), the ledger, the dataset of each figure, and the files written."""

    folder: Path
    account: Mapping[str, Any]
    ledger: Mapping[str, Any]
    datasets: Mapping[str, xr.Dataset]
    files: tuple[Path, ...] = ()

    def judged(self, verdict: str, role: str | None = None) -> list[dict[str, Any]]:
        """The claims of one verdict, all or those of one role."""
        found = [claim for claim in self.ledger["claims"] if claim["verdict"] == verdict]
        return [claim for claim in found if role in (None, claim["role"])]

    @property
    def to_go_on(self) -> str:
        """The command that goes on with all settings of the folder, its store among them."""
        return _going_on(self.folder)

    def command(self, figure: str) -> str:
        """The command that makes one figure."""
        return shlex.join(["largeprompt", "figure", figure, *self.account["options"]])


def read(folder: Path, figures: Mapping[str, Experiment]) -> Reproduction:
    """A finished reproduction from its folder; an error names what is missing and the command that makes it."""
    run = _load(folder, RUN, _ACCOUNT)
    ledger = _load(folder, LEDGER, ("rule", "claims"))
    _same_choice(folder, LEDGER, ledger.get("choice"), run)
    for claim in ledger["claims"]:
        known = CLAIMS[claim["key"]].role if claim["key"] in CLAIMS else "test"
        claim.setdefault("role", known)  # a ledger of an earlier version does not say it
        for field, names in (("verdict", VERDICTS), ("role", tuple(ROLES))):
            if claim[field] not in names:
                said = f"{folder / LEDGER}: the {field} of {claim['key']} is {claim[field]!r}"
                raise ValueError(f"{said}; it must be one of {', '.join(names)}")
    ledger["claims"].sort(key=_natural)
    ledger.setdefault("errata", [])
    unknown = [key for key in run["figures"] if key not in figures]
    if unknown:
        raise ValueError(f"{folder / RUN}: unknown figure {unknown[0]!r}; known are {', '.join(figures)}")
    found = Reproduction(folder, run, ledger, {})
    keys = [key for key in figures if key in run["figures"]]
    return dataclasses.replace(found, datasets={key: _dataset(found, key, figures[key]) for key in keys})


def _going_on(folder: Path) -> str:
    return shlex.join(["largeprompt", "reproduce", "--resume", "--out", str(folder)])


def _natural(claim: dict[str, Any]) -> list[tuple[int, str]]:
    """C2 before C10."""
    return [(int(part or 0) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", claim["key"])]


def _load(folder: Path, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    path = folder / name
    remedy = f"`{shlex.join(['largeprompt', 'reproduce', '--out', str(folder)])}` makes it"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {remedy}")
    found = read_json(path)
    if isinstance(found, dict) and found.get("finished") is False:
        raise ValueError(f"{path} is of a job that is not finished; `{_going_on(folder)}` goes on")
    for field in fields:
        part = found
        for name in field.split("."):
            if not isinstance(part, dict) or name not in part:
                raise ValueError(f"{path} has no {field!r}; {remedy}")
            part = part[name]
    return found


def _same_choice(folder: Path, name: str, choice: Any, run: Mapping[str, Any]) -> None:
    """Refuse a part that other settings made; one that does not say is refused too, if the run says."""
    if "choice" not in run:
        return
    if not isinstance(choice, dict) or any(choice.get(key) != run["choice"].get(key) for key in _CHOICE):
        said = f"{folder / name} was made with other settings than {RUN}"
        raise ValueError(f"{said}; `{_going_on(folder)}` makes it again")


@contextlib.contextmanager
def _naming(path: Path, command: str) -> Iterator[None]:
    """A damaged file raises errors of many kinds, none of which says more than this."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} is damaged, or no NetCDF file; `{command}` makes it again") from error


def _dataset(found: Reproduction, key: str, figure: Experiment) -> xr.Dataset:
    command = found.command(key)
    for form in FORMATS:
        path = found.folder / "figures" / f"figure-{key}.{form}"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; `{command}` makes it")
    path = found.folder / "figures" / f"figure-{key}.nc"
    with _naming(path, command):
        data = xr.load_dataset(io.BytesIO(path.read_bytes()), engine="scipy", decode_times=False)
        choice = json.loads(data.attrs.get("choice", "null"))
    _same_choice(found.folder, f"figures/{path.name}", choice, found.account)
    with _naming(path, command):
        _ = figure.chart(data), figure.summary(data)  # which a damaged file may not allow
    return data
