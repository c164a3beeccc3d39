"""A folder replaced whole: whatever happens, it has all of its old contents or all of its new."""

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
# What a system or file system answers that cannot swap two folders, or lacks directory syncs.
# Containers answer EPERM to system calls that they do not know.
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}
UNSUPPORTED_SYNC = UNSUPPORTED | {errno.EBADF, errno.EACCES}
# Windows does not open folders, and syncs files only through descriptors that may write.
OPENS_FOLDERS = hasattr(os, "O_DIRECTORY")


@contextmanager
def replacing_folder(
    target: str | Path, superseded: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """An empty folder to write files into, which takes the place of `target` when the block ends.

    It lies beside the target. What is written is flushed to the disk before it takes the target's
    place, in one step: a crash, a kill or an error at any moment leaves the old folder whole, or
    the new one. Only where the system cannot swap two folders is the old one moved out of the way
    first; killed in that moment, it comes back with the next save.

    - Files of the old folder that are not written anew stay, as do its subfolders and its mode. Of
      the files only those whose names are `superseded` go. Links stay links; they are never written
      through. A target that is itself a link to a folder stays one.
    - New files get the mode that the umask gives, whatever wrote them.
    - Folders that killed processes left beside the target are removed, where the file system has
      locks to tell them from those of living ones.

    Linux and macOS, on their usual file systems, have all that this needs. Elsewhere less is
    promised; the contents are never mixed, and an error still leaves the old folder.

    - Without `fcntl`, as on Windows, there are no locks: two processes must not save into the same
      folder at the same time, and what killed processes left stays until it is removed by hand.
    - Without a call that swaps two folders (`renameat2` on Linux, `renamex_np` on macOS) the old
      folder is moved away first, as described above. For that moment readers find neither folder.
    - Without directory syncs, as on Windows, a loss of power right after the block may leave the
      old folder, or none under the target's name.
    - Windows does not rename a folder in which a file is open or mapped, as the weights of a model
      that was loaded with `mmap=True` are. This is an error, and the old folder stays.

    Raises:
        CheckpointError: the target is a file, the current folder or one around it, or cannot be
            written; errors of the block that come from the system are told in the same way.
    """
    lock, temporary = None, None
    try:
        place = Path(os.path.realpath(target))
        with _locked(place.parent, create=True):
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
            f"{target} cannot be written: {error}\n"
            f"Nothing half-written is left. {next_step}, or name another folder."
        ) from error
    finally:
        try:
            _remove(temporary)  # unfinished, or by now the old folder
        finally:
            _remove(temporary)  # Ctrl-C may have come amid the first
            if lock is not None:
                os.close(lock)


def _beside(place: Path, kind: str, suffix: str) -> Path:
    return place.with_name(f".{place.name}.compat-{kind}-{suffix}")


def _check(place: Path) -> None:
    """Nothing, or a folder that may be replaced."""
    if place.exists() and not place.is_dir():
        raise CheckpointError(f"{place} is a file; expected a folder, or nothing there yet")
    with suppress(FileNotFoundError):  # the current folder may be gone
        here = Path.cwd()
        if place == here or place in here.parents:
            raise CheckpointError(
                f"{place} is the current folder or holds it, and would be replaced under the feet "
                "of this process and its shell; write into a folder inside, or from elsewhere"
            )
    if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


@contextmanager
def _locked(folder: Path, create: bool = False) -> Iterator[None]:
    """One process at a time looks at what lies in the folder and changes it."""
    if create:
        folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, wait: bool = False) -> int | None:
    """A lock that ends with this process, however it ends; None where another holds one.

    It is None, too, on systems without such locks.
    """
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        held, descriptor = descriptor, None
        return held
    except OSError:  # held by another, no folder, or a file system without locks
        return None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _clean(place: Path) -> None:
    """Remove what killed processes left, and bring back an old folder that one had moved away."""
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
    """Give every file the mode that the umask gave the folder, and flush it to the disk."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.iterdir():
        path.chmod(mode)
        _flush(path)


def _carry_over(old: Path, new: Path, superseded: Callable[[str], bool]) -> None:
    """Put into the new folder what shall stay of the old one, by hard links where there are any."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        return {n for n in names if replaced(n)} if Path(folder) == old else set()

    def replaced(name: str) -> bool:
        is_folder = (old / name).is_dir() and not (old / name).is_symlink()
        # Asked of the file system, which may not tell upper case from lower.
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
    except (OSError, NotImplementedError):  # no hard links here, or not to another user's file
        shutil.copy2(source, target)
        _flush(Path(target))


def _put_in_place(temporary: Path, place: Path) -> None:
    """The new folder under the target's name, and the old one, if any, under the temporary."""
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
    """Swap the names of two folders in one step; False where the system cannot."""
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
    """Have the system write a file, or a folder's names where it can, to the disk now."""
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
    """Delete a folder, if it is there, with read-only folders in it; links are not followed."""
    if folder is not None and not folder.is_symlink():
        for inner, _, _ in os.walk(folder):
            with suppress(OSError):
                os.chmod(inner, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
