"""Graphs of small functions: dependencies between nodes, and measured formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compat.adaptation.anatomy.dissect import dissect
from compat.adaptation.anatomy.norms import NormFormula, formula_of, norms_between, place_norms
from compat.adaptation.diagnosis.attention_formula import AttentionFormula, attention_of
from compat.adaptation.mapping.assignments import find_assignments
from compat.adaptation.mapping.linear_maps import LinearMap, linear_map, token_view
from compat.adaptation.tracing.calling import find_signature
from compat.adaptation.tracing.graph import Graph, ShapeChanged
from compat.adaptation.tracing.record import to_graph
from compat.adaptation.tracing.rewrites import drop_neutral_operands
from tests.adaptation.catalogue import MODELS, MUTATIONS, composed
from tests.adaptation.common import build, tiny_config

Function = Callable[[Tensor, Tensor], Tensor]


class Text(nn.Module):
    """The smallest traceable model: token embeddings that are passed to a function."""

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


def test_a_graph_runs_in_float64_from_ids_or_from_known_values() -> None:
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


def test_rows_are_counted_before_their_order_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tokens that an expert gets depends on the parameters."""
    graph, _ = graph_of(lambda x, w: (x.transpose(0, 1).reshape(10, 8) * w).view(5, 2, 8).mT)
    assert graph.time_first
    graph.invalidate()
    run, calls = Graph.run, list[int]()

    def one_row_less(self: Graph, *args: object, **kwargs: object) -> list[Tensor]:
        calls.append(1)
        found = run(self, *args, **kwargs)  # type: ignore[arg-type]
        return [x[len(calls) - 1 :] for x in found]

    monkeypatch.setattr(Graph, "run", one_row_less)
    assert graph.time_first == set()


def test_a_graph_records_dependence_on_ids_and_parameters() -> None:
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


class Routed(nn.Module):
    """Adds a zero term to the two rows that the ids and their positions select."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).view(-1, 4)
        rows = (ids * torch.arange(ids.shape[1]) > 5).flatten().nonzero()[:, 0]
        chosen: Tensor = x[rows]
        term = 0 * (torch.ones(2, 2) @ chosen)
        return x.index_add(0, rows, chosen + term).view(*ids.shape, 4)


@pytest.mark.parametrize("ids, dropped", [([1, 2, 5, 6], False), ([6, 6, 6], True)])
def test_zero_terms_are_dropped_only_if_the_graph_runs_with_other_ids(
    ids: list[int], dropped: bool
) -> None:
    example = torch.tensor([ids])
    graph = to_graph(Routed(), lambda model, x: model(x), example)
    assert drop_neutral_operands(graph) is dropped


def test_equal_operations_are_merged() -> None:
    graph, _ = graph_of(lambda x, w: torch.cat([(x * w).sin(), (x * w).sin()]))
    assert sum("sin" in node.name for node in graph.nodes) == 1


# Norms: the formula is found for every way of writing the norm


def sizes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance over C."""
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
    (lambda x, w: F.layer_norm(x, (8,), w, None, 50257), NormFormula(eps=50257)),
    (written, NormFormula()),
    (unbiased, NormFormula(unbiased=True)),
    (eps_outside, NormFormula(eps=1e-4, eps_outside=True)),
    (annotated, NormFormula(unbiased=True, eps=1e-6, eps_outside=True)),
    (rms, NormFormula(centred=False, eps=1e-6)),
    (lambda x, w: F.rms_norm(x, (8,), w, 1e-5), NormFormula(centred=False)),
    (lambda x, w: x / (x.abs().mean(-1, keepdim=True) + 1e-5) * w, None),
]


@pytest.mark.parametrize(("function", "expected"), FORMULAS)
def test_the_formula_of_a_norm_is_measured(
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


def test_two_norms_in_a_row_are_separate() -> None:
    graph, _ = graph_of(lambda x, w: F.layer_norm(written(x, w), (8,)))
    start = next(n for n in graph.nodes if n in graph.live and n is not graph.input)
    assert len(norms_between(graph, start, graph.output)) == 2
    assert norms_between(graph, start, start) == []


# Linear maps: the element of a parameter that connects two channels


def map_of(function: Function) -> LinearMap | None:
    graph, _ = graph_of(function)
    start = next(n for n in graph.nodes if n in graph.live and n is not graph.input)
    source, target = token_view(graph, start), token_view(graph, graph.output)
    assert source is not None and target is not None
    return linear_map(graph, source, target)


def test_a_linear_map_contains_the_index_of_every_weight() -> None:
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
        lambda x, w: x.cumsum(1) * w.sum(),  # a token depends on the previous ones
        lambda x, w: (x * w).square(),
        lambda x, w: x * 0 + w,
    ],
)
def test_functions_that_are_not_linear_for_each_token_have_no_linear_map(
    function: Function,
) -> None:
    assert map_of(function) is None


# Attention


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


@pytest.mark.parametrize(("style", "code"), ATTENTIONS, ids="-".join)
def test_the_formula_of_attention_is_measured(
    tiny: Path, tmp_path: Path, style: str, code: str
) -> None:
    mutation = next(m for m in MUTATIONS if (m.style, m.code) == (style, code))
    model = build(MODELS[style], composed(MODELS[style], [mutation], tmp_path), tiny)
    ids = torch.randint(0, 97, (2, 13))
    graph = to_graph(model, find_signature(model, ids), ids)
    anatomy = dissect(graph)
    assignments = find_assignments(anatomy, place_norms(anatomy), tiny_config(tiny))
    scale, axis, after, diagonal = ATTENTIONS[style, code]
    for attention in assignments.attentions:
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


def test_a_shape_that_depends_on_values_is_named_if_an_operation_fails_with_others() -> None:
    def routed(x: Tensor, w: Tensor) -> Tensor:
        chosen = x[x[..., 0] > 0]
        return (chosen * torch.ones(len(chosen), 1)).sum() + x * w

    graph, model = graph_of(routed)
    [out] = graph.run([graph.output], {}, double=False)
    torch.testing.assert_close(out, model(graph.example))
    with pytest.raises(ShapeChanged, match=r"at .*test_graph\.py:\d+$"):
        graph.run([graph.output], {graph.input: graph.example[:, :1].expand(2, 5)})
