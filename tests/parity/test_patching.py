"""`trace` records, patches and differentiates all kinds of models like hand-written hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from compat import (
    CompatError,
    ConfigError,
    ParityError,
    Tap,
    adapt,
    generate,
    load_pretrained,
    taps,
    trace,
    tracing,
)
from compat.tap import BLOCK_TAPS, tap_names
from tests.conftest import TINY, MakeCheckpoint, noisy_reference
from tests.own_gpt2 import MyGPT2

IDS = torch.arange(20).view(2, 10)
OTHERS = torch.arange(30, 44).view(1, 14)  # a shape that `adapt` does not trace
Edit = Callable[[str, Tensor], Tensor]
KINDS = ("linear", "conv1d", "transformers", "adapted")


@pytest.fixture(scope="module")
def hf() -> nn.Module:
    return noisy_reference()


@pytest.fixture(scope="module")
def models(tiny: Path, hf: nn.Module) -> dict[str, tuple[nn.Module, list[Tap] | None]]:
    """One model of every kind with the weights of `tiny`, and the taps to pass to `trace`."""
    own = MyGPT2()
    adaptation = adapt(own, tiny)
    assert adaptation
    return {
        "linear": (load_pretrained(tiny, "linear"), None),
        "conv1d": (load_pretrained(tiny, "conv1d"), None),
        "transformers": (hf, None),
        "adapted": (own, adaptation.taps),
    }


def edited_logits(model: Any, ids: Tensor, edit: Edit) -> Tensor:
    """Compute the logits of transformers' GPT-2 with its modules, and edit every hidden state."""
    gpt, (B, T), H = model.transformer, ids.shape, model.config.n_head
    x = edit("embed", gpt.wte(ids) + gpt.wpe(torch.arange(T)))
    for i, block in enumerate(gpt.h):
        y = edit(f"h.{i}.ln_1", block.ln_1(x))
        q, k, v = block.attn.c_attn(y).chunk(3, dim=-1)
        q, k, v = edit(f"h.{i}.q", q), edit(f"h.{i}.k", k), edit(f"h.{i}.v", v)
        q, k, v = (t.view(B, T, H, -1).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
        probs = edit(f"h.{i}.probs", scores.softmax(-1))
        heads = edit(f"h.{i}.heads", (probs @ v).transpose(1, 2).reshape(B, T, -1))
        x = edit(f"h.{i}.resid_mid", x + edit(f"h.{i}.attn", block.attn.c_proj(heads)))
        y = edit(f"h.{i}.fc", block.mlp.c_fc(edit(f"h.{i}.ln_2", block.ln_2(x))))
        y = block.mlp.c_proj(edit(f"h.{i}.act", block.mlp.act(y)))
        x = edit(f"h.{i}.out", x + edit(f"h.{i}.mlp", y))
    return edit("logits", model.lm_head(edit("ln_f", gpt.ln_f(x))))


def changed(state: Tensor) -> Tensor:
    return state.flip(-1) * 0.5 + 0.1


def close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool((one - two).norm() <= 1e-4 * two.norm())


@pytest.mark.parametrize("ids", [IDS, OTHERS], ids=["two-rows", "one-row"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_hidden_state_is_recorded(models: Any, hf: Any, kind: str, ids: Tensor) -> None:
    model, model_taps = models[kind]
    states = trace(model, ids, model_taps)
    expected: dict[str, Tensor] = {}

    def keep(name: str, state: Tensor) -> Tensor:
        return expected.setdefault(name, state.detach())

    assert torch.allclose(edited_logits(hf, ids, keep), hf(ids).logits, atol=1e-4)
    missing = set(tap_names(3)) - set(states)
    assert {name.split(".")[-1] for name in missing} == (
        # Q and k are fused, and SDPA has no probs.
        {"q", "k", "probs"} if kind == "adapted" else set()
    )
    assert all(close(state, expected[name]) for name, state in states.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tap", ["embed", *(f"h.1.{tap}" for tap in BLOCK_TAPS), "ln_f", "logits"])
def test_a_patch_changes_all_later_hidden_states(models: Any, hf: Any, kind: str, tap: str) -> None:
    model, model_taps = models[kind]
    if model_taps is not None and tap not in {tap_.name for tap_ in model_taps}:
        return
    expected: dict[str, Tensor] = {}

    def patched(name: str, state: Tensor) -> Tensor:
        return expected.setdefault(name, (changed(state) if name == tap else state).detach())

    edited_logits(hf, IDS, patched)
    before = trace(model, IDS, model_taps)
    by_function = trace(model, IDS, model_taps, patch={tap: changed})
    by_tensor = trace(model, IDS, model_taps, patch={tap: changed(before[tap])})
    for states in (by_function, by_tensor):
        assert all(close(state, expected[name]) for name, state in states.items())
    assert not close(by_tensor["logits"], before["logits"])
    assert torch.equal(trace(model, IDS, model_taps)["logits"], before["logits"])


def test_a_patch_that_omits_the_residual_connection_is_detected(hf: Any) -> None:
    """A naive hook replaces only the input of the second norm."""

    def naive(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (changed(args[0]), *args[1:])

    expected = trace(hf, IDS, ["logits"], patch={"h.1.resid_mid": changed})["logits"]
    with hf.transformer.h[1].ln_2.register_forward_pre_hook(naive), torch.no_grad():
        assert not close(hf(IDS).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_all_taps_match_those_of_hand_written_hooks(
    models: Any, hf: Any, kind: str
) -> None:
    model, model_taps = models[kind]
    kept: dict[str, Tensor] = {}

    def keep(name: str, state: Tensor) -> Tensor:
        state = kept[name] = state.clone()
        state.retain_grad()
        return state

    edited_logits(hf, IDS, keep)[0, -1, 5].backward()
    states = trace(model, IDS, model_taps, grad=True, patch={"h.0.mlp": lambda state: state + 0})
    states["logits"][0, -1, 5].backward()
    for name, state in states.items():
        assert state.grad is not None and close(state.grad, kept[name].grad), name
    model.zero_grad()
    hf.zero_grad()


def test_the_gradient_of_a_detached_residual_differs(tiny: Path) -> None:
    model = load_pretrained(tiny, "conv1d")
    before = _embedding_gradient(model)
    inner = model.h[1].attn.forward
    model.h[1].attn.forward = lambda x, *rest: inner(x.detach(), *rest)
    assert not close(_embedding_gradient(model), before)


def _embedding_gradient(model: nn.Module) -> Tensor:
    states = trace(model, IDS, ["embed", "logits"], grad=True)
    return torch.autograd.grad(states["logits"][0, -1, 5], states["embed"])[0]


def test_gradients_of_a_frozen_model_can_be_computed(tiny: Path) -> None:
    model = load_pretrained(tiny)
    with torch.no_grad():
        expected = trace(model, IDS, ["h.1.out", "logits"], grad=True)
    gradient = torch.autograd.grad(expected["logits"].sum(), expected["h.1.out"])[0]
    states = trace(model.requires_grad_(False), IDS, ["h.1.out", "logits"], grad=True)
    states["logits"].sum().backward()
    assert states["h.1.out"].grad is not None and torch.equal(states["h.1.out"].grad, gradient)


def test_taps_and_patches_of_all_layers_are_expanded(models: Any) -> None:
    model, _ = models["linear"]
    zero, patch = torch.zeros_like, {"h.1.attn": lambda state: state}
    states = trace(model, IDS, ["h.{i}.attn"], patch={"h.{i}.attn": zero, **patch})
    assert list(states) == ["h.0.attn", "h.1.attn", "h.2.attn"]
    assert [bool(state.any()) for state in states.values()] == [False, True, False]


def test_tracing_can_run_the_model_several_times(models: Any) -> None:
    model, _ = models["linear"]
    patch = {"h.{i}.mlp": torch.zeros_like}
    before = model(IDS)
    with tracing(model, ["logits"], patch=patch) as run:
        first, second = run(IDS)["logits"], run(OTHERS)["logits"]
        assert torch.equal(model(IDS), first)
        ids = generate(model, OTHERS, max_new_tokens=3, temperature=0)
    assert torch.equal(second, trace(model, OTHERS, patch=patch)["logits"])
    assert torch.equal(model(IDS), before) and not torch.equal(first, before)
    for T in range(14, 17):  # greedy decoding with the patch, a complete run for each id
        logits = trace(model, ids[:, :T], ["logits"], patch=patch)["logits"]
        assert int(logits[0, -1].argmax()) == int(ids[0, T])


def test_transformers_models_without_a_head_or_with_sdpa_are_supported(hf: Any) -> None:
    without = trace(hf.transformer, IDS)
    assert list(without) == tap_names(3)[:-1]
    assert torch.equal(without["ln_f"], trace(hf, IDS, ["ln_f"])["ln_f"])
    fused = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**TINY, attn_implementation="sdpa")
    ).eval()
    assert taps(fused) == [name for name in tap_names(3) if "probs" not in name]
    with pytest.raises(ParityError, match="attn_implementation="):
        trace(fused, IDS, ["h.0.probs"])


def test_upcast_attention_can_be_patched(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(reorder_and_upcast_attn=True)
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    patch = {"h.1.probs": changed}
    expected = trace(reference.eval(), IDS, ["logits"], patch=patch)["logits"]
    assert close(trace(load_pretrained(folder), IDS, ["logits"], patch=patch)["logits"], expected)
    assert not close(reference(IDS).logits, expected)


MISUSES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "name": (lambda m: trace(m, IDS, ["h.1.atn"]), "no tap 'h.1.atn'. Did you mean 'h.1.attn'"),
    "layer": (lambda m: trace(m, IDS, ["h.3.attn"]), "h.0 to h.2"),
    "patched name": (lambda m: trace(m, IDS, patch={"h.1.atn": changed}), "Did you mean"),
    "type of taps": (lambda m: trace(m, IDS, 3), "taps is 3"),  # type: ignore[arg-type]
    "type of a tap": (lambda m: trace(m, IDS, [3]), "contains 3"),  # type: ignore[list-item]
    "type of patches": (lambda m: trace(m, IDS, patch=[changed]), "dictionary"),  # type: ignore[arg-type]
    "type of a patch": (lambda m: trace(m, IDS, patch={"embed": 0}), "is 0"),  # type: ignore[dict-item]
    "shape": (
        lambda m: trace(m, IDS, patch={"h.1.attn": torch.zeros(1, 10, 24)}),
        r"float32 \[1, 10, 24\] on cpu, but must be float32 \[2, 10, 24\]",
    ),
    "dtype": (
        lambda m: trace(m, IDS, patch={"h.1.attn": torch.zeros(2, 10, 24).double()}),
        "float64 .* must be float32",
    ),
    "nothing returned": (
        lambda m: trace(m, IDS, patch={"h.1.attn": lambda state: None}),  # type: ignore[dict-item, return-value]
        "returned is None",
    ),
    "dropout": (lambda m: trace(m.train(), IDS), "dropout"),
    "class": (lambda m: trace(MyGPT2(), IDS), r"adapt\(model, source\)\.taps"),
    "listed class": (lambda m: taps(MyGPT2()), r"adapt\(model, source\)\.taps"),
    "module": (lambda m: trace(m, IDS, [Tap("embed", "nowhere")]), "no module 'nowhere'"),
    "argument": (
        lambda m: trace(m, IDS, [Tap("embed", "trf_blocks.0", at="input", item=5)]),
        "positional arguments",
    ),
    "several values": (
        lambda m: trace(SharedActivation(), IDS, [Tap("h.0.act", "act")]),
        "takes several values",
    ),
    "no tensor": (
        lambda m: trace(noisy_reference(), IDS, [Tap("logits", "")]),
        "must be a tensor",
    ),
    "shape of ids": (lambda m: trace(m, IDS[0]), "input_ids"),
    "ids": (lambda m: trace(m, IDS + 90), "vocabulary"),
    "inference mode": (
        lambda m: torch.inference_mode()(trace)(m, IDS, grad=True),
        "torch.inference_mode",
    ),
}


class SharedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.act = nn.Embedding(97, 4), nn.GELU()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.act(self.act(self.table(ids)))
        return out


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_an_error(tiny: Path, name: str) -> None:
    misuse, message = MISUSES[name]
    with pytest.raises(CompatError, match=message):
        misuse(load_pretrained(tiny))


def test_a_value_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module"):
        trace("gpt2", IDS)  # type: ignore[arg-type]


def test_patches_may_draw_random_numbers(models: Any) -> None:
    model, _ = models["linear"]
    states = trace(model, IDS, ["embed"], patch={"embed": lambda x: x + torch.randn_like(x)})
    assert not torch.equal(states["embed"], trace(model, IDS, ["embed"])["embed"])
