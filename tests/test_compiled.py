"""The compiled decode step computes what the decode step in eager mode computes."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from compat import ConfigError, Engine, check_parity, load_pretrained, save_pretrained
from compat.decoding import NotFiniteError
from compat.decoding.compiled import _import_compiler
from tests.conftest import MakeCheckpoint

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
TEXT = torch.randint(97, (64,), generator=torch.Generator().manual_seed(3)).tolist()
# Of the logits' norm; in int8 a rounding of activations the other way.
RELATIVE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 1e-2}


@pytest.fixture(scope="module")
def source(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(n_positions=64, n_layer=2)


def logits(engine: Engine, prompts: list[list[int]], ids: list[list[int]]) -> Tensor:
    decoder = engine.decoder()
    return torch.stack([decoder.start(prompts), *(decoder.step(torch.tensor(i)) for i in ids)])


@needs_compiler
@pytest.mark.parametrize("dtype", list(RELATIVE))
def test_logits_equal_those_without_compilation(source: Path, dtype: Any) -> None:
    engine = Engine.from_pretrained(source, dtype=dtype)
    compiled = Engine.from_pretrained(source, dtype=dtype, compile=True)
    steps: list[Any] = []
    step = compiled.transformer.step  # type: ignore[attr-defined]
    compiled.transformer.step = lambda *args: steps.append(args) or step(*args)  # type: ignore
    single = [[i] for i in TEXT]
    passes = 64 - 1 - 1 + 64 - 9 - 1  # those of two texts, but for the last position of all
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (1, 9):
            found, expected = (logits(e, [TEXT[:n]], single[n:]) for e in (compiled, engine))
            assert (found - expected).norm() < RELATIVE[dtype] * expected.norm()
            wrong = logits(engine, [TEXT[:n]], [[5], *single[n + 1 :]])
            assert (found - wrong).norm() > 2 * RELATIVE[dtype] * expected.norm()
        assert len(steps) == passes
        both = [[i, 96 - i] for i in TEXT]  # a batch is not compiled
        prompts = [TEXT[:3], TEXT[:5]]
        assert torch.equal(logits(compiled, prompts, both[:9]), logits(engine, prompts, both[:9]))
        one_left(compiled, engine, RELATIVE[dtype])
    assert len(steps) == passes


def one_left(compiled: Engine, engine: Engine, bound: float) -> None:
    """The last sequence of a batch, whose cache has room for two."""
    rest = []
    for decoder in (compiled.decoder(), engine.decoder()):
        decoder.start([TEXT[:4], TEXT[4:8]])
        decoder.keep(torch.tensor([1]))
        rest.append(decoder.step(torch.tensor([11])))
    assert (rest[0] - rest[1]).norm() < bound * rest[1].norm()


def test_a_nan_that_fused_attention_hides_is_found(source: Path) -> None:
    model = load_pretrained(source, "conv1d")
    model.h[1].attn.c_attn.bias.data[0] = torch.nan
    engine = Engine(model, compile=True)
    with pytest.raises(NotFiniteError, match=r"h\.1\.q"):
        engine.generate(torch.tensor([TEXT[:4]]), max_new_tokens=3)
    first, following = logits(engine, [TEXT[:4]], [[7]])
    assert first.isnan().any() and following.isnan().any()


def test_a_missing_compiler_is_an_error(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    missing = config.patch({"cpp.cxx": ("no-such-compiler",)})  # torch's way, which it undoes
    with missing, pytest.raises(ConfigError, match=r"torch\.compile failed: "):
        Engine.from_pretrained(source, compile=True)


@pytest.mark.parametrize("others", [{"speculate": "int8"}, {"speculate": "lookup"}])
def test_speculation_cannot_be_compiled(source: Path, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="without speculate"):
        Engine.from_pretrained(source, compile=True, **others)


@needs_compiler
def test_compiling_leaves_the_settings_of_the_process(source: Path) -> None:
    """Seen by another thread too, while it compiles."""
    from torch._inductor import config

    def settings() -> tuple[Any, ...]:
        return (
            config.freezing,
            config.cpp_wrapper,
            config.cpp.threads,
            list(warnings.filters),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )

    before, seen, done = settings(), list[tuple[Any, ...]](), Event()

    def watch() -> None:
        while not done.wait(0.01):
            seen.append(settings()[:3] + settings()[4:7])

    thread = Thread(target=watch)
    thread.start()
    try:
        engine = Engine.from_pretrained(source, compile=True)
        engine.generate(torch.tensor([[1, 2]]), max_new_tokens=5)
    finally:
        done.set()
        thread.join()
    assert settings() == before
    assert set(seen) == {before[:3] + before[4:7]}


def test_a_model_in_the_wrapper_of_torch_compile_is_taken(tiny: Path, tmp_path: Path) -> None:
    """It is unwrapped, so that nothing is compiled here."""
    _import_compiler()
    compiled: Any = torch.compile(load_pretrained(tiny))
    save_pretrained(compiled, tmp_path / "saved")
    expected = load_pretrained(tiny)
    ids = torch.tensor([[5, 17, 60]])
    for model in (load_pretrained(tmp_path / "saved"), expected):
        assert torch.equal(model(ids), expected(ids))
    assert torch.equal(Engine(compiled).score(ids), Engine(expected).score(ids))
    report = check_parity(compiled, tiny, input_ids=ids)
    assert report.passed and report.model_name == "linear"
