"""Loading into the dialects by name, and back to Hugging Face's layout, is bit-identical."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compat import CompatError, ConfigError, load_block, load_pretrained, to_hf_state_dict
from compat.checkpoint import open_checkpoint
from compat.dialects import DIALECTS
from tests.conftest import MakeCheckpoint, noisy_reference
from tests.loading_common import both_dialects, check_identical, ids, save, state_of_tied

HEADS = {"linear": ("out_head", "tok_emb"), "conv1d": ("lm_head", "wte")}


# Both directions


@both_dialects
def test_a_tied_checkpoint_is_restored_bit_by_bit(tiny: Path, dialect: str) -> None:
    check_identical(
        to_hf_state_dict(load_pretrained(tiny, dialect)), state_of_tied(noisy_reference())
    )


@both_dialects
@pytest.mark.parametrize(
    "fields",
    [
        {"tie_word_embeddings": False},
        {"tie_word_embeddings": False, "n_inner": 40, "n_layer": 1},
    ],
)
def test_an_untied_checkpoint_is_restored_bit_by_bit(
    make_checkpoint: MakeCheckpoint, dialect: str, fields: dict[str, int]
) -> None:
    model = load_pretrained(make_checkpoint(seed=3, **fields), dialect)
    check_identical(to_hf_state_dict(model), noisy_reference(seed=3, **fields).state_dict())


@both_dialects
def test_an_untied_head_that_equals_the_embedding_is_kept(tmp_path: Path, dialect: str) -> None:
    reference = noisy_reference(tie_word_embeddings=False)
    with torch.no_grad():
        reference.lm_head.weight.copy_(reference.transformer.wte.weight)
    model = load_pretrained(save(tmp_path, reference), dialect)
    check_identical(to_hf_state_dict(model), reference.state_dict())


@both_dialects
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_same_logits_from_the_saved_weights(
    make_checkpoint: MakeCheckpoint, dialect: str, tied: bool
) -> None:
    model = load_pretrained(make_checkpoint(tie_word_embeddings=tied), dialect)
    reference = noisy_reference(tie_word_embeddings=tied)
    with torch.no_grad():
        expected = reference(ids()).logits
        for parameter in reference.parameters():
            parameter.zero_()
        result = reference.load_state_dict(to_hf_state_dict(model), strict=False)
        assert result.missing_keys == (["lm_head.weight"] if tied else [])
        assert result.unexpected_keys == []
        assert torch.equal(reference(ids()).logits, expected)


@both_dialects
def test_twelve_layers_are_assigned_in_order(make_checkpoint: MakeCheckpoint, dialect: str) -> None:
    """A map that compares names as prefixes confuses layer 1 with layers 10 and 11."""
    size = {"n_layer": 12, "n_embd": 8, "n_head": 2}
    model = load_pretrained(make_checkpoint(**size), dialect)
    reference = noisy_reference(**size)
    blocks = model.get_submodule(DIALECTS[dialect].block_path.removesuffix(".{i}"))
    assert len(blocks) == 12
    with torch.no_grad():
        hidden = reference(
            ids(), output_hidden_states=True
        ).hidden_states  # the last one is after ln_f
        for i, block in enumerate(blocks[:-1]):
            torch.testing.assert_close(block(hidden[i]), hidden[i + 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids()), reference(ids()).logits, rtol=1e-4, atol=1e-4)
    check_identical(to_hf_state_dict(model), state_of_tied(reference))


# The loaded model


@both_dialects
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_shares_the_embeddings_parameter(
    make_checkpoint: MakeCheckpoint, dialect: str, tied: bool
) -> None:
    model = load_pretrained(make_checkpoint(tie_word_embeddings=tied), dialect)
    head, embedding = (model.get_parameter(f"{name}.weight") for name in HEADS[dialect])
    assert (head is embedding) is tied
    assert (head.data_ptr() == embedding.data_ptr()) is tied
    reference = noisy_reference(tie_word_embeddings=tied)
    assert model.config.tie_word_embeddings is tied
    assert sum(p.numel() for p in model.parameters()) == reference.num_parameters()


@both_dialects
def test_a_stored_head_that_differs_is_loaded_untied(
    tiny: Path, tmp_path: Path, dialect: str
) -> None:
    state = load_file(tiny / "model.safetensors")
    state["lm_head.weight"] = state["transformer.wte.weight"] + 1
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    check_identical(to_hf_state_dict(load_pretrained(tmp_path, dialect)), state)


@both_dialects
def test_a_loaded_model_is_complete_and_in_eval_mode(tiny: Path, dialect: str) -> None:
    copied = load_pretrained(tiny, dialect, mmap=False)
    assert all(tensor.is_contiguous() for tensor in copied.state_dict().values())
    model = load_pretrained(tiny, dialect)
    assert not any(module.training for module in model.modules())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.device == torch.device("cpu"), name
        # In a mapped model, matrices are views: [out, in] of [in, out], and q, k and v of one
        # tensor.
        is_view = dialect == "linear" and tensor.dim() == 2 and tensor.stride(0) == 1
        assert tensor.is_contiguous() or is_view, name
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(ids()), model(ids()))


@both_dialects
def test_views_in_a_pickle_are_loaded_as_contiguous(
    tiny: Path, tmp_path: Path, dialect: str
) -> None:
    """A `.bin` file keeps the strides of `weight.T`, which safetensors refuses to write."""
    state = load_file(tiny / "model.safetensors")
    views = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in state.items()}
    torch.save(views, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    model = load_pretrained(tmp_path, dialect)
    assert [k for k, v in model.named_parameters() if not v.is_contiguous()] == []
    save_file(to_hf_state_dict(model), tmp_path / "written.safetensors")
    check_identical(load_file(tmp_path / "written.safetensors"), state)


@both_dialects
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_all_parameters_have_the_requested_dtype(
    tiny: Path, dialect: str, dtype: torch.dtype
) -> None:
    model = load_pretrained(tiny, dialect, dtype=dtype)
    check_identical(to_hf_state_dict(model), state_of_tied(noisy_reference().to(dtype)))


@both_dialects
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_dtype_that_of_the_checkpoint_is_kept(
    tmp_path: Path, dialect: str, dtype: torch.dtype
) -> None:
    reference = noisy_reference().to(dtype)
    model = load_pretrained(save(tmp_path, reference), dialect)
    assert {p.dtype for p in model.parameters()} == {dtype}
    check_identical(to_hf_state_dict(model), state_of_tied(reference))


def test_weights_beyond_the_range_of_the_data_type_are_refused(tmp_path: Path, tiny: Path) -> None:
    """A cast to float16 would silently turn the weights into infinity."""
    state = load_file(tiny / "model.safetensors")
    state["transformer.h.1.mlp.c_fc.weight"][3, 4] = -70000.0
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(tiny / "config.json", tmp_path)
    load_pretrained(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(CompatError, match=r"h\.1\.mlp\.c_fc\.weight has values up to 70000"):
        load_pretrained(tmp_path, dtype=torch.float16)


def test_integer_weights_are_refused(tiny: Path) -> None:
    with pytest.raises(CompatError, match=r"dtype is torch\.int64"):
        load_pretrained(tiny, dtype=torch.int64)


def test_two_models_of_one_open_checkpoint_share_no_memory(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    first, second = load_pretrained(checkpoint), load_pretrained(checkpoint)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    check_identical(to_hf_state_dict(second), to_hf_state_dict(load_pretrained(tiny)))


def test_an_unknown_dialect_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="'einops', but must be one of linear, conv1d"):
        load_pretrained(tiny, "einops")


# A single block


@both_dialects
def test_load_block_returns_the_block_of_the_model(
    make_checkpoint: MakeCheckpoint, dialect: str
) -> None:
    folder = make_checkpoint(scale_attn_by_inverse_layer_idx=True)
    model, x = load_pretrained(folder, dialect), torch.randn(2, 7, 24)
    outputs = []
    for i in range(3):
        block = load_block(folder, i, dialect)
        expected_block = model.get_submodule(DIALECTS[dialect].block_path.format(i=i))
        check_identical(block.state_dict(), expected_block.state_dict())
        assert not any(module.training for module in block.modules())
        with torch.no_grad():
            outputs.append(block(x))
            assert torch.equal(outputs[-1], expected_block(x))
    assert not torch.allclose(outputs[0], outputs[1])


@both_dialects
def test_load_block_accepts_a_dtype(tiny: Path, dialect: str) -> None:
    block = load_block(tiny, 1, dialect, dtype=torch.float64)
    assert {p.dtype for p in block.parameters()} == {torch.float64}


@both_dialects
@pytest.mark.parametrize("layer", [-1, 3])
def test_load_block_refuses_a_missing_layer(tiny: Path, dialect: str, layer: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"layer is {layer} .*integer from 0 to 2, the layers of"
    ):
        load_block(tiny, layer, dialect)
