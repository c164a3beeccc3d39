"""Both dialects against transformers, from the checkpoint to ours and from ours to a checkpoint."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from compat import ParityError, ParityReport, check_parity, load_pretrained, to_hf_state_dict
from compat.checkpoint import open_checkpoint
from compat.dialects import DIALECTS, conv1d, get_dialect, linear
from compat.parity import random_ids
from compat.parity.reference import Reference
from compat.taps import tap_names
from tests.conftest import TINY, MakeCheckpoint

NORMS = ("ln_1", "ln_2", "ln_f")


def assert_parity(report: ParityReport) -> None:
    """All taps pass; `conv1d` to the bit, `linear` to the bit locally but for its norms."""
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
def test_parity_with_eager(make_checkpoint: MakeCheckpoint, dialect: str, seed: int) -> None:
    assert_parity(check_parity(dialect, make_checkpoint(seed)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_parity_with_sdpa(make_checkpoint: MakeCheckpoint, dialect: str, seed: int) -> None:
    """Another kernel, hence not to the bit, and no probabilities to look at."""
    report = check_parity(dialect, make_checkpoint(seed), attention="sdpa")
    assert report.passed, report.headline
    assert len(report.taps) == len(tap_names(3)) - 3
    assert not any(result.tap.endswith("probs") for result in report.taps)


@pytest.mark.parametrize("length", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_inputs_raise_no_false_alarm(dtype: torch.dtype, length: int) -> None:
    """With a token or two, luck can make the reference's own error much smaller than usual."""
    model, generator = load_pretrained("demo", dtype=dtype), torch.Generator().manual_seed(0)
    for _ in range(10):
        ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        report = check_parity(model, "demo", input_ids=ids)
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
def test_field_that_changes_the_arithmetic(
    make_checkpoint: MakeCheckpoint, dialect: str, field: dict[str, Any]
) -> None:
    assert check_parity(dialect, make_checkpoint(**field)).passed


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("field", CONFIGS[1:-1], ids=lambda field: next(iter(field)))
def test_field_that_is_overlooked(
    make_checkpoint: MakeCheckpoint, dialect: str, field: dict[str, Any]
) -> None:
    """The same weights without the field compute something else, so the test above sees it.

    (With another `n_inner` or an untied head the weights do not fit; the loader's tests show that.)
    """
    with_field, name = make_checkpoint(**field), next(iter(field))
    report = check_parity(_without(with_field, name, dialect), with_field)
    # In float32 upcasting is nothing, and a fused tanh GELU differs from the usual one by rounding.
    same = name == "reorder_and_upcast_attn" or "gelu_pytorch_tanh" in field.values()
    assert report.passed == same


@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_other_precisions(
    make_checkpoint: MakeCheckpoint, dialect: str, dtype: torch.dtype, upcast: bool
) -> None:
    if upcast and dtype == torch.float64:
        dtype = torch.float32  # "upcast" would mean float32, which transformers refuses
    folder = make_checkpoint(reorder_and_upcast_attn=upcast)
    report = check_parity(dialect, folder, dtype=dtype)
    assert report.passed, report.headline
    assert report.dtype == str(dtype).removeprefix("torch.")
    if dialect == "conv1d":
        assert all(result.accumulated.bit_identical for result in report.taps)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_from_ours_to_transformers(tmp_path: Path, dialect: str, seed: int) -> None:
    """A model made here, written as a checkpoint, computes the same in transformers."""
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
def test_checkpoints_made_by_others(shared: Path, name: str, dialect: str) -> None:
    report = check_parity(dialect, shared / "data/checkpoints" / name)
    assert report.passed, report.headline
    if dialect == "conv1d":
        assert all(result.accumulated.bit_identical for result in report.taps)


def test_single_file_is_compared_with_the_same_file(tmp_path: Path, tiny: Path) -> None:
    """A weights file of another name is given to transformers too, not the folder's default."""
    model = load_pretrained(tiny, "conv1d")
    with torch.no_grad():
        model.ln_f.bias.add_(1)
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    save_file(to_hf_state_dict(model), tmp_path / "other.safetensors", metadata={"format": "pt"})
    assert check_parity(model, tmp_path / "other.safetensors").passed
    assert check_parity(model, tiny).first_divergence == "ln_f"


def test_text_is_encoded_by_the_checkpoints_tokenizer(shared: Path) -> None:
    report = check_parity("conv1d", shared / "data/checkpoints/tarot", text="The more you make")
    assert report.passed and report.input_shape == (1, 4)


def test_somebody_elses_model_is_compared_by_its_logits(tiny: Path) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"\[3\]"),
        ({"input_ids": torch.zeros(1, 33, dtype=torch.long)}, r"\[1, 33\].*1 to 32"),
        ({"input_ids": torch.full((1, 4), 97)}, "0 to 96"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.long), "text": "x"}, "both"),
    ],
)
def test_input_that_cannot_be_compared(tiny: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        check_parity("linear", tiny, **arguments)


def test_model_of_another_data_type_is_refused(tiny: Path) -> None:
    with pytest.raises(ParityError, match=r"float32.*expected torch.bfloat16"):
        check_parity(load_pretrained(tiny), tiny, dtype=torch.bfloat16)


def _without(folder: Path, name: str, dialect: str) -> linear.GPTModel | conv1d.GPTModel:
    """The checkpoint's weights in a model that overlooks one field of its config."""
    from compat import load_into
    from compat.checkpoint import open_checkpoint
    from compat.config import GPT2Config

    config = open_checkpoint(folder).config
    fields = {**config.to_hf_dict(), name: getattr(GPT2Config(), name)}
    model = get_dialect(dialect).model_class(fields).eval()
    load_into(model, get_dialect(dialect).name_map, folder)
    return model


@pytest.mark.parametrize("sizes", [{"length": 33}, {"length": 0}, {"batch": 0}, {"length": 2.5}])
def test_random_ids_are_of_the_size_asked_for(tiny: Path, sizes: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(tiny)
    assert random_ids(checkpoint).shape == (2, 32)  # the default fits the context
    assert random_ids(checkpoint, batch=3, length=32).shape == (3, 32)
    (name, value), *_ = sizes.items()
    expected = "1 to 32" if name == "length" else "1 or more"
    with pytest.raises(ParityError, match=f"{name} is {value}; expected .*{expected}"):
        random_ids(checkpoint, **sizes)


def test_a_reference_is_freed_without_the_garbage_collector(tiny: Path) -> None:
    """A cycle would keep a model of gigabytes until the collector happens to run."""
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
