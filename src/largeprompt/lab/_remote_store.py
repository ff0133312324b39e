import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ._store import AbstractStore, Store

_FOLDERS = ("file", "local")
# kinds whose every write is one request that succeeds or does not; elsewhere a write is a new object, then renamed
_WHOLE = ("abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a")


def store_at(where: Path | str | None = None) -> AbstractStore:
    """The store in a folder, or at an address such as `s3://bucket/runs`; by default LARGEPROMPT_STORE, or `runs`."""
    given = where if where is not None else os.environ.get("LARGEPROMPT_STORE") or "runs"
    protocol, sign, rest = str(given).partition("://")
    if not sign:
        return Store(given)
    if protocol in _FOLDERS:  # a folder can do more: claims, and writes that reach the disk
        if not rest.startswith("/"):
            raise ValueError(f"the store is {str(given)!r}; a folder as an address is file:///absolute/path")
        return Store(rest)
    return RemoteStore(str(given))


class RemoteStore(AbstractStore):
    """Results at any address that fsspec knows: `s3://bucket/runs`, `gs://…`, `memory://runs`.

    There are no locks here, and none is needed for results to be right: two writers of one run write the same result,
    each object is replaced at once, and any checkpoint of a run is a state that it passes through. What is lost is the
    time of one of them. A sweep on one Dask scheduler gives each run to one worker, by its key. Credentials are those
    that the machine has, for each worker its own.
    """

    def __init__(self, address: str):
        try:
            import fsspec
        except ImportError:
            raise ValueError(
                f"the store is {address!r}; addresses need fsspec: pip install 'largeprompt[cluster]'"
            ) from None
        self.address = address.rstrip("/")
        self.location = re.sub(r"(?<=://)[^/@]*@", "", self.address)  # no password on a screen or in a file
        try:
            with self._plainly():
                self._files, self._root = fsspec.core.url_to_fs(self.address)
        except ImportError as error:
            raise ValueError(f"the store is {self.location!r}: {error}") from None
        self._whole = address.partition("://")[0] in _WHOLE

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        yield True

    def _read(self, name: str) -> bytes | None:
        with self._plainly():
            try:
                return self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def _write(self, name: str, content: bytes | memoryview) -> None:
        with self._plainly():
            if self._whole:
                self._files.pipe_file(self._path(name), bytes(content))
                return
            self._files.makedirs(self._root, exist_ok=True)
            temporary = self._path(f".{secrets.token_hex(8)}-{name}")
            self._files.pipe_file(temporary, bytes(content))
            self._files.mv(temporary, self._path(name))

    def _delete(self, name: str) -> None:
        with self._plainly(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _exists(self, name: str) -> bool:
        with self._plainly():
            self._files.invalidate_cache()  # others write here too
            return self._files.exists(self._path(name))

    def _names(self) -> Iterable[str]:
        with self._plainly():
            self._files.invalidate_cache()
            try:
                return [str(path).rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
            except FileNotFoundError:
                return []

    def _is_there(self) -> bool:
        with self._plainly():
            self._files.invalidate_cache()
            return self._files.exists(self._root)

    def _rename(self, name: str, to: str) -> None:
        with self._plainly():
            self._files.mv(self._path(name), self._path(to))

    def _working(self, key: str) -> None:
        return None

    def _path(self, name: str) -> Any:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _plainly(self) -> Iterator[None]:
        """Whatever a service's own library raises, as the error of reading or writing that it is."""
        try:
            yield
        except (OSError, ImportError):
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise OSError(f"{self.location}: {type(error).__name__}: {first}") from error
