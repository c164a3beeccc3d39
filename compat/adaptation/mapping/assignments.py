"""Where every Hugging Face tensor goes: the parameters that play its part."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from compat.adaptation.mapping.views import View
from compat.errors import AdaptError
from compat.ops import Op

Home = tuple[tuple[Node, ...], Op]  # the parameters that one tensor goes to, and how


class BatchFirst(AdaptError):
    """Attention along the first axis of the ids: a mistake, or a model that wants ids (T, B)."""


@dataclass
class Attention:
    """What tracing one layer's attention showed beside the map itself.

    Args:
        q, k, v, heads: views (B, H, T, D) of the operands and of the result.
        q_factor, k_factor: what q and k are multiplied by before their product.
        rotated: q and k change with the position on their way from the projections.
        shared_kv: one projection is key and value.
        unmerged: the output projection does not see each token's heads side by side.
    """

    q: View
    k: View
    v: View
    heads: View
    q_factor: float = 1.0
    k_factor: float = 1.0
    rotated: bool = False
    shared_kv: bool = False
    unmerged: bool = False

    @property
    def prescale(self) -> float:
        return self.q_factor * self.k_factor


@dataclass
class Assignments:
    """The homes of the tensors, by Hugging Face name, every layer written out."""

    by_tensor: dict[str, Home] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)
    zeroed: list[Node] = field(default_factory=list)  # biases that GPT-2 does not have
    output_softmax: Node | None = None  # what is applied to the logits
    head_scale: float = 1.0
