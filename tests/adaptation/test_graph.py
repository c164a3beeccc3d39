"""Graphs of small functions: what depends on what, what a piece of them computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compat.adaptation.anatomy.dissect import dissect
from compat.adaptation.anatomy.norms import NormFormula, formula_of, norms_between
from compat.adaptation.anatomy.placement import place_norms
from compat.adaptation.diagnosis.attention_formula import AttentionFormula, attention_of
from compat.adaptation.mapping.find import find_mapping
from compat.adaptation.mapping.linear_maps import LinearMap, linear_map
from compat.adaptation.mapping.views import token_view
from compat.adaptation.tracing.calling import default_forward
from compat.adaptation.tracing.export import to_graph
from compat.adaptation.tracing.graph import Graph
from tests.adaptation.catalogue import MODELS, MUTATIONS, composed
from tests.adaptation.common import build, tiny_config

Function = Callable[[Tensor, Tensor], Tensor]


class Text(nn.Module):
    """Ids → a table's rows, through a function: the smallest model there is a graph of."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.w = nn.Parameter(torch.rand(8) + 0.5)
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        return self.function(self.table(ids), self.w)


def graph_of(function: Function) -> tuple[Graph, Text]:
    model = Text(function)
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    return to_graph(model, lambda module, ids: module(ids), ids), model


def test_a_graph_runs_in_float64_on_ids_or_on_given_values() -> None:
    graph, model = graph_of(lambda x, w: (x * w).tanh())
    ids = torch.randint(0, 11, (2, 5))
    [out] = graph.run([graph.output], {graph.input: ids})
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), model(ids))
    embedding = next(n for n in graph.nodes if n in graph.live and n is not graph.input)
    [out] = graph.run([graph.output], {embedding: torch.zeros(2, 5, 8, dtype=torch.float64)})
    assert not out.any()
    [out] = graph.run([graph.output], {graph.input: ids}, lambda n: graph.values[n].double() * 0)
    assert not out.any()


def test_a_graph_knows_what_depends_on_the_ids_and_on_which_parameters() -> None:
    graph, _ = graph_of(lambda x, w: x * (w * 2).exp())
    assert set(graph.names.values()) == {"table.weight", "w"}
    [exp] = [node for node in graph.nodes if "exp" in node.name]
    assert exp not in graph.live
    assert {graph.names[p] for p in graph.parameters_of[exp]} == {"w"}
    assert graph.output in graph.live
    assert graph.input in graph.ancestors[graph.output]
    assert exp not in graph.ancestors[graph.output]
    place = graph.place(graph.output)
    assert place is not None and place.file == __file__
    assert "exp()" in place.text


def test_what_is_computed_twice_is_one_node() -> None:
    graph, _ = graph_of(lambda x, w: torch.cat([(x * w).sin(), (x * w).sin()]))
    assert sum("sin" in node.name for node in graph.nodes) == 1


# Norms: which formula a piece computes, however it is written.


def sizes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean, and the variance over C."""
    return x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)


def written(x: Tensor, w: Tensor) -> Tensor:
    mean, var = sizes(x)
    return w * (x - mean) / torch.sqrt(var + 1e-5)


def eps_outside(x: Tensor, w: Tensor) -> Tensor:
    mean, var = sizes(x)
    return (x - mean) / (var.sqrt() + 1e-4) * w


def unbiased(x: Tensor, w: Tensor) -> Tensor:
    return w * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()


def annotated(x: Tensor, w: Tensor) -> Tensor:
    return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def rms(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


FORMULAS: list[tuple[Function, NormFormula | None]] = [
    (lambda x, w: F.layer_norm(x, (8,), w), NormFormula()),
    (lambda x, w: F.layer_norm(x, (8,), w, None, 1e-3), NormFormula(eps=1e-3)),
    (lambda x, w: F.layer_norm(x, (8,), eps=1e-12), NormFormula(eps=1e-12)),
    (written, NormFormula()),
    (unbiased, NormFormula(unbiased=True)),
    (eps_outside, NormFormula(eps=1e-4, eps_outside=True)),
    (annotated, NormFormula(unbiased=True, eps=1e-6, eps_outside=True)),
    (rms, NormFormula(centred=False, eps=1e-6)),
    (lambda x, w: F.rms_norm(x, (8,), w, 1e-5), NormFormula(centred=False)),
    (lambda x, w: x / (x.abs().mean(-1, keepdim=True) + 1e-5) * w, None),
]


@pytest.mark.parametrize(("function", "expected"), FORMULAS)
def test_a_norm_is_known_by_what_it_computes(
    function: Function, expected: NormFormula | None
) -> None:
    graph, _ = graph_of(function)
    start = next(n for n in graph.nodes if n in graph.live and n is not graph.input)
    [norm] = norms_between(graph, start, graph.output)
    found = formula_of(graph, norm)
    assert found == expected
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    if found is not None and norm.shift is None:
        w = 1 if norm.scale is None else graph.values[norm.scale].double()
        [own] = graph.run([norm.end], {start: x})
        torch.testing.assert_close(found(x) * w, own)


def test_two_norms_in_a_row_are_two() -> None:
    graph, _ = graph_of(lambda x, w: F.layer_norm(written(x, w), (8,)))
    start = next(n for n in graph.nodes if n in graph.live and n is not graph.input)
    assert len(norms_between(graph, start, graph.output)) == 2
    assert norms_between(graph, start, start) == []


# Linear maps: which element of a parameter joins which channels.


def map_of(function: Function) -> LinearMap | None:
    graph, _ = graph_of(function)
    start = next(n for n in graph.nodes if n in graph.live and n is not graph.input)
    source, target = token_view(graph, start), token_view(graph, graph.output)
    assert source is not None and target is not None
    return linear_map(graph, source, target)


def test_a_linear_map_tells_the_place_of_every_weight() -> None:
    class Projected(Text):
        def __init__(self) -> None:
            super().__init__(lambda x, w: x)
            self.a = nn.Parameter(torch.rand(6, 8))
            self.b = nn.Parameter(torch.rand(6))

        def forward(self, ids: Tensor) -> Tensor:
            return (self.table(ids) @ self.a.T + self.b) * 3

    model = Projected()
    ids = torch.zeros(2, 5, dtype=torch.long)
    graph = to_graph(model, lambda module, ids: module(ids), ids)
    start = next(n for n in graph.nodes if "embedding" in n.name)
    source, target = token_view(graph, start), token_view(graph, graph.output)
    assert source is not None and target is not None
    found = linear_map(graph, source, target)
    assert found is not None and found.factor == 3
    values = torch.cat([graph.values[node].reshape(-1) for node in found.parameters])
    assert torch.equal(values[found.weight - 1], model.a.T)
    assert torch.equal(values[found.bias - 1], model.b)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x.cumsum(1) * w.sum(),  # a token sees the one before
        lambda x, w: (x * w).square(),
        lambda x, w: x * 0 + w,
    ],
)
def test_what_is_no_linear_map_per_token(function: Function) -> None:
    assert map_of(function) is None


# Attention.


def causal(T: int) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


SCALE = 6**-0.5
ATTENTIONS = {
    ("nano", "erf_gelu"): (SCALE, -1, False, 0),
    ("mingpt", "no_attn_scale"): (1.0, -1, False, 0),
    ("lecture", "scale_by_d_model"): (24**-0.5, -1, False, 0),
    ("bmm_time_first", "scale_by_d_model"): (24**-0.5, -1, False, 0),
    ("scratch", "wrong_scale"): (1 / 6, -1, False, 0),
    ("mingpt", "softmax_dim"): (SCALE, -2, False, 0),
    ("renormalised", "mask_after_softmax"): (SCALE, -1, True, 0),
    ("book", "mask_off"): (SCALE, -1, False, 1),
    ("cached", "mask_off"): (SCALE, -1, False, 1),
    ("head_loop", "no_mask"): (SCALE, -1, False, 99),
}


@pytest.mark.parametrize(("info", "code"), ATTENTIONS, ids="-".join)
def test_attention_is_known_by_what_it_computes(
    tiny: Path, tmp_path: Path, style: str, code: str
) -> None:
    mutation = next(m for m in MUTATIONS if (m.style, m.code) == (style, code))
    model = build(MODELS[style], composed(MODELS[style], [mutation], tmp_path), tiny)
    ids = torch.randint(0, 97, (2, 13))
    graph = to_graph(model, default_forward(model, ids), ids)
    anatomy = dissect(graph)
    homes = find_mapping(anatomy, place_norms(anatomy), tiny_config(tiny))
    scale, axis, after, diagonal = ATTENTIONS[style, code]
    for attention in homes.attentions:
        found = attention_of(graph, attention)
        assert found is not None
        assert (found.axis, found.after) == (axis, after)
        assert abs(found.scale - scale) < 1e-6
        assert torch.equal(found.allowed, torch.ones(13, 13, dtype=torch.bool).tril(diagonal))


def test_the_formula_of_gpt2_is_that_of_scaled_dot_product_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 7, 6, dtype=torch.float64)
    probs = AttentionFormula(causal(7), SCALE).probabilities(q @ k.mT)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(probs @ v, expected)
