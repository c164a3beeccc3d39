"""Saving works on systems without locks, atomic swaps of folders, or syncs of folders."""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compat import CheckpointError
from tests.test_atomic import contents, fill, replace

# Makes Python behave as on Windows where saving depends on it: some modules, functions and flags
# are missing, folders cannot be opened, and only writable descriptors can be synced.
WINDOWS = """
import ctypes, errno, os, shutil, sys
sys.modules["fcntl"] = None
shutil._use_fd_functions = False
for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "renameat2"):
    if hasattr(os, name):
        delattr(os, name)
real_open, real_fsync, real_link, CDLL = os.open, os.fsync, os.link, ctypes.CDLL

def no_folders(path, flags, *args, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    descriptor = real_open(path, flags, *args, **kwargs)
    if flags & 3 == os.O_RDONLY:
        read_only.add(descriptor)
    else:
        read_only.discard(descriptor)
    return descriptor

def fsync(descriptor):
    if descriptor in read_only:
        raise OSError(errno.EBADF, "Bad file descriptor")
    real_fsync(descriptor)

def link(source, target, *, follow_symlinks=True):
    if not follow_symlinks:
        raise NotImplementedError("link: follow_symlinks unavailable on this platform")
    real_link(source, target)

def load(name, *args, **kwargs):
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return CDLL(name, *args, **kwargs)

read_only = set()
"""
# Runs after torch has been imported, because torch loads libraries itself.
SAVE = """
import compat
os.open, os.fsync, os.link, ctypes.CDLL = no_folders, fsync, link, load
folder = sys.argv[1]
for _ in range(2):
    compat.save_pretrained(compat.load_pretrained("demo"), folder, tokenizer="demo")
assert compat.load_pretrained(folder).config == compat.load_pretrained("demo").config
"""


def test_a_model_is_saved_on_a_system_like_windows(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model", notes="mine")
    code = WINDOWS + SAVE
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "notes").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return fill(tmp_path / "model", w1="old", log="1")


def no_symbol(name: str | None, **kwargs: Any) -> object:
    return object()


def no_library(name: str | None, **kwargs: Any) -> object:
    raise OSError("cannot load it")


@pytest.mark.parametrize("load", [no_symbol, no_library])
def test_without_an_atomic_swap_folders_are_renamed(
    target: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[..., object]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", load)
    replace(target, w2="new")
    assert contents(target) == {"w2": b"new", "log": b"1"}


def test_without_ctypes_folders_are_renamed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def import_without_ctypes(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ctypes":
            raise ModuleNotFoundError("No module named '_ctypes'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_ctypes)
    replace(target, w2="new")
    assert contents(target) == {"w2": b"new", "log": b"1"}


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP])
def test_folders_are_renamed_if_the_system_refuses_to_swap_them(
    target: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Containers return EPERM for unknown system calls."""

    class Libc:
        def renameat2(self, *args: object) -> int:
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda name, **kwargs: Libc())
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    replace(target, w2="new")
    assert contents(target) == {"w2": b"new", "log": b"1"}


@pytest.mark.parametrize("failing", [1, 2])
def test_a_folder_that_cannot_be_renamed_stays_unchanged(
    target: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """On Windows, this happens if another program has one of its files open."""
    monkeypatch.setattr(ctypes, "CDLL", no_symbol)
    rename, calls = Path.rename, iter(range(1, 9))

    def refuse(self: Path, other: Path) -> Path:
        if next(calls) == failing:
            raise PermissionError(errno.EACCES, "Access is denied", str(self), None, str(other))
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"(?s)Access is denied.*no other program has a file"):
        replace(target, w1="new")
    assert contents(target) == {"w1": b"old", "log": b"1"}
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.EACCES, errno.ENOTSUP])
def test_a_file_system_without_syncs_of_folders_is_supported(
    target: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.fsync

    def files_only(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    replace(target, w1="new")
    assert contents(target) == {"w1": b"new", "log": b"1"}


def test_a_failing_sync_is_an_error(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        replace(target, w1="new")
    assert contents(target) == {"w1": b"old", "log": b"1"}
