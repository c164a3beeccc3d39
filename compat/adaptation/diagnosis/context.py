"""A model under examination, and one deviation found in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Anatomy, Layer
from compat.adaptation.anatomy.norms import NormPlaces
from compat.adaptation.diagnosis.modified_reference import ModifiedReference
from compat.adaptation.mapping.assignments import Assignments
from compat.adaptation.result import Severity
from compat.adaptation.tracing.graph import Graph, Place
from compat.config import GPT2Config
from compat.ops import Rows

Apply = Callable[[ModifiedReference], None]


@dataclass
class Deviation:
    """One deviation, in all the layers that show it.

    Args:
        code: of `CODES`.
        tap: the first one that it changes; None where it changes none.
        place: the author's line.
        words: for the texts of the code; "evidence" if it is known already.
        severity: where it is not the code's.
        apply: makes the same change to a reference; None where there is nothing to change.
    """

    code: str
    tap: str | None
    place: Place | None
    words: dict[str, Any] = field(default_factory=dict)
    apply: Apply | None = None
    severity: Severity | None = None


@dataclass
class DiagnosisContext:
    """All that is known of a model before it is judged."""

    model: nn.Module
    anatomy: Anatomy
    places: NormPlaces
    mapping: Assignments
    config: GPT2Config
    weights: dict[str, Tensor]  # of the checkpoint, in float64
    last_only: Node | None = None  # where all positions but the last are dropped
    with_targets: bool = False  # they are dropped unless targets are given, as they are here
    fixed_length: int | None = None  # the only length that the model takes
    noise: str = ""  # by how much two runs in eval mode differ, in words

    @property
    def graph(self) -> Graph:
        return self.anatomy.graph

    @property
    def layers(self) -> list[tuple[int, Layer]]:
        return list(enumerate(self.anatomy.layers))

    @property
    def room(self) -> int:
        """How many positions model and checkpoint both have."""
        home = self.mapping.by_tensor.get("wpe.weight")
        if home is not None and isinstance(home[1], Rows):
            return min(self.config.n_positions, home[1].wanted)
        return self.config.n_positions

    def tap_after(self, node: Node) -> str:
        """The first tap that is computed after a node, or by it."""
        anatomy, order = self.anatomy, self.graph.order
        taps = [("embed", anatomy.embed)]
        for i, layer in self.layers:
            nodes = {
                "ln_1": layer.x1, "q": layer.cores[0].q.node, "heads": layer.heads,
                "attn": layer.attn, "resid_mid": layer.mid, "ln_2": layer.x2, "fc": layer.fc_end,
                "act": layer.act, "mlp": layer.mlp, "out": layer.out,
            }  # fmt: skip
            taps += [(f"h.{i}.{name}", n) for name, n in nodes.items()]
        taps += [("ln_f", anatomy.xf)]
        return next((name for name, n in taps if order[n] >= order[node]), "logits")


def sizes_of(config: GPT2Config) -> dict[str, Any]:
    return {
        "n_positions": config.n_positions,
        "n_embd": config.n_embd,
        "d_head": config.d_head,
        "n_layer": config.n_layer,
    }
