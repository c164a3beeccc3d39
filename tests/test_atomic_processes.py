"""Replacing a folder: killed and concurrent processes, the current folder, and permissions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compat import CheckpointError
from compat.saving.atomic import replacing_folder
from tests.forked import run
from tests.test_atomic import contents, fill, mode, replace


def test_temporary_folders_of_killed_processes_are_removed_and_those_in_use_are_kept(
    tmp_path: Path,
) -> None:
    target = tmp_path / "model"
    dead = fill(tmp_path / f".model.compat-tmp-{os.getpid()}-dead", w1="half")
    (dead / "inner").mkdir(mode=0o555)
    other = fill(tmp_path / ".model2.compat-tmp-1-a", w1="another target's")
    unrelated = fill(tmp_path / "unrelated", w1="mine")
    for name in ("tmp-2-link", "old-link"):  # links that an attacker could have placed
        (tmp_path / f".model.compat-{name}").symlink_to(unrelated)
    before = mode(unrelated)
    with replacing_folder(target) as living:
        fill(living, w1="first")
        replace(target, w1="second")
        assert living.is_dir()
        assert not dead.exists()
        assert contents(target) == {"w1": b"second"}
    assert contents(target) == {"w1": b"first"}
    with replacing_folder(target) as living:
        fill(living, w1="third")
    assert other.is_dir() and not target.is_symlink()
    assert (contents(unrelated), mode(unrelated)) == ({"w1": b"mine"}, before)


@pytest.mark.parametrize("name", [".", "..", "", "/"])
def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fill(tmp_path / "here", w1="old")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match="is the current folder or contains it"):
        replace(Path(name), w1="new")
    assert contents(tmp_path / "here") == {"w1": b"old"}


def test_concurrent_saves_lose_no_files(tmp_path: Path) -> None:
    """The result is one complete save, plus the unrelated files of all the saves."""
    target = tmp_path / "model"

    def save(number: int) -> None:
        with replacing_folder(target, lambda name: name.startswith("w")) as folder:
            fill(folder, **{f"w{number}": "", f"log{number}": "", "config": str(number)})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(40)))
    last = (target / "config").read_text()
    assert contents(target).keys() == {"config", f"w{last}", *(f"log{n}" for n in range(40))}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def replace_as_nobody(target: Path) -> None:
    """Replace the folder without root's permissions, and print the error."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        with replacing_folder(target) as folder:
            (folder / "w1").write_text("new")
    except CheckpointError as error:
        print(error)


def as_nobody(target: Path) -> str:
    """Replace the folder in a process without root's permissions, and return its error message."""
    for folder in target.parents[1:]:
        if "pytest-of-" in str(folder):  # pytest's own folders are private
            folder.chmod(0o755)
    return run(replace_as_nobody, target)


def test_read_only_subfolders_are_replaced(tmp_path: Path) -> None:
    target = fill(fill(tmp_path / "parent") / "model", w1="old")
    inner = fill(fill(target / "runs") / "deep", log="1")
    for folder in (inner, inner.parent, target, target.parent):
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
        folder.chmod(0o555 if folder == inner else 0o755)
    assert as_nobody(target) == ""
    assert contents(target) == {"w1": b"new", "runs/deep/log": b"1"}
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert mode(inner) == 0o555


@pytest.mark.parametrize("read_only", ["parent", "parent/model"])
def test_a_folder_without_write_permission_is_refused(tmp_path: Path, read_only: str) -> None:
    target = fill(fill(tmp_path / "parent") / "model", w1="old")
    target.chmod(0o777)
    target.parent.chmod(0o777)
    (tmp_path / read_only).chmod(0o555)
    printed = as_nobody(target)
    (tmp_path / read_only).chmod(0o755)
    assert "cannot be written: [Errno 13] Permission denied" in printed
    assert contents(tmp_path) == {"parent/model/w1": b"old"}
    assert len(list(target.parent.iterdir())) == 1


SLOW = """
import signal, sys, time
from pathlib import Path
from compat.saving.atomic import replacing_folder
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in some shells' background
with replacing_folder(Path(sys.argv[1])) as folder:
    (folder / "w1").write_text("new")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_the_old_folder_unchanged(tmp_path: Path, number: signal.Signals) -> None:
    """The next save removes the temporary files of a killed process."""
    target = fill(tmp_path / "model", w1="old")
    command = [sys.executable, "-c", SLOW, str(target)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        left = [path for path in target.parent.iterdir() if path != target]
        assert len(left) == 1 and left[0].name.startswith(f".model.compat-tmp-{process.pid}-")
        replace(target, w2="meanwhile")
        assert left[0].is_dir()
        process.send_signal(number)
    assert process.returncode == -number
    assert left[0].exists() == (number == signal.SIGKILL)
    assert contents(target) == {"w2": b"meanwhile"}
    replace(target, w1="next")
    assert contents(target) == {"w1": b"next"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
