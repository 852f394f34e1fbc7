"""Files and directories that are there whole or not at all, whatever kills the writer.

What is new is written beside its target, flushed to disk, and takes the target's name at the end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial-"
"""In the name of everything that is not finished; a writer that was killed leaves it behind."""


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """A directory to write in, beside the target; it takes the target's name when all went well."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}{PARTIAL}", dir=directory.parent))
    try:
        partial.chmod(0o777 & ~_umask())
        yield partial
        flush_to_disk([*partial.rglob("*"), partial])
        _swap_in(partial, directory)
        flush_to_disk([directory.parent])
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step: a reader sees the old content or the new."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}{PARTIAL}", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
        flush_to_disk([path.parent])
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file in one step."""
    write_bytes(path, text.encode())


def link_directory(source: Path, target: Path) -> None:
    """A second name for a directory's files, which are not copied where the file system has hard links; what
    the name stood for before is replaced. Neither directory may be written into afterwards."""
    with replacing(target) as partial:
        shutil.copytree(source, partial, copy_function=_link_or_copy, dirs_exist_ok=True)


def remove(directory: Path) -> None:
    """Remove a directory: under its name it is whole, then gone, never half."""
    if directory.exists():
        hidden = Path(tempfile.mkdtemp(prefix=f".{directory.name}{PARTIAL}", dir=directory.parent))
        directory.rename(hidden / directory.name)
        shutil.rmtree(hidden)


def remove_partial(directory: Path) -> None:
    """Clear what killed writers left in a directory. Only its one writer may ask for this."""
    for path in directory.glob(f".*{PARTIAL}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step (Linux's renameat2); False where system or file system cannot."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return False
    working_directory, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = (os.fsencode(path.absolute()) for path in (one, other))
    return bool(libc.renameat2(working_directory, next(names), working_directory, next(names), swap) == 0)


def flush_to_disk(paths: Iterable[Path]) -> None:
    """fsync of each file or directory."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap_in(partial: Path, directory: Path) -> None:
    """Give the new directory its name; the old one, if any, goes with the temporary ones."""
    if not directory.exists():
        partial.rename(directory)
        return
    if exchange(partial, directory):
        return
    # Where names cannot be exchanged there is a moment without a directory; the old one is kept beside.
    previous = Path(tempfile.mkdtemp(prefix=f".{directory.name}.previous-", dir=directory.parent))
    directory.rename(previous / directory.name)
    try:
        partial.rename(directory)
    except OSError:
        (previous / directory.name).rename(directory)
        raise
    finally:
        shutil.rmtree(previous, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
