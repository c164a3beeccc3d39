"""`generate` computes what the modules of a model compute that was modified after loading.

Every edit is applied to a freshly loaded model, alone and in random combinations.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from compat import GenerationError, PlainBlocks, generate, load_pretrained
from compat.decoding import decoder_of
from compat.decoding.fast_path import _freshly_built, is_unmodified
from compat.decoding.static import StaticDecoder
from compat.dialects import Model, conv1d, linear
from tests.command_line import python
from tests.conftest import MakeCheckpoint
from tests.generation_common import each_dialect

PROMPTS = torch.tensor([[5, 17, 60, 8], [0, 96, 3, 44]])
Edit = Callable[[Model, pytest.MonkeyPatch], Any]
EDITS: dict[str, Edit] = {}


def edit(function: Edit) -> Edit:
    EDITS[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def source(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(n_positions=64)


def blocks(model: Model) -> nn.ModuleList:
    return model.trf_blocks if isinstance(model, linear.GPTModel) else model.h


def part(model: Model, layer: int, conv1d_name: str) -> nn.Module:
    """Return a part of a block by its name in `conv1d`."""
    names = {
        "attn": "attention", "mlp": "feedforward", "ln_1": "norm1", "ln_2": "norm2",
        "attn.c_proj": "attention.out_proj", "mlp.c_fc": "feedforward.layers.0",
        "mlp.act": "feedforward.layers.1", "attn.attn_dropout": "attention.dropout",
    }  # fmt: skip
    name = names[conv1d_name] if isinstance(model, linear.GPTModel) else conv1d_name
    return blocks(model)[min(layer, len(blocks(model)) - 1)].get_submodule(name)


class Half(nn.Module):
    """The replacement of an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Skipped(nn.Module):
    """The replacement of a block: an identity."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


class DoubledProducts(nn.Parameter):
    """A tensor subclass that doubles the results of matrix products."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return out * 2 if func in (F.linear, torch.addmm) else out


@edit
def activation(model: Model, _: pytest.MonkeyPatch) -> None:
    if isinstance(model, linear.GPTModel):
        blocks(model)[0].feedforward.layers[1] = Half()
    else:
        blocks(model)[0].mlp.act = nn.GELU()


@edit
def activation_of_the_same_type(model: Model, _: pytest.MonkeyPatch) -> None:
    part(model, 0, "mlp.act").forward = lambda x: x.relu()


@edit
def eps(model: Model, _: pytest.MonkeyPatch) -> None:
    part(model, 1, "ln_2").eps = 0.5


@edit
def scale(model: Model, _: pytest.MonkeyPatch) -> None:
    part(model, 0, "attn").scale = 2.0


@edit
def heads(model: Model, _: pytest.MonkeyPatch) -> None:
    attention = part(model, 1, "attn")
    attention.n_head, attention.d_head = 2, 12


@edit
def block_removed(model: Model, _: pytest.MonkeyPatch) -> None:
    if len(blocks(model)) > 1:
        del blocks(model)[0]


@edit
def blocks_reversed(model: Model, _: pytest.MonkeyPatch) -> None:
    order = list(blocks(model))[::-1]
    for i, block in enumerate(order):
        blocks(model)[i] = block


@edit
def block_repeated(model: Model, _: pytest.MonkeyPatch) -> None:
    blocks(model).append(blocks(model)[0])


@edit
def block_skipped(model: Model, _: pytest.MonkeyPatch) -> None:
    if len(blocks(model)) > 1:
        blocks(model)[0] = Skipped()


@edit
def blocks_shared(model: Model, _: pytest.MonkeyPatch) -> None:
    blocks(model)[-1] = blocks(model)[0]


@edit
def class_patched(model: Model, patch: pytest.MonkeyPatch) -> None:
    kind = type(part(model, 0, "ln_1"))
    if kind in (linear.LayerNorm, nn.LayerNorm):
        forward = kind.forward
        patch.setattr(kind, "forward", lambda self, x: forward(self, x) * 1.5)


@edit
def class_call_patched(model: Model, patch: pytest.MonkeyPatch) -> None:
    kind = type(part(model, 0, "mlp"))
    call = kind.__call__
    patch.setattr(kind, "__call__", lambda self, *args: call(self, *args) / 2, raising=False)


@edit
def torch_linear_patched(model: Model, patch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 0.9)


@edit
def torch_function_patched(model: Model, patch: pytest.MonkeyPatch) -> None:
    name = "linear" if isinstance(model, linear.GPTModel) else "layer_norm"
    function = getattr(F, name)
    patch.setattr(F, name, lambda *args: function(*args) * 0.8)


@edit
def helper_patched(model: Model, patch: pytest.MonkeyPatch) -> None:
    file = linear if isinstance(model, linear.GPTModel) else conv1d
    positions = file.position_ids
    patch.setattr(file, "position_ids", lambda *args: positions(*args) // 2)


@edit
def property_on_the_class(model: Model, patch: pytest.MonkeyPatch) -> None:
    kind = type(part(model, 0, "attn"))
    if kind in (linear.MultiHeadAttention, conv1d.MultiHeadAttention):
        patch.setattr(kind, "scale", property(lambda _: 0.01, lambda *_: None), raising=False)


@edit
def tensor_operator_patched(model: Model, patch: pytest.MonkeyPatch) -> None:
    multiply = Tensor.__mul__
    patch.setattr(Tensor, "__mul__", lambda a, b: multiply(a, b) + 0.01, raising=False)


@edit
def hook(model: Model, _: pytest.MonkeyPatch) -> None:
    part(model, 0, "mlp").register_forward_hook(lambda _, args, out: out * 1.2)


@edit
def pre_hook(model: Model, _: pytest.MonkeyPatch) -> None:
    blocks(model)[-1].register_forward_pre_hook(lambda _, args: (args[0] * 1.2, *args[1:]))


@edit
def hook_with_kwargs(model: Model, _: pytest.MonkeyPatch) -> None:
    part(model, 0, "attn").register_forward_hook(
        lambda _, args, kwargs, out: out * 1.2, with_kwargs=True
    )


@edit
def hook_always_called(model: Model, _: pytest.MonkeyPatch) -> None:
    part(model, 1, "ln_1").register_forward_hook(lambda _, a, out: out * 1.2, always_call=True)


@edit
def hook_on_all(model: Model, _: pytest.MonkeyPatch) -> None:
    target = part(model, 1, "ln_1")
    every = nn.modules.module
    every.register_module_forward_hook(lambda m, _, out: out * 1.3 if m is target else None)


@edit
def weights_in_place(model: Model, _: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


@edit
def weights_swapped(model: Model, _: pytest.MonkeyPatch) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.roll(1, 0)


@edit
def head_untied(model: Model, _: pytest.MonkeyPatch) -> None:
    head = model.out_head if isinstance(model, linear.GPTModel) else model.lm_head
    head.weight = nn.Parameter(head.weight.detach().flip(0))


@edit
def norms_tied(model: Model, _: pytest.MonkeyPatch) -> None:
    name = "scale" if isinstance(model, linear.GPTModel) else "weight"
    setattr(part(model, 0, "ln_1"), name, getattr(part(model, 1, "ln_2"), name))


@edit
def bias_removed(model: Model, _: pytest.MonkeyPatch) -> None:
    part(model, 0, "mlp.c_fc").bias = None


@edit
def subclass_of_tensor(model: Model, _: pytest.MonkeyPatch) -> None:
    module = part(model, 0, "mlp.c_fc")
    module.weight = DoubledProducts(module.weight.data)


@edit
def extra_parameter(model: Model, _: pytest.MonkeyPatch) -> None:
    module = part(model, 0, "mlp")
    if "gain" not in module._parameters:
        module.gain = nn.Parameter(torch.tensor(0.7))
        forward = type(module).forward
        module.forward = types.MethodType(lambda self, x: forward(self, x) * self.gain, module)


@edit
def dropout_in_training(model: Model, _: pytest.MonkeyPatch) -> None:
    """Dropout is active with probability 0, so that two runs have equal results."""
    dropout = part(model, 0, "attn.attn_dropout")
    dropout.p = 0.0
    dropout.train()


@edit
def users_subclass(model: Model, _: pytest.MonkeyPatch) -> None:
    kind = type(part(model, 0, "mlp"))

    class Louder(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return 1.5 * super().forward(x)

    part(model, 0, "mlp").__class__ = Louder


@edit
def model_forward_patched(model: Model, _: pytest.MonkeyPatch) -> None:
    forward = model.forward
    model.forward = lambda *args, **settings: -forward(*args, **settings)


@edit
def model_forward_without_a_mask(model: Model, _: pytest.MonkeyPatch) -> None:
    forward = model.forward
    model.forward = lambda input_ids: -forward(input_ids)


@edit
def submodule_added(model: Model, _: pytest.MonkeyPatch) -> None:
    part(model, 0, "attn").add_module("probe", nn.Identity())


@edit
def config_changed(model: Model, _: pytest.MonkeyPatch) -> None:
    """After a model is built, its parts do not read the config."""
    object.__setattr__(model.config, "n_head", 2)
    object.__setattr__(model.config, "scale_attn_by_inverse_layer_idx", True)


# Edits that keep the fast path. With this config, blocks do not depend on their index.
KEEP_FAST_PATH = {"weights_in_place", "weights_swapped", "blocks_reversed"}


# These edits are applied last, because the other ones need the blocks.
BLOCK_EDITS = {name for name in EDITS if name.startswith("block")}


@contextmanager
def edited(source: Path, dialect: str, names: list[str]) -> Iterator[Model]:
    """Yield a model with these edits, and undo those that affect more than the model."""
    model = load_pretrained(source, dialect)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.callback(nn.modules.module._global_forward_hooks.clear)
        for name in sorted(names, key=BLOCK_EDITS.__contains__):
            EDITS[name](model, patch)
        yield model


def generated_ids(model: Model | PlainBlocks, **settings: Any) -> list[Tensor]:
    """Return greedy ids and sampled ids."""
    return [
        generate(
            model, PROMPTS, max_new_tokens=4, stop_ids=(), temperature=temperature,
            generator=torch.Generator().manual_seed(4), **settings,
        )
        for temperature in (0, 1.3)
    ]  # fmt: skip


@torch.no_grad()
def greedy_by_forward(model: Model) -> Tensor:
    ids = PROMPTS
    for _ in range(4):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


@each_dialect
@pytest.mark.parametrize("name", EDITS)
def test_generate_computes_what_the_modules_of_a_modified_model_compute(
    source: Path, dialect: str, name: str
) -> None:
    with edited(source, dialect, [name]) as model:
        fast, plain = generated_ids(model), generated_ids(PlainBlocks(model))
        assert torch.equal(fast[0], greedy_by_forward(model))
        assert all(map(torch.equal, fast, plain))
        assert is_unmodified(model) == (name in KEEP_FAST_PATH)
    fresh = load_pretrained(source, dialect)
    assert is_unmodified(fresh), "the edit affects other models"


@each_dialect
@settings(
    deadline=None, max_examples=15, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(names=st.lists(st.sampled_from(sorted(EDITS)), max_size=5))
def test_combined_edits_take_effect(source: Path, dialect: str, names: list[str]) -> None:
    with edited(source, dialect, names) as model:
        fast, plain = generated_ids(model), generated_ids(PlainBlocks(model))
        assert all(map(torch.equal, fast, plain))
        assert torch.equal(fast[0], greedy_by_forward(model))
        assert isinstance(decoder_of(model), StaticDecoder) == (set(names) <= KEEP_FAST_PATH)


class Shifted(TorchFunctionMode):
    """A mode that changes the results of some torch functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + 0.1 if func is F.layer_norm or func is torch.pow else out


@each_dialect
@pytest.mark.parametrize(
    "surroundings", [Shifted, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["mode", "cast"]
)
def test_modes_that_intercept_torch_disable_the_fast_path(
    source: Path, dialect: str, surroundings: Any
) -> None:
    model = load_pretrained(source, dialect)
    with surroundings():
        assert not is_unmodified(model)
        assert all(map(torch.equal, generated_ids(model), generated_ids(PlainBlocks(model))))
    assert is_unmodified(model)


@each_dialect
@pytest.mark.parametrize(
    "mode",
    [lambda: torch.device("cpu"), torch.inference_mode, torch.no_grad],
    ids=["device", "inference_mode", "no_grad"],
)
def test_contexts_that_do_not_intercept_torch_keep_the_fast_path(
    source: Path, dialect: str, mode: Any
) -> None:
    model = load_pretrained(source, dialect)
    with mode():
        assert isinstance(decoder_of(model), StaticDecoder)


def test_libraries_that_wrap_torch_keep_the_fast_path(source: Path) -> None:
    """torch's compiler wraps `nn.Module.__init__` when it is imported."""
    import torch._dynamo  # noqa: F401

    assert isinstance(decoder_of(load_pretrained(source)), StaticDecoder)


def test_a_patch_before_compat_is_imported_is_detected() -> None:
    code = """
import torch
linear = torch.nn.functional.linear
torch.nn.functional.linear = lambda *args: 2 * linear(*args)
from compat import GPT2Config
from compat.decoding.fast_path import _freshly_built, is_unmodified
from compat.dialects.linear import GPTModel
config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=5, n_positions=4)
print(is_unmodified(GPTModel(config).eval()))
"""
    for lines, expected in ((code.splitlines(), "False"), (code.splitlines()[4:], "True")):
        assert python("\n".join(lines)).stdout.strip() == expected


def test_the_check_for_modifications_draws_no_random_numbers(source: Path) -> None:
    model = load_pretrained(source)
    before = torch.get_rng_state()
    _freshly_built.cache_clear()
    assert is_unmodified(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_padded_prompts_need_a_forward_that_accepts_a_mask(source: Path) -> None:
    with edited(source, "conv1d", ["model_forward_without_a_mask"]) as model:
        mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
        with pytest.raises(GenerationError, match="replaced by one without attention_mask"):
            generate(model, PROMPTS, max_new_tokens=1, attention_mask=mask)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), lambda ids: ids, None])
def test_generating_with_a_value_that_is_not_a_model_is_refused(model: Any) -> None:
    with pytest.raises(GenerationError, match=r"cannot generate with a .*, but only with a model"):
        generate(model, PROMPTS, max_new_tokens=1)


@each_dialect
def test_non_finite_values_are_located_in_a_modified_model(source: Path, dialect: str) -> None:
    names = ["block_removed", "block_skipped", "submodule_added"]
    with edited(source, dialect, names) as model:
        part(model, 1, "mlp.c_fc").bias.data[0] = torch.nan
        with pytest.raises(
            GenerationError, match=r"h\.1\.fc is the first hidden state that contains NaN"
        ):
            generate(model, PROMPTS, max_new_tokens=1)
