"""A recorded graph computes what the code computes, in spite of in-place operations and views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from compat.adaptation.tracing import record
from compat.adaptation.tracing.graph import DRAWS, Graph, kind
from compat.adaptation.tracing.record import Untraceable, to_graph

IDS = torch.tensor([[1, 5, 3, 9, 2], [4, 4, 8, 10, 6]])


class Model(nn.Module):
    """Looks up the rows of a table for the ids and passes them to a function."""

    def __init__(self, function: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("cache", torch.zeros(2, 6, 8))
        self.constant = torch.rand(8)
        self.transposed = self.w.data.T  # a view from before the call
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        return self.function(self, self.table(ids))


def written_head_by_head(model: Model, x: Tensor) -> Tensor:
    out = torch.empty(2, 5, 8)
    for h in range(2):
        out[:, :, 4 * h : 4 * h + 4] = x[..., 4 * h : 4 * h + 4] * (h + 1)
    return out


def written_token_by_token(model: Model, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(5):
        out[:, t] = x[:, : t + 1].sum(1)
    return out


def split_and_scaled(model: Model, x: Tensor) -> Tensor:
    q, k = x.chunk(2, dim=-1)
    q *= 3
    return torch.cat([k, q, x[..., 4:], x[..., :4]], -1)


def clamped_in_a_flat_view(model: Model, x: Tensor) -> Tensor:
    x.view(-1).clamp_(max=0.5)
    return x


def added_in_a_transposed_view(model: Model, x: Tensor) -> Tensor:
    x.transpose(1, 2).add_(torch.arange(5.0))
    return x


def added_in_a_strided_view(model: Model, x: Tensor) -> Tensor:
    x[..., ::2][:, 1:3] += 1
    return x


def filled_in_a_diagonal_view(model: Model, x: Tensor) -> Tensor:
    scores = x @ x.mT
    scores.diagonal(dim1=1, dim2=2).fill_(7)
    return scores


def a_view_read_after_a_change(model: Model, x: Tensor) -> Tensor:
    first = x[:, 0]
    x += 1
    return first


def a_copy_made_before_a_change(model: Model, x: Tensor) -> Tensor:
    before = x.clone()
    x.zero_()
    return before + x


def a_cache(model: Model, x: Tensor) -> Tensor:
    model.cache[:, :5] = x
    model.cache[:, 5:] = x[:, :1]
    return model.cache[:, 1:6]


def a_mask(model: Model, x: Tensor) -> Tensor:
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask |= torch.ones(5, 5, dtype=torch.bool).triu_(1)
    return (x @ x.mT).masked_fill_(mask, -torch.inf).softmax(-1)


def with_an_out_argument(model: Model, x: Tensor) -> Tensor:
    out = torch.empty(2, 5, 8)
    torch.matmul(x, model.w, out=out)
    return out


def reshaped_in_place(model: Model, x: Tensor) -> Tensor:
    return x.clone().unsqueeze_(1).transpose_(1, 2).add_(1)


def assigned_by_index(model: Model, x: Tensor) -> Tensor:
    x[torch.tensor([0, 1]), torch.tensor([3, 2])] = model.constant
    return x


def through_numpy(model: Model, x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy()) * 2


def a_view_made_before_the_call(model: Model, x: Tensor) -> Tensor:
    return x @ model.transposed + x @ model.w.data


def mapped_over_tokens(model: Model, x: Tensor) -> Tensor:
    return torch.vmap(torch.vmap(lambda token: model.w @ token))(x)


def in_bfloat16(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ model.w).float()


def without_autocast(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        return x @ model.w


def checkpointed(model: Model, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    found: Tensor = checkpoint(lambda x: (x @ model.w).tanh(), x, use_reentrant=False)
    return found


def dropout_and_activations_in_place(model: Model, x: Tensor) -> Tensor:
    x = nn.functional.dropout(x @ model.w, 0.5, training=False, inplace=True)
    return nn.functional.leaky_relu(nn.functional.silu(x, inplace=True), 0.1, inplace=True)


def a_constant_written_by_element(model: Model, x: Tensor) -> Tensor:
    """It is read by a view from before all writes, and added to before the last of them."""
    P = torch.zeros(5, 8)
    row, early = P[0], x
    for t in range(5):
        for i in range(8):
            P[t, i] = torch.sin(torch.tensor(t + i / 8))
            early = early + P if (t, i) == (4, 3) else early
    return early * row + P


FUNCTIONS = [
    written_head_by_head, written_token_by_token, split_and_scaled, clamped_in_a_flat_view,
    added_in_a_transposed_view, added_in_a_strided_view, filled_in_a_diagonal_view,
    a_view_read_after_a_change, a_copy_made_before_a_change, a_cache, a_mask, with_an_out_argument,
    reshaped_in_place, assigned_by_index, through_numpy, a_view_made_before_the_call,
    mapped_over_tokens, in_bfloat16, without_autocast, checkpointed,
    dropout_and_activations_in_place, a_constant_written_by_element,
]  # fmt: skip


def recorded(function: Callable[[Model, Tensor], Tensor]) -> tuple[Graph, Model]:
    torch.manual_seed(0)
    model = Model(function)
    return to_graph(model, lambda module, ids: module(ids), IDS), model


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_recorded_graph_computes_what_the_code_computes(
    function: Callable[[Model, Tensor], Tensor],
) -> None:
    graph, model = recorded(function)
    for ids in (IDS, IDS.roll(1, 1), IDS.flip(0)):
        with torch.no_grad():
            expected = model(ids)
        [found] = graph.run([graph.output], {graph.input: ids}, double=False)
        torch.testing.assert_close(found, expected)
    other = IDS.clone()
    other[0, 0] = 0  # shows that the comparison can fail
    [found] = graph.run([graph.output], {graph.input: other}, double=False)
    with torch.no_grad():
        assert not torch.equal(found, model(IDS))


def test_a_graph_contains_no_in_place_operations() -> None:
    for function in FUNCTIONS:
        graph, _ = recorded(function)
        targets = [node.target for node in graph.nodes if node.op == "call_function"]
        assert not any(
            target._schema.is_mutable for target in targets if hasattr(target, "_schema")
        )


def test_unchanged_parts_do_not_depend_on_a_change() -> None:
    def fused(model: Model, x: Tensor) -> Tensor:
        q, k = (x @ model.w).split(4, dim=-1)
        q *= 3
        return q @ k.mT

    graph, _ = recorded(fused)
    assert not any("scatter" in kind(node) or kind(node) == "index_put" for node in graph.nodes)


def test_composite_operations_are_recorded_as_a_whole() -> None:
    graph, _ = recorded(lambda model, x: nn.functional.layer_norm(x @ model.w, (8,)).softmax(-1))
    assert [kind(node) for node in graph.nodes if kind(node)] == [
        "embedding", "matmul", "layer_norm", "softmax",
    ]  # fmt: skip


def test_operations_record_their_lines_and_modules() -> None:
    graph, _ = recorded(lambda model, x: (x @ model.w).relu())
    [relu] = [node for node in graph.nodes if kind(node) == "relu"]
    assert [place.function for place in graph.places(relu)] == [
        "recorded.<locals>.<lambda>",
        "Model.forward",
        "test_operations_record_their_lines_and_modules.<locals>.<lambda>",
    ]
    assert ".relu()" in graph.places(relu)[-1].text
    [embedding] = [node for node in graph.nodes if kind(node) == "embedding"]
    assert embedding.meta["modules"] == ("table",)


@pytest.mark.parametrize(
    "dropping",
    [
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.9)) / 0.9,
        lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.9).div_(0.9),
        lambda x: x * (torch.rand_like(x) > 0.1).float() / 0.9,
        lambda x: x * (1 - torch.rand(x.shape).lt(0.1).type_as(x)),
        lambda x: x.masked_fill(torch.rand(x.shape[:2]).lt(0.1)[..., None], 0.0),
        lambda x: torch.where(torch.rand_like(x) < 0.1, 0.0, x),
        lambda x: x / 0.9 * torch.floor(0.9 + torch.rand(len(x), 1, 1)),
    ],
)
def test_a_random_mask_is_dropout(dropping: Callable[[Tensor], Tensor]) -> None:
    graph, _ = recorded(lambda model, x: dropping(x))
    assert len(graph.dropouts) == 1


@pytest.mark.parametrize(
    "noisy",
    [
        lambda x: x + torch.rand_like(x) - torch.rand_like(x),
        lambda x: x * (1 + 0.1 * torch.rand(x.shape)) * torch.rand(len(x), 1, 1),
        lambda x: x - torch.log(-torch.log(torch.rand_like(x))) + torch.rand(x.shape),
        lambda x: x + torch.bernoulli(torch.full_like(x, 0.1)) + (torch.rand_like(x) > 0.5),
    ],
)
def test_other_random_numbers_are_not_dropout(noisy: Callable[[Tensor], Tensor]) -> None:
    graph, _ = recorded(lambda model, x: noisy(x))
    assert not graph.dropouts
    assert sum(kind(node) in DRAWS for node in graph.nodes) == 2  # the two are not merged


def test_the_error_for_values_that_leave_torch_names_the_line() -> None:
    def leaving(model: Model, x: Tensor) -> Tensor:
        return torch.tensor(x.tolist())

    with pytest.raises(Untraceable, match=r"test_record\.py:\d+ return torch.tensor\(x.tolist"):
        recorded(leaving)


def test_a_loop_that_writes_to_too_many_elements_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_element(model: Model, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(8):
            out[:, :, i] = x[:, :, i] * model.constant[i]
        return out

    recorded(by_element)
    monkeypatch.setattr(record, "MOST_VIEWS", 8)
    pattern = r"more than 8 views at .*test_record\.py:\d+ out\[:, :, i\] = "
    with pytest.raises(Untraceable, match=pattern):
        recorded(by_element)


def test_a_constant_that_a_loop_writes_by_element_is_recorded_by_its_value() -> None:
    graph, _ = recorded(a_constant_written_by_element)
    assert len(graph.nodes) < 150  # with every write, it has 254


def test_gradients_and_stored_tensors_work_after_recording() -> None:
    def keeping(model: Model, x: Tensor) -> Tensor:
        model.constant = torch.ones(8) * 2
        return x * model.constant

    _, model = recorded(keeping)
    model.function = lambda model, x: x * model.constant
    model(IDS).sum().backward()
    assert model.table.weight.grad is not None
