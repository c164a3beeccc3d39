"""GPT-2 of `transformers`: loading it, its taps, and variants of it.

This is the only file that imports `transformers`.
"""

from __future__ import annotations

import copy
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from compat.checkpoint import Checkpoint
from compat.checkpoint.foreign import HUGGING_FACE
from compat.checkpoint.layout import WEIGHT_FILES, saved_name
from compat.errors import ParityError, listed
from compat.tap import Tap, expand_taps

Attention = Literal["eager", "sdpa"]

TAPS = (
    Tap("embed", "transformer.h.0", at="input"),
    Tap("h.{i}.ln_1", "transformer.h.{i}.ln_1"),
    Tap("h.{i}.q", "transformer.h.{i}.attn.c_attn", part=0),
    Tap("h.{i}.k", "transformer.h.{i}.attn.c_attn", part=1),
    Tap("h.{i}.v", "transformer.h.{i}.attn.c_attn", part=2),
    Tap("h.{i}.probs", "transformer.h.{i}.attn", item=1),
    Tap("h.{i}.heads", "transformer.h.{i}.attn.c_proj", at="input"),
    Tap("h.{i}.attn", "transformer.h.{i}.attn"),
    Tap("h.{i}.resid_mid", "transformer.h.{i}.ln_2", at="input"),
    Tap("h.{i}.ln_2", "transformer.h.{i}.ln_2"),
    Tap("h.{i}.fc", "transformer.h.{i}.mlp.c_fc"),
    Tap("h.{i}.act", "transformer.h.{i}.mlp.act"),
    Tap("h.{i}.mlp", "transformer.h.{i}.mlp"),
    Tap("h.{i}.out", "transformer.h.{i}"),
    Tap("ln_f", "transformer.ln_f"),
    Tap("logits", "lm_head"),
)

# `from_pretrained` replaces methods of transformers' classes while it runs and restores what it
# found. Two calls at the same time would leave a method replaced permanently.
loading = threading.Lock()


def versions() -> dict[str, str]:
    """Return the versions of the programs that a comparison depends on."""
    return {
        "compat": version("gpt2-compat"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def taps(n_layer: int, attention: Attention) -> list[Tap]:
    """Return the taps of every layer. Only eager attention returns its probabilities."""
    available = [tap for tap in TAPS if attention == "eager" or tap.name != "h.{i}.probs"]
    return expand_taps(available, n_layer)


def taps_of(model: nn.Module) -> list[Tap]:
    """Return the taps that a GPT-2 of transformers has, with or without a head.

    The attention module returns its probabilities after using them, so a patch of its result would
    have no effect. They are therefore tapped at its softmax.
    """
    config: Any = model.config
    modules = dict(model.named_modules())
    prefix = "" if "h.0" in modules else "transformer."
    found = []
    for tap in taps(config.n_layer, config._attn_implementation):
        path = prefix + tap.module.removeprefix("transformer.") if "." in tap.module else tap.module
        if tap.name.endswith("probs"):
            tap = replace(tap, at="softmax", item=0)
        found.append(replace(tap, module=path))
    return [tap for tap in found if tap.module in modules]


def load_reference(
    checkpoint: Checkpoint, dtype: torch.dtype, attention: Attention = "eager"
) -> nn.Module:
    """Return transformers' model in eval mode, with the weights as transformers reads them.

    Raises:
        ParityError: transformers did not load all weights and initialised some at random.
    """
    with loading, quiet():
        loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            **_weights_arguments(checkpoint),
        )
    model, info = loaded
    faults = [*info["missing_keys"], *info["mismatched_keys"], *info["error_msgs"]]
    if faults:
        raise ParityError(
            f"transformers did not load all of {checkpoint.weights} and initialised at random "
            f"{listed(sorted(map(str, faults)))}. Repair the checkpoint, for which there is no "
            "reference to compare with."
        )
    reference: nn.Module = model.eval()
    return reference


@torch.no_grad()
def in_float64(reference: nn.Module, by_module: bool = False) -> nn.Module:
    """Return the same model in float64, to distinguish rounding from mistakes.

    `reorder_and_upcast_attn` is off in it, because it would compute attention in float32. It
    protects half precision and changes nothing in exact arithmetic.

    Args:
        reference: the result of `load_reference`.
        by_module: share the reference's parameters, and convert those of a module only while the
            module runs. Memory is then needed for one matrix in float64 instead of the model.
    """
    memo = {
        id(p): p if by_module else nn.Parameter(p.double(), requires_grad=False)
        for p in reference.parameters()
    }
    exact: Any = copy.deepcopy(reference, memo)
    if by_module:
        for module in exact.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(_convert_parameters)
                module.register_forward_hook(_restore_parameters, prepend=True)
    else:
        exact.double()  # the buffers
    for block in exact.transformer.h:
        block.attn.reorder_and_upcast_attn = False
    float64: nn.Module = exact
    return float64


@torch.no_grad()
def with_8_bit_weights(reference: nn.Module) -> nn.Module:
    """Return a copy with matrices rounded to 8 bits, with one scale for each output feature."""
    rounded: Any = copy.deepcopy(reference)
    rounded.lm_head.weight = nn.Parameter(rounded.lm_head.weight.clone())  # untied
    matrices = [
        part.weight
        for block in rounded.transformer.h
        for part in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
    ]
    for matrix in (*matrices, rounded.lm_head.weight.t()):  # [in, out]
        scale = (matrix.abs().amax(dim=0) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        matrix.copy_((matrix / scale).round_() * scale)
    quantized: nn.Module = rounded
    return quantized


@contextmanager
def sdpa_attention(reference: nn.Module) -> Iterator[None]:
    """Use SDPA attention in the reference, which is faster than eager on long sequences."""
    config: Any = reference.config
    before = config._attn_implementation
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = before


def _convert_parameters(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Replace a module's own parameters by float64 copies, except those of an embedding."""
    if not isinstance(module, nn.Embedding):
        module.__dict__["_shared"] = dict(module._parameters)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.double(), requires_grad=False)


def _restore_parameters(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Put the shared parameters back, and convert the rows that an embedding looked up."""
    if not isinstance(module, nn.Embedding):
        module._parameters.update(module.__dict__.pop("_shared"))
    return output.double()


def translation_notes(checkpoint: Checkpoint) -> list[str]:
    """Return a note if transformers cannot read the weights file and gets compat's tensors."""
    if _is_readable(checkpoint):
        return []
    kind = "a file with another name" if checkpoint.kind == HUGGING_FACE else checkpoint.kind
    return [
        f"transformers cannot read {checkpoint.weights.name} ({kind}). Because compat translated "
        "the weights for the reference, this comparison does not cover how the file was read."
    ]


def _is_readable(checkpoint: Checkpoint) -> bool:
    """Return whether transformers finds and understands the weights file in its folder."""
    return checkpoint.kind == HUGGING_FACE and checkpoint.weights.name in WEIGHT_FILES


def _weights_arguments(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that select exactly the checkpoint's weights.

    Tensors of a file that transformers does not read are passed as compat read them.
    """
    if _is_readable(checkpoint):
        safe = checkpoint.weights.name.startswith("model.safetensors")
        return {"pretrained_model_name_or_path": checkpoint.folder, "use_safetensors": safe}
    if checkpoint.kind == HUGGING_FACE:
        config = transformers.GPT2Config.from_pretrained(checkpoint.folder)
    else:
        config = transformers.GPT2Config.from_dict(checkpoint.config.to_hf_dict())
    tensors = {saved_name(name): checkpoint.read(name) for name in checkpoint.infos}
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": tensors}


# The settings of transformers before the first thread turned them off, once for each thread that
# needs them off.
_settings_before: list[tuple[int, bool]] = []
_settings_lock = threading.Lock()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars, load reports and advice of transformers, whose facts compat checks.

    All threads share these settings. They are off while any thread needs them off. The last thread
    restores the settings that the first one found.
    """
    logging: Any = transformers.utils.logging
    with _settings_lock:
        if _settings_before:
            _settings_before.append(_settings_before[0])
        else:
            _settings_before.append((logging.get_verbosity(), logging.is_progress_bar_enabled()))
            logging.set_verbosity(logging.CRITICAL)
            logging.disable_progress_bar()
    try:
        yield
    finally:
        with _settings_lock:
            verbosity, progress_bars = _settings_before.pop()
            if not _settings_before:
                logging.set_verbosity(verbosity)
                if progress_bars:
                    logging.enable_progress_bar()
