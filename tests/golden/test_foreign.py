"""Arrays with the names and layouts of other implementations, and common mistakes of ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compat import ParityError
from compat.golden_files import Golden, GoldenReport, golden
from compat.golden_files.names import CONVENTIONS, LENS, LLM_C, MODULES, recognise
from compat.tap import BLOCK_TAPS
from tests.conftest import noisy_reference

B, T, N, L, H, C, V = 2, 5, 3, 3, 4, 24, 97
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Golden:
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5))
    return golden(tiny, input_ids=ids, gradients=True, decode=N)


@pytest.fixture(scope="module")
def taps(reference: Golden) -> Arrays:
    return {name: reference.read(name).numpy() for name in reference.judged}


def codes(report: GoldenReport) -> list[tuple[str, str]]:
    return [(finding.code, finding.tap) for finding in report.findings]


# llm.c


def stacked(arrays: Arrays, pattern: str) -> Any:
    """Return one array of all layers, with q, k and v concatenated."""
    if pattern.endswith("qkv"):
        parts = [stacked(arrays, f"{pattern[:-3]}{part}") for part in "qkv"]
        return np.concatenate(parts, -1)
    if "{i}" not in pattern:
        return arrays[pattern]
    return np.stack([arrays[pattern.replace("{i}", str(i))] for i in range(L)])


def llm_c(taps: Arrays) -> Arrays:
    """Return llm.c's arrays in training: T − 1 positions, stacked layers, a padded vocabulary."""
    found: Arrays = {"loss": taps["loss"]}
    for name, tap in LLM_C.taps.items():
        for prefix, d in (("", ""), ("grad.", "d")):
            array = stacked(taps, prefix + tap)
            short = array[..., : T - 1, : T - 1] if name == "att" else array[..., : T - 1, :]
            found[d + name] = np.tril(short) if name == "att" else short
    for name, parameter in LLM_C.parameters.items():
        array = stacked(taps, f"grad.{parameter}")
        matrix = name.endswith("w") and array.ndim == 3
        found[f"d{name}"] = np.swapaxes(array, 1, 2) if matrix else array
    found["dwte"] = np.pad(found["dwte"], ((0, 31), (0, 0)))
    found["logits"] = np.pad(found["logits"], ((0, 0), (0, 0), (0, 31)))
    return found | {"ln1_mean": np.zeros((L, B, T - 1)), "probs": np.zeros((B, T - 1, V + 31))}


def test_names_and_layouts_of_llm_c_are_recognized(
    reference: Golden, taps: Arrays, tiny: Path
) -> None:
    arrays = llm_c(taps)
    report = reference.check(arrays, model=tiny)
    assert report.passed, report
    assert len(report.taps) == len(reference.judged) - 1  # all except the decode steps
    text = " ".join(report.notes)
    for words in ("such as encoded as embed", "4 of 5 positions", "padded", "not taps: ln1_mean"):
        assert words in text, report.notes
    wrong = {**arrays, "fch_gelu": np.maximum(arrays["fch"], 0)}
    assert codes(reference.check(wrong, model=tiny))[0] == ("relu", "h.0.act")
    wrong = {**arrays, "dattprojb": arrays["dattprojb"] * 2}
    assert codes(reference.check(wrong, model=tiny)) == [
        ("scaled_gradient", "grad.h.2.attn.c_proj.bias")
    ]
    with pytest.raises(ParityError, match="must have all 3 blocks along the first axis"):
        reference.check({"fch": arrays["fch"][0]})


def test_a_map_can_name_an_array_of_all_layers(reference: Golden, taps: Arrays) -> None:
    arrays = {"gelus": stacked(taps, "h.{i}.act")}
    report = reference.check(arrays, rename={"gelus": "h.{i}.act"})
    assert report.passed and len(report.taps) == L
    with pytest.raises(ParityError, match="gelus"):
        reference.check(arrays)


# TransformerLens


def lens(taps: Arrays) -> Arrays:
    """Return the cache of a HookedTransformer."""
    found: Arrays = {"hook_embed": np.zeros((B, T, C)), "logits": taps["logits"]}
    for name, tap in LENS.taps.items():
        for i in range(L):
            array = taps[tap.replace("{i}", str(i))]
            split = tap.endswith((".q", ".k", ".v", ".heads"))
            found[name.replace("{i}", str(i))] = array.reshape(B, T, H, -1) if split else array
    return found


def test_names_of_transformer_lens_are_recognized(reference: Golden, taps: Arrays) -> None:
    arrays = lens(taps)
    report = reference.check(arrays)
    assert report.passed and len(report.taps) == 13 * L + 3
    assert not any("weight and bias were applied" in note for note in report.notes)
    # A TransformerBridge calls this hook before the weight and the bias are applied.
    weight, bias = (
        reference.read(f"weight.h.1.ln_2.{part}").numpy() for part in ("weight", "bias")
    )
    plain = (taps["h.1.ln_2"] - bias) / weight
    report = reference.check({**arrays, "blocks.1.ln2.hook_normalized": plain})
    assert report.passed and any("without them: h.1.ln_2" in note for note in report.notes)
    assert not reference.check({"h.1.ln_2": plain}).passed  # wrong as the tap itself


def test_an_additional_bos_token_is_reported(reference: Golden, taps: Arrays) -> None:
    longer = {
        name: np.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))
        for name, x in lens(taps).items()
        if "pattern" not in name
    }
    with pytest.raises(ParityError, match="prepend_bos") as raised:
        reference.check(longer)
    assert len(str(raised.value).splitlines()) < 15  # the layers share a line


# Modules of torch and Flax


def modules(taps: Arrays) -> Arrays:
    """Return the outputs of all modules of a GPT-2; some have several names."""
    found: Arrays = {"transformer.wte": np.zeros((B, T, C)), "transformer.ln_f": taps["ln_f"]}
    for name, tap in MODULES.taps.items():
        for i in range(L):
            label = f"transformer.{name}".replace("{i}", str(i))
            label = "lm_head" if name == "lm_head" else label
            if tap.endswith("qkv"):
                found[label] = stacked(taps, tap)[i]
            else:
                found[label] = taps[tap.replace("{i}", str(i))]
    return found | {f"transformer.h.{i}.ln_1": taps[f"h.{i}.ln_1"] for i in range(L)}


def test_names_of_modules_are_recognized(reference: Golden, taps: Arrays) -> None:
    arrays = modules(taps)
    report = reference.check(arrays)
    assert report.passed and len(report.taps) == 10 * L + 3
    assert any("other arrays contain the same tap" in note for note in report.notes)
    for form in ("model.{}", "_orig_mod.{}"):
        assert reference.check({form.format(name): x for name, x in arrays.items()}).passed
    # The output of a module with dropout is compared, and not that of the projection in it.
    dropped = {**arrays, "transformer.h.1.mlp.dropout": 0 * taps["h.1.mlp"]}
    assert reference.check(dropped).first_divergence == "h.1.mlp"


def test_names_of_flax_are_recognized(reference: Golden, taps: Arrays) -> None:
    arrays = {
        f"{name}.__call__".replace(".", "/"): x
        for name, x in modules(taps).items()
        if "attentions" not in name and not name.endswith("__call__.1")
    }
    arrays |= {f"hidden_states/{i + 1}": taps[f"h.{i}.out"] for i in range(L - 1)}
    arrays |= {f"hidden_states/{L}": taps["ln_f"], "__call__/1": np.zeros(3)}
    kernel = np.ascontiguousarray(taps["grad.h.0.mlp.c_fc.weight"].T)
    arrays |= {"grads/transformer/h/0/mlp/c_fc/kernel": kernel}
    arrays |= {"grads/transformer/wte/embedding": taps["grad.wte.weight"]}
    report = reference.check(arrays)
    assert report.passed and {"grad.wte.weight", "h.1.out"} <= {tap.tap for tap in report.taps}
    states = {f"hidden_states/{i}": taps["embed"] for i in range(L)}
    assert reference.check(states).first_divergence == "h.0.out"


def test_all_conventions_name_existing_taps() -> None:
    for convention in CONVENTIONS:
        for name, golden_name in convention.taps.items():
            tap = golden_name.removeprefix("h.{i}.")
            assert tap in (*BLOCK_TAPS, "qkv", "embed", "ln_f", "logits")
            [first, *_] = recognise(name.replace("{i}", "2"), L)
            found = golden_name if "{i}" not in name else golden_name.replace("{i}", "2")
            assert first.golden == found
    assert not list(recognise("h.0.gelu", L)) and not list(recognise("something", L))


# Common mistakes


def decoded(ids: Tensor, positions: Tensor) -> Any:
    with torch.no_grad():
        return noisy_reference()(ids, position_ids=positions).logits[:, T:].numpy()


def test_mistakes_in_the_positions_of_decode_steps_are_named(reference: Golden, tiny: Path) -> None:
    ids = torch.cat([reference.ids, reference.read("decode.input_ids")], 1)
    correct, n = torch.arange(T + N), torch.arange(N)
    assert reference.check({"decode.logits": decoded(ids, correct[None])}, model=tiny).passed
    for positions, words in (
        (torch.cat([correct[:T], 0 * n]), "every step has position 0"),
        (torch.cat([correct[:T], n]), "start at 0 again"),
        (torch.cat([correct[:T], T + 1 + n]), f"the first step has position {T + 1}"),
        (1 + correct, "with a cache, the positions start at 1"),
    ):
        wrong = decoded(ids, positions[None])
        [finding] = reference.check({"decode.logits": wrong}, model=tiny).findings
        assert finding.code == "kv_cache" and words in finding.message
        [finding] = reference.check({"decode.logits": wrong}).findings  # without the model
        assert finding.code == "kv_cache" and "--model" in finding.evidence


def test_a_query_without_keys_is_named(reference: Golden, taps: Arrays, tiny: Path) -> None:
    """If the mask hides a token from itself, the first token has no keys and becomes NaN."""
    q, k, v = (torch.from_numpy(taps[f"h.0.{n}"]).view(B, T, H, -1).transpose(1, 2) for n in "qkv")
    scores = q @ k.mT / (C // H) ** 0.5
    probs = scores.masked_fill(torch.ones(T, T).triu() > 0, -torch.inf).softmax(-1)
    heads = (probs @ v).transpose(1, 2).reshape(B, T, C)
    arrays = {f"h.0.{n}": taps[f"h.0.{n}"] for n in "qkv"}
    arrays |= {"h.0.heads": heads.numpy(), "h.0.attn": heads.numpy() * np.nan}
    [finding] = reference.check(arrays, model=tiny).findings
    assert (finding.code, finding.tap) == ("mask_off", "h.0.heads") and "NaN" in finding.evidence


def test_gradients_of_masked_probabilities_are_not_compared(
    reference: Golden, taps: Arrays, tiny: Path
) -> None:
    correct = {
        name: np.tril(x) if name.endswith("probs") else x
        for name, x in taps.items()
        if name.startswith("grad.")
    }
    assert reference.check(correct, model=tiny).passed
    damaged = correct["grad.h.1.probs"] * np.float32(1.01)
    assert not reference.check({**correct, "grad.h.1.probs": damaged}).passed


def test_rounding_errors_are_not_named_as_a_deviation(
    reference: Golden, taps: Arrays, tiny: Path
) -> None:
    """The difference slightly exceeds the bound, and no formula explains a part of it."""
    noise = np.random.default_rng(0).standard_normal(taps["h.1.ln_2"].shape).astype(np.float32)
    half = {n: torch.from_numpy(taps[n]).bfloat16() for n in ("embed", "h.1.resid_mid")}
    bound = reference.bound("h.1.ln_2", torch.bfloat16).rms
    size = np.sqrt(np.mean(taps["h.1.ln_2"] ** 2))
    noisy = taps["h.1.ln_2"] + 1.3 * bound * size * noise
    report = reference.check({**half, "h.1.ln_2": torch.from_numpy(noisy).bfloat16()}, model=tiny)
    [finding] = report.findings
    assert finding.code == "unexplained" and "rounding to half precision" in finding.evidence
