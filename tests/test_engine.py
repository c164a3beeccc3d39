"""The engine computes what the dialects and transformers compute, with every kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compat import (
    CheckpointError,
    ConfigError,
    GenerationError,
    Transpose,
    load_pretrained,
)
from compat.checkpoint import open_checkpoint
from compat.decoding import scoring
from compat.decoding.matrices import Blas
from compat.decoding.transformer import Transformer
from compat.dialects import DIALECTS
from compat.engine import Engine
from compat.parity.compare import compare
from compat.parity.reference import Reference
from tests.conftest import MakeCheckpoint, State, Write, noisy_reference
from tests.generation_common import greedy, relative

PRECISIONS = ("float32", "bfloat16", "int8")
# Bounds relative to the norm of the float32 logits; a position that is off by one causes 0.3.
RELATIVE = {"float32": 1e-5, "bfloat16": 0.05, "int8": 0.08}


@pytest.fixture(scope="module")
def source(make_checkpoint: MakeCheckpoint) -> Path:
    """A small checkpoint whose logits differ so much that greedy ids do not depend on rounding."""
    return make_checkpoint(n_positions=64, activation_function="gelu_new")


def logits_of(engine: Engine, ids: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = engine.transformer(ids, engine.transformer.new_cache(len(ids)).kv, 0)
        return engine.transformer.logits(hidden)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_logits_are_within_the_calibrated_bound_of_parity(
    source: Path, dtype: Any, torch_dtype: torch.dtype
) -> None:
    """As for the blocks, the bound is twice the reference's own error against float64."""
    reference = Reference(open_checkpoint(source), torch_dtype)
    ids = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    expected, exact = reference.logits(ids)
    engine = Engine.from_pretrained(source, dtype=dtype)
    found = {"logits": logits_of(engine, ids).to(torch_dtype)}
    (result,) = compare({"logits": expected}, found, found, {"logits": exact}, {"logits": exact})
    assert result.passed
    engine.transformer.wpe.mul_(1.1)  # a wrong engine exceeds the bound
    found = {"logits": logits_of(engine, ids).to(torch_dtype)}
    (result,) = compare({"logits": expected}, found, found, {"logits": exact}, {"logits": exact})
    assert not result.passed


@pytest.mark.parametrize(
    "config",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"activation_function": "relu"},
        {"activation_function": "gelu"},
        {"tie_word_embeddings": False},
        {"n_inner": 40},
        {"layer_norm_epsilon": 1e-2},
    ],
    ids=str,
)
def test_every_field_of_the_config_has_an_effect(
    make_checkpoint: MakeCheckpoint, config: dict[str, Any]
) -> None:
    folder = make_checkpoint(**config)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        expected = noisy_reference(**config)(ids).logits
    assert relative(logits_of(Engine.from_pretrained(folder), ids), expected) < 1e-5


@pytest.mark.parametrize("dtype", PRECISIONS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_engine_and_dialects_agree_for_any_lengths(source: Path, dtype: Any, data: Any) -> None:
    """Batches of prompts of any lengths, some of which are removed between decode steps."""
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    steps = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    texts = [torch.randint(97, (n + steps,), generator=generator).tolist() for n in lengths]
    blocks = load_pretrained(source)
    decoder = Engine.from_pretrained(source, dtype=dtype).decoder()
    found = decoder.start([text[:n] for text, n in zip(texts, lengths, strict=True)])
    rows = list(range(len(texts)))
    for step in range(steps + 1):
        for row, logits in zip(rows, found, strict=True):
            with torch.no_grad():
                expected = blocks(torch.tensor([texts[row][: lengths[row] + step]]))[0, -1]
            assert relative(logits, expected) < RELATIVE[dtype]
        if step == steps:
            return
        if len(rows) > 1 and data.draw(st.booleans()):
            removed = data.draw(st.integers(0, len(rows) - 1))
            decoder.keep(torch.tensor([i for i in range(len(rows)) if i != removed]))
            del rows[removed]
        found = decoder.step(torch.tensor([texts[row][lengths[row] + step] for row in rows]))


@pytest.mark.parametrize("speculate", [None, "lookup"])
@pytest.mark.parametrize("chunk", [1, 7, 20, 64])
def test_prompts_can_be_prefilled_in_chunks(
    source: Path, speculate: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(source, speculate=speculate)
    monkeypatch.setattr(type(engine.transformer), "prefill_chunk", chunk)
    texts = [torch.arange(40).tolist(), [5, 3, 9]] if speculate is None else [list(range(40))]
    found = engine.decoder().start(texts)
    blocks = load_pretrained(source)
    for row, text in zip(found, texts, strict=True):
        with torch.no_grad():
            assert relative(row, blocks(torch.tensor([text]))[0, -1]) < 1e-5


@pytest.mark.parametrize(
    ("dialect", "dtype"), [("linear", "float32"), ("conv1d", "float32"), ("linear", "int8")]
)
def test_an_engine_built_from_a_model_equals_one_from_its_checkpoint(
    source: Path, dialect: str, dtype: Any
) -> None:
    ids = torch.arange(20)[None]
    from_model = logits_of(Engine(load_pretrained(source, dialect), dtype=dtype), ids)
    assert torch.equal(from_model, logits_of(Engine.from_pretrained(source, dtype=dtype), ids))


def test_an_engine_accepts_a_users_module_with_a_map_and_a_config(source: Path) -> None:
    model = load_pretrained(source, "conv1d")
    config, ids = model.config, torch.arange(20)[None]
    del model.config
    name_map = DIALECTS["conv1d"].name_map
    with pytest.raises(ConfigError, match="has no GPT2Config"):
        Engine(model, name_map=name_map)
    engine = Engine(model, name_map=name_map, config=config)
    assert torch.equal(logits_of(engine, ids), logits_of(Engine.from_pretrained(source), ids))


# Greedy ids and scores


def test_greedy_ids_equal_those_of_transformers(source: Path) -> None:
    model = noisy_reference(n_positions=64)
    engine = Engine.from_pretrained(source)
    for seed in range(10):
        ids = torch.randint(97, (1, 8), generator=torch.Generator().manual_seed(seed))
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=56, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found = greedy(engine, ids, 56)
        assert torch.equal(found, expected), seed


@pytest.mark.parametrize("length", [1, 2, 64])
def test_scores_match_those_of_transformers(
    source: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 10)
    monkeypatch.setattr(scoring, "BATCH_POSITIONS", 130)
    check_scores(source, torch.randint(97, (3, length), generator=torch.Generator().manual_seed(5)))


def test_the_last_scored_id_needs_no_position(source: Path) -> None:
    check_scores(source, torch.randint(97, (2, 65), generator=torch.Generator().manual_seed(6)))


def check_scores(source: Path, ids: Tensor) -> None:
    """Compare the engine's scores with those of transformers."""
    with torch.no_grad():
        logits = noisy_reference(n_positions=64)(ids[:, :64]).logits[:, : ids.shape[1] - 1]
    expected = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    found = Engine.from_pretrained(source).score(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 65])
def test_greedy_choices_are_reported_with_the_scores(
    source: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 10)
    monkeypatch.setattr(scoring, "ROW_POSITIONS", 70)
    engine = Engine.from_pretrained(source)
    ids = greedy(engine, torch.tensor([[5, 17], [9, 44]]), 62)
    ids = torch.cat([ids, torch.tensor([[1], [2]])], dim=1)
    ids[0, 30] = (ids[0, 30] + 1) % 97
    ids = ids[:, :length]
    with torch.no_grad():
        chosen = noisy_reference(n_positions=64)(ids[:, :64]).logits.argmax(-1)[:, : length - 1]
    scores, is_greedy = engine.score(ids, greedy=True)
    assert torch.equal(scores, engine.score(ids))
    assert is_greedy.dtype == torch.bool
    assert torch.equal(is_greedy, chosen == ids[:, 1:])
    if length == 65:
        assert is_greedy[1, 1:63].all() and not is_greedy[0, 29]


def test_ids_in_any_container_can_be_scored(source: Path) -> None:
    engine, ids = Engine.from_pretrained(source), torch.tensor([[5, 17, 60]])
    for container in (ids.tolist(), ids.numpy(), ids.to(torch.uint8)):
        assert torch.equal(engine.score(container), engine.score(ids))
    with pytest.raises(GenerationError, match="input_ids is the text 'Hello'"):
        engine.score("Hello")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            torch.zeros(1, 66, dtype=torch.long),
            "66 ids were passed, but a model with 64 positions scores up to 65",
        ),
        (torch.tensor([[97]]), "97"),
    ],
)
def test_ids_that_cannot_be_scored_are_refused(source: Path, ids: Tensor, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        Engine.from_pretrained(source).score(ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, "'float16', but must be 'float32', 'bfloat16' or 'int8'"),
        ({"speculate": "magic"}, "'magic', but must be"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"device": "abacus"}, "device is 'abacus', which cannot be used: .*abacus"),
        ({"device": "meta"}, "device is 'meta', which cannot be used"),
    ],
)
def test_invalid_arguments_are_refused(
    source: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine.from_pretrained(source, **arguments)


def test_hub_options_for_an_open_checkpoint_are_refused(source: Path) -> None:
    with pytest.raises(CheckpointError, match="Pass revision to open_checkpoint"):
        Engine.from_pretrained(open_checkpoint(source), revision="main")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused(source: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'cuda', which cannot be used"):
        Engine.from_pretrained(source, device="cuda")


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("speculate", [None, "int8"])
def test_all_tensors_are_on_the_engines_device(source: Path, dtype: Any, speculate: Any) -> None:
    """A tensor created without a device would be on torch's default device, here `meta`."""
    ids, text = torch.tensor([[5, 17, 60]]), torch.arange(40)[None]
    device = torch.device("cpu")
    expected = Engine.from_pretrained(source, dtype=dtype)

    def decode_prompts_of_unequal_length(engine: Engine) -> list[Tensor]:
        decoder, (first, row, last) = engine.decoder(), ([7, 8], [1], [9])
        found = [decoder.start([[1, 2, 3], [4]])]
        found.append(decoder.step(torch.tensor(first, device=device)))
        decoder.keep(torch.tensor(row, device=device))
        return [*found, decoder.step(torch.tensor(last, device=device))]

    with torch.device("meta"):
        assert torch.zeros(1).is_meta
        engine = Engine.from_pretrained(source, dtype=dtype, speculate=speculate, device=device)
        found = greedy(engine, ids, 30)
        scores = engine.score(text)
        batch = [] if speculate else decode_prompts_of_unequal_length(engine)
    if speculate:
        assert engine._draft_sources[-1].rate > 0.7  # the initial value, so drafts were accepted
    else:
        assert torch.equal(torch.cat(batch), torch.cat(decode_prompts_of_unequal_length(expected)))
    assert torch.equal(found, greedy(expected, ids, 30))
    assert torch.equal(scores, expected.score(text))


def test_more_prompts_than_max_batch_are_refused(source: Path) -> None:
    with pytest.raises(GenerationError, match="3 prompts were passed at once, but at most 2 fit"):
        Engine.from_pretrained(source, max_batch=2).decoder().start([[1], [2], [3]])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("restored_threads")
def test_ids_do_not_depend_on_the_number_of_threads(source: Path, threads: int) -> None:
    ids = torch.arange(8)[None]
    expected = greedy(load_pretrained(source), ids, 40)
    torch.set_num_threads(threads)
    assert torch.equal(greedy(Engine.from_pretrained(source), ids, 40), expected)


def test_a_transposed_weight_is_detected(source: Path) -> None:
    """c_proj is square, so transposing it changes no shape; the tests above would detect it."""
    checkpoint, ids = open_checkpoint(source), torch.arange(20)[None]

    def read(name: str) -> list[Tensor]:
        tensor = checkpoint.read(name)
        return list(Transpose().load(tensor)) if name == "h.1.attn.c_proj.weight" else [tensor]

    with torch.no_grad():
        embedding = checkpoint.read("wte.weight"), checkpoint.read("wpe.weight")
        wrong = Transformer(checkpoint.config, embedding, read, Blas, torch.float32)
        logits = wrong.logits(wrong(ids, wrong.new_cache(1).kv, 0))
    assert relative(logits, logits_of(Engine.from_pretrained(source), ids)) > 0.01


@pytest.mark.parametrize("speculate", [None, "lookup"])
@pytest.mark.parametrize(
    ("tensor", "at", "tap"),
    [
        ("wpe.weight", 0, "embed"),
        ("h.1.attn.c_attn.bias", -1, "h.1.v"),
        ("h.1.attn.c_attn.bias", 0, "h.1.q"),  # torch's fused attention hides this NaN
        ("h.1.mlp.c_fc.weight", 0, "h.1.fc"),
        ("ln_f.bias", 0, "ln_f"),
    ],
)
def test_an_error_for_non_finite_logits_names_the_first_layer(
    state: State, write: Write, tensor: str, at: int, tap: str, speculate: Any
) -> None:
    state[tensor].view(-1)[at] = torch.nan
    engine = Engine.from_pretrained(
        open_checkpoint(write(state), check_finite=False), speculate=speculate
    )
    with pytest.raises(
        GenerationError, match=f" {tap} is the first hidden state that contains NaN"
    ):
        engine.generate(torch.arange(5)[None], max_new_tokens=2, temperature=0)


@pytest.mark.parametrize("length", [1, 7, 40])
def test_continuations_have_the_scores_of_the_complete_texts(
    source: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 10)
    monkeypatch.setattr(scoring, "ROW_POSITIONS", 70)
    engine, generator = Engine.from_pretrained(source), torch.Generator().manual_seed(8)
    context = torch.randint(97, (length,), generator=generator).tolist()
    drawn = [torch.randint(97, (n,), generator=generator).tolist() for n in (1, 12, 25, 3)]
    likely = greedy(engine, [context], 9)
    continuations = [*drawn, likely[0, length:].tolist()]
    found = engine.score_continuations(context, continuations)
    for ids, pair in zip(continuations, found, strict=True):
        whole = engine.score([[*context, *ids]], greedy=True)
        (alone,) = engine.score_continuations(context, [ids])
        for scores, is_greedy in (pair, alone):
            torch.testing.assert_close(scores, whole[0][0, length - 1 :], rtol=1e-5, atol=1e-5)
            assert torch.equal(is_greedy, whole[1][0, length - 1 :])
    assert found[-1][1].all() and not found[1][1].all()


def test_requests_of_several_contexts_are_scored_together(source: Path) -> None:
    engine, generator = Engine.from_pretrained(source), torch.Generator().manual_seed(9)

    def draw(n: int) -> list[int]:
        return torch.randint(97, (n,), generator=generator).tolist()

    requests = [(draw(S), [draw(T) for T in lengths]) for S, lengths in
                ((1, [64]), (30, [1, 1, 7]), (7, [20, 3]), (30, [5]))]  # fmt: skip
    found = dict(engine.score_requests(requests))
    assert len(found) == 7
    for (request, i), score in found.items():
        context, continuations = requests[request]
        whole = engine.score([[*context, *continuations[i]]], greedy=True)
        expected = [part[0, len(context) - 1 :] for part in whole]
        torch.testing.assert_close(score.logprobs, expected[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(score.is_greedy, expected[1])


@pytest.mark.parametrize(
    ("context", "continuations", "message"),
    [
        ([], [[1]], "the context, a continuation or the list of continuations is empty"),
        ([1], [[2], []], "the context, a continuation or the list of continuations is empty"),
        ([1], [], "the context, a continuation or the list of continuations is empty"),
        ([1] * 60, [[2], [3] * 6], "have 66 ids, but a model with 64 positions scores up to 65"),
        ([1], [[2], [97]], "input_ids contains 97"),
    ],
)
def test_continuations_that_cannot_be_scored_are_refused(
    source: Path, context: list[int], continuations: list[list[int]], message: str
) -> None:
    with pytest.raises(GenerationError, match=message):
        Engine.from_pretrained(source).score_continuations(context, continuations)
