"""What the diagnosis reads: a model's parts, its mapping, and the formulas measured in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Anatomy, Layer, Sum
from compat.adaptation.anatomy.norms import NormFormula, NormPlaces, formula_of
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.activations import Activation, activation_of, called_activation
from compat.adaptation.mapping.assignments import Assignments, Unmatched
from compat.adaptation.mapping.embeddings import EmbeddingFormula, embedding_of
from compat.adaptation.tracing.graph import (
    MOVES,
    Graph,
    Place,
    kind,
    live_inputs,
    reads_parameter,
    size,
)
from compat.adaptation.tracing.rewrites import POOLS
from compat.config import GPT2Config
from compat.ops import Rows


@dataclass(frozen=True)
class Branch:
    """Attention or the MLP of a block, with its norm and its sum with the residual stream.

    Args:
        norm, name, tap: the names of the norm, the result and the sum, such as `h.0.ln_1`,
            `h.0.attn` and `h.0.resid_mid`.
        x, end, total: the input, the result and the sum.
    """

    norm: str
    name: str
    tap: str
    x: Node
    end: Node
    total: Sum


@dataclass
class DiagnosisContext:
    """What is known about a model when the diagnosis begins.

    Args:
        model: the user's model, with the checkpoint's weights.
        anatomy: the parts of the model's graph.
        places: the model's norms.
        mapping: the parameters that hold each tensor of the checkpoint.
        config: the checkpoint's config.
        weights: the checkpoint's tensors, in float64.
        unmatched: the tensors without a parameter.
        last_only: the node that drops all positions but the last, if there is one.
        with_targets: the model is called with targets, because it drops these positions otherwise.
        of_loss: the model returns the loss and no logits, which are what it is computed from.
        input_shape: the shape of the ids that the model takes, if it is not (B, T).
        setup: the method that makes the masks of the call, without which it fails.
        output_shape: the shape of the logits that the model returns, if it is not (B, T, V).
        leaves_out_last: the model returns logits for all ids but the last, and gets one more.
        mask: the optional argument that is passed, because tokens attend to later ones without it.
        fixed_length: the only sequence length that the model accepts, if it accepts only one.
        length_error: what the model raises for a shorter sequence, if it accepts only one length.
        noise: a sentence that says by how much two runs in eval mode differ.
        attentions: what the detectors of attention have computed, by layer.
        failed_input: the first designed input on which the logits differ, if they agree on ids that
            were drawn at random.
    """

    model: nn.Module
    anatomy: Anatomy
    places: NormPlaces
    mapping: Assignments
    config: GPT2Config
    weights: dict[str, Tensor]
    unmatched: Unmatched
    last_only: Node | None = None
    with_targets: bool = False
    of_loss: bool = False
    input_shape: str = ""
    setup: str = ""
    output_shape: str = ""
    leaves_out_last: bool = False
    mask: str = ""
    fixed_length: int | None = None
    length_error: Exception | None = None
    noise: str = ""
    failed_input: str = ""
    attentions: dict[int, Any] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.anatomy.graph

    @property
    def layers(self) -> list[tuple[int, Layer]]:
        return list(enumerate(self.anatomy.layers))

    def branches_of(self, i: int) -> tuple[Branch, Branch]:
        """Return attention and the MLP of a layer."""
        at, layer = f"h.{i}.", self.anatomy.layers[i]
        attn, mlp = (layer.x1, layer.attn, layer.attn_sum), (layer.x2, layer.mlp, layer.mlp_sum)
        return (
            Branch(f"{at}ln_1", f"{at}attn", f"{at}resid_mid", *attn),
            Branch(f"{at}ln_2", f"{at}mlp", f"{at}out", *mlp),
        )

    @property
    def branches(self) -> list[Branch]:
        """Attention and the MLP of every layer, in order."""
        return [branch for i, _ in self.layers for branch in self.branches_of(i)]

    @property
    def is_pooled(self) -> bool:
        """Whether the logits are computed from the mean or maximum over all positions."""
        return self.last_only is not None and kind(self.last_only) in POOLS

    @property
    def room(self) -> int:
        """The number of positions that both the model and the checkpoint have."""
        assigned = self.mapping.by_tensor.get("wpe.weight")
        if assigned is not None and isinstance(assigned[1], Rows):
            return min(self.config.n_positions, assigned[1].wanted)
        return self.config.n_positions

    @property
    def on_tokens_alone(self) -> list[Node]:
        """The operations on the token embedding alone, before its sum with the positions."""
        anatomy = self.anatomy
        if anatomy.own_input is None or anatomy.own_input is anatomy.looked_up:
            return []
        path = self.graph.on_paths([anatomy.looked_up], [anatomy.own_input])
        return [node for node in path if kind(node) not in MOVES | {"getitem"}]

    @cached_property
    def embedding(self) -> EmbeddingFormula | None:
        """The formula of the embedding; None if it is unknown."""
        tokens, positions = self.nodes_of("wte.weight"), self.nodes_of("wpe.weight")
        if not tokens:
            return None
        return embedding_of(self.anatomy, tokens[0], positions[0] if positions else None)

    def nodes_of(self, hf: str) -> tuple[Node, ...]:
        """Return the parameters in place of a tensor, whether it fits into them or not."""
        assigned = self.mapping.by_tensor.get(hf)
        return assigned[0] if assigned else self.unmatched.nodes.get(hf, ())

    @cached_property
    def norm_formulas(self) -> dict[str, NormFormula | None]:
        """The formula of each norm, by name; None if it is unknown."""
        return {name: formula_of(self.graph, norm) for name, norm in self.places.named.items()}

    @property
    def n_head(self) -> int | None:
        """The number of heads in the first layer."""
        return self.mapping.attentions[0].q.index.shape[1] if self.layers else None

    @cached_property
    def activations(self) -> list[Activation]:
        """The activation in each layer."""
        graph, found = self.graph, []
        for i, layer in self.layers:
            if layer.unknown:
                found.append(called_activation(graph, graph.between([layer.mlp], [layer.x2]))[0])
            else:
                before = self.places.extra.get(f"h.{i}.fc")
                after = self.places.extra.get(f"h.{i}.act")
                places = layer.activation_spans(graph)
                if before is not None or after is not None:
                    start = layer.fc_end if before is None else before.end
                    places = [(start, layer.act if after is None else after.start)]
                every = [activation_of(graph, *place) for place in places]
                found.append(next((a for a in every if a.name != "identity"), every[0]))
        return found

    @cached_property
    def late_activations(self) -> dict[int, Activation]:
        """The activations that are applied to the results of MLPs, by layer."""
        graph, found = self.graph, {}
        for i, layer in self.layers:
            start, end = layer.mlp, layer.mlp_sum.branch
            inside = graph.live_between([end], [start])
            if layer.mlp_proj is None or layer.extra or all(kind(n) in MOVES for n in inside):
                continue
            if graph.parameters_between([end], [start]) or graph.input in inside:
                continue
            activation = activation_of(graph, start, end)
            if activation.name not in (None, "identity"):
                found[i] = activation
        return found

    @cached_property
    def learned_factors(self) -> dict[str, tuple[list[Node], Tensor]]:
        """The products of branches with parameters, and the factors (C,), by branch.

        The branches are the taps `h.0.attn` and `h.0.mlp`.
        """
        graph, found = self.graph, dict[str, tuple[list[Node], Tensor]]()
        for branch in self.branches:
            end, sent = branch.end, branch.total.branch
            inside = graph.live_between([sent], [end])
            factors = [n for n in inside if kind(n) == "mul" and reads_parameter(graph, n)]
            if not factors or any(n not in factors and kind(n) not in MOVES for n in inside):
                continue
            [value] = graph.run([sent], {end: torch.ones(size(end), dtype=torch.float64)})
            value = value.reshape(-1, self.anatomy.width)
            if torch.equal(value, value[:1].expand_as(value)):
                found[branch.name] = factors, value[0]
        return found

    @cached_property
    def sums_of_copies(self) -> list[Node]:
        """The sums of branches without a shortcut of their own with several copies of the stream.

        These copies, (B, T, n, C), are those of hyper-connections.
        """
        graph, found = self.graph, list[Node]()
        elements = prod(graph.shape) * self.anatomy.width
        wide = [
            node for node in graph.nodes
            if node in graph.live and kind(node) == "add" and len(live_inputs(graph, node)) == 2
            and size(node)[-1:] == (self.anatomy.width,)
            and prod(size(node)) > elements and prod(size(node)) % elements == 0
        ]  # fmt: skip
        for branch in self.branches:
            if branch.total.shortcut is None:
                found += [node for node in wide if branch.end in graph.ancestors[node]][:1]
        return found

    def owner_of(self, hf: str) -> Place | None:
        """Return the line that builds the module that holds a tensor, or that is in its place."""
        return next(iter(self.owners_of(hf)), None)

    def owners_of(self, hf: str) -> list[Place | None]:
        """Return the same for each of the modules among which a tensor is divided."""
        return [source.built(self.model, self.graph.names[node]) for node in self.nodes_of(hf)]

    def built_between(self, targets: list[Node], cuts: list[Node]) -> Place | None:
        """Return the line that builds the first parameter that `targets` are computed with."""
        parameters = self.graph.parameters_between(targets, cuts)
        return source.built(self.model, self.graph.names[parameters[0]]) if parameters else None

    def tap_after(self, node: Node) -> str:
        """Return the first tap that is computed by a node or after it."""
        anatomy, order = self.anatomy, self.graph.order
        taps = [("embed", anatomy.embed)]
        for i, layer in self.layers:
            nodes = {
                "ln_1": layer.x1, "q": layer.attention_ops[0].q.node, "heads": layer.heads,
                "attn": layer.attn, "resid_mid": layer.mid, "ln_2": layer.x2, "fc": layer.fc_end,
                "act": layer.act, "mlp": layer.mlp, "out": layer.out,
            }  # fmt: skip
            taps += [(f"h.{i}.{name}", n) for name, n in nodes.items()]
        taps += [("ln_f", anatomy.xf)]
        return next((name for name, n in taps if order[n] >= order[node]), "logits")
