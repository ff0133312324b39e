"""Attention calls from arrays in files: no model and no PyTorch is needed."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from ._call import AttentionCall, chosen_queries
from ._load import read_array

_PARTS = ("queries", "keys", "values", "scale", "mask", "log_weights", "causal")


def holds_arrays(model: str) -> bool:
    """Whether this names arrays, by its ending or by what its folder holds."""
    path = Path(model)
    return path.suffix in (".npz", ".safetensors", ".npy") or (path / "queries.npy").is_file()


def calls_from(path: Path | str, queries: int = 32) -> list[AttentionCall]:
    """The attention calls in a file, or in a folder of .npy files, with `queries` of their queries.

    A call has arrays `queries`, `keys` and `values` of shape (heads, tokens, dimension), or without the heads where it
    has one, and may have `scale`, by default one over the root of the dimension of keys; `mask`, true where a query
    sees a token; `log_weights`, added to scores; and `causal`, 1 where the queries are the last tokens and see no later
    ones. Of several calls in a .npz or .safetensors file the names begin with that of the call and a dot.
    """
    path = Path(path)
    layers: dict[str, dict[str, np.ndarray]] = {}
    for name, array in _arrays(path).items():
        layer, _, part = name.rpartition(".")
        if part not in _PARTS:
            raise ValueError(
                f"{path} has an array {name!r}; the last part of a name must be one of {', '.join(_PARTS)}"
            )
        layers.setdefault(layer, {})[part] = array
    if not layers:
        raise ValueError(f"{path} has no arrays; it must have queries, keys and values")
    return [_call(path, layer, layers[layer], queries) for layer in sorted(layers, key=_natural)]


def _natural(name: str) -> list[Any]:
    """Numbers in a name count as numbers: layer 2 comes before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        return read_array(path, lambda: _all(path))
    if path.suffix == ".safetensors":
        try:
            from safetensors.numpy import load_file
        except ImportError:
            raise ValueError(f'{path} needs safetensors; `pip install "largeprompt[models]"` installs it') from None
        return read_array(path, lambda: load_file(path))
    folder = path.parent if path.suffix == ".npy" else path
    files = {part: folder / f"{part}.npy" for part in _PARTS}
    if path.suffix == ".npy" and (path.stem not in _PARTS or not files["queries"].is_file()):
        raise ValueError(f"{path} alone is no attention call; give a folder with queries.npy, keys.npy and values.npy")
    return {part: read_array(file, lambda file=file: np.load(file)) for part, file in files.items() if file.is_file()}


def _all(path: Path) -> dict[str, np.ndarray]:
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        raise ValueError("it holds one array without a name")
    with loaded:
        return dict(loaded)


def _call(path: Path, layer: str, parts: dict[str, np.ndarray], queries: int) -> AttentionCall:
    name = layer or path.stem
    missing = [part for part in ("queries", "keys", "values") if part not in parts]
    if missing:
        raise ValueError(f"{name} in {path} has no {' and no '.join(missing)}; it must have queries, keys and values")
    q, k, v = (_heads(name, part, parts[part]) for part in ("queries", "keys", "values"))
    n, L = q.shape[1], k.shape[1]
    scale = _scalar(name, parts, "scale", max(q.shape[2], 1) ** -0.5)
    causal = bool(_scalar(name, parts, "causal", 0.0))
    if causal and n > L:
        raise ValueError(f"{name} has {n} queries and {L} tokens; causal queries must be among the tokens")
    positions = np.arange(L - n, L) if causal or n == L else None
    added = _added(name, parts, n, L, causal)
    seen = np.full(n, L) if added is None else np.isfinite(added).sum(axis=2).min(axis=0)
    if n and seen.min() == 0:
        raise ValueError(f"the mask of {name} hides every token from query {int(seen.argmin())}")
    at = chosen_queries(seen, queries)
    return AttentionCall(
        name,
        q[:, at],
        k,
        v,
        scale,
        None if added is None else added[:, at],
        None if positions is None else positions[at],
    )


def _heads(name: str, part: str, array: np.ndarray) -> np.ndarray:
    """With the heads as the first axis."""
    if array.dtype.kind not in "fiu" or array.size == 0:
        raise ValueError(f"{part} of {name} have shape {array.shape} and type {array.dtype}; they must be numbers")
    array = array if array.dtype == np.float64 else array.astype(np.float32)
    return array[None] if array.ndim == 2 else array


def _scalar(name: str, parts: dict[str, np.ndarray], part: str, default: float) -> float:
    if part not in parts:
        return default
    array = parts[part]
    if array.size != 1 or array.dtype.kind not in "fiub" or not np.isfinite(array).all():
        raise ValueError(
            f"{part} of {name} has shape {array.shape} and type {array.dtype}; it must be one finite number"
        )
    return float(array.reshape(()))


def _added(name: str, parts: dict[str, np.ndarray], n: int, L: int, causal: bool) -> np.ndarray | None:
    """What is added to scores, −∞ for tokens that a query does not see."""
    added = None
    for part in ("mask", "log_weights"):
        if part not in parts:
            continue
        array = parts[part]
        array = array[None] if array.ndim == 2 else array
        if array.ndim != 3 or array.shape[1:] != (n, L):
            raise ValueError(
                f"{part} of {name} has shape {parts[part].shape}; it must be ({n}, {L}): queries and tokens"
            )
        if part == "mask":
            if not np.isin(array, (0, 1)).all():
                raise ValueError(f"the mask of {name} has other values than true and false; add numbers by log_weights")
            array = np.where(array.astype(bool), 0.0, -np.inf)
        if np.isnan(array).any() or (array == np.inf).any():
            raise ValueError(f"{part} of {name} are not all finite or −∞; hidden tokens have −∞")
        added = array.astype(np.float64) if added is None else added + array
    if causal:
        hidden = np.arange(L) > np.arange(L - n, L)[:, None]
        added = np.where(hidden, -np.inf, 0.0 if added is None else added).reshape(-1, n, L)
    return added
