"""The cache of 8-bit weights: a checkpoint is quantized once, and later engines read the result.

An entry is a packed file in the user's cache folder. Its name is a hash of everything that
determines its bytes, see `_key`. Without a cache, engines are the same, and are built more slowly.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from compat.checkpoint import Checkpoint
from compat.checkpoint.files import TensorInfo
from compat.checkpoint.packed import PackedFile, write_packed
from compat.checkpoint.safetensors_file import SafetensorsFile
from compat.decoding.int8_weights import Int8Weights
from compat.decoding.machine import cache_folder, processor
from compat.decoding.matrices import in_huge_pages
from compat.decoding.transformer import Read
from compat.errors import CheckpointError
from compat.saving.atomic import replacing_file

Built = TypeVar("Built")

SMALLEST = 64 << 20  # bytes; smaller checkpoints are quantized in a few hundredths of a second
LARGEST = 2 << 30  # bytes of all entries
SETTLED = 2.0  # seconds since the last change of a file; file times have a limited resolution
ABANDONED = 3600.0  # seconds after which a temporary file belongs to a killed process
HEAD_BYTES, SAMPLES, SAMPLE_BYTES = 1 << 18, 64, 1 << 12  # of a file; only these parts are hashed
LOWEST_PRIORITY = 19  # niceness of the thread that writes
SIGNATURE = "signature"  # key in the metadata of an entry
# The source files that determine the bytes of an entry.
ROOT = Path(__file__).parent
SOURCES = ("config.py", "int8_cache.py", "layers.py", "checkpoint/*.py", "decoding/*.*")


class Int8Cache:
    """The entry of one checkpoint, which does not have to exist yet.

    Args:
        checkpoint: an open checkpoint.
        key: its `_key`.
        folder: the folder of entries.
    """

    def __init__(self, checkpoint: Checkpoint, key: str, folder: Path) -> None:
        self._checkpoint, self._key = checkpoint, key
        self._path = folder / f"{key}.safetensors"

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Int8Cache | None:
        """Return the cache, or None if there is none for this checkpoint on this machine."""
        key = _key(checkpoint)
        folder = _folder() if key else None
        return cls(checkpoint, key, folder) if key and folder else None

    def build(self, make: Callable[[Read], Built]) -> Built:
        """Return what `make` builds from the weights that `Int8Weights` reads.

        They come from the entry if it exists and is intact. Otherwise they are quantized, and a
        thread of the lowest priority writes the entry, for which the end of the process waits.

        Raises:
            CheckpointError: The checkpoint cannot be read, or has non-finite values.
        """
        with suppress(CheckpointError, OSError):  # no entry, or a damaged one
            return make(self._entry())
        weights = Int8Weights(self._checkpoint)
        built = make(weights)
        threading.Thread(target=self._write, args=[weights], name="int8-cache").start()
        return built

    def _entry(self) -> Read:
        """Return a function that reads the entry.

        Raises:
            OSError, CheckpointError: There is none, or it is damaged. The function that is
                returned raises these errors, too.
        """
        path = self._path
        times = time.time_ns(), path.stat().st_mtime_ns  # only the first, of the last use, changes
        with suppress(OSError):  # a cache that can only be read
            os.utime(path, ns=times)
        file = SafetensorsFile(path)
        packed = PackedFile(path, file)
        if file.metadata.get(SIGNATURE) != self._signature(file.infos):
            raise CheckpointError(f"{path} is damaged.")

        def read(name: str) -> list[Any]:
            mapped = self._checkpoint.mmap
            quantized = packed.quantized(name, mapped)
            if quantized is not None:
                return [in_huge_pages(quantized)]
            return [packed.read(name, mapped=mapped)]

        return read

    def _signature(self, infos: dict[str, TensorInfo]) -> str:
        """Return the hash of the key and of the header, which no checksum of a tensor covers."""
        shapes = {name: [str(info.dtype), *info.shape] for name, info in infos.items()}
        return _hash(json.dumps([self._key, shapes], sort_keys=True).encode())

    def _write(self, weights: Int8Weights) -> None:
        """Write the entry. Where it cannot be written, later engines quantize again."""
        if sys.platform == "linux":  # where threads have priorities of their own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        with suppress(CheckpointError, OSError):
            tensors = weights.tensors()
            if sum(tensor.nbytes for tensor in tensors.values()) > LARGEST:
                return
            if _key(self._checkpoint) != self._key:
                return  # it was changed while it was read
            infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
            fields = {
                "precision": "int8",
                "source": self._checkpoint.source,
                "source_sha256": "",  # reading the weights takes longer than quantizing them
                "config": self._checkpoint.config.to_hf_dict(),
            }
            with replacing_file(self._path) as temporary:
                write_packed(temporary, tensors, fields, **{SIGNATURE: self._signature(infos)})
            _delete_old(self._path.parent)


def _key(checkpoint: Checkpoint) -> str | None:
    """Return the hash of everything that determines the weights in 8 bits, or None to use no cache.

    The files of the checkpoint are identified by path, inode, size and times, and by parts of their
    content. Users can set the time of the last modification, but not that of the last change.
    Windows has no such time.
    """
    is_off = os.environ.get("COMPAT_CACHE") == "0" or os.name == "nt"
    if is_off or checkpoint.packed or not checkpoint.check_finite:
        return None
    try:
        files = [_identity(path) for path in checkpoint.files]
        code = _code()
    except (OSError, CheckpointError):
        return None
    newest = max(max(times) for _, _, times, _ in files) / 1e9
    if sum(size for _, (_, size), _, _ in files) < SMALLEST or time.time() - newest < SETTLED:
        return None
    machine = [processor(), torch.__version__, torch.backends.cpu.get_cpu_capability()]
    config = asdict(checkpoint.config)
    return _hash(json.dumps([files, checkpoint.kind, config, code, machine]).encode())


def _identity(path: Path) -> tuple[str, tuple[int, int], tuple[int, int], str]:
    """Return a file's path, inode and size, its times in nanoseconds, and a hash of samples."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        samples = [file.read(HEAD_BYTES)]
        for number in range(SAMPLES):
            file.seek(status.st_size * number // SAMPLES)
            samples.append(file.read(SAMPLE_BYTES))
    return (
        os.path.realpath(path),
        (status.st_ino, status.st_size),
        (status.st_mtime_ns, status.st_ctime_ns),
        _hash(b"".join(samples)),
    )


@cache
def _code() -> str:
    """Return the hash of the source of everything that determines the bytes of an entry."""
    paths = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    return _hash(b"\0".join(path.read_bytes() for path in paths if path.suffix in (".py", ".c")))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _folder() -> Path | None:
    """Return the folder of entries, or None if it cannot be written or others can write to it."""
    root = cache_folder()
    if root is None:
        return None
    folder = root / "int8"
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return folder if is_private else None


def _delete_old(folder: Path) -> None:
    """Delete the entries that were not used for longest, and files of killed processes."""
    total = 0
    for path in sorted(folder.iterdir(), key=_used, reverse=True):
        with suppress(OSError):
            if path.suffix == ".safetensors":
                total += path.stat().st_size
                is_old = total > LARGEST
            else:
                is_old = time.time() - _used(path) > ABANDONED
            if is_old:
                path.unlink()


def _used(path: Path) -> float:
    try:
        return path.stat().st_atime
    except OSError:
        return 0.0
