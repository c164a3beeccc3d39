"""LoRA adapters of PEFT have the same effect on GPT-2 and on other models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compat import (
    CheckpointError,
    NameMap,
    NameMapError,
    Row,
    load_into,
    load_pretrained,
    lora_from_hf,
    lora_to_hf,
    merge_lora,
    save_pretrained,
    to_hf_state_dict,
)
from compat.dialects.conv1d import Conv1D
from compat.lora import WEIGHTS
from tests.conftest import noisy_reference
from tests.own_gpt2 import MyGPT2, my_map

pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear

pytestmark = [
    pytest.mark.interop,
    # PEFT warns about our Conv1D, and when it transposes nn.Linear or Conv1D.
    pytest.mark.filterwarnings("default"),
]

IDS = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(2))
TARGETS = {
    "hf": ["c_attn", "c_proj", "c_fc"],
    "linear": ["W_query", "W_value", "out_proj", "layers.0", "layers.2"],  # not W_key
    "conv1d": ["c_attn", "c_proj", "c_fc"],
    "own": ["query_key", "value", "merge", "wide"],
}
OURS = ("linear", "conv1d", "own")
Ours = tuple[nn.Module, NameMap | None]


def ours(kind: str, source: Path) -> Ours:
    if kind != "own":
        return load_pretrained(source, kind), None
    model, name_map = MyGPT2(), my_map()
    load_into(model, name_map, source)
    return model.eval(), name_map


def lora_config(kind: str, **fields: Any) -> LoraConfig:
    """Return a configuration that initialises both A and B at random."""
    config = LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 6,
            "target_modules": TARGETS[kind],
            "fan_in_fan_out": kind in ("hf", "conv1d"),
            "init_lora_weights": False,
            **fields,
        }
    )
    config._register_custom_module({Conv1D: LoraLinear})
    return config


def adapted(model: nn.Module, folder: Path) -> PeftModel:
    """Load the adapter of a folder into the model."""
    config = LoraConfig.from_pretrained(folder)
    config._register_custom_module({Conv1D: LoraLinear})
    return PeftModel.from_pretrained(model, folder, config=config).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found = model(IDS)
    return found if isinstance(found, Tensor) else found.logits


@pytest.fixture(scope="module")
def hf_adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, dict[str, Tensor]]:
    """An adapter of Hugging Face's GPT-2, its logits, and the merged weights."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    fields = {"rank_pattern": {"h.1.attn.c_attn": 2}, "alpha_pattern": {"mlp.c_fc": 3}}
    model = get_peft_model(noisy_reference(), lora_config("hf", **fields)).eval()
    model.save_pretrained(folder)
    found = logits(model)
    assert (found - logits(noisy_reference())).abs().max() > 1
    return folder, found, model.merge_and_unload().state_dict()


@pytest.mark.parametrize("kind", OURS)
def test_an_adapter_of_gpt2_can_be_merged(kind: str, tiny: Path, hf_adapter: Any) -> None:
    folder, expected, weights = hf_adapter
    model, name_map = ours(kind, tiny)
    merge_lora(model, folder, name_map=name_map)
    for name, tensor in to_hf_state_dict(model, name_map).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=2e-6)
    torch.testing.assert_close(
        logits(model), expected, rtol=0, atol=1e-6 * float(expected.std()) * 10
    )


@pytest.mark.parametrize("kind", OURS)
def test_an_adapter_of_gpt2_keeps_its_rank_in_another_model(
    kind: str, tiny: Path, tmp_path: Path, hf_adapter: Any
) -> None:
    folder, expected, _ = hf_adapter
    model, name_map = ours(kind, tiny)
    lora_from_hf(model, folder, tmp_path / "ours", name_map=name_map)
    found = adapted(model, tmp_path / "ours")
    assert {len(A) for name, A in found.named_parameters() if "lora_A" in name} == {2, 4}
    torch.testing.assert_close(logits(found), expected, rtol=1e-5, atol=1e-5)
    lora_to_hf(found, tmp_path / "ours", tmp_path / "again", name_map=name_map)
    again, before = (load_file(f / WEIGHTS) for f in (tmp_path / "again", folder))
    assert {name: t.shape for name, t in again.items()} == {n: t.shape for n, t in before.items()}
    torch.testing.assert_close(
        logits(adapted(noisy_reference(), tmp_path / "again")), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", OURS)
def test_an_adapter_of_another_model_has_the_same_effect_in_gpt2(
    kind: str, tiny: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model, name_map = ours(kind, tiny)
    peft = get_peft_model(model, lora_config(kind, use_rslora=True))
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        loss = nn.functional.cross_entropy(peft(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peft.eval().save_pretrained(tmp_path / "ours")
    lora_to_hf(model, tmp_path / "ours", tmp_path / "hf", name_map=name_map)
    found = logits(adapted(noisy_reference(), tmp_path / "hf"))
    torch.testing.assert_close(found, logits(peft), rtol=1e-5, atol=1e-5)
    for unmerged in (model, peft):
        with pytest.raises(NameMapError, match=r"LoRA layers of PEFT, .* `merge_and_unload\(\)`"):
            save_pretrained(unmerged, tmp_path / "model", dialect_or_name_map=name_map)
    merged = peft.merge_and_unload()
    torch.testing.assert_close(found, logits(merged), rtol=1e-5, atol=1e-5)
    to_hf_state_dict(merged, name_map)


def test_exchanged_matrices_of_an_adapter_change_the_logits(
    tiny: Path, tmp_path: Path, hf_adapter: Any
) -> None:
    folder, expected, _ = hf_adapter
    model, _ = ours("linear", tiny)
    lora_from_hf(model, folder, tmp_path / "ours")
    path = tmp_path / "ours" / WEIGHTS
    tensors = load_file(path)
    at = "base_model.model.trf_blocks.0.attention.W_{}.lora_B.weight"
    q, v = at.format("query"), at.format("value")
    tensors[q], tensors[v] = tensors[v], tensors[q]
    save_file(tensors, path)
    found = logits(adapted(model, tmp_path / "ours"))
    assert (found - expected).abs().max() > 0.1


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def rename(new: str) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "h.0.attn.c_attn" in name]:
            tensors[name.replace("h.0.attn.c_attn", new)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: c.update(use_dora=True), "use_dora = True, so the adapter is not only"),
        (lambda c, t: c.update(bias="all"), "bias = 'all', so the adapter"),
        (
            lambda c, t: c.update(init_lora_weights="pissa"),
            "'pissa', so the adapter",
        ),
        (lambda c, t: c.update(peft_type="IA3"), "peft_type 'IA3', but must have 'LORA'"),
        (lambda c, t: c.update(lora_alpha="many"), "lora_alpha 'many' and alpha_pattern"),
        (lambda c, t: t.clear(), "is not a LoRA adapter:\n  no lora_A and lora_B"),
        (lambda c, t: t.update(x=torch.ones(1)), "x: is not the A or B of a module"),
        (lambda c, t: next(iter(t.values())).fill_(torch.nan), "lora_A.weight: has .* NaN"),
        (lambda c, t: t.popitem(), "its A and B do not have the same rank"),
        (rename("lm_head"), "adapts lm_head, but may adapt only the projections"),
        (rename("h.3.attn.c_attn"), "adapts h.3.attn.c_attn, but may adapt only"),
        (rename("h.0.mlp.c_new"), "adapts h.0.mlp.c_new, but may adapt only"),
    ],
)
@pytest.mark.parametrize("call", [merge_lora, lora_from_hf])
def test_an_adapter_that_cannot_be_used_is_refused(
    tiny: Path, tmp_path: Path, hf_adapter: Any, change: Change, message: str, call: Any
) -> None:
    config = json.loads((hf_adapter[0] / "adapter_config.json").read_text())
    tensors = load_file(hf_adapter[0] / WEIGHTS)
    change(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / WEIGHTS)
    model, _ = ours("linear", tiny)
    before = logits(model)
    rest = () if call is merge_lora else (tmp_path / "new",)
    with pytest.raises(CheckpointError, match=message):
        call(model, tmp_path, *rest)
    assert torch.equal(logits(model), before)
    assert not (tmp_path / "new").exists()


def test_a_model_of_another_size_is_refused(tmp_path: Path, hf_adapter: Any) -> None:
    with pytest.raises(CheckpointError, match=r"found \(24, 72\) inputs and outputs, expected"):
        merge_lora(load_pretrained("demo"), hf_adapter[0])


class Scrambled:
    """An op that rearranges elements so that no row or column of GPT-2's weight is preserved."""

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.reshape(96, 24),)

    def save(self, tensors: Any) -> Tensor:
        return tensors[0].reshape(24, 96)  # type: ignore[no-any-return]


def test_a_layout_that_would_lose_the_rank_is_refused(tmp_path: Path, hf_adapter: Any) -> None:
    row = Row("h.{i}.mlp.c_fc.weight", ("stack.{i}.wide.weight",), Scrambled())
    with pytest.raises(NameMapError, match=r"stack\.0\.wide\.weight: .* whole rows and columns"):
        lora_from_hf(MyGPT2(), hf_adapter[0], tmp_path / "new", name_map=my_map(row))
    merge_lora(MyGPT2(), hf_adapter[0], name_map=my_map(row))
