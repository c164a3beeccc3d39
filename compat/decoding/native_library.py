"""The library of `native.c`, compiled on first use and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_int32, c_int64, c_void_p
from pathlib import Path
from threading import Lock
from typing import Any

from compat.decoding.machine import cache_folder, processor

SOURCE = Path(__file__).with_name("native.c")
ARM = platform.machine().lower() in ("aarch64", "arm64")
OPTIONS = ["-O2", "-mcpu=native" if ARM else "-march=native", "-fPIC"]
# Flags for the compiler and for the linker. A library that is not linked to OpenMP uses the one
# that torch has loaded, with its threads. Two sets of threads would compete for the processors.
OPENMP: tuple[tuple[list[str], list[str]], ...] = (
    (["-fopenmp"], []),
    (["-fopenmp"], ["-fopenmp"]),
    ([], []),
)
TIMEOUT = 120  # seconds for one run of the compiler


class NativeError(Exception):
    """The library is not available on this machine."""


def library() -> CDLL:
    """Return the loaded library.

    The first failure of a process is printed to stderr, unless `COMPAT_NATIVE=0` is the reason.

    Raises:
        NativeError: No compiler works, the library cannot be loaded, or COMPAT_NATIVE is 0.
    """
    global _loaded
    if os.environ.get("COMPAT_NATIVE") == "0":
        raise NativeError("COMPAT_NATIVE is 0")
    with _loading:
        if _loaded is None:
            try:
                _loaded = _load()
            except NativeError as error:
                _loaded = error
                note(str(error))
    if isinstance(_loaded, NativeError):
        raise _loaded
    return _loaded


def is_available() -> bool:
    """Return whether the library can be loaded."""
    try:
        library()
    except NativeError:
        return False
    return True


def note(reason: str) -> None:
    """Print why decoding runs on torch alone."""
    print(
        f"compat decodes with torch's operators, which are slower: {reason}. COMPAT_NATIVE=0 "
        "selects them without this note.",
        file=sys.stderr,
    )


_loaded: CDLL | NativeError | None = None
_loading = Lock()
_is_forked = False


def _after_fork() -> None:
    """Replace the lock, and remember that the threads of OpenMP do not exist in this process."""
    global _loading, _is_forked
    _loading, _is_forked = Lock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def usable_threads(wanted: int) -> int:
    """Return the number of threads for a call.

    It is one in a forked process, where OpenMP would wait forever for threads of the parent.
    """
    return 1 if _is_forked else wanted


def _load() -> CDLL:
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    version = _run([*compiler, "--version"])
    parts = [SOURCE.read_text("utf-8"), version, *compiler, *OPTIONS, *processor().values()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_folder()
    name = f"native-{key}{'.dylib' if sys.platform == 'darwin' else '.so'}"
    if folder and (folder / name).is_file():
        try:
            return _opened(folder / name)
        except OSError:  # damaged, or built for another OpenMP
            pass
    with _build_folder(folder) as build:
        found = _build(compiler, build)
        if folder and build.parent == folder:
            os.replace(build / "native", folder / name)  # atomic
    return found


@contextmanager
def _build_folder(folder: Path | None) -> Iterator[Path]:
    """Yield a new folder in the cache, or else in the system's temporary folder."""
    try:
        if folder is None:
            raise OSError
        folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="native-", dir=folder)
    except OSError:
        made = tempfile.TemporaryDirectory(prefix="gpt2-compat-")
    with made as build:
        yield Path(build)


def _build(compiler: list[str], build: Path) -> CDLL:
    """Compile into `build`/native, and load it."""
    compiled, linked = str(build / "native.o"), build / "native"
    reason: Exception = NativeError()
    for compile_options, link_options in OPENMP:
        try:
            _run([*compiler, *OPTIONS, *compile_options, "-c", str(SOURCE), "-o", compiled])
            _run([*compiler, "-shared", *link_options, compiled, "-o", str(linked), "-lm"])
            return _opened(linked)
        except (NativeError, OSError) as error:
            reason = error
            linked.unlink(missing_ok=True)
    raise NativeError(f"{shlex.join(compiler)} cannot build native.c: {reason}")


def _run(command: list[str]) -> str:
    """Return what a command prints.

    Raises:
        NativeError: it cannot be started, fails, or takes too long.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"the C compiler {command[0]!r} cannot be run: {error}") from error
    if done.returncode:
        raise NativeError((done.stderr.strip().splitlines() or ["it failed"])[0])
    return done.stdout


# Arguments and result of each function of native.c.
FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "decode": ([c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64], None),
    "scratch_size": ([c_void_p, c_int64, c_int64], c_int64),
    "quantize_by_outputs": ([c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p], None),
    "quantize_by_inputs": ([c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p], None),
    "has_panels": ([], c_int32),
}


def _opened(path: Path) -> CDLL:
    """Return the library of a file, with the types of its functions."""
    opened = CDLL(str(path))
    for name, (arguments, result) in FUNCTIONS.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, result
    return opened
