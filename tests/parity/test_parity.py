"""Both dialects compute what transformers computes, with loaded and with exported weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from compat import (
    CheckpointError,
    GPT2Config,
    ParityError,
    ParityReport,
    adapt,
    check_parity,
    load_into,
    load_pretrained,
    open_checkpoint,
    to_hf_state_dict,
)
from compat.dialects import DIALECTS, conv1d, get_dialect, linear
from compat.parity import random_ids
from compat.parity.reference import Reference
from compat.tap import tap_names
from tests.conftest import TINY, MakeCheckpoint

pytestmark = pytest.mark.usefixtures("shared_reference")

NORMS = ("ln_1", "ln_2", "ln_f")


def assert_parity(report: ParityReport) -> None:
    """Check all taps. `conv1d` must be bit-identical, as must `linear` locally except in norms."""
    assert report.passed, report.headline
    assert [result.tap for result in report.taps if "probs" not in result.tap] == [
        tap for tap in tap_names(TINY["n_layer"]) if "probs" not in tap
    ]
    if report.model_name == "conv1d":
        assert all(result.accumulated.bit_identical for result in report.taps)
    pieces = [r for r in report.taps if report.model_name == "conv1d" or not r.tap.endswith(NORMS)]
    assert all(result.local.bit_identical for result in pieces)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_have_parity_with_eager_attention(
    make_checkpoint: MakeCheckpoint, dialect: str, seed: int
) -> None:
    assert_parity(check_parity(dialect, make_checkpoint(seed)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_have_parity_with_sdpa(
    make_checkpoint: MakeCheckpoint, dialect: str, seed: int
) -> None:
    """SDPA uses another kernel, so results are not bit-identical, and it has no tap `probs`."""
    report = check_parity(dialect, make_checkpoint(seed), attention="sdpa")
    assert report.passed, report.headline
    assert len(report.taps) == len(tap_names(3)) - 3
    assert not any(result.tap.endswith("probs") for result in report.taps)


@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.float32, 1), (torch.float32, 2), (torch.float32, 6), (torch.bfloat16, 1)],
)
def test_a_correct_model_passes_on_short_inputs(
    tiny: Path, dtype: torch.dtype, length: int
) -> None:
    """On one or two tokens, the reference's own error can by chance be much smaller than usual."""
    model, generator = load_pretrained(tiny, dtype=dtype), torch.Generator().manual_seed(0)
    for _ in range(10):
        ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        report = check_parity(model, tiny, input_ids=ids)
        assert report.passed, report.headline


CONFIGS: list[dict[str, Any]] = [
    {"n_inner": 40},
    {"activation_function": "gelu"},
    {"activation_function": "relu"},
    {"activation_function": "gelu_pytorch_tanh"},
    {"layer_norm_epsilon": 1e-3},
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"reorder_and_upcast_attn": True},
    {"tie_word_embeddings": False},
]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("field", CONFIGS, ids=lambda field: next(iter(field)))
def test_dialects_have_parity_for_all_config_fields_that_affect_the_computation(
    make_checkpoint: MakeCheckpoint, dialect: str, field: dict[str, Any]
) -> None:
    assert check_parity(dialect, make_checkpoint(**field)).passed


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("field", CONFIGS[1:-1], ids=lambda field: next(iter(field)))
def test_a_model_that_ignores_a_config_field_fails(
    make_checkpoint: MakeCheckpoint, dialect: str, field: dict[str, Any]
) -> None:
    """The previous test depends on the fields: the same weights without them must not pass.

    With another `n_inner` or an untied head, weights cannot be loaded, which other tests show.
    """
    with_field, name = make_checkpoint(**field), next(iter(field))
    report = check_parity(_without(with_field, name, dialect), with_field)
    # In float32, upcasting changes nothing, and the fused tanh GELU differs only by rounding.
    same = name == "reorder_and_upcast_attn" or "gelu_pytorch_tanh" in field.values()
    assert report.passed == same


@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_have_parity_in_other_data_types(
    make_checkpoint: MakeCheckpoint, dialect: str, dtype: torch.dtype, upcast: bool
) -> None:
    if upcast and dtype == torch.float64:
        dtype = torch.float32  # from float64, "upcast" to float32 raises an error in transformers
    folder = make_checkpoint(reorder_and_upcast_attn=upcast)
    report = check_parity(dialect, folder, dtype=dtype)
    assert report.passed, report.headline
    assert report.dtype == str(dtype).removeprefix("torch.")
    if dialect == "conv1d":
        names = [result.tap for result in report.taps]
        n_equal = names.index("h.0.probs") if strides_change_products(dtype) else len(names)
        assert all(result.accumulated.bit_identical for result in report.taps[:n_equal])
        assert n_equal > 4


def strides_change_products(dtype: torch.dtype) -> bool:
    """Return whether this machine's BLAS rounds q·kᵀ differently for strided and contiguous keys.

    The keys of transformers are contiguous, because they are concatenated with its cache.
    """
    qkv = torch.randn(20, 32, 3, 4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, k, _ = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D)
    strided = q @ k.transpose(-2, -1)
    return not torch.equal(strided, q @ k.contiguous().transpose(-2, -1))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_exported_weights_compute_the_same_in_transformers(
    tmp_path: Path, dialect: str, seed: int
) -> None:
    torch.manual_seed(seed)
    model = get_dialect(dialect).model_class(TINY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    save_file(to_hf_state_dict(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    transformers.GPT2Config(**TINY).save_pretrained(tmp_path)
    assert_parity(check_parity(model, tmp_path))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["tarot", "machining"])
def test_dialects_have_parity_on_published_checkpoints(
    shared: Path, name: str, dialect: str
) -> None:
    report = check_parity(dialect, shared / "data/checkpoints" / name)
    assert report.passed, report.headline
    if dialect == "conv1d":
        assert all(result.accumulated.bit_identical for result in report.taps)


def test_a_weights_file_is_compared_with_the_same_file(tmp_path: Path, tiny: Path) -> None:
    """transformers must read the named weights file and not the default one of the folder."""
    model = load_pretrained(tiny, "conv1d")
    with torch.no_grad():
        model.ln_f.bias.add_(1)
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    save_file(to_hf_state_dict(model), tmp_path / "other.safetensors", metadata={"format": "pt"})
    assert check_parity(model, tmp_path / "other.safetensors").passed
    assert check_parity(model, tiny).first_divergence == "ln_f"


def test_text_is_encoded_with_the_tokenizer_of_the_checkpoint(shared: Path) -> None:
    report = check_parity("conv1d", shared / "data/checkpoints/tarot", text="The more you make")
    assert report.passed and report.input_shape == (1, 4)


def test_a_users_model_is_compared_by_its_logits(tiny: Path) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = load_pretrained(tiny, "linear")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.inner(ids)
            return logits

    model = Wrapped()
    report = check_parity(model, tiny)
    assert report.passed and [result.tap for result in report.taps] == ["logits"]
    model.inner.final_norm.eps = 1e-2
    assert check_parity(model, tiny).first_divergence == "logits"


def test_a_users_model_may_have_a_module_named_decoder(tiny: Path) -> None:
    class WithDecoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = load_pretrained(tiny, "linear")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.decoder(ids)
            return logits

    report = check_parity(WithDecoder(), tiny)
    assert report.passed and report.model_name == "WithDecoder" and report.source == str(tiny)


@pytest.mark.parametrize("function", [check_parity, adapt])
@pytest.mark.parametrize("option", [{"revision": "main"}, {"verify": True}, {"n_head": 4}])
def test_options_of_the_source_reach_open_checkpoint(
    tiny: Path, function: Callable[..., object], option: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=f"already open. Pass {next(iter(option))}"):
        function(load_pretrained(tiny), open_checkpoint(tiny), **option)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"\[3\]"),
        ({"input_ids": torch.zeros(1, 33, dtype=torch.long)}, r"\[1, 33\].*1 to 32"),
        ({"input_ids": torch.full((1, 4), 97)}, "0 to 96"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.long), "text": "x"}, "both"),
    ],
)
def test_invalid_input_ids_are_refused(tiny: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        check_parity("linear", tiny, **arguments)


def test_a_model_of_another_data_type_is_refused(tiny: Path) -> None:
    with pytest.raises(ParityError, match=r"float32.*must be torch.bfloat16"):
        check_parity(load_pretrained(tiny), tiny, dtype=torch.bfloat16)


def _without(folder: Path, name: str, dialect: str) -> linear.GPTModel | conv1d.GPTModel:
    """Return the checkpoint's weights in a model that ignores one field of its config."""
    config = open_checkpoint(folder).config
    fields = {**config.to_hf_dict(), name: getattr(GPT2Config(), name)}
    model = get_dialect(dialect).model_class(fields).eval()
    load_into(model, get_dialect(dialect).name_map, folder)
    return model


@pytest.mark.parametrize("sizes", [{"length": 33}, {"length": 0}, {"batch": 0}, {"length": 2.5}])
def test_random_ids_have_the_requested_shape(tiny: Path, sizes: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(tiny)
    assert random_ids(checkpoint).shape == (2, 32)  # the default fits the context
    assert random_ids(checkpoint, batch=3, length=32).shape == (3, 32)
    (name, value), *_ = sizes.items()
    expected = "1 to 32" if name == "length" else "1 or more"
    with pytest.raises(ParityError, match=f"{name} is {value}, but must be .*{expected}"):
        random_ids(checkpoint, **sizes)


def test_a_reference_is_freed_without_the_garbage_collector(tiny: Path) -> None:
    """A reference cycle would keep gigabytes in memory until the collector runs."""
    reference = Reference(open_checkpoint(tiny), torch.float32)
    reference.logits(torch.tensor([[1, 2, 3]]))
    model = weakref.ref(reference.model)
    gc.collect()
    gc.disable()
    try:
        del reference
        assert model() is None
    finally:
        gc.enable()
