"""Files that are written at once or not at all, and lock files."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

_umask = threading.Lock()  # the process has one umask, and reading it means setting it


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and vanishes when it does not.

    A reader, or a run killed half-way, then sees the old file or the new one, never a part of one; so does one after a
    loss of power, because the contents reach the disk before the name does.
    """
    with about(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            with _umask:
                umask = os.umask(0)
                os.umask(umask)
            temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner reads
            _reach_the_disk(temporary)
            temporary.replace(path)
            _reach_the_disk(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def about(path: Path | str) -> Iterator[None]:
    """An error of reading or writing names this file, whatever the system named, if anything."""
    try:
        yield
    except OSError as error:
        if error.errno is None or str(error.filename) == str(path):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def reason(error: OSError) -> str:
    """Why the system refused, where a folder was wanted."""
    return "it is no folder" if isinstance(error, FileExistsError) else error.strerror or str(error)


def writable_folder(
    folder: Path, name: str = "the folder", folders: Iterable[str] = (), files: Iterable[str] = ()
) -> None:
    """Make a folder and see, before any work, that files can be written there, and these folders and files in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"written")
    except OSError as error:
        raise ValueError(f"{name} is {str(folder)!r}; no file can be written there: {reason(error)}") from None
    for wanted, parts in (("folder", folders), ("file", files)):
        for part in (folder / part for part in parts):
            if part.exists() and part.is_dir() != (wanted == "folder"):
                raise ValueError(f"{name} is {str(folder)!r}; {part} is in the way, no {wanted} can be made there")


def _reach_the_disk(path: Path) -> None:
    if os.name != "posix" and path.is_dir():  # only POSIX lets a folder be opened
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def leftovers(path: Path) -> list[Path]:
    """Temporary files of `replacing(path)` whose writer was killed."""
    return sorted(path.parent.glob(f".{path.stem}-*{path.suffix}"))


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this block alone, of all processes and threads, holds the lock file `path`; it never waits.

    The system lets go of the lock of a process that was killed.
    """
    handle = _locked(path)
    if handle is None:
        yield False
        return
    try:
        yield True
    finally:
        # removed while still locked: whoever opened it meanwhile finds another file, or none, under its name
        path.unlink(missing_ok=True)
        os.close(handle)


def is_claimed(path: Path) -> bool:
    """Whether some process holds the lock file `path`."""
    if not path.exists():
        return False
    with claimed(path) as free:
        return not free


def _locked(path: Path) -> int | None:
    import fcntl  # not on Windows, where everything but the store of runs works

    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except FileNotFoundError:  # its last holder removed it between our opening and our locking
            pass
        os.close(handle)
