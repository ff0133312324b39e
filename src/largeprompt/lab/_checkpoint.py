import hashlib
import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_OPENING = b"largeprompt checkpoint 1\n"


class Damaged(ValueError):
    """A file that is not what its name says: cut short, altered, or another run's."""


class Checkpoint(NamedTuple):
    """How far a run is: plain data and arrays by name."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]


def checkpoint_bytes(checkpoint: Checkpoint) -> bytes:
    """The contents of its file, with a digest of all that follows."""
    buffer = io.BytesIO()
    header = np.frombuffer(json.dumps(checkpoint.header).encode(), np.uint8)
    np.savez(buffer, allow_pickle=False, header=header, **{f"array {n}": a for n, a in checkpoint.arrays.items()})
    payload = buffer.getvalue()
    digest = hashlib.sha256(payload).hexdigest().encode()
    return _OPENING + digest + b"\n" + payload


def checkpoint_from(content: bytes, place: str, key: str) -> Checkpoint:
    """What the file at `place` holds, once every bit of it is as it was written, for the run of that key."""
    start = len(_OPENING) + 65
    payload = content[start:]
    if content[:start] != _OPENING + hashlib.sha256(payload).hexdigest().encode() + b"\n":
        raise Damaged(f"{place} is damaged: its contents are not those that were written")
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            arrays = {name.removeprefix("array "): file[name] for name in file.files if name != "header"}
        held = str(header["hash"])
    except Exception:  # as it was written, but not by this version
        raise Damaged(f"{place} is another version's checkpoint") from None
    if held != key:
        raise Damaged(f"{place} belongs to the run {held[:12]}, not to {key[:12]}")
    return Checkpoint(header, arrays)


def layers_in(checkpoint: Checkpoint, starts: Sequence[Any], part: str = "") -> tuple[Any, ...]:
    """The layers of a checkpoint, or a moment of them, each of the kind and shape that it had at the start."""
    return tuple(
        layer.with_parameters({name: checkpoint.arrays[f"state {i} {name}{part}"] for name in layer.parameters})
        for i, layer in enumerate(starts)
    )
