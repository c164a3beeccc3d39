"""What a model shows that cannot be built or called: its parts are examined alone.

A block, an attention, an MLP or a norm of the user's takes the place of GPT-2's in compat's own
model, as in part.py. The outermost modules that can be called with hidden states are examined.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import nn

from compat.adaptation.adapt import adapt, no_progress
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.counterfactual import relative_rms
from compat.adaptation.diagnosis.findings import partly_examined
from compat.adaptation.diagnosis.first_block import SAME, part_name, with_noise
from compat.adaptation.mapping.assignments import names_without_tied_head
from compat.adaptation.other_ways import finds_other_layers
from compat.adaptation.part import with_mask
from compat.adaptation.result import Adaptation, Finding
from compat.adaptation.stages import Progress
from compat.adaptation.tracing.graph import Place
from compat.checkpoint import Checkpoint
from compat.errors import AdaptError
from compat.name_map import NameMap
from compat.user_models.usage import is_users_class


def adapt_partly(
    target: type,
    model: nn.Module | None,
    parts: Iterable[nn.Module],
    checkpoint: Checkpoint,
    error: AdaptError,
    progress: Progress = no_progress,
) -> Adaptation | None:
    """Examine parts of a model that cannot be built or called; None if no part can be examined.

    The checkpoint's weights are loaded into the parts. The result has no map and no parity, and its
    first finding says why.

    Args:
        target: the class of the model.
        model: the model, if it could be built.
        parts: other modules of the user's. No further ones are taken from the iterable once a whole
            block was examined.
        checkpoint: the checkpoint.
        error: why the whole model is not examined.
        progress: as for `adapt`.
    """
    examined = _Parts(checkpoint, progress)
    for module in chain([] if model is None else [model], parts):
        examined.examine(module)
        if examined.complete:
            break
    if not examined.found:
        return None
    first = partly_examined(error, examined.described, model is not None)
    names = names_without_tied_head(checkpoint)
    return Adaptation(
        model=target.__name__,
        source=checkpoint.source,
        n_layer=checkpoint.config.n_layer,
        tensors=len(names),
        unmatched=names,
        name_map=NameMap(()),
        parity=None,
        findings=[first, *examined.findings],
    )


@dataclass
class _Part:
    """A part that was examined.

    Args:
        cls: the class of the module.
        adaptation: the result.
        line: the line that builds the module, or that of its class, for findings without another.
    """

    cls: type
    adaptation: Adaptation
    line: Place | None


@dataclass
class _Parts:
    """The parts that were examined.

    Args:
        checkpoint, progress: as for `adapt`.

    Attributes:
        found: the parts by their names.
        tried: the user's classes of which a module was examined, or refused.
    """

    checkpoint: Checkpoint
    progress: Progress
    found: dict[str, _Part] = field(default_factory=dict)
    tried: set[type] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return "h.0" in self.found or self.found.keys() >= {"h.0.attn", "h.0.mlp", "h.0.ln_1"}

    def examine(self, root: nn.Module, path: str = "") -> None:
        """Examine a module as a part of GPT-2, or else the modules that it consists of.

        Args:
            root: a module that the user's code has built.
            path: where the module is in it, "" for itself.
        """
        module = root.get_submodule(path)
        cls = type(module)
        if self.complete or cls in self.tried:
            return
        if is_users_class(cls):
            self.tried.add(cls)
        name = self._name(module)
        if name and name not in self.found:
            with suppress(Exception, SystemExit):  # it may fail on other hidden states
                adaptation = adapt(module, self.checkpoint, part=name, progress=self.progress)
                if not finds_other_layers(adaptation):  # the module computes several blocks
                    part = _Part(cls, adaptation, _line(root, path))
                    # A block makes parts redundant that were found before it.
                    self.found = {name: part} if name == "h.0" else {**self.found, name: part}
                    return
        for child, _ in module.named_children():
            self.examine(root, f"{path}.{child}".lstrip("."))

    def _name(self, module: nn.Module) -> str:
        """Return which part of GPT-2 a module is, or ""."""
        config = self.checkpoint.config
        with suppress(Exception, SystemExit), with_noise(module):
            x = torch.randn(2, min(9, config.n_positions), config.n_embd)
            on = with_mask(module, config)
            if relative_rms(on(x)[:1], on(x[:1])) < SAME:  # otherwise it takes sequences time first
                return part_name(module, on, x)
        return ""

    @property
    def described(self) -> list[str]:
        """The parts in words, such as `Block as h.0`."""
        return [f"{part.cls.__name__} as {name}" for name, part in self.found.items()]

    @property
    def findings(self) -> list[Finding]:
        """What differs in the parts, once for each line."""
        found: dict[tuple[object, ...], Finding] = {}
        for name, part in self.found.items():
            for each in part.adaptation.deviations:
                evidence = f"{part.cls.__name__} was examined alone as {name}"
                evidence = f"{evidence}; {each.evidence}" if each.evidence else evidence
                located = replace(each, evidence=evidence)
                if each.file is None and part.line is not None:
                    file, line, text = part.line.file, part.line.line, part.line.text
                    located = replace(located, file=file, line=line, source_line=text)
                found.setdefault((each.code, located.file, located.line), located)
        return [*found.values()]


def _line(root: nn.Module, path: str) -> Place | None:
    """Return the line that builds a module, or else that of its class."""
    module = root.get_submodule(path)
    of_class = source.matching(module, rf"^class {type(module).__name__}\b")
    return (source.building(root, path) if path else None) or of_class
