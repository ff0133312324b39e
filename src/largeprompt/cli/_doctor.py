"""What is installed, which devices there are, where files are kept, what is broken and how to mend it."""

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer
from typer.core import TyperCommand

from largeprompt import __version__

from ._app import Json, app, screen

_EXTRAS = ("cuda", "cluster", "models")
_MODULES = {"numba-cuda": "numba.cuda"}  # where a package is not imported by its own name
_OF_JAX = ("jaxlib", "jax", "numpy", "scipy")  # without these nothing is known about devices
_SECONDS = 120  # after which a package that is still being imported counts as broken
_SETTINGS = ("CUDA_VISIBLE_DEVICES", "JAX_ENABLE_X64", "JAX_PLATFORMS", "NUMBA_DISABLE_JIT", "XLA_FLAGS")
# A process of its own: a package that is broken may end the process that imports it. It says what it is about to do,
# where no package prints: what they write to standard output is lost.
_IMPORTS = """
import importlib, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def answer(*words):
    print(json.dumps(words), file=answers, flush=True)
for name in sys.argv[1:]:
    answer(name)
    try:
        if name == "devices":
            import jax
            found = ", ".join(f"{each.platform} ({each.device_kind})" for each in jax.devices())
        elif name == "cuda":
            from largeprompt._device import gpu_refusal
            found = gpu_refusal("cuda") or ""
        else:
            found = importlib.import_module(name) and ""
        answer(name, True, found)
    except BaseException as error:
        answer(name, False, f"{type(error).__name__}: {error}")
"""


Answers = Mapping[str, tuple[bool, str]]
State = Literal["ok", "none", "broken"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One line: a name, what was found, and where that is broken or missing what to do."""

    name: str
    state: State
    found: str
    mend: str = ""


@app.command(cls=TyperCommand)
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which devices and caches there are, what is broken and how to mend it."""
    required = _required()
    installed = [_module(name) for name, _, _ in required if _version(name) is not None]
    answers = {name: (works, words) for name, works, words in imported([*installed, "devices", "cuda"])}
    checks = [Check("largeprompt", "ok", f"{__version__} in {Path(__file__).parents[1]}"), _python()]
    checks += _packages(required, answers)
    checks += [*_devices(answers, {each.name for each in checks if each.state == "broken"}), *_caches(), *_settings()]
    broken = sum(check.state == "broken" for check in checks)
    if as_json:
        print(json.dumps({"broken": broken, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    else:
        for check in checks:
            words = f"{check.found}; {check.mend}" if check.mend else check.found
            line = f"{check.name:<18} {'BROKEN: ' if check.state == 'broken' else ''}{words}"
            style = {"ok": "", "none": "dim", "broken": "red"}[check.state]
            screen.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
        screen.print(f"{broken or 'nothing'} {'are' if broken > 1 else 'is'} broken", highlight=False)
    raise typer.Exit(1 if broken else 0)


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Check("python", "ok", f"{found}, {sys.executable}")


def _packages(required: Sequence[tuple[str, str, str]], answers: Answers) -> Iterator[Check]:
    """Every package that this one asks for: there, new enough, and can be imported."""
    if not required:
        yield Check("packages", "broken", "nothing is known about this package", "install it: pip install .")
    for name, least, extra in required:
        version, (works, words) = _version(name), answers.get(_module(name), (False, ""))
        newer = f'pip install "{name}>={least}"'
        if version is None:
            mend = f'pip install "largeprompt[{extra}]"' if extra else newer
            yield Check(name, "none" if extra else "broken", "not installed", mend)
        elif _numbers(version) < _numbers(least):
            yield Check(name, "broken", f"{version} is too old", newer)
        elif not works:
            mend = f'pip install "largeprompt[{extra}]"' if extra else f"pip install --force-reinstall {name}"
            yield Check(name, "broken", f"{version} cannot be imported: {words}", mend)
        else:
            yield Check(name, "ok", version)


def _required() -> list[tuple[str, str, str]]:
    """Names, least versions and extras ("" where it is always needed), each name once."""
    try:
        lines = metadata.requires("largeprompt") or []
    except metadata.PackageNotFoundError:
        return []
    found: dict[str, tuple[str, str, str]] = {"jaxlib": ("jaxlib", "0", "")}
    for line in lines:
        match = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\d.]+)(?:\s*;.*extra == ['\"](\w+)['\"])?", line)
        if match and (match[3] or "") in ("", *_EXTRAS):
            found.setdefault(match[1], (match[1], match[2], match[3] or ""))
    return sorted(found.values(), key=lambda each: (each[2], each[0]))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _module(name: str) -> str:
    return _MODULES.get(name, name.replace("-", "_"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def imported(names: Sequence[str]) -> Iterator[tuple[str, bool, str]]:
    """Whether each module can be imported, and else why, in one line; `devices` and `cuda` look for those."""
    left = list(names)
    while left:
        command = [sys.executable, "-W", "ignore", "-c", _IMPORTS, *left]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, errors="replace")
            output, end = done.stdout, _last_line(done.stderr) or f"the process ends with {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output, end = (error.stdout or b"").decode(errors="replace"), f"no answer after {_SECONDS} s"
        started = ""
        for line in output.splitlines():
            started, *result = json.loads(line)
            if result:
                left.remove(started)
                yield started, result[0], " ".join(result[1].split())[:300]
        if not left:
            return
        if started not in left:  # it ended between two
            started = left[0]
        left.remove(started)
        yield started, False, end


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def _devices(answers: Answers, broken: Set[str]) -> Iterator[Check]:
    """The devices that JAX and the engine see; `broken` are the packages that are."""
    state, words = _unless(broken, _OF_JAX, *answers["devices"])
    card = Path("/dev/nvidia0").exists()
    mend = "correct XLA_FLAGS" if "XLA_FLAGS" in words else "set JAX_PLATFORMS=cpu to go without a GPU"
    if state == "ok" and card and "cpu" in words and not re.search("gpu|cuda", words):
        state, mend = "broken", 'there is an NVIDIA GPU that JAX does not see: pip install "largeprompt[cuda]"'
    yield Check("devices of JAX", state, words, mend if state == "broken" else "")
    state, words = _unless(broken, (*_OF_JAX, "numba", "numba-cuda"), *answers["cuda"])
    state = "none" if state == "ok" and words else state
    again = "pip install --force-reinstall numba-cuda" if _version("numba-cuda") else ""
    yield Check("GPU of the engine", state, words or "there is one", again if state == "broken" else "")


def _unless(broken: Set[str], needed: Sequence[str], works: bool, words: str) -> tuple[State, str]:
    """An answer; where there is none for want of a package that is broken, that package alone counts as broken."""
    if works:
        return "ok", words
    missing = next((name for name in needed if name in broken), None)
    return ("none", f"not known: {missing} is broken") if missing else ("broken", words)


def _caches() -> Iterator[Check]:
    from largeprompt._compiled import LIMIT, VARIABLE, cache_folder, programs

    folder, own = cache_folder(), os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if own:
        yield Check("compiled programs", "ok", f"{own} (JAX_COMPILATION_CACHE_DIR): {_size(Path(own).glob('*'))}")
    elif folder is None:
        yield Check("compiled programs", "none", f"not kept: {VARIABLE} is off, or there is no such home")
    else:
        words = f"{folder}: {_size(file for _, _, file in programs(folder))}, at most {LIMIT / 2**20:.0f} MiB"
        there = next(each for each in (folder, *folder.parents) if each.exists())
        writable = there.is_dir() and os.access(there, os.W_OK)
        mend = "" if writable else f"nothing can be written there: set {VARIABLE} to another folder, or to off"
        yield Check("compiled programs", "ok" if writable else "broken", words, mend)
    if engine := os.environ.get("NUMBA_CACHE_DIR"):
        yield Check("compiled engine", "ok", f"{engine} (NUMBA_CACHE_DIR): {_size(Path(engine).rglob('*.nb[ic]'))}")


def _size(files: Iterator[Path]) -> str:
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return f"{len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"


def _settings() -> Iterator[Check]:
    found = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    if found:
        yield Check("environment", "ok", ", ".join(found))
