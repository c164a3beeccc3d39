"""GPT-2 written down once more, with every deviation as a switch: the numerical witness.

With all switches as they are by default it computes what `transformers` computes; that is checked
each time before it is believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compat.adaptation.anatomy.norms import NormFormula
from compat.adaptation.diagnosis.attention_formula import AttentionFormula
from compat.adaptation.diagnosis.formulas import ACTIVATIONS
from compat.config import GPT2Config
from compat.parity.trace import Trace

OwnAttention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v → heads, (B, H, T, D) each


@dataclass
class ModifiedReference:
    """A GPT-2 with deviations.

    Args:
        config: of the checkpoint.
        weights: under Hugging Face's names, in float64; what the model has no place for is missing:
            biases count as zero, a missing norm is none at all.
        formulas: of norms that are not GPT-2's, by name.
        post: norms that stand on the stream, after the sum.
        on_output: norms that stand on the branch's result, before the sum.
        from_norm: norms behind which the shortcut starts.
        activation, attention: by layer, where it is not GPT-2's.
        rotation: by layer, what q and k are multiplied by at every position: (T, D, D) each.
        unmerged: layers in which the heads are merged without bringing each token's together.
        parallel, no_attn_residual, no_mlp_residual: layers.
        past_attention: layers in which the MLP is added to what came in, not to attention's sum.
        extra: norms that GPT-2 does not have, on the embeddings ("embed"), before another norm
            ("h.0.ln_1.before") or on what a branch makes ("h.0.attn"), and what they compute.
        n_head, n_layer: of the model, where they are not the checkpoint's.
        token_scale, position_scale, offset, added: of the embeddings.
        head_scale: of the logits.
    """

    config: GPT2Config
    weights: Mapping[str, Tensor]
    formulas: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    post: set[str] = field(default_factory=set)
    on_output: set[str] = field(default_factory=set)
    activation: dict[int, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    attention: dict[int, AttentionFormula | OwnAttention] = field(default_factory=dict)
    rotation: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    head_scale: float = 1.0
    unmerged: set[int] = field(default_factory=set)
    parallel: set[int] = field(default_factory=set)
    no_attn_residual: set[int] = field(default_factory=set)
    no_mlp_residual: set[int] = field(default_factory=set)
    past_attention: set[int] = field(default_factory=set)
    from_norm: set[str] = field(default_factory=set)
    token_scale: float = 1.0
    position_scale: float = 1.0
    offset: int = 0
    added: Tensor | None = None
    extra: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    n_head: int | None = None
    n_layer: int | None = None

    def drop(self, tensors: Iterable[str]) -> None:
        """Go on without these tensors."""
        gone = set(tensors)
        self.weights = {name: t for name, t in self.weights.items() if name not in gone}

    def trace(self, ids: Tensor) -> Trace:
        """Ids (B, T) → every tap of `compat.taps`, in float64."""
        seen: Trace = {}
        x = self._embed(ids)
        seen["embed"] = x
        x = self._extra("embed", x)
        for i in range(self.n_layer or self.config.n_layer):
            x = self._block(i, x, seen)
        x = seen["ln_f"] = self._norm("ln_f", self._extra("final", x))
        head = self.weights.get("lm_head.weight", self.weights["wte.weight"])
        seen["logits"] = x @ head.T * self.head_scale
        return seen

    def _embed(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        x = self.weights["wte.weight"][ids] * self.token_scale
        if "wpe.weight" in self.weights:
            rows = self.weights["wpe.weight"][self.offset : self.offset + T]
            x = x + rows * self.position_scale
        return x if self.added is None else x + self.added[:T]

    def _extra(self, place: str, x: Tensor) -> Tensor:
        return self.extra[place](x) if place in self.extra else x

    def _block(self, i: int, x: Tensor, seen: Trace) -> Tensor:
        ln_1, ln_2 = f"h.{i}.ln_1", f"h.{i}.ln_2"
        branch = self._branch(ln_1, x, lambda y: self._attention(i, y, seen), seen)
        branch = self._extra(f"h.{i}.attn", branch)
        mid = branch if i in self.no_attn_residual else self._shortcut(ln_1, x) + branch
        mid = seen[f"h.{i}.resid_mid"] = self._norm(ln_1, mid) if ln_1 in self.post else mid
        start = x if i in self.parallel else mid
        branch = self._branch(ln_2, start, lambda y: self._mlp(i, y, seen), seen)
        branch = self._extra(f"h.{i}.mlp", branch)
        out = (
            branch
            if i in self.no_mlp_residual
            else self._shortcut(ln_2, x if i in self.past_attention else mid) + branch
        )
        out = self._norm(ln_2, out) if ln_2 in self.post else out
        seen[f"h.{i}.out"] = out
        return out

    def _shortcut(self, name: str, x: Tensor) -> Tensor:
        return self._norm(name, x) if name in self.from_norm else x

    def _branch(
        self, name: str, x: Tensor, inner: Callable[[Tensor], Tensor], seen: Trace
    ) -> Tensor:
        """The norm in front of the branch, or on its result, or elsewhere."""
        if name in self.on_output:
            return self._norm(name, inner(x))
        if name not in self.post:
            x = seen[name] = self._norm(name, self._extra(f"{name}.before", x))
        return inner(x)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self.weights:
            return x
        eps = self.config.layer_norm_epsilon
        x = self.formulas.get(name, NormFormula(eps=eps))(x) * self.weights[f"{name}.weight"]
        return x + self._bias(name)

    def _bias(self, name: str) -> Tensor | float:
        return self.weights.get(f"{name}.bias", 0.0)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"] + self._bias(name)

    def _attention(self, i: int, x: Tensor, seen: Trace) -> Tensor:
        (B, T, C), H = x.shape, self.n_head or self.config.n_head
        name = f"h.{i}.attn"
        q, k, v = self._linear(f"{name}.c_attn", x).chunk(3, dim=-1)
        seen[f"h.{i}.q"], seen[f"h.{i}.k"], seen[f"h.{i}.v"] = q, k, v
        q, k, v = (t.view(B, T, H, C // H).transpose(1, 2) for t in (q, k, v))
        if i in self.rotation:
            turn = self.rotation[i]
            q, k = (torch.einsum("bhtd,tde->bhte", t, R) for t, R in zip((q, k), turn, strict=True))
        scale = self.config.attention_scale(i) * math.sqrt(self.config.d_head * H / C)
        formula = self.attention.get(i) or causal(T, scale)
        if isinstance(formula, AttentionFormula):
            probs = seen[f"h.{i}.probs"] = formula.probabilities(q @ k.mT)
            heads = probs @ v  # (B, H, T, D)
        else:
            heads = formula(q, k, v)
        seen[f"h.{i}.heads"] = heads.transpose(1, 2).reshape(B, T, C)
        merged = heads.reshape(B, T, C) if i in self.unmerged else seen[f"h.{i}.heads"]
        if f"{name}.c_proj.weight" in self.weights:
            merged = self._linear(f"{name}.c_proj", merged)
        seen[name] = merged
        return merged

    def _mlp(self, i: int, x: Tensor, seen: Trace) -> Tensor:
        name = f"h.{i}.mlp"
        fc = seen[f"h.{i}.fc"] = self._linear(f"{name}.c_fc", x)
        name_of_it = self.config.activation_function
        usual = ACTIVATIONS[ALIASES.get(name_of_it, name_of_it)]
        act = seen[f"h.{i}.act"] = self.activation.get(i, usual)(fc)
        seen[name] = self._linear(f"{name}.c_proj", act)
        return seen[name]


ALIASES = {
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "swish": "silu",
}


def causal(T: int, scale: float) -> AttentionFormula:
    """GPT-2's own attention."""
    return AttentionFormula(torch.ones(T, T, dtype=torch.bool).tril(), scale)
