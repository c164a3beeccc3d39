"""Replacing a folder: which files are kept or removed, and what happens if a step fails."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import compat.saving.atomic
from compat import CheckpointError
from compat.saving.atomic import replacing_folder

Contents = dict[str, bytes | str]


def contents(folder: Path) -> Contents:
    """Return the bytes of every file and the target of every link, by path."""
    found: Contents = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def replace(target: Path, **files: str) -> None:
    with replacing_folder(target, lambda name: name.startswith("w")) as folder:
        fill(folder, **files)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """A path in a folder in which no other files may remain after the test."""
    path = tmp_path / "parent" / "model"
    path.parent.mkdir()
    yield path
    assert {path.name for path in path.parent.iterdir()} <= {"model"}


@pytest.fixture(params=["exchange", "renames"])
def swap_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The system call that swaps two folders, and the renames that replace it elsewhere."""
    if request.param == "renames":
        monkeypatch.setattr(compat.saving.atomic, "_exchange", lambda one, other: False)
    return str(request.param)


def test_a_new_folder_appears_with_its_parents(tmp_path: Path) -> None:
    replace(tmp_path / "a" / "b" / "model", w1="new")
    assert contents(tmp_path) == {"a/b/model/w1": b"new"}


@pytest.mark.usefixtures("swap_method")
def test_superseded_files_are_removed_and_others_are_kept(target: Path) -> None:
    fill(target, w1="old", w2="old", config="old", README="mine")
    (target / "w_folder").mkdir()
    fill(target / "runs", w3="log")
    fill(target / "runs" / "deep", state="1")
    (target / "link").symlink_to("runs/w3")
    (target / "broken").symlink_to("../nowhere")
    (target / "runs" / "up").symlink_to("..")
    replace(target, w1="new", config="new")
    assert contents(target) == {
        "w1": b"new",
        "config": b"new",
        "README": b"mine",
        "link": "runs/w3",
        "broken": "../nowhere",
        "runs/up": "..",
        "runs/w3": b"log",
        "runs/deep/state": b"1",
    }
    assert (target / "w_folder").is_dir()


def test_kept_files_are_hard_links(target: Path) -> None:
    """A program that has a kept file open continues to write to it."""
    fill(target, log="1")
    with (target / "log").open("a") as log:
        replace(target, w1="new")
        log.write("2")
    assert (target / "log").read_text() == "12"


def test_kept_files_are_copied_without_hard_links(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    fill(target, log="1")
    (target / "log").chmod(0o640)
    replace(target, w1="new")
    assert contents(target) == {"log": b"1", "w1": b"new"}
    assert mode(target / "log") == 0o640


def test_two_folders_are_swapped_atomically(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux and macOS support this on their usual file systems."""

    def refuse(self: Path, other: Path) -> None:
        raise AssertionError("renamed")

    fill(target, w1="old", log="1")
    monkeypatch.setattr(Path, "rename", refuse)
    replace(target, w2="new")
    assert contents(target) == {"w2": b"new", "log": b"1"}


@pytest.mark.usefixtures("swap_method")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left"), ValueError])
def test_a_failure_while_writing_leaves_the_old_folder(
    target: Path, error: BaseException | type[BaseException]
) -> None:
    fill(target, w1="old", log="1")
    wanted = CheckpointError if isinstance(error, OSError) else error
    with pytest.raises(wanted):  # type: ignore[arg-type]
        with replacing_folder(target) as folder:
            fill(folder, w1="new")
            raise error
    assert contents(target) == {"w1": b"old", "log": b"1"}


@pytest.mark.parametrize("step", ["_settle", "_carry_over", "_put_in_place"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_at_any_step_leaves_the_old_folder_or_none(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: BaseException,
    exists: bool,
) -> None:
    def fail(*args: object) -> None:
        raise error

    if exists:
        fill(target, w1="old")
    monkeypatch.setattr(compat.saving.atomic, step, fail)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
        replace(target, w1="new")
    assert contents(target) == ({"w1": b"old"} if exists else {})
    assert target.exists() == exists


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_between_the_renames_leaves_one_complete_folder(
    target: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Without the atomic swap, the old folder is moved away first; Ctrl-C restores it."""
    monkeypatch.setattr(compat.saving.atomic, "_exchange", lambda one, other: False)
    rename, calls = Path.rename, iter(range(1, 9))

    def interrupted(self: Path, other: Path) -> Path:
        moved = rename(self, other)
        if next(calls) == at:
            raise KeyboardInterrupt
        return moved

    fill(target, w1="old")
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace(target, w1="new")
    assert contents(target) == {"w1": b"old" if at == 1 else b"new"}


def test_an_old_folder_that_a_killed_process_moved_away_is_restored(target: Path) -> None:
    """Without the atomic swap, this is the moment in which neither folder is in place."""
    fill(target.with_name(".model.compat-old-1"), w1="old", log="1")
    fill(target.with_name(".model.compat-tmp-1-a"), w1="half")
    replace(target, w2="new")
    assert contents(target) == {"w2": b"new", "log": b"1"}


def test_an_old_folder_that_was_moved_away_is_removed_if_the_new_one_is_in_place(
    target: Path,
) -> None:
    fill(target.with_name(".model.compat-old-1"), w1="old")
    fill(target, log="new")
    replace(target, w2="new")
    assert contents(target) == {"log": b"new", "w2": b"new"}


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real = fill(tmp_path / "elsewhere" / "real", w1="old", log="1")
    link = tmp_path / "model"
    link.symlink_to("elsewhere/real")
    replace(link, w1="new")
    assert os.readlink(link) == "elsewhere/real"
    assert contents(real) == {"w1": b"new", "log": b"1"}
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "model"}
    assert {path.name for path in real.parent.iterdir()} == {"real"}


def test_the_target_of_a_dangling_link_is_created(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("real")
    replace(tmp_path / "model", w1="new")
    assert contents(tmp_path / "real") == {"w1": b"new"}
    assert (tmp_path / "model").is_symlink()


@pytest.mark.usefixtures("swap_method")
def test_links_in_the_folder_are_replaced_and_not_followed(target: Path, tmp_path: Path) -> None:
    """In the hub's cache, every file is a link to a blob."""
    blobs = fill(tmp_path / "blobs", a="old weights", b="readme")
    fill(target)
    for name, blob in {"w1": "a", "README": "b"}.items():
        (target / name).symlink_to(f"../../blobs/{blob}")
    replace(target, w1="new")
    assert contents(target) == {"w1": b"new", "README": "../../blobs/b"}
    assert (target / "README").read_text() == "readme"
    assert contents(blobs) == {"a": b"old weights", "b": b"readme"}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_file_modes_follow_the_umask(target: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with replacing_folder(target) as folder:
            fill(folder, w1="new").joinpath("w1").chmod(0o600)
    finally:
        os.umask(before)
    assert mode(target / "w1") == 0o666 & ~umask
    assert mode(target) == 0o777 & ~umask


def test_a_folder_keeps_its_mode_and_its_owner(target: Path) -> None:
    fill(target, log="1")
    (target / "log").chmod(0o604)
    target.chmod(0o2750)
    if os.geteuid() == 0:
        os.chown(target, 4321, 1234)
        target.chmod(0o2750)
    before = target.stat()
    replace(target, w1="new")
    after = target.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert mode(target / "log") == 0o604


def test_an_existing_file_at_the_path_is_refused(target: Path) -> None:
    target.write_text("mine")
    with pytest.raises(CheckpointError, match="model is a file, but must be a folder"):
        replace(target, w1="new")
    assert target.read_text() == "mine"


def test_a_file_as_the_parent_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, parent="mine")
    with pytest.raises(CheckpointError, match=r"parent/model cannot be written: .*\n.*another"):
        replace(tmp_path / "parent" / "model", w1="new")


def test_a_folder_with_the_name_of_a_written_file_is_refused(target: Path) -> None:
    fill(fill(target) / "w1", inner="mine")
    with pytest.raises(CheckpointError, match=r"Is a directory: .*model/w1"):
        replace(target, w1="new")
    assert contents(target) == {"w1/inner": b"mine"}


def test_every_file_and_folder_is_synced_before_the_old_one_is_removed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    flush, put = compat.saving.atomic._flush, compat.saving.atomic._put_in_place

    def record_flush(path: Path) -> None:
        events.append(path.name.partition("-tmp-")[0])
        flush(path)

    def record_put(one: Path, other: Path) -> None:
        events.append("in place")
        put(one, other)

    monkeypatch.setattr(compat.saving.atomic, "_flush", record_flush)
    monkeypatch.setattr(compat.saving.atomic, "_put_in_place", record_put)
    fill(target, log="1")
    replace(target, w1="new", w2="new")
    assert sorted(events[:2]) == ["w1", "w2"]
    assert events[2:] == [".model.compat", "in place", "parent"]
