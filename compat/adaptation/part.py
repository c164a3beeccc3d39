"""Adapting a single part of a GPT-2, such as a user's attention, inside compat's own model.

The part replaces the corresponding part of compat's `linear` model. The whole model is then adapted
like any other, and the mapping, the proof and the findings are those of the part.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from compat.adaptation.result import Adaptation
from compat.adaptation.tracing.calling import MASKS, describe_error, required_arguments
from compat.config import GPT2Config
from compat.dialects.linear import GPTModel
from compat.errors import AdaptError
from compat.name_map import NameMap, Row
from compat.user_code import is_users
from compat.user_models.eval_mode import eval_mode

# The parts of a layer, and where compat's own model has them.
PATHS = {
    "": "",
    ".attn": ".attention",
    ".mlp": ".feedforward",
    ".ln_1": ".norm1",
    ".ln_2": ".norm2",
}


def path_of(part: str, config: GPT2Config) -> str:
    """Return where compat's `linear` model has a part, by its Hugging Face name.

    Raises:
        AdaptError: the name is not that of a part, or the checkpoint does not have its layer.
    """
    if part == "ln_f":
        return "final_norm"
    named = re.fullmatch(r"h\.(\d+)(\.\w+)?", part)
    if named is None or (named[2] or "") not in PATHS:
        raise AdaptError(
            f"part is {part!r}, but must be ln_f, h.0, h.0.attn, h.0.mlp, h.0.ln_1 or h.0.ln_2, "
            "with the number of any layer"
        )
    if int(named[1]) >= config.n_layer:
        raise AdaptError(
            f"part is {part!r}, but the checkpoint has {config.n_layer} layers, h.0 to "
            f"h.{config.n_layer - 1}"
        )
    return f"trf_blocks.{named[1]}{PATHS[named[2] or '']}"


class _Slot(nn.Module):
    """Calls a user's part with hidden states alone: (B, T, C) → (B, T, C)."""

    def __init__(
        self, part: nn.Module, mask: Callable[[int], Tensor | None], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.part, self.mask, self.names = part, mask, names

    def forward(self, x: Tensor, *_: object) -> Tensor:
        mask = self.mask(x.shape[1])
        found = self.part(x, **{name: mask if "mask" in name else None for name in self.names})
        results = found if isinstance(found, (tuple, list)) else [found]
        for result in results:
            if isinstance(result, Tensor) and result.shape == x.shape:
                return result
        shapes = [list(getattr(result, "shape", ())) or type(result).__name__ for result in results]
        raise AdaptError(
            f"{type(self.part).__name__} returns {shapes} for hidden states {list(x.shape)}, but a "
            "part returns hidden states of the same shape. Pass the module that does, such as the "
            "one that joins the heads of attention"
        )


def with_part(part: nn.Module, name: str, config: GPT2Config) -> tuple[nn.Module, str]:
    """Put a user's part into compat's own model; return it and the part's parameter prefix.

    Raises:
        AdaptError: the checkpoint does not have the part, or the module cannot be called with
            hidden states.
    """
    path = path_of(name, config)
    model = GPTModel(config).eval()
    owner, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(owner), attribute, with_mask(part, config))
    return model, f"{path}.part."


def with_mask(part: nn.Module, config: GPT2Config) -> nn.Module:
    """Return a module that calls a part with hidden states (B, T, C), and a mask if it takes one.

    It is the first mask with which no token attends to a later one. An optional mask is passed only
    if tokens attend to later ones without it.

    Raises:
        AdaptError: the part cannot be called so.
    """
    T = min(9, config.n_positions)
    x, other = torch.randn(2, 1, T, config.n_embd, generator=torch.Generator().manual_seed(0))
    other[:, :-1] = x[:, :-1]  # the last token differs, and not by a constant, which a norm removes
    required, working, errors = required_arguments(part), list[_Slot](), list[str]()
    optional = [name for name in inspect.signature(part.forward).parameters if "mask" in name]
    optional.sort(key=lambda name: "pad" in name)  # of padding, which no (T, T) describes
    passed = [[], *([name] for name in optional), optional]
    for names in dict.fromkeys((*dict.fromkeys([*required, *more]),) for more in passed):
        for mask in MASKS.values():
            slot = _Slot(part, mask, names)
            try:
                with eval_mode(part):
                    one, two = slot(x), slot(other)
            except AdaptError:
                raise
            except Exception as error:
                errors.append(describe_error(error))
                continue
            working.append(slot)
            if torch.allclose(one[:, :-1], two[:, :-1], rtol=1e-3, atol=1e-4):
                return slot
            if not any("mask" in name for name in names):
                break
    if not working:
        raise AdaptError(
            f"{type(part).__name__} cannot be called with hidden states {list(x.shape)}: "
            f"{errors[0]}"
        )
    return working[0]


def takes_hidden_states(module: nn.Module, config: GPT2Config) -> bool:
    """Return whether a module can be called like a part."""
    try:
        with_mask(module, config)
    except AdaptError:
        return False
    return True


def of_part(adaptation: Adaptation, part: nn.Module, name: str, prefix: str) -> Adaptation:
    """Convert the adaptation of the whole model to that of the part, with the part's names."""

    def own(text: str) -> str:
        return text.replace(prefix, "")

    rows = [
        Row(row.hf, tuple(own(name) for name in row.ours), row.op)
        for row in adaptation.name_map.expand(adaptation.n_layer)
        if all(name.startswith(prefix) for name in row.ours)
    ]
    zeros = [own(zero) for zero in adaptation.name_map.expand_zeros(adaptation.n_layer)]
    only = f" (only in {'.'.join(name.split('.')[:2])})"  # the layer of the part
    findings = []
    for found in adaptation.findings:
        if found.file is not None and not is_users(found.file):  # a line of compat's own
            found = replace(found, file=None, line=None, source_line=None)
        also = [line for line in found.also if is_users(line.rpartition(":")[0])]
        message = own(found.message).removesuffix(only)
        findings.append(replace(found, message=message, evidence=own(found.evidence), also=also))
    parity = adaptation.parity
    if parity is not None:
        parity = replace(parity, model_name=f"GPT-2 with {type(part).__name__} as {name}")
    return replace(
        adaptation,
        model=type(part).__name__,
        parity=parity,
        tensors=len(rows) + len(adaptation.unmatched),
        name_map=NameMap(tuple(rows), tuple(zeros)),
        findings=findings,
        find_taps=list,
    )
