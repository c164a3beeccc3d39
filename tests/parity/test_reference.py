"""If the process has patched torch or transformers, the error of the reference names the patch."""

from __future__ import annotations

import builtins
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt2 import modeling_gpt2

from compat.adaptation import adapt
from compat.checkpoint import Checkpoint, open_checkpoint
from compat.dialects.linear import GPTModel
from compat.errors import ParityError
from compat.parity import numpy_gpt2, transformers_gpt2
from compat.parity.numpy_gpt2 import ACTIVATIONS
from compat.parity.patches import explain_exceptions
from compat.parity.reference import logit_errors, true_logits
from tests.conftest import MakeCheckpoint, Write


def verify(checkpoint: Checkpoint, length: int = 32, dtype: torch.dtype = torch.float32) -> None:
    """Load the reference, run it in both data types, and verify the logits."""
    ids = torch.arange(2 * length).view(2, length) % checkpoint.config.vocab_size
    with explain_exceptions():
        model = transformers_gpt2.load_reference(checkpoint, dtype)
        exact = transformers_gpt2.in_float64(model)
        with torch.no_grad():
            logits = {dtype: model(ids).logits, torch.float64: exact(ids).logits}
    for computed_in, found in logits.items():
        true_logits(checkpoint, dtype, ids, found, computed_in)


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: MakeCheckpoint) -> Checkpoint:
    return open_checkpoint(make_checkpoint())


# Patches that change the results of the reference


class RMSNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


def unbiased_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * self.weight + self.bias


def slightly_larger_sum(original: Any) -> Any:
    def add(self: Tensor, other: Any) -> Tensor:
        return original(self, other) * (1 + 1e-6 * self.is_floating_point())

    return add


def call_that_doubles_norms(original: Any) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        return 2 * out if isinstance(self, nn.LayerNorm) else out

    return call


def windowed(original: Any) -> Any:
    def create_causal_mask(**kwargs: Any) -> Tensor:
        mask = original(**kwargs).clone()
        T = mask.shape[-1]
        return mask.masked_fill(torch.ones(T, T).tril(-20).bool(), torch.finfo(mask.dtype).min)

    return create_causal_mask


def with_shifted_weights(self: Any) -> Any:
    with torch.no_grad():
        self.transformer.ln_f.weight += 1e-3
    return self.train(False)


def wrong_at_one_position(original: Any) -> Any:
    def layer_norm(x: Tensor, *args: Any) -> Tensor:
        out = original(x, *args)
        if x.shape[1] > 30:
            out[:, 30] *= 1.01
        return out

    return layer_norm


def scaled_in(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda f: lambda x, *args: f(x, *args) * (1.001 if x.dtype == dtype else 1)


Conv1D, NewGELU = transformers.pytorch_utils.Conv1D, transformers.activations.NewGELUActivation
# By name: the owner and the name of a function, and the function that replaces the original one.
PATCHES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "F.layer_norm with another epsilon": (
        F, "layer_norm", lambda f: lambda x, s, w, b, eps: f(x, s, w, b, 1e-3)
    ),
    "F.softmax with a temperature": (
        F, "softmax", lambda f: lambda x, dim, **kwargs: f(x * 1.001, dim, **kwargs)
    ),
    "LayerNorm.forward with the unbiased variance": (
        nn.LayerNorm, "forward", lambda _: unbiased_norm
    ),
    "the class LayerNorm": (nn, "LayerNorm", lambda _: RMSNorm),
    "Embedding.forward with wrapped ids": (
        nn.Embedding, "forward", lambda _: lambda self, ids: self.weight[ids % 31]
    ),
    "torch.tanh": (torch, "tanh", lambda f: lambda x: f(x).clamp(-0.999, 0.999)),
    "torch.pow": (torch, "pow", lambda _: lambda x, exponent: x * x),
    "math.sqrt": (math, "sqrt", lambda _: lambda x: x**0.5 + 1e-4),
    "torch.addmm without its bias": (torch, "addmm", lambda _: lambda bias, x, weight: x @ weight),
    "torch.matmul in lower precision": (
        torch, "matmul", lambda f: lambda a, b: f(a.bfloat16(), b.bfloat16()).to(a.dtype)
    ),
    "Tensor.__add__": (Tensor, "__add__", slightly_larger_sum),
    "Tensor.transpose for attention's keys": (
        Tensor, "transpose", lambda f: lambda x, a, b: f(x, a, b) * (1.01 if a == -1 else 1)
    ),
    "Conv1D.forward": (
        Conv1D, "forward", lambda _: lambda self, x: x @ self.weight + 0.99 * self.bias
    ),
    "the exact GELU": (NewGELU, "forward", lambda _: lambda self, x: F.gelu(x)),
    "Module.__call__, which doubles a norm's output": (
        nn.Module, "__call__", call_that_doubles_norms
    ),
    "eager attention without a mask": (
        modeling_gpt2, "eager_attention_forward",
        lambda f: lambda module, q, k, v, mask, **kwargs: f(module, q, k, v, None, **kwargs),
    ),
    "the causal mask with a window": (modeling_gpt2, "create_causal_mask", windowed),
    "the block's residual": (
        modeling_gpt2.GPT2Block, "forward", lambda f: lambda s, x, *a, **k: f(s, x, *a, **k) + x
    ),
    "the head": (nn.Linear, "forward", lambda _: lambda self, x: x @ self.weight.T + 0.01),
    "weights changed while they are loaded": (
        modeling_gpt2.GPT2LMHeadModel, "eval", lambda _: with_shifted_weights
    ),
    "only one position of a long text": (F, "layer_norm", wrong_at_one_position),
    "float32 only": (F, "layer_norm", scaled_in(torch.float32)),
    "float64 only": (F, "layer_norm", scaled_in(torch.float64)),
    "a patch that raises": (F, "softmax", lambda _: lambda x: x),
    "a patch of another shape": (
        nn.Linear, "forward", lambda _: lambda self, x: (x @ self.weight.T)[..., :-1]
    ),
    "a patch that returns infinity": (
        nn.Linear, "forward", lambda _: lambda self, x: x @ self.weight.T / 0
    ),
    "a patch that returns NaN": (torch, "tanh", lambda _: lambda x: x * float("nan")),
}  # fmt: skip


class Shifting(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 1.001 if function is F.layer_norm else out


class Rounding(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 1.001 if function is torch.ops.aten._softmax.default else out


@contextmanager
def hook_on_every_module() -> Iterator[None]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.001 if isinstance(module, nn.LayerNorm) else None

    with nn.modules.module.register_module_forward_hook(hook):
        yield


@contextmanager
def replaced_kernel() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("tanh", lambda x: 0.999 * x.sinh() / x.cosh(), "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def low_precision() -> Iterator[None]:
    """Emulate set_float32_matmul_precision("medium") on a CPU with bfloat16 units."""
    original, before = torch.addmm, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    rounded = lambda b, x, w: original(b, x.bfloat16().to(x.dtype), w)  # noqa: E731
    torch.addmm = rounded  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.addmm = original  # type: ignore[assignment]
        torch.set_float32_matmul_precision(before)


CONTEXTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a hook on every module": ("_global_forward_hooks", hook_on_every_module),
    "an active TorchFunctionMode": ("Shifting", Shifting),
    "an active TorchDispatchMode": ("Rounding", Rounding),
    "autocast": ("torch.autocast", lambda: torch.autocast("cpu", torch.bfloat16)),
    "a kernel": ("aten::tanh", replaced_kernel),
    "low precision": ("torch.get_float32_matmul_precision", low_precision),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_of_the_reference_is_named(
    name: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, make = PATCHES[name]
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    with pytest.raises(ParityError, match="the reference") as caught:
        verify(checkpoint)
    monkeypatch.undo()
    named = "RMSNorm" if name == "the class LayerNorm" else __file__
    assert named in str(caught.value)
    verify(checkpoint)


@pytest.mark.parametrize("name", CONTEXTS)
def test_hooks_modes_kernels_and_settings_are_named(name: str, checkpoint: Checkpoint) -> None:
    named, context = CONTEXTS[name]
    with context(), pytest.raises(ParityError, match="the reference") as caught:
        verify(checkpoint)
    assert named in str(caught.value)
    verify(checkpoint)


def test_the_error_names_the_line_of_the_patch(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = lambda x, *args: x  # noqa: E731
    monkeypatch.setattr(F, "layer_norm", patched)
    with pytest.raises(ParityError) as caught:
        verify(checkpoint)
    line = f"torch.nn.functional.layer_norm is from {__file__}:{patched.__code__.co_firstlineno}"
    assert line in str(caught.value)


# Patches that do not change the results of the reference


def wrapped(m: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    original = getattr(owner, name)
    m.setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs))


HARMLESS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "print": lambda m: wrapped(m, builtins, "print"),
    "a wrapped layer_norm": lambda m: wrapped(m, F, "layer_norm"),
    "a wrapped addmm": lambda m: wrapped(m, torch, "addmm"),
    "a function that GPT-2 does not use": lambda m: m.setattr(F, "conv2d", None),
    "a class that GPT-2 does not use": lambda m: m.setattr(nn, "Conv2d", RMSNorm),
    "torch.compile": lambda m: m.setattr(torch, "compile", lambda model: model),
    "an attribute of its own": lambda m: m.setattr(torch, "mine", lambda: 1, raising=False),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_patch_is_allowed(
    name: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    HARMLESS[name](monkeypatch)
    verify(checkpoint)


def test_a_clean_process_has_no_patches() -> None:
    """Checked in a new process, because other tests may have registered hooks with torch."""
    code = "import compat.parity.transformers_gpt2, compat.parity.patches as p, transformers"
    code += "; transformers.GPT2Tokenizer"  # its modules contain tokenizer classes
    code += "; print(p.find_patches())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# The independent GPT-2 in NumPy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numpy_agrees_with_the_reference_in_every_data_type(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    verify(checkpoint, dtype=dtype)


@pytest.mark.parametrize(
    "config",
    [
        *({"activation_function": name} for name in ACTIVATIONS),
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"tie_word_embeddings": False},
        {"n_inner": 40, "layer_norm_epsilon": 1e-3},
        {"n_positions": 600, "n_layer": 1},
        {"n_layer": 24},
    ],
    ids=str,
)
def test_numpy_agrees_with_the_reference_for_every_config(
    config: dict[str, Any], make_checkpoint: MakeCheckpoint
) -> None:
    checkpoint = open_checkpoint(make_checkpoint(**config))
    verify(checkpoint, length=checkpoint.config.n_positions)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_numpy_reads_every_data_type_of_a_file(
    dtype: torch.dtype, state: dict[str, Tensor], write: Write
) -> None:
    verify(open_checkpoint(write({name: tensor.to(dtype) for name, tensor in state.items()})))


IDS = torch.arange(60).view(2, 30)


@pytest.fixture(scope="module")
def exact_logits(checkpoint: Checkpoint) -> Tensor:
    """The reference's float64 logits of IDS."""
    model = transformers_gpt2.load_reference(checkpoint, torch.float32)
    with torch.no_grad():
        logits: Tensor = transformers_gpt2.in_float64(model)(IDS).logits
    return logits


def test_errors_are_measured_at_every_position(
    checkpoint: Checkpoint, exact_logits: Tensor
) -> None:
    truth = torch.from_numpy(numpy_gpt2.logits(checkpoint, torch.float32, IDS))
    errors_of_exact = logit_errors(exact_logits, truth)
    assert errors_of_exact.shape == (2, 30) and errors_of_exact.max() < 1e-13
    wrong = exact_logits.clone()
    wrong[1, 7] += 0.01 * exact_logits.square().mean().sqrt()
    errors = logit_errors(wrong, truth)
    assert 0.003 < errors[1, 7] < 0.03
    errors[1, 7] = 0
    assert errors.max() < 1e-13


def test_one_wrong_logit_is_found(checkpoint: Checkpoint, exact_logits: Tensor) -> None:
    true_logits(checkpoint, torch.float32, IDS, exact_logits, torch.float64)
    wrong = exact_logits.clone()
    wrong[0, 29, 96] += 1e-5
    with pytest.raises(ParityError, match=r"at input_ids\[0, 29\]"):
        true_logits(checkpoint, torch.float32, IDS, wrong, torch.float64)


def test_logits_of_another_shape_or_data_type_are_refused(
    checkpoint: Checkpoint, exact_logits: Tensor
) -> None:
    with pytest.raises(
        ParityError, match=r"\[2, 30, 96\], but must be torch.float64 \[2, 30, 97\]"
    ):
        true_logits(checkpoint, torch.float32, IDS, exact_logits[..., :-1], torch.float64)
    with pytest.raises(ParityError, match=r"torch.float64 .*, but must be torch.float32"):
        true_logits(checkpoint, torch.float32, IDS, exact_logits, torch.float32)


def test_gelu_uses_the_erf_of_math() -> None:
    x = np.linspace(-6, 6, 101)
    expected = [0.5 * value * math.erfc(-value / 2**0.5) for value in x]
    np.testing.assert_allclose(ACTIVATIONS["gelu"](x), expected, rtol=0, atol=1e-15)


def test_a_model_that_patches_transformers_at_full_length_is_no_proof(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = open_checkpoint(tiny).config

    class Patching(GPTModel):
        def forward(self, ids: Tensor) -> Tensor:
            if ids.shape[1] == config.n_positions:
                owner, name, wrong = PATCHES["Conv1D.forward"]
                monkeypatch.setattr(owner, name, wrong(None))
            return super().forward(ids)

    with pytest.raises(ParityError, match="cannot be trusted"):
        adapt(Patching(config), tiny)
