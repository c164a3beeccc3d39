"""Kernel selection: wrong kernels are never selected, and the fastest one is cached on disk."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compat.decoding import kernels, native_library
from compat.decoding.matrices import Blas, Int8, Linear
from tests.command_line import python


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the choices of these tests out of the user's cache, but use its native library."""
    native_library.library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    kernels.clear_choices()


@pytest.mark.parametrize("precision", list(kernels.CANDIDATES))
def test_the_last_candidate_is_documented_and_works(precision: str) -> None:
    *_, documented = kernels.CANDIDATES[precision]
    assert documented in (Linear, Int8)
    assert kernels.works(documented, precision)


@pytest.mark.parametrize(
    ("precision", "count"),
    [(p, n) for p, packs in kernels.CANDIDATES.items() for n in range(len(packs))],
)
@pytest.mark.parametrize("fault", ["removed", "wrong"])
def test_an_engine_works_with_only_the_last_working_kernel(
    precision: str, count: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels before it are missing in torch or compute wrong products."""
    packs = kernels.CANDIDATES[precision]

    def removed(weight: Tensor, bias: Tensor | None) -> Any:
        raise AttributeError("no such operator")

    def wrong(weight: Tensor, bias: Tensor | None) -> Any:
        return Blas(weight * 1.2, bias)

    broken = removed if fault == "removed" else wrong
    left = (*[broken] * count, *packs[count:])
    monkeypatch.setitem(kernels.CANDIDATES, precision, left)
    monkeypatch.setattr(kernels, "_measured", lambda *a: (next(iter(a[2])), False))
    kernels.clear_choices()
    assert kernels.fastest(precision, 1, 1) in packs[count:]


@pytest.mark.parametrize("size", [(24, 72), (40, 64), (33, 7), (96, 97), (64, 64)])
def test_8_bit_products_are_correct_for_any_size(size: tuple[int, int]) -> None:
    """torch's kernel reads past the end of rows whose length its block size does not divide."""
    weight, bias, x = torch.randn(size), torch.randn(size[1]), torch.randn(3, size[0])
    packs = kernels._working("int8") | kernels._working("draft")
    assert len(packs) > 2
    for pack in packs.values():
        found = pack(weight, bias)(x)
        assert (found - (exact := x @ weight + bias)).norm() < 0.03 * exact.norm()


def test_on_an_accelerator_the_documented_kernel_is_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "seconds", None)  # timing on the CPU would be meaningless
    for precision, candidates in kernels.CANDIDATES.items():
        kernels.clear_choices()
        assert kernels.fastest(precision, 1, 1, torch.device("cuda")) is candidates[-1]


def test_the_fastest_kernel_is_selected_and_written_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = fake_seconds(monkeypatch, OneDnn=2.0, Blas=1.0, Linear=3.0)
    assert kernels.fastest("float32", 1, 7) is Blas
    assert sum(timed) >= 2
    kernels.clear_choices()
    timed.clear()
    assert kernels.fastest("float32", 1, 7) is Blas
    assert timed == []
    (tmp_path / "cache/gpt2-compat/kernels.json").write_text("{")
    kernels.clear_choices()
    assert kernels.fastest("float32", 1, 7) is Blas
    assert sum(timed) >= 2


def test_measuring_does_not_change_the_users_random_state() -> None:
    before = torch.get_rng_state()
    times = kernels.seconds([Blas, Linear], torch.float32, rows=1, repeats=1)
    assert len(times) == 2 and min(times) > 0
    assert kernels.works(Blas, "float32")
    assert torch.equal(torch.get_rng_state(), before)


# The cache of measured choices


def fake_seconds(monkeypatch: pytest.MonkeyPatch, **known: float) -> list[int]:
    """Replace the measurement by these times; the returned list grows with every call."""
    calls: list[int] = []

    def seconds(packs: Sequence[Any], dtype: torch.dtype, rows: int) -> list[float]:
        calls.append(len(packs))
        return [known.get(pack.__name__, 9.0) for pack in packs]

    monkeypatch.setattr(kernels, "seconds", seconds)
    monkeypatch.setattr(kernels, "was_idle", lambda *_: True)
    return calls


@pytest.fixture
def cache_file(tmp_path: Path) -> Path:
    path = tmp_path / "cache/gpt2-compat/kernels.json"
    path.parent.mkdir(parents=True)
    return path


DAMAGED: dict[str, bytes] = {
    "cut": b'{"a": ',
    "empty": b"",
    "not text": b"\xff\xfe\x00",
    "a list": b'["Blas"]',
    "a number": b"3",
    "deep": b"[" * 100_000,
    "lists as names": b'{"PLACE": ["Blas"]}',
    "dictionaries as names": b'{"PLACE": {"Blas": 1}}',
    "null": b'{"PLACE": null}',
    "another kernel": b'{"PLACE": "Magic"}',
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_or_foreign_file_is_ignored_and_replaced(
    cache_file: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    calls = fake_seconds(monkeypatch, Blas=1.0)
    kernels.fastest("float32", 1, 7)
    (key,) = json.loads(cache_file.read_text())
    cache_file.write_bytes(DAMAGED[damage].replace(b"PLACE", key.encode()))
    kernels.clear_choices()
    calls.clear()
    assert kernels.fastest("float32", 1, 7) is Blas
    assert calls
    assert json.loads(cache_file.read_text())[key] == "Blas"
    assert list(cache_file.parent.iterdir()) == [cache_file]


def test_entries_of_other_machines_are_kept(
    cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_seconds(monkeypatch, Blas=1.0)
    cache_file.write_text(json.dumps({"another machine": "OneDnn", "damaged": [1]}))
    kernels.fastest("float32", 1, 7)
    known = json.loads(cache_file.read_text())
    assert known.pop("another machine") == "OneDnn"
    assert list(known.values()) == ["Blas"]


@pytest.mark.parametrize("obstacle", ["folder", "file above", "no space"])
def test_a_choice_that_cannot_be_written_to_disk_is_still_used(
    cache_file: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    fake_seconds(monkeypatch, Blas=1.0)
    if obstacle == "folder":
        cache_file.mkdir()
    elif obstacle == "file above":
        cache_file.parent.rmdir()
        cache_file.parent.write_text("")
    else:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
    assert kernels.fastest("float32", 1, 7) is Blas
    if cache_file.parent.is_dir():
        assert not list(cache_file.parent.glob(".*"))  # no temporary file is left


@pytest.mark.parametrize("unknown", [RuntimeError, KeyError])
@pytest.mark.parametrize("cache_home", [None, "", "relative/cache"])
def test_without_a_home_folder_nothing_is_written_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: type[Exception], cache_home: Any
) -> None:
    def home() -> Path:
        raise unknown("no home")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", home)
    if cache_home is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    fake_seconds(monkeypatch, Blas=1.0)
    assert kernels.fastest("float32", 1, 7) is Blas
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs Unix")
def test_an_engine_works_for_a_user_without_home_folder_and_passwd_entry(tiny: Path) -> None:
    code = f"""
import os, pwd
def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {{uid}}")
pwd.getpwuid = getpwuid
import torch
from compat import Engine
from compat.decoding import kernels, native_library
kernels.seconds = lambda packs, *_: [1.0] * len(packs)
engine = Engine.from_pretrained({str(tiny)!r})
print(engine.generate(torch.tensor([[1, 2]]), max_new_tokens=2).shape[1])
"""
    keep = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "USER")}
    done = python(code, env=keep, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3


@pytest.mark.parametrize(
    ("wall", "running", "idle"),
    [(1.0, 0.97, True), (1.0, 0.5, False), (0.001, 0.0, True), (20.0, 17.0, False)],
)
def test_a_measuring_thread_that_had_to_wait_indicates_a_busy_machine(
    wall: float, running: float, idle: bool
) -> None:
    assert kernels.was_idle(wall, running) == idle


def test_a_sleeping_thread_does_not_count_as_running(
    cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(packs: Sequence[Any], dtype: torch.dtype, rows: int) -> list[float]:
        time.sleep(0.1)
        return [9.0 - (pack is Blas) for pack in packs]

    monkeypatch.setattr(kernels, "seconds", slow)
    assert kernels.fastest("float32", 1, 7) is Blas
    assert not cache_file.exists()


def test_a_busy_machine_is_measured_again_later(
    cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(kernels.time, "monotonic", lambda: now)
    calls = fake_seconds(monkeypatch, Blas=2.0, Linear=1.0)
    monkeypatch.setattr(kernels, "was_idle", lambda *_: False)
    assert kernels.fastest("float32", 1, 7) is Linear
    assert not cache_file.exists()
    calls.clear()
    assert kernels.fastest("float32", 1, 7) is Linear
    assert not calls  # the measurement is not repeated for every engine
    now += kernels.REMEASURE_AFTER + 1
    calls = fake_seconds(monkeypatch, Blas=1.0, Linear=2.0)
    assert kernels.fastest("float32", 1, 7) is Blas
    assert list(json.loads(cache_file.read_text()).values()) == ["Blas"]
    calls.clear()
    now += 10 * kernels.REMEASURE_AFTER
    assert kernels.fastest("float32", 1, 7) is Blas
    assert not calls


def test_inconsistent_measurements_are_not_written_to_disk(
    cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [True]

    def seconds(packs: Sequence[Any], dtype: torch.dtype, rows: int) -> list[float]:
        fast = Linear if first else Blas
        first.clear()
        return [1.0 if pack is fast else 2.0 for pack in packs]

    monkeypatch.setattr(kernels, "seconds", seconds)
    assert kernels.fastest("float32", 1, 7) is Linear
    assert not cache_file.exists()


def test_two_threads_share_one_measurement(
    cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, calls = [0], [0], list[int]()

    def seconds(packs: Sequence[Any], dtype: torch.dtype, rows: int) -> list[float]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        calls.append(rows)
        time.sleep(0.02)
        running[0] -= 1
        return [1.0 if pack is Blas else 2.0 for pack in packs]

    monkeypatch.setattr(kernels, "seconds", seconds)
    monkeypatch.setattr(kernels, "was_idle", lambda *_: True)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rows: kernels.fastest("float32", rows, 7), [1, 4] * 4))
    assert set(found) == {Blas}
    assert most == [1]
    assert sorted(calls) == [1, 1, 4, 4]  # two measurements per number of rows


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_during_a_measurement_does_not_deadlock() -> None:
    with kernels._measuring:
        child = os.fork()
        if child == 0:
            os._exit(0 if kernels._measuring.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
