"""Replacing a folder as a whole: at any moment it has all its previous or all its new contents.

Two folders are swapped by `renameat2` (Linux) or `renamex_np` (macOS), which Python does not wrap.
`os.replace` cannot replace a folder that is not empty, and replacing file by file would leave a
mixture of two models when the process is killed in between.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from uuid import uuid4

from compat.errors import CheckpointError

AT_FDCWD, RENAME_EXCHANGE, RENAME_SWAP = -100, 2, 2
# Errors of a system or file system that cannot swap folders, or cannot sync them. Containers return
# EPERM for system calls that they do not know.
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}
UNSUPPORTED_SYNC = UNSUPPORTED | {errno.EBADF, errno.EACCES}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # no space is left, or a limit is reached
# Windows does not open folders, and syncs files only through writable descriptors.
OPENS_FOLDERS = hasattr(os, "O_DIRECTORY")


@contextmanager
def replacing_folder(
    target: str | Path, superseded: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """Yield an empty folder, which replaces `target` when the block ends.

    The empty folder is created beside the target. Its files are flushed to the disk before the two
    are swapped in one step. After a crash, a kill or an error at any moment, either the previous or
    the new folder is complete. If the system cannot swap folders, the previous one is moved away
    first; if the process is killed before the new one is in place, the next save restores it.

    - Files that are not written again are kept, except those that are `superseded`. Subfolders and
      the folder's mode are kept. Links remain links, and are never written through. This also holds
      for a target that is a link to a folder.
    - New files get the mode that the umask allows, independently of the code that wrote them.
    - Temporary folders of killed processes are removed by the next save.

    Linux and macOS support all of this on their usual file systems. On other systems, contents are
    still never mixed, and an error still keeps the previous folder, but:

    - Without `fcntl` (Windows) there are no locks. Two processes must not save into the same folder
      at the same time, and temporary folders of killed processes remain.
    - Without a swap of folders, there is no folder for a moment between two renames.
    - Without syncs of folders (Windows), a power failure right after the block may leave the
      previous folder, or none.
    - Windows cannot rename a folder while a file in it is open or mapped, as by a model that was
      loaded from it without `mmap=False`. This is an error, and the previous folder is kept.

    Args:
        target: the folder, which does not have to exist.
        superseded: returns whether an existing file of this name is removed.

    Raises:
        CheckpointError: The target is a file, is or contains the current folder, or cannot be
            written. An OSError in the block becomes a CheckpointError.
    """
    lock, temporary = None, None
    try:
        place = Path(os.path.realpath(target))
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.parent):
            _check(place)
            _clean(place)
            temporary = _beside(place, "tmp", f"{os.getpid()}-{uuid4().hex[:8]}")
            temporary.mkdir()
            lock = _lock(temporary)
        yield temporary
        _settle(temporary)
        with _locked(place.parent):
            _carry_over(place, temporary, superseded)
            _put_in_place(temporary, place)
            _flush(place.parent)
    except OSError as error:
        next_step = (
            "Check that it may be written and that no other program has a file in it open"
            if isinstance(error, PermissionError)
            else "Free space there"
        )
        raise CheckpointError(
            f"{target} cannot be written: {error}.\n"
            f"The previous contents are unchanged. {next_step}, or use another folder."
        ) from error
    finally:
        try:
            _remove(temporary)  # the unfinished folder or, after the swap, the old one
        finally:
            _remove(temporary)  # again, in case Ctrl-C interrupted the first call
            if lock is not None:
                os.close(lock)


@contextmanager
def replacing_file(target: str | Path) -> Iterator[Path]:
    """Yield the path of an empty file, which replaces `target` as a whole when the block ends.

    After an error, the previous file is unchanged and the new one removed. A link remains a link.

    Raises:
        CheckpointError: The target is a folder or cannot be written. An OSError in the block
            becomes a CheckpointError.
    """
    place = Path(os.path.realpath(target))
    temporary = _beside(place, "tmp", f"{os.getpid()}-{uuid4().hex[:8]}")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # that the umask allows, whatever wrote the file
        _flush(temporary)
        os.replace(temporary, place)
        _flush(place.parent)
    except OSError as error:
        next_step = "Free space there, or pass" if error.errno in FULL else "Pass"
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}. Nothing was changed. "
            f"{next_step} another path."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _beside(place: Path, kind: str, suffix: str) -> Path:
    return place.with_name(f".{place.name}.compat-{kind}-{suffix}")


def _check(place: Path) -> None:
    """Raise an error unless the path does not exist, or is a folder that may be replaced."""
    if place.exists() and not place.is_dir():
        raise CheckpointError(
            f"{place} is a file, but must be a folder or a path that does not exist. Use another "
            "path."
        )
    with suppress(FileNotFoundError):  # the current folder may have been removed
        here = Path.cwd()
        if place == here or place in here.parents:
            raise CheckpointError(
                f"{place} is the current folder or contains it, and replacing it would leave this "
                "process and its shell in a removed folder. Save into a folder inside it, or "
                "change to another folder first."
            )
    if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change what is in the folder."""
    lock = _lock(folder, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, wait: bool = False) -> int | None:
    """Lock a folder until the descriptor is closed or the process ends.

    Return None if another process holds the lock, or the system has no locks.
    """
    descriptor = None
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        held, descriptor = descriptor, None
        return held
    except (ImportError, OSError):
        return None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _clean(place: Path) -> None:
    """Remove temporary folders of killed processes, and restore a folder that one moved away."""
    for left in place.parent.glob(escape(_beside(place, "tmp", "").name) + "*"):
        if (lock := _lock(left)) is not None:
            _remove(left)
            os.close(lock)
    for moved in place.parent.glob(escape(_beside(place, "old", "").name) + "*"):
        if place.exists():
            _remove(moved)
        elif not moved.is_symlink():
            moved.rename(place)


def _settle(folder: Path) -> None:
    """Give every file the mode that the umask allows, and flush it to the disk."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.iterdir():
        path.chmod(mode)
        _flush(path)


def _carry_over(old: Path, new: Path, superseded: Callable[[str], bool]) -> None:
    """Hard-link or copy the files that are kept into the new folder."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if is_replaced(name)} if Path(folder) == old else set()

    def is_replaced(name: str) -> bool:
        is_folder = (old / name).is_dir() and not (old / name).is_symlink()
        # The file system decides whether names differ, since it may ignore case.
        written = os.path.lexists(new / name)
        if is_folder and written:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(old / name))
        return written or (superseded(name) and not is_folder)

    if old.is_dir():
        before = old.stat()
        if hasattr(os, "chown"):
            with suppress(PermissionError):
                os.chown(new, before.st_uid, before.st_gid)
        shutil.copytree(
            old, new, symlinks=True, ignore=ignored, copy_function=_link, dirs_exist_ok=True
        )
    for folder, _, _ in os.walk(new):
        _flush(Path(folder))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):  # no hard links, or not to another user's file
        shutil.copy2(source, target)
        _flush(Path(target))


def _put_in_place(temporary: Path, place: Path) -> None:
    """Give the new folder the target's name, and the previous one the temporary name."""
    if not place.is_dir():
        temporary.rename(place)
    elif not _exchange(temporary, place):
        moved = _beside(place, "old", uuid4().hex[:8])
        try:
            place.rename(moved)
            temporary.rename(place)
        finally:
            if moved.exists():
                moved.rename(temporary if place.exists() else place)


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; returns False if the system cannot."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError, TypeError):  # TypeError: Windows has no such library
        return False
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):
        failed = libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
    elif hasattr(libc, "renamex_np"):  # macOS
        failed = libc.renamex_np(*names, RENAME_SWAP)
    else:
        return False
    code = ctypes.get_errno()
    if failed and code not in UNSUPPORTED:
        raise OSError(code, os.strerror(code), str(one), None, str(other))
    return not failed


def _flush(path: Path) -> None:
    """Flush a file or, if the system can, a folder to the disk."""
    is_folder = path.is_dir()
    if is_folder and not (OPENS_FOLDERS and os.access(path, os.R_OK)):
        return
    descriptor = os.open(path, os.O_RDONLY if OPENS_FOLDERS else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (is_folder and error.errno in UNSUPPORTED_SYNC):
            raise
    finally:
        os.close(descriptor)


def _remove(folder: Path | None) -> None:
    """Delete a folder if it exists, even if folders in it are read-only; links are not followed."""
    if folder is not None and not folder.is_symlink():
        for inner, _, _ in os.walk(folder):
            with suppress(OSError):
                os.chmod(inner, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
