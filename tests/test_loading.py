"""Loading by name: HF → ours → HF to the bit, and nothing loaded unless everything fits."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from compat import (
    CheckpointError,
    CompatError,
    ConfigError,
    GPT2Config,
    NameMap,
    NameMapError,
    Row,
    Same,
    Split,
    Transpose,
    load_block,
    load_into,
    load_pretrained,
    to_hf_state_dict,
)
from compat.checkpoint import open_checkpoint
from compat.dialects import DIALECTS
from tests.conftest import MakeCheckpoint, noisy_reference

State = dict[str, Tensor]

both_dialects = pytest.mark.parametrize("dialect", DIALECTS)
HEADS = {"linear": ("out_head", "tok_emb"), "conv1d": ("lm_head", "wte")}


def identical(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def saved(folder: Path, model: transformers.GPT2LMHeadModel) -> Path:
    model.save_pretrained(folder)
    return folder


def ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(1))


# Both directions, for the dialects.


@both_dialects
def test_a_tied_checkpoint_comes_back_to_the_bit(tiny: Path, dialect: str) -> None:
    expected = noisy_reference().state_dict()
    del expected["lm_head.weight"]
    identical(to_hf_state_dict(load_pretrained(tiny, dialect)), expected)


@both_dialects
@pytest.mark.parametrize(
    "fields",
    [
        {"tie_word_embeddings": False},
        {"tie_word_embeddings": False, "n_inner": 40, "n_layer": 1},
    ],
)
def test_an_untied_checkpoint_comes_back_to_the_bit(
    make_checkpoint: MakeCheckpoint, dialect: str, fields: dict[str, int]
) -> None:
    model = load_pretrained(make_checkpoint(seed=3, **fields), dialect)
    identical(to_hf_state_dict(model), noisy_reference(seed=3, **fields).state_dict())


@both_dialects
def test_an_untied_head_that_equals_the_embedding_is_kept(tmp_path: Path, dialect: str) -> None:
    reference = noisy_reference(tie_word_embeddings=False)
    with torch.no_grad():
        reference.lm_head.weight.copy_(reference.transformer.wte.weight)
    model = load_pretrained(saved(tmp_path, reference), dialect)
    identical(to_hf_state_dict(model), reference.state_dict())


@both_dialects
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_back_gives_transformers_the_same_logits(
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
def test_twelve_layers_are_not_mixed_up(make_checkpoint: MakeCheckpoint, dialect: str) -> None:
    """A map that parses names takes layer 1 for 10 and 11."""
    size = {"n_layer": 12, "n_embd": 8, "n_head": 2}
    model = load_pretrained(make_checkpoint(**size), dialect)
    reference = noisy_reference(**size)
    blocks = model.get_submodule(DIALECTS[dialect].block_path.removesuffix(".{i}"))
    assert len(blocks) == 12
    with torch.no_grad():
        hidden = reference(ids(), output_hidden_states=True).hidden_states  # the last: after ln_f
        for i, block in enumerate(blocks[:-1]):
            torch.testing.assert_close(block(hidden[i]), hidden[i + 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids()), reference(ids()).logits, rtol=1e-4, atol=1e-4)
    expected = reference.state_dict()
    del expected["lm_head.weight"]
    identical(to_hf_state_dict(model), expected)


# What load_pretrained hands out.


@both_dialects
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_one_parameter_an_untied_one_is_two(
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
    identical(to_hf_state_dict(load_pretrained(tmp_path, dialect)), state)


@both_dialects
def test_a_loaded_model_is_whole_and_ready(tiny: Path, dialect: str) -> None:
    model = load_pretrained(tiny, dialect)
    assert not any(module.training for module in model.modules())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.device == torch.device("cpu"), name
        assert tensor.is_contiguous(), name
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(ids()), model(ids()))


@both_dialects
def test_views_in_a_pickle_do_not_reach_the_model(tiny: Path, tmp_path: Path, dialect: str) -> None:
    """A `.bin` keeps the strides of `weight.T`; safetensors then refuses to write such a tensor."""
    state = load_file(tiny / "model.safetensors")
    views = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in state.items()}
    torch.save(views, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    model = load_pretrained(tmp_path, dialect)
    assert [k for k, v in model.named_parameters() if not v.is_contiguous()] == []
    save_file(to_hf_state_dict(model), tmp_path / "written.safetensors")
    identical(load_file(tmp_path / "written.safetensors"), state)


@both_dialects
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_that_of_every_parameter(tiny: Path, dialect: str, dtype: torch.dtype) -> None:
    model = load_pretrained(tiny, dialect, dtype=dtype)
    expected = noisy_reference().to(dtype).state_dict()
    del expected["lm_head.weight"]
    identical(to_hf_state_dict(model), expected)


@both_dialects
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_dtype_the_checkpoints_is_kept(
    tmp_path: Path, dialect: str, dtype: torch.dtype
) -> None:
    reference = noisy_reference().to(dtype)
    model = load_pretrained(saved(tmp_path, reference), dialect)
    assert {p.dtype for p in model.parameters()} == {dtype}
    expected = reference.state_dict()
    del expected["lm_head.weight"]
    identical(to_hf_state_dict(model), expected)


def test_two_models_from_one_open_checkpoint_share_nothing(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    first, second = load_pretrained(checkpoint), load_pretrained(checkpoint)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    identical(to_hf_state_dict(second), to_hf_state_dict(load_pretrained(tiny)))


def test_an_unknown_dialect_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="'einops'; there are linear, conv1d"):
        load_pretrained(tiny, "einops")


# One block.


@both_dialects
def test_load_block_is_that_block_of_the_model(
    make_checkpoint: MakeCheckpoint, dialect: str
) -> None:
    folder = make_checkpoint(scale_attn_by_inverse_layer_idx=True)
    model, x = load_pretrained(folder, dialect), torch.randn(2, 7, 24)
    outputs = []
    for i in range(3):
        block = load_block(folder, i, dialect)
        whole = model.get_submodule(DIALECTS[dialect].block_path.format(i=i))
        identical(block.state_dict(), whole.state_dict())
        assert not any(module.training for module in block.modules())
        with torch.no_grad():
            outputs.append(block(x))
            assert torch.equal(outputs[-1], whole(x))
    assert not torch.allclose(outputs[0], outputs[1])


@both_dialects
def test_load_block_takes_a_dtype(tiny: Path, dialect: str) -> None:
    block = load_block(tiny, 1, dialect, dtype=torch.float64)
    assert {p.dtype for p in block.parameters()} == {torch.float64}


@both_dialects
@pytest.mark.parametrize("layer", [-1, 3, 100])
def test_load_block_refuses_a_layer_that_is_not_there(tiny: Path, dialect: str, layer: int) -> None:
    with pytest.raises(ConfigError, match=f"layer {layer} is not .* layers 0 to 2"):
        load_block(tiny, layer, dialect)


# A module of one's own.


class MyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(24), nn.LayerNorm(24)
        self.query_key = nn.Linear(24, 48)
        self.value = nn.Linear(24, 24)
        self.merge = nn.Linear(24, 24)
        self.wide, self.narrow = nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)
        q, k, v = (
            t.unflatten(-1, (4, 6)).transpose(1, 2)
            for t in (*self.query_key(y).chunk(2, dim=-1), self.value(y))
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(heads.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.before_mlp(x)), approximate="tanh"))


class MyGPT2(nn.Module):
    """Own names and layout: fused `query_key` beside `value`, no `config`; head None is no head."""

    def __init__(self, head: str | None = "tied") -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(97, 24), nn.Embedding(32, 24)
        self.stack = nn.Sequential(*[MyBlock() for _ in range(3)])
        self.end = nn.LayerNorm(24)
        if head is not None:
            self.head = nn.Linear(24, 97, bias=False)
        if head == "tied":
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        x = self.end(self.stack(x))
        return self.head(x) if hasattr(self, "head") else x @ self.tokens.weight.t()


class Cut:
    """Fused q, k, v ↔ fused q, k beside v: an op of the user's own, for weights and biases."""

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        q, k, v = tensor.t().chunk(3)
        return torch.cat([q, k]), v.contiguous()

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).t().contiguous()


ROWS = [
    Row("wte.weight", ("tokens.weight",), Same()),
    Row("wpe.weight", ("places.weight",), Same()),
    *[
        Row(f"h.{{i}}.{hf}.{kind}", tuple(f"stack.{{i}}.{name}.{kind}" for name in ours), op)
        for hf, ours, op in [
            ("ln_1", ["before_attention"], Same()),
            ("attn.c_attn", ["query_key", "value"], Cut()),
            ("attn.c_proj", ["merge"], Transpose()),
            ("ln_2", ["before_mlp"], Same()),
            ("mlp.c_fc", ["wide"], Transpose()),
            ("mlp.c_proj", ["narrow"], Transpose()),
        ]
        for kind in ("weight", "bias")
    ],
    Row("ln_f.weight", ("end.weight",), Same()),
    Row("ln_f.bias", ("end.bias",), Same()),
    Row("lm_head.weight", ("head.weight",), Same()),
]


def my_map(*changed: Row, without: str = "") -> NameMap:
    """The map of MyGPT2, one row left out, or some put in another's place or added."""
    rows = {row.hf: row for row in [*ROWS, *changed]}
    return NameMap(tuple(row for row in rows.values() if row.hf != without))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("head", "row"), [("tied", True), ("tied", False), ("untied", True), (None, False)]
)
def test_load_into_a_module_of_ones_own(
    make_checkpoint: MakeCheckpoint, tied: bool, head: str | None, row: bool
) -> None:
    folder = make_checkpoint(tie_word_embeddings=tied)
    model = MyGPT2(head).eval()
    name_map = my_map(without="" if row else "lm_head.weight")
    if not tied and head != "untied":  # there is no place for a head of its own
        untouched(model, name_map, folder, "head" if row or head else "lm_head.weight")
        return
    load_into(model, name_map, folder)
    reference = noisy_reference(tie_word_embeddings=tied)
    with torch.no_grad():
        torch.testing.assert_close(model(ids()), reference(ids()).logits, rtol=1e-4, atol=1e-4)
    if head is not None:
        assert (model.head.weight is model.tokens.weight) is (head == "tied")
    expected = reference.state_dict()
    if tied:
        del expected["lm_head.weight"]
    identical(to_hf_state_dict(model, name_map), expected)


def test_load_into_keeps_dtype_mode_and_frozen_parameters(tiny: Path) -> None:
    model = MyGPT2().to(torch.float64)
    model.stack.eval()
    model.places.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    load_into(model, my_map(), tiny)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert [module.training for module in model.modules()] == modes
    assert [k for k, v in model.named_parameters() if not v.requires_grad] == ["places.weight"]
    assert torch.equal(
        model.places.weight.float(), load_file(tiny / "model.safetensors")["transformer.wpe.weight"]
    )


def test_load_into_keeps_the_parameters_that_an_optimizer_holds(tiny: Path) -> None:
    model = MyGPT2()
    held = torch.optim.SGD(model.parameters()).param_groups[0]["params"]
    load_into(model, my_map(), tiny)
    assert {id(parameter) for parameter in held} == {id(p) for p in model.parameters()}
    assert torch.equal(held[0], load_file(tiny / "model.safetensors")["transformer.wte.weight"])


def untouched(
    model: nn.Module,
    name_map: NameMap,
    source: Path,
    *fragments: str,
    error: type[CompatError] = CompatError,
) -> None:
    """load_into fails, says all of this, and leaves every parameter the object and value it was."""
    before = dict(model.named_parameters(remove_duplicate=False))
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    with pytest.raises(error) as caught:
        load_into(model, name_map, source)
    for fragment in fragments:
        assert fragment in str(caught.value)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    identical({name: parameter.detach() for name, parameter in after.items()}, values)


QKV, FC = "h.{i}.attn.c_attn.weight", "h.{i}.mlp.c_fc.weight"
QKV_PARTS, WIDE = ("stack.{i}.query_key.weight", "stack.{i}.value.weight"), "stack.{i}.wide.weight"


@pytest.mark.parametrize(
    ("name_map", "fragments"),
    [
        pytest.param(
            my_map(Row("ln_f.weight", ("the_end",), Same())),
            ("1 of its names are not in the model: the_end", "have no row: end.weight"),
            id="name not in the model",
        ),
        pytest.param(
            my_map(Row("ln_f.bias", ("end.shift",), Same())),
            ("1 parameters of the model have no row: end.bias",),
            id="misspelt bias",
        ),
        pytest.param(
            my_map(Row(FC, ("stack.0.wide.weight",), Transpose())),
            ("names stack.0.wide.weight in two rows",),
            id="layer forgotten",
        ),
        pytest.param(
            my_map(without="wpe.weight"),
            ("1 tensors have no row: wpe.weight",),
            id="tensor without a row",
        ),
        pytest.param(
            my_map(without=FC),
            ("3 tensors have no row: h.0.mlp.c_fc.weight, h.1.mlp.c_fc.weight, h.2.mlp.c_fc",),
            id="tensors of all layers without a row",
        ),
        pytest.param(
            my_map(Row("h.{i}.rotary", ("stack.{i}.rotary",), Same())),
            ("3 rows name no tensor: h.0.rotary, h.1.rotary, h.2.rotary",),
            id="row without a tensor",
        ),
        pytest.param(
            my_map(Row(FC, (WIDE,), Same())),
            (
                "stack.0.wide.weight: found [24, 96] (h.0.mlp.c_fc.weight [24, 96], same), "
                "expected [96, 24]",
                "stack.2.wide.weight",
            ),
            id="not transposed",
        ),
        pytest.param(
            my_map(Row(QKV, QKV_PARTS, Split(3))),
            ("h.0.attn.c_attn.weight: split in 3 makes 3 tensors, the row names 2",),
            id="split with too few names",
        ),
        pytest.param(
            my_map(Row(QKV, QKV_PARTS, Split(1))),
            ("h.0.attn.c_attn.weight: split in 1 makes 1 tensors, the row names 2",),
            id="split with too many names",
        ),
        pytest.param(
            my_map(Row(QKV, QKV_PARTS, Split(5))),
            ("h.0.attn.c_attn.weight", "into 5 equal parts"),
            id="split in parts that do not divide",
        ),
    ],
)
def test_load_into_refuses_a_map_that_does_not_fit(
    tiny: Path, name_map: NameMap, fragments: tuple[str, ...]
) -> None:
    untouched(MyGPT2(), name_map, tiny, *fragments, error=NameMapError)


def test_load_into_refuses_a_parameter_without_a_row(tiny: Path) -> None:
    model = MyGPT2()
    model.temperature = nn.Parameter(torch.ones(1))
    untouched(model, my_map(), tiny, "1 parameters", "no row: temperature", error=NameMapError)


def test_load_into_refuses_a_module_of_another_size(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(n_positions=64)
    message = "places.weight: found [64, 24] (wpe.weight [64, 24], same), expected [32, 24]"
    untouched(MyGPT2(), my_map(), folder, message, error=NameMapError)


@pytest.mark.parametrize("n_layer", [2, 4])
def test_load_into_refuses_another_depth(make_checkpoint: MakeCheckpoint, n_layer: int) -> None:
    name = "stack.2.wide.bias" if n_layer == 2 else "stack.3.wide.weight"
    folder = make_checkpoint(n_layer=n_layer)
    untouched(MyGPT2(), my_map(), folder, name.removesuffix(".wide.bias"), error=NameMapError)


def test_load_into_changes_nothing_when_the_last_tensor_is_not_finite(tmp_path: Path) -> None:
    reference = noisy_reference()
    with torch.no_grad():
        reference.transformer.h[2].mlp.c_proj.bias[7] = float("nan")
    folder = saved(tmp_path, reference)
    untouched(MyGPT2(), my_map(), folder, "h.2.mlp.c_proj.bias", "[7]", error=CheckpointError)


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_load_into_fills_a_module_built_on_the_meta_device(tiny: Path, head: str) -> None:
    with torch.device("meta"):
        model = MyGPT2(head)
    load_into(model, my_map(), tiny)
    ordinary = MyGPT2(head)
    load_into(ordinary, my_map(), tiny)
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids), ordinary(ids))
    assert (model.head.weight is model.tokens.weight) == (head == "tied")


def test_load_into_refuses_buffers_that_nothing_would_fill(tiny: Path) -> None:
    with torch.device("meta"):
        model = MyGPT2("tied")
        model.register_buffer("mask", torch.ones(32, 32), persistent=False)
    with pytest.raises(CompatError, match="1 buffers are on the meta device.*: mask"):
        load_into(model, my_map(), tiny)


def test_weights_beyond_the_data_type_are_refused(tmp_path: Path, tiny: Path) -> None:
    """A cast to float16 would turn them into infinity without a word."""
    state = load_file(tiny / "model.safetensors")
    state["transformer.h.1.mlp.c_fc.weight"][3, 4] = -70000.0
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(tiny / "config.json", tmp_path)
    load_pretrained(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(CompatError, match=r"h\.1\.mlp\.c_fc\.weight has values up to 70000"):
        load_pretrained(tmp_path, dtype=torch.float16)


def test_weights_of_whole_numbers_are_not_to_be_had(tiny: Path) -> None:
    with pytest.raises(CompatError, match=r"dtype is torch\.int64"):
        load_pretrained(tiny, dtype=torch.int64)


# Blocks that lack biases.


LACKING = [
    ("qkv_bias", ("attn.c_attn.bias",), "h.0.attn.c_attn.bias"),
    ("layer_norm_bias", ("ln_1.bias", "ln_2.bias", "ln_f.bias"), "ln_f.bias"),
]


@both_dialects
@pytest.mark.parametrize(("field", "biases", "named"), LACKING)
def test_a_bias_that_the_model_lacks_is_refused_unless_zero(
    tiny: Path, dialect: str, field: str, biases: tuple[str, ...], named: str
) -> None:
    config = GPT2Config.from_dict({**open_checkpoint(tiny).config.to_hf_dict(), field: False})
    model = DIALECTS[dialect].model_class(config)
    name_map = DIALECTS[dialect].name_map
    untouched(model, name_map, tiny, named, "not zero", error=CheckpointError)


@both_dialects
@pytest.mark.parametrize(("field", "biases", "named"), LACKING)
def test_zero_biases_that_the_model_lacks_are_dropped_and_written_back(
    tmp_path: Path, dialect: str, field: str, biases: tuple[str, ...], named: str
) -> None:
    reference = noisy_reference()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(biases):
                parameter.zero_()
    folder = saved(tmp_path, reference)
    config = GPT2Config.from_dict({**open_checkpoint(folder).config.to_hf_dict(), field: False})
    model = DIALECTS[dialect].model_class(config).eval()
    load_into(model, DIALECTS[dialect].name_map, folder)
    expected = reference.state_dict()
    del expected["lm_head.weight"]
    identical(to_hf_state_dict(model), expected)
    with torch.no_grad():
        torch.testing.assert_close(model(ids()), reference(ids()).logits, rtol=1e-4, atol=1e-4)


# Writing back.


def test_a_module_of_ones_own_needs_its_map_to_be_written() -> None:
    with pytest.raises(NameMapError, match="MyGPT2 is not one of compat's models"):
        to_hf_state_dict(MyGPT2())


def test_a_map_that_lacks_a_parameter_is_refused_when_writing() -> None:
    with pytest.raises(
        NameMapError, match=r"1 parameters of the model have no row: places\.weight"
    ):
        to_hf_state_dict(MyGPT2(), my_map(without="wpe.weight"))


def test_a_map_without_an_embedding_can_be_written() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 5, bias=False)})
    name_map = NameMap((Row("lm_head.weight", ("head.weight",), Same()),))
    written = to_hf_state_dict(model, name_map)
    identical(written, {"lm_head.weight": model["head"].weight.detach()})
