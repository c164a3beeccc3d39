"""The cache of int8 weights only saves time, and never returns weights of other checkpoints."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compat import CheckpointError, Engine, int8_cache, open_checkpoint
from compat.checkpoint.packed import METADATA, SCALE, checksum
from compat.checkpoint.safetensors_file import SafetensorsFile
from compat.decoding import matrices, native
from compat.decoding.int8_weights import Int8Weights
from tests.command_line import python
from tests.conftest import MakeCheckpoint
from tests.native_common import plant_outliers

IDS = torch.randint(97, (1, 12), generator=torch.Generator().manual_seed(1))
GREEDY: Any = {"max_new_tokens": 8, "temperature": 0, "stop_ids": ()}
INT8 = [
    pytest.param(native.NativeInt8Prompts, marks=pytest.mark.vnni),
    matrices.int8_weight_only, matrices.Int8TwoTerm, matrices.Int8,
]  # fmt: skip


class Cache:
    """The cache of one test, and how many checkpoints were quantized for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.quantized = folder / "int8", 0

    def engine(self, source: Any, **options: Any) -> Engine:
        """Return an int8 engine after its cache entry has been written."""
        engine = Engine.from_pretrained(source, **{"dtype": "int8", **options})
        finish_writing()
        return engine

    @property
    def entries(self) -> list[Path]:
        return sorted(self.folder.glob("*")) if self.folder.is_dir() else []


def finish_writing() -> None:
    for thread in threading.enumerate():
        if thread.name == "int8-cache":
            thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache(tmp_path / "cache")

    class Counting(Int8Weights):
        def __init__(self, *arguments: Any) -> None:
            cache.quantized += 1
            super().__init__(*arguments)

    monkeypatch.setenv("COMPAT_CACHE", "1")
    monkeypatch.setattr(int8_cache, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(int8_cache, "Int8Weights", Counting)
    monkeypatch.setattr(int8_cache, "SMALLEST", 0)
    monkeypatch.setattr(int8_cache, "SETTLED", 0)
    return cache


@pytest.fixture
def source(tmp_path: Path, tiny: Path) -> Path:
    """A copy of `tiny` that the test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "source"))


def uncached(source: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    with monkeypatch.context() as patch:
        patch.setenv("COMPAT_CACHE", "0")
        return Engine.from_pretrained(source, **{"dtype": "int8", **options})


def assert_equal(one: Engine, other: Engine) -> None:
    """Check that both engines compute the same bits."""
    assert one.config == other.config
    assert torch.equal(one.score(IDS), other.score(IDS))
    assert torch.equal(one.generate(IDS, **GREEDY), other.generate(IDS, **GREEDY))


def change_a_weight(source: Path) -> None:
    """Change one weight in place without changing the file's size and modification time."""
    file = source / "model.safetensors"
    status = file.stat()
    at = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    begin, _ = SafetensorsFile(file)._offsets["transformer.h.1.mlp.c_fc.weight"]
    with file.open("r+b") as opened:
        opened.seek(at + begin)
        opened.write(torch.tensor([3.0]).numpy().tobytes())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("outliers", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kernel", INT8, ids=lambda kernel: str(kernel.__name__))
def test_an_engine_from_the_cache_computes_the_same_as_one_without_it(
    cache: Cache, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch,
    kernel: Any, tied: bool, outliers: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("compat.engine.fastest", lambda *_: kernel)
    source = make_checkpoint(n_embd=32, tie_word_embeddings=tied)
    if outliers:
        plant_outliers(source)
    expected = uncached(source, monkeypatch)
    assert cache.quantized == 0 and not cache.entries
    for _ in range(3):
        assert_equal(cache.engine(source), expected)
        assert cache.quantized == 1 and len(cache.entries) == 1
    assert_equal(cache.engine(open_checkpoint(source, mmap=False)), expected)
    assert cache.quantized == 1


def test_a_wrong_entry_changes_what_the_engine_computes(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous test depends on this."""
    cache.engine(source)
    [entry] = cache.entries
    metadata, tensors = SafetensorsFile(entry).metadata, load_file(entry)
    fields, name = json.loads(metadata[METADATA]), f"h.1.mlp.c_fc.weight{SCALE}"
    tensors[name] = tensors[name].roll(1)
    fields["checksums"][name] = checksum(tensors[name])
    save_file(tensors, entry, {**metadata, METADATA: json.dumps(fields)})
    found, expected = cache.engine(source), uncached(source, monkeypatch)
    assert cache.quantized == 1
    assert not torch.allclose(found.score(IDS), expected.score(IDS), atol=1e-3)


def replace_the_file(source: Path) -> None:
    """Replace the file with another one of the same size and modification time."""
    file, other = source / "model.safetensors", source / "other"
    shutil.copy2(file, other)
    other.rename(file)
    change_a_weight(source)


def change_the_config(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config["layer_norm_epsilon"] = 0.3
    (source / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("change", [change_a_weight, replace_the_file, change_the_config])
def test_a_changed_checkpoint_is_quantized_again(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(int8_cache, "HEAD_BYTES", 0)  # the content is not compared
    monkeypatch.setattr(int8_cache, "SAMPLES", 0)
    before = cache.engine(source)
    change(source)
    expected = uncached(source, monkeypatch)
    assert not torch.equal(before.score(IDS), expected.score(IDS))
    for _ in range(2):
        assert_equal(cache.engine(source), expected)
        assert cache.quantized == 2


@pytest.mark.parametrize("protection", ["time of the change", "content", "none"])
def test_only_a_cache_without_any_protection_is_stale(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch, protection: str
) -> None:
    """Each of the two protections suffices; some file systems do not record change times."""
    status = os.fstat

    class WithoutChangeTime:
        def __init__(self, file: int) -> None:
            self.found = status(file)

        def __getattr__(self, name: str) -> Any:
            return 0 if name == "st_ctime_ns" else getattr(self.found, name)

    if protection != "time of the change":
        monkeypatch.setattr(os, "fstat", WithoutChangeTime)
    if protection != "content":
        monkeypatch.setattr(int8_cache, "HEAD_BYTES", 0)
        monkeypatch.setattr(int8_cache, "SAMPLES", 0)
    before = cache.engine(source)
    change_a_weight(source)
    after = cache.engine(source)
    is_stale = torch.equal(before.score(IDS), after.score(IDS))
    assert is_stale == (protection == "none")


def test_another_version_of_the_code_quantizes_again(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (name, change) in enumerate([
        ("compat.int8_cache._code", lambda: "another"),
        ("torch.__version__", "9.9.9"),
        ("compat.int8_cache.processor", lambda: {"flags": "another"}),
        ("torch.backends.cpu.get_cpu_capability", lambda: "another"),
    ]):  # fmt: skip
        cache.engine(source)
        assert cache.quantized == number + 1
        monkeypatch.setattr(name, change)
    cache.engine(source)
    assert cache.quantized == 5


def test_the_code_version_covers_all_modules_that_quantize(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {path.name for pattern in int8_cache.SOURCES for path in int8_cache.ROOT.glob(pattern)}
    modules = (int8_cache, matrices, native, sys.modules[Int8Weights.__module__])
    used = {Path(str(module.__file__)).name for module in modules}
    assert used | {"native.c", "outliers.py", "transformer.py", "packed.py"} <= names
    read: list[str] = []

    def read_bytes(path: Path) -> bytes:
        read.append(path.name)
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    int8_cache._code.__wrapped__()
    assert used | {"native.c"} <= set(read)


def test_a_recently_written_file_is_not_cached(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File times have a coarse resolution, so the file could change again without a new time."""
    monkeypatch.setattr(int8_cache, "SETTLED", 3600)
    cache.engine(source)
    assert not cache.entries
    os.utime(source / "model.safetensors", (0, 0))  # this call sets the change time
    os.utime(source / "config.json", (0, 0))
    cache.engine(source)
    assert not cache.entries


def test_a_checkpoint_that_changes_while_it_is_read_is_not_cached(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = uncached(source, monkeypatch)
    write = int8_cache.Int8Cache._write

    def change_and_write(*arguments: Any) -> None:
        os.utime(source / "model.safetensors", (1, 1))
        write(*arguments)

    monkeypatch.setattr(int8_cache.Int8Cache, "_write", change_and_write)
    assert_equal(cache.engine(source), expected)
    assert not cache.entries
    monkeypatch.setattr(int8_cache.Int8Cache, "_write", write)
    cache.engine(source)
    assert len(cache.entries) == 1


def test_a_damaged_entry_is_replaced(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = uncached(source, monkeypatch)
    cache.engine(source)
    [entry] = cache.entries
    intact = entry.read_bytes()
    start = 8 + int.from_bytes(intact[:8], "little")
    damages = [b"", intact[:-1], intact[: start + 5], intact[:4], bytes(len(intact))]
    damages += [flipped(intact, at) for at in range(0, start, start // 80)]
    damages += [flipped(intact, at) for at in range(start, len(intact), len(intact) // 40)]
    for number, damaged in enumerate(damages):
        entry.write_bytes(damaged)
        assert torch.equal(cache.engine(source).score(IDS), expected.score(IDS)), number
        entry.write_bytes(intact)
    entry.write_bytes(damages[0])
    for _ in range(2):
        before = cache.quantized
        assert_equal(cache.engine(source), expected)
    assert cache.quantized == before
    assert cache.entries == [entry]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("verified", [True, False])
def test_a_changed_header_of_an_entry_is_detected(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    """The checksums of the tensors do not cover their shapes."""
    if not verified:
        monkeypatch.setattr(int8_cache.Int8Cache, "_signature", lambda *_: "")
    cache.engine(source)
    [entry] = cache.entries
    content = entry.read_bytes()
    correct, wrong = (
        b'"wpe.weight":{"dtype":"BF16","shape":' + shape for shape in (b"[32,24]", b"[24,32]")
    )
    assert correct in content
    entry.write_bytes(content.replace(correct, wrong))
    found = cache.engine(source)
    assert cache.quantized == (2 if verified else 1)
    assert (found.transformer.wpe.shape == (32, 24)) == verified


def test_an_entry_of_another_checkpoint_is_not_read(
    cache: Cache, source: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.engine(source)
    [entry] = cache.entries
    cache.engine(make_checkpoint(seed=1))
    [foreign] = set(cache.entries) - {entry}
    foreign.replace(entry)
    assert_equal(cache.engine(source), uncached(source, monkeypatch))
    assert cache.quantized == 3


def test_non_finite_weights_are_refused_and_not_cached(cache: Cache, source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"][2, 3] = torch.nan
    save_file(tensors, source / "model.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.c_fc\.weight has 1 NaN"):
            cache.engine(source)
    cache.engine(open_checkpoint(source, check_finite=False))
    assert not cache.entries


def disabled_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("COMPAT_CACHE", "0")


def no_home_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(int8_cache, "cache_folder", lambda: None)


def file_at_the_path(patch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.write_text("")


def writable_by_others(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "int8").mkdir(parents=True)
    (folder / "int8").chmod(0o777)


def owned_by_another(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(os, "geteuid", lambda: -1)


def full_disk(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def write(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    patch.setattr(int8_cache, "write_packed", write)


def small_checkpoint(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(int8_cache, "SMALLEST", 1 << 30)


def large_checkpoint(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(int8_cache, "LARGEST", 1000)


OBSTACLES = [
    disabled_cache, no_home_folder, file_at_the_path, writable_by_others, owned_by_another,
    full_disk, small_checkpoint, large_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.filterwarnings("error")
def test_without_a_cache_the_engine_computes_the_same(
    cache: Cache, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], obstacle: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:  # fmt: skip
    expected = uncached(source, monkeypatch)
    obstacle(monkeypatch, tmp_path / "cache")
    for _ in range(2):
        assert_equal(cache.engine(source), expected)
    assert not cache.entries
    assert capfd.readouterr() == ("", "")


def test_an_entry_is_read_from_a_cache_that_cannot_be_written(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def utime(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    cache.engine(source)
    monkeypatch.setattr(os, "utime", utime)
    assert_equal(cache.engine(source), uncached(source, monkeypatch))
    assert cache.quantized == 1


def test_only_the_owner_can_read_and_write_the_cache(cache: Cache, source: Path) -> None:
    umask = os.umask(0)
    try:
        cache.engine(source)
    finally:
        os.umask(umask)
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_an_unexpected_error_is_reported(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)

    def write(*_: object, **__: object) -> None:
        raise AssertionError("a mistake")

    monkeypatch.setattr(int8_cache, "write_packed", write)
    cache.engine(source)
    assert [str(found.exc_value) for found in reported] == ["a mistake"]
    assert not cache.entries


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_only_the_writing_thread_has_the_lowest_priority(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: list[int] = []
    monkeypatch.setattr(int8_cache, "write_packed", lambda *_, **__: found.append(priority()))
    before = priority()
    cache.engine(source)
    assert found == [19] and priority() == before < 19


def test_concurrent_processes_do_not_disturb_each_other(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = uncached(source, monkeypatch).score(IDS)

    def child() -> None:
        torch.set_num_threads(1)
        found = [cache.engine(source).score(IDS) for _ in range(5)]
        os._exit(sum(not torch.equal(each, expected) for each in found))

    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child) for _ in range(3)]
    for process in children:
        process.start()
    for process in children:
        process.join(60)
    assert [process.exitcode for process in children] == [0, 0, 0]
    assert len(cache.entries) == 1


EXITING = """
import sys
from pathlib import Path
from compat import Engine, int8_cache
int8_cache.SMALLEST = int8_cache.SETTLED = 0
int8_cache.cache_folder = lambda: Path(sys.argv[2])
Engine.from_pretrained(sys.argv[1], dtype="int8")
"""


def test_a_process_ends_only_after_its_entry_is_written(cache: Cache, source: Path) -> None:
    environment = {**os.environ, "COMPAT_NATIVE": "0", "COMPAT_CACHE": "1"}
    done = python(EXITING, source, cache.folder.parent, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [entry.suffix for entry in cache.entries] == [".safetensors"]


def test_the_cache_is_bounded_and_keeps_the_most_recently_used_entries(
    cache: Cache, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [make_checkpoint(seed=seed) for seed in range(4)]
    cache.engine(sources[0])
    [first] = cache.entries
    monkeypatch.setattr(int8_cache, "LARGEST", first.stat().st_size * 5 // 2)  # fits two entries
    cache.engine(sources[1])
    [second] = set(cache.entries) - {first}
    for number, entry in enumerate((first, second)):
        os.utime(entry, (1000 + number, entry.stat().st_mtime))
    modified = first.stat().st_mtime_ns
    cache.engine(sources[0])  # makes the second entry the least recently used
    assert first.stat().st_mtime_ns == modified  # otherwise a reader would consider it changed
    cache.engine(sources[2])
    assert first in cache.entries and second not in cache.entries and len(cache.entries) == 2
    cache.engine(sources[3])
    assert cache.quantized == 4 and len(cache.entries) == 2


def test_temporary_files_of_killed_processes_are_deleted_later(cache: Cache, source: Path) -> None:
    cache.engine(source)
    [entry] = cache.entries
    temporary = entry.with_name(f".{entry.name}.compat-tmp-1-0")
    for age, remain in ((10, True), (7200, False)):
        temporary.write_bytes(b"half")
        os.utime(temporary, (time.time() - age, time.time() - age))
        entry.unlink()
        cache.engine(source)
        assert temporary.exists() == remain


def test_snapshots_of_the_hub_share_an_entry_if_they_have_the_same_file(
    cache: Cache, source: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    snapshots = [tmp_path / name for name in "ab"]
    for snapshot in snapshots:
        snapshot.mkdir()
        for name in ("config.json", "model.safetensors"):
            (snapshot / name).symlink_to(source / name)
        cache.engine(snapshot)
    assert cache.quantized == 1
    (snapshots[1] / "model.safetensors").unlink()
    (snapshots[1] / "model.safetensors").symlink_to(make_checkpoint(seed=1) / "model.safetensors")
    cache.engine(snapshots[1])
    assert cache.quantized == 2


def test_a_packed_file_is_not_packed_again(cache: Cache, source: Path, tmp_path: Path) -> None:
    cache.engine(source)
    [entry] = cache.entries
    copy = shutil.copy(entry, tmp_path / "copy.safetensors")
    assert torch.equal(cache.engine(copy).score(IDS), cache.engine(source).score(IDS))
    assert cache.quantized == 1 and len(cache.entries) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_draft_models_use_the_cache_and_do_not_change_the_tokens(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    plain = Engine.from_pretrained(source, dtype=dtype, speculate=None)
    expected = plain.generate(IDS, **GREEDY)
    assert not cache.entries
    for _ in range(2):
        engine = cache.engine(source, dtype=dtype, speculate="int8")
        assert torch.equal(engine.generate(IDS, **GREEDY), expected)
        finish_writing()
        draft: Any = engine._draft_sources[1].draft
        assert "transformer" in vars(draft)
        assert cache.quantized == 1 and len(cache.entries) == 1
    assert_equal(cache.engine(source), uncached(source, monkeypatch))
    assert cache.quantized == 1


def test_a_draft_model_is_disabled_if_its_checkpoint_changes(cache: Cache, source: Path) -> None:
    expected = Engine.from_pretrained(source, speculate=None).generate(IDS, **GREEDY)
    engine = Engine.from_pretrained(source, speculate="int8")
    change_a_weight(source)
    os.utime(source / "model.safetensors")
    assert torch.equal(engine.generate(IDS, **GREEDY), expected)
    finish_writing()
    draft: Any = engine._draft_sources[1].draft
    assert "transformer" in vars(draft) and not cache.entries
