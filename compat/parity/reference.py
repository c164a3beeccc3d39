"""The reference: GPT-2 by `transformers`, the one file that imports it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from compat.checkpoint import Checkpoint
from compat.checkpoint.foreign import HUGGING_FACE
from compat.checkpoint.layout import saved_name
from compat.errors import ParityError, listed
from compat.taps import Tap, expand_taps

VERSION: str = transformers.__version__
Attention = Literal["eager", "sdpa"]

# The files that transformers looks for in a folder.
SAFE_FILES = ("model.safetensors", "model.safetensors.index.json")
BIN_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

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


def taps(n_layer: int, attention: Attention) -> list[Tap]:
    """The reference's taps, written out; only eager attention shows its probabilities."""
    shown = [tap for tap in TAPS if attention == "eager" or tap.name != "h.{i}.probs"]
    return expand_taps(shown, n_layer)


def load_reference(
    checkpoint: Checkpoint, dtype: torch.dtype, attention: Attention = "eager"
) -> nn.Module:
    """`transformers`' own model, with the weights as `transformers` reads them, in eval mode.

    Raises:
        ParityError: `transformers` left weights out or made some up, so that it is no reference.
    """
    with quiet():
        loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            **_from_where(checkpoint),
        )
    model, info = loaded
    made_up = [*info["missing_keys"], *info["mismatched_keys"], *info["error_msgs"]]
    if made_up:
        raise ParityError(
            f"transformers could not load {checkpoint.weights} in full and made up "
            f"{listed(sorted(map(str, made_up)))}; there is nothing to compare with"
        )
    reference: nn.Module = model.eval()
    return reference


@torch.no_grad()
def in_float64(reference: nn.Module, by_module: bool = False) -> nn.Module:
    """The same model computed in float64, to tell rounding from mistakes.

    `reorder_and_upcast_attn` is off in it: it is a guard against half precision, means float32
    where it says upcast, and changes nothing in exact arithmetic.

    Args:
        reference: from `load_reference`.
        by_module: share the reference's parameters, and convert those of each module only while
            that module runs, so that memory is needed for one matrix and not for the model.
    """
    memo = {
        id(p): p if by_module else nn.Parameter(p.double(), requires_grad=False)
        for p in reference.parameters()
    }
    exact: Any = copy.deepcopy(reference, memo)
    if by_module:
        for module in exact.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(_widen)
                module.register_forward_hook(_narrow, prepend=True)
    else:
        exact.double()  # the buffers
    for block in exact.transformer.h:
        block.attn.reorder_and_upcast_attn = False
    float64: nn.Module = exact
    return float64


@torch.no_grad()
def with_8_bit_weights(reference: nn.Module) -> nn.Module:
    """A copy whose matrices are rounded to 8 bits, with one scale for each output feature."""
    rounded: Any = copy.deepcopy(reference)
    rounded.lm_head.weight = nn.Parameter(rounded.lm_head.weight.clone())  # the embedding is not
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
def fused_attention(reference: nn.Module) -> Iterator[None]:
    """The reference with `transformers`' SDPA attention: on long sequences eager takes longer."""
    config: Any = reference.config
    before = config._attn_implementation
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = before


def _widen(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Replace a module's own parameters by float64 copies; a table of rows stays as it is."""
    if not isinstance(module, nn.Embedding):
        module.__dict__["_shared"] = dict(module._parameters)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.double(), requires_grad=False)


def _narrow(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Put the shared parameters back; rows that were looked up become float64 here."""
    if not isinstance(module, nn.Embedding):
        module._parameters.update(module.__dict__.pop("_shared"))
    return output.double()


def translation_notes(checkpoint: Checkpoint) -> list[str]:
    """A note if `transformers` cannot read these weights itself and gets what compat read."""
    if _reads_itself(checkpoint):
        return []
    kind = "a file of another name" if checkpoint.kind == HUGGING_FACE else checkpoint.kind
    return [
        f"transformers does not read {checkpoint.weights.name} ({kind}) itself: compat translated "
        "the weights for the reference, so an error in reading the file would not show here"
    ]


def _reads_itself(checkpoint: Checkpoint) -> bool:
    """Whether transformers finds and understands the weights file in its folder."""
    return checkpoint.kind == HUGGING_FACE and checkpoint.weights.name in (SAFE_FILES + BIN_FILES)


def _from_where(checkpoint: Checkpoint) -> dict[str, Any]:
    """What makes transformers take the very weights that the checkpoint has."""
    folder = checkpoint.folder
    if checkpoint.kind != HUGGING_FACE:
        config = transformers.GPT2Config.from_dict(checkpoint.config.to_hf_dict())
        return _from_tensors(checkpoint, config)
    if _reads_itself(checkpoint):
        safe = checkpoint.weights.name in SAFE_FILES
        return {"pretrained_model_name_or_path": folder, "use_safetensors": safe}
    return _from_tensors(checkpoint, transformers.GPT2Config.from_pretrained(folder))


def _from_tensors(checkpoint: Checkpoint, config: transformers.GPT2Config) -> dict[str, Any]:
    """A file that transformers does not look for, or does not know: what we read from it.

    Whether that was read right, the comparison then does not show.
    """
    tensors = {saved_name(name): checkpoint.read(name) for name in checkpoint.infos}
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": tensors}


class _Noise:
    """transformers' verbosity and progress bars, which are the process's.

    They are off while any thread needs them off, and then set to what they were before the first.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users, self.verbosity, self.bars = 0, 0, True

    def off(self) -> None:
        logging: Any = transformers.utils.logging
        with self.lock:
            if self.users == 0:
                self.verbosity = logging.get_verbosity()
                self.bars = logging.is_progress_bar_enabled()
                logging.set_verbosity(logging.CRITICAL)
                logging.disable_progress_bar()
            self.users += 1

    def restore(self) -> None:
        logging: Any = transformers.utils.logging
        with self.lock:
            self.users -= 1
            if self.users:
                return
            logging.set_verbosity(self.verbosity)
            if self.bars:
                logging.enable_progress_bar()


_noise = _Noise()


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, load reports or advice from transformers; what matters is checked here."""
    _noise.off()
    try:
        yield
    finally:
        _noise.restore()
