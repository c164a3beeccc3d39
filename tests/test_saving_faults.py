"""Failed and killed saves leave either the complete old folder or the complete new one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compat import CompatError, load_pretrained, save_pretrained
from tests import killed_saves
from tests.forked import Forked, run
from tests.test_atomic import contents


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGINT"])
def test_a_signal_at_any_moment_leaves_the_old_or_the_new_folder(tmp_path: Path, kind: str) -> None:
    """All tensors and the config belong to the same model."""
    ended = Forked(killed_saves.report, 25, signal.Signals[kind], tmp_path / "model").wait()
    assert ended.code == 0, ended.err
    counts = json.loads(ended.out)
    assert counts["old"] and counts["new"] and counts["old"] + counts["new"] == 25
    assert ("with a temporary" in counts) == (kind == "SIGKILL")


def save(folder: Path, dialect: str, limit: int, shard: str) -> None:
    """Save the demo checkpoint, with a limit on file sizes unless it is 0, and print the error."""
    model = load_pretrained("demo", dialect)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save_pretrained(model, folder, tokenizer="demo", max_shard_size=shard)
    except CompatError as error:
        print(type(error).__name__, error)


@pytest.mark.parametrize(
    ("limit", "shard", "file", "dialect"),
    [
        (1_000_000, "5GB", "model.safetensors", "linear"),
        (1_000_000, "5GB", "model.safetensors", "conv1d"),
        (800_000, "1MB", "model-00001-of-00005.safetensors", "conv1d"),
        (12_000, "1KB", "model-00001-of-", "conv1d"),
    ],
)
def test_a_file_size_limit_leaves_the_old_folder_unchanged(
    tmp_path: Path, tiny: Path, limit: int, shard: str, file: str, dialect: str
) -> None:
    folder = tmp_path / "model"
    for before in [{}, contents(tiny)]:
        if before:
            shutil.copytree(tiny, folder)
        printed = run(save, folder, dialect, limit, shard)
        assert printed.startswith(f"CheckpointError {folder} cannot be written: {file}"), printed
        assert "File too large" in printed and "Free space there" in printed
        assert [path.name for path in tmp_path.iterdir()] == (["model"] if before else [])
        assert contents(folder) == before


@contextmanager
def small_disk(mount_point: Path, size: str) -> Iterator[bool]:
    """Mount a file system in memory, and yield whether this process is allowed to."""
    mount_point.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount_point)]
    allowed = os.geteuid() == 0 and shutil.which("mount") is not None
    mounted = allowed and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(mount_point)], check=True)


def may_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder) / "m", "1m") as mounted:
        return mounted


if may_mount():  # otherwise, only the limit on file sizes is tested

    @pytest.mark.parametrize("shard", ["5GB", "1MB"])
    def test_a_full_disk_leaves_the_old_folder_unchanged(tmp_path: Path, shard: str) -> None:
        """First, the disk has space for one and a half checkpoints; then, for two."""
        with small_disk(tmp_path / "disk", "6m"):
            folder = tmp_path / "disk" / "model"
            save_pretrained(load_pretrained("demo"), folder)
            before = contents(folder)
            printed = run(save, folder, "conv1d", 0, shard)
            assert "No space left on device" in printed and "Free space there" in printed
            assert [path.name for path in folder.parent.iterdir()] == ["model"]
            assert contents(folder) == before
        with small_disk(tmp_path / "disk", "9m"):
            for _ in range(3):
                assert run(save, folder, "conv1d", 0, shard) == ""
