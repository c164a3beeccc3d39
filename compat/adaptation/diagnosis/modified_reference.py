"""GPT-2 in float64 with switches for deviations, for counterfactual runs.

Without changes it computes what `transformers` computes; `counterfactual.run` verifies that each
time before it relies on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compat.adaptation.anatomy.norms import NormFormula
from compat.adaptation.diagnosis.activations import ACTIVATIONS, canonical_activation
from compat.adaptation.diagnosis.attention_formula import AttentionFormula
from compat.config import GPT2Config
from compat.parity.trace import Trace

Function = Callable[[Tensor], Tensor]
OwnAttention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v → heads, (B, H, T, D) each


@dataclass
class Changes:
    """What a reference computes differently from GPT-2; by default, nothing.

    Args:
        weights: tensors that replace the checkpoint's; None removes one. A missing bias counts as
            zero, and a norm without a weight is skipped.
        norm_fields: fields of `NormFormula`, by the norm's name and the field's.
        norm_formula: other formulas of norms, by name.
        functions: functions that are applied one after the other, by position: the tap of the
            residual stream that they follow, such as "embed" or "h.0.out"; "wte" for the token
            embedding alone; "h.0.attn" or "h.0.mlp" for the output of a branch, and
            "h.0.mlp.c_proj" for the MLP's without the input that `own_input` adds; "h.0.heads" for
            the merged heads; "h.0.fc" and "h.0.act" before and after the activation;
            "h.0.ln_1.before", "h.0.ln_1.after" and "h.0.ln_1" beside a norm.
        post_norm: names of norms that are applied after the residual sum.
        norm_on_output: names of norms that are applied to the output of the branch.
        residual_from_norm: names of norms after which the residual connection starts.
        activation: activation functions, by layer.
        attention: attention functions, by layer.
        rotation: matrices (T, D, D) by which q and k are multiplied, by layer.
        operands: functions of q, k and v that attention is applied to, by layer.
        unnormed: which of q, k and v are projected from the input of ln_1, by layer.
        value_as_key: layers that use the value as the key.
        no_mlp: layers without an MLP.
        parallel: layers whose MLP reads the input of the block.
        no_residual: taps `resid_mid` and `out` without a residual connection.
        mlp_residual_from_input: layers that add the MLP to the input of the block.
        mlp_residual_from_attention: layers that add the MLP to the result of attention alone.
        input_again: layers whose input is added to their result a second time.
        own_input: taps `resid_mid` and `out` of branches that add their own input to their result.
        shortcut_factor: factors of the shortcuts, by the tap of the sum.
        token_scale, position_scale: factors of the embeddings.
        position_offset: the position of the first token.
        added: a constant (T, C) that is added to the embedding.
        head_scale: a factor of the logits.
        n_head, n_layer: sizes that replace the checkpoint's.
    """

    weights: dict[str, Tensor | None] = field(default_factory=dict)
    norm_fields: dict[tuple[str, str], Any] = field(default_factory=dict)
    norm_formula: dict[str, Function] = field(default_factory=dict)
    functions: dict[str, list[Function]] = field(default_factory=dict)
    post_norm: set[str] = field(default_factory=set)
    norm_on_output: set[str] = field(default_factory=set)
    residual_from_norm: set[str] = field(default_factory=set)
    activation: dict[int, Function] = field(default_factory=dict)
    attention: dict[int, AttentionFormula | OwnAttention] = field(default_factory=dict)
    rotation: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    operands: dict[int, Callable[..., list[Tensor]]] = field(default_factory=dict)
    unnormed: dict[int, str] = field(default_factory=dict)
    value_as_key: set[int] = field(default_factory=set)
    no_mlp: set[int] = field(default_factory=set)
    parallel: set[int] = field(default_factory=set)
    no_residual: set[str] = field(default_factory=set)
    mlp_residual_from_input: set[int] = field(default_factory=set)
    mlp_residual_from_attention: set[int] = field(default_factory=set)
    input_again: set[int] = field(default_factory=set)
    own_input: set[str] = field(default_factory=set)
    shortcut_factor: dict[str, float] = field(default_factory=dict)
    token_scale: float = 1.0
    position_scale: float = 1.0
    position_offset: int = 0
    added: Tensor | None = None
    head_scale: float = 1.0
    n_head: int | None = None
    n_layer: int | None = None


def combine(changes: Iterable[Changes]) -> Changes:
    """Merge changes into one object."""
    combined = Changes()
    for change in changes:
        for each in fields(Changes):
            value = getattr(change, each.name)
            if each.name == "functions":
                for position, functions in value.items():
                    combined.functions.setdefault(position, []).extend(functions)
            elif isinstance(value, (dict, set)):
                getattr(combined, each.name).update(value)
            elif value is not each.default:
                setattr(combined, each.name, value)
    return combined


class ModifiedReference:
    """A GPT-2 with changes.

    Args:
        config: the checkpoint's config.
        weights: the checkpoint's tensors by Hugging Face name, in float64.
        changes: what to compute differently.
    """

    def __init__(self, config: GPT2Config, weights: Mapping[str, Tensor], changes: Changes) -> None:
        self.config, self.changes = config, changes
        replaced = {**weights, **changes.weights}
        self.weights = {name: tensor for name, tensor in replaced.items() if tensor is not None}
        self.taps: Trace = {}

    def trace(self, ids: Tensor) -> Trace:
        """Return the value of every tap of `compat.tap`, in float64, for ids of shape (B, T)."""
        self.taps = {}
        x = self.taps["embed"] = self._embed(ids)
        x = self._after("embed", x)
        n_layer = self.changes.n_layer
        for i in range(self.config.n_layer if n_layer is None else n_layer):
            start, x = x, self._block(i, x)
            self.taps[f"h.{i}.out"] = x
            x = x + start if i in self.changes.input_again else x
            x = self._after(f"h.{i}.out", x)
        x = self.taps["ln_f"] = self._norm("ln_f", self._after("ln_f.before", x))
        x = self._after("ln_f", self._after("ln_f.after", x))
        head = self.weights.get("lm_head.weight", self.weights["wte.weight"])
        self.taps["logits"] = x @ head.T * self.changes.head_scale
        return self.taps

    def _embed(self, ids: Tensor) -> Tensor:
        T, changes = ids.shape[1], self.changes
        x = self._after("wte", self.weights["wte.weight"][ids] * changes.token_scale)
        if "wpe.weight" in self.weights:
            rows = self.weights["wpe.weight"][changes.position_offset : changes.position_offset + T]
            x = x + rows * changes.position_scale
        return x if changes.added is None else x + changes.added[:T]

    def _block(self, i: int, x: Tensor) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        changes, tap = self.changes, f"h.{i}.resid_mid"
        mid = self._sum(f"h.{i}.ln_1", f"h.{i}.attn", tap, x, x, partial(self._attention, i, raw=x))
        self.taps[tap] = mid
        mid = self._after(tap, mid)
        if i in changes.no_mlp:
            return mid
        source = x if i in changes.parallel else mid
        shortcut = x if i in changes.mlp_residual_from_input else mid
        if i in changes.mlp_residual_from_attention:
            shortcut = self.taps[f"h.{i}.attn"]
        mlp = partial(self._mlp, i)
        return self._sum(f"h.{i}.ln_2", f"h.{i}.mlp", f"h.{i}.out", source, shortcut, mlp)

    def _sum(
        self, norm: str, branch: str, tap: str, x: Tensor, shortcut: Tensor, function: Function
    ) -> Tensor:
        """Run a branch with its norm, if any, and add it to the residual stream.

        Args:
            norm, branch, tap: the names of the norm, of the branch's result and of the sum.
            x: the input of the branch, (B, T, C).
            shortcut: the residual stream that the result is added to.
            function: attention or the MLP.
        """
        changes = self.changes
        if norm in changes.norm_on_output:
            y = self._norm(norm, function(x))
        else:
            if norm not in changes.post_norm:
                x = self.taps[norm] = self._norm(norm, self._after(f"{norm}.before", x))
                x = self._after(norm, self._after(f"{norm}.after", x))
            y = x + function(x) if tap in changes.own_input else function(x)
        y = self._after(branch, y)
        if tap not in changes.no_residual:
            if norm in changes.residual_from_norm:
                shortcut = self._norm(norm, shortcut)
            y = changes.shortcut_factor.get(tap, 1) * shortcut + y
        return self._norm(norm, y) if norm in changes.post_norm else y

    def _after(self, position: str, x: Tensor) -> Tensor:
        for function in self.changes.functions.get(position, ()):
            x = function(x)
        return x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self.weights:
            return x
        changed = {each: v for (norm, each), v in self.changes.norm_fields.items() if norm == name}
        usual = NormFormula(**{"eps": self.config.layer_norm_epsilon, **changed})
        formula = self.changes.norm_formula.get(name, usual)
        return formula(x) * self.weights[f"{name}.weight"] + self._bias(name)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"] + self._bias(name)

    def _bias(self, name: str) -> Tensor | float:
        return self.weights.get(f"{name}.bias", 0.0)

    def _attention(self, i: int, x: Tensor, raw: Tensor) -> Tensor:
        (B, T, C), H = x.shape, self.changes.n_head or self.config.n_head
        name, taps = f"h.{i}.attn", self.taps
        projected = self._linear(f"{name}.c_attn", x).chunk(3, dim=-1)
        if letters := self.changes.unnormed.get(i, ""):
            others = self._linear(f"{name}.c_attn", raw).chunk(3, dim=-1)
            pairs = zip("qkv", projected, others, strict=True)
            projected = tuple(other if one in letters else own for one, own, other in pairs)
        q, k, v = projected
        if i in self.changes.value_as_key:
            k = v
        taps[f"h.{i}.q"], taps[f"h.{i}.k"], taps[f"h.{i}.v"] = q, k, v
        q, k, v = (t.view(B, T, H, C // H).transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
        if i in self.changes.rotation:
            for_q, for_k = self.changes.rotation[i]
            q = torch.einsum("bhtd,tde->bhte", q, for_q)
            k = torch.einsum("bhtd,tde->bhte", k, for_k)
        if i in self.changes.operands:
            q, k, v = self.changes.operands[i](q, k, v)
        scale = self.config.attention_scale(i) * math.sqrt(self.config.d_head * H / C)
        formula = self.changes.attention.get(i) or causal(T, scale)
        if isinstance(formula, AttentionFormula):
            probs = taps[f"h.{i}.probs"] = formula.probabilities(q @ k.mT)
            heads = probs @ v
        else:
            heads = formula(q, k, v)
        context: Tensor
        context = taps[f"h.{i}.heads"] = heads.transpose(1, 2).reshape(B, T, C)
        context = self._after(f"h.{i}.heads", context)
        if f"{name}.c_proj.weight" in self.weights:
            context = self._linear(f"{name}.c_proj", context)
        taps[name] = context
        return context

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        name, taps = f"h.{i}.mlp", self.taps
        usual = ACTIVATIONS[canonical_activation(self.config)]
        fc = taps[f"h.{i}.fc"] = self._linear(f"{name}.c_fc", x)
        act = self.changes.activation.get(i, usual)(self._after(f"h.{i}.fc", fc))
        act = taps[f"h.{i}.act"] = self._after(f"h.{i}.act", act)
        out = taps[name] = self._linear(f"{name}.c_proj", act)
        return self._after(f"{name}.c_proj", out)


def causal(T: int, scale: float) -> AttentionFormula:
    """Return the attention of GPT-2."""
    return AttentionFormula(torch.ones(T, T, dtype=torch.bool).tril(), scale)
