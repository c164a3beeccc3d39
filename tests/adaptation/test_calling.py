"""Which models are accepted, how they are called, and where their output contains the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat import AdaptError
from compat.adaptation.tracing.calling import check_model, find_signature
from compat.parity.outputs import find_logits

IDS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
LOGITS = torch.randn(2, 5, 11)
HIDDEN = torch.randn(2, 5, 4)


@dataclass
class Output:
    hidden: Tensor
    logits: Tensor
    loss: Tensor | None = None


class PydanticOutput:
    """Has what the models of pydantic have: their fields, and attributes with these names."""

    model_fields = ("loss", "logprobs")

    def __init__(self) -> None:
        self.loss, self.logprobs = None, LOGITS


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        PydanticOutput(),
        (LOGITS, None),
        (None, LOGITS),
        [LOGITS, [HIDDEN]],
        (HIDDEN, LOGITS),
        (IDS, LOGITS),
        {"logits": LOGITS, "hidden": HIDDEN},
        {"hidden": HIDDEN, "out": {"logits": LOGITS}},
        Output(HIDDEN, LOGITS),
        SimpleNamespace(logits=LOGITS),
        LOGITS.view(10, 11),
        (torch.tensor(1.0), LOGITS.view(10, 11)),
        (LOGITS.view(10, 11), [(HIDDEN, HIDDEN)]),
        (LOGITS, HIDDEN[:, -1]),
        LOGITS[None],
        (LOGITS[:, None, :, None],),
        LOGITS.transpose(0, 1),
    ],
    ids=lambda output: type(output).__name__,
)
def test_logits_are_found_by_their_shape(output: Any) -> None:
    assert torch.equal(find_logits(output, IDS), LOGITS)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("with_hidden", [False, True])
def test_logits_that_are_not_returned_are_those_of_the_loss(
    with_hidden: bool, shifted: bool, by_hand: bool
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            x = self.table(ids)
            logits = self.head(x)
            if shifted:
                logits, labels = logits[:, :-1], labels[:, 1:]
            if by_hand:
                loss = -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
            else:
                loss = F.cross_entropy(logits.reshape(-1, 11), labels.reshape(-1))
            return (loss, x) if with_hidden else loss

    model = Model()
    signature = find_signature(model, IDS)
    assert signature.of_loss
    for ids in (IDS, IDS[:, :1]):
        torch.testing.assert_close(signature(model, ids), model.head(model.table(ids)))


@pytest.mark.parametrize(
    "output",
    [
        LOGITS[:, -1],
        LOGITS[:, -1:],
        (None, LOGITS[:, -1]),
        (LOGITS[:, -1:], [(HIDDEN, HIDDEN)]),  # the keys and values of a KV cache
    ],
)
def test_logits_of_the_last_position_are_accepted_only_on_request(output: Any) -> None:
    assert torch.equal(find_logits(output, IDS, last=True), LOGITS[:, -1:])
    with pytest.raises(AdaptError):
        find_logits(output, IDS)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "returned no tensor for ids [2, 5], but must return [2, 5, V]"),
        (torch.zeros(5, 3, 11), "returned [5, 3, 11] for ids [2, 5]"),
        (torch.zeros(1, 5, 2, 11), "returned [1, 5, 2, 11] for ids [2, 5]"),
        (IDS, "returned [2, 5] for ids"),
        ("logits", "no tensor"),
    ],
)
def test_an_output_without_logits_raises_an_error(output: Any, words: str) -> None:
    with pytest.raises(AdaptError) as caught:
        find_logits(output, IDS)
    assert words in str(caught.value)


class Plain(nn.Module):
    """A model with a table of logits; subclasses define `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)
        self.calls: list[dict[str, Any]] = []

    def seen(self, **arguments: Any) -> None:
        self.calls.append(arguments)


class Ids(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Targets(Plain):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.table(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Mask(Plain):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.seen(mask=mask)
        return self.table(ids) + mask.float().sum()


class MaskOfTokens(Plain):
    def forward(self, ids: Tensor, input_mask: Tensor) -> Tensor:
        self.seen(input_mask=input_mask)
        return self.table(ids) * input_mask.view(*ids.shape, 1)


class OptionalMask(Plain):
    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        self.seen(mask=mask)
        return self.table(ids)


class Positions(Plain):
    def forward(self, ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        self.seen(positions=position_ids)
        return {"logits": self.table(ids) + 0 * position_ids[:, None]}


class Decoder(Plain):
    def forward(self, source: Tensor, target_ids: Tensor, padding_mask: Tensor) -> Tensor:
        self.seen(target=target_ids, mask=padding_mask)
        return self.table(source) + 0 * self.table(target_ids) * padding_mask[..., None]


class PaddingId(Plain):
    def forward(self, ids: Tensor, pad_idx: int) -> Tensor:
        return self.table(ids).masked_fill((ids == pad_idx)[..., None], 0)


class Lengths(Plain):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        inside = torch.arange(ids.shape[1]) < lengths[:, None]
        return self.table(ids) * inside[..., None]


class State(Plain):
    def initial_state(self, batch_size: int) -> list[Tensor]:
        return [torch.zeros(batch_size, 0, 11)]

    def forward(self, ids: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        seen = state[0].shape[1]  # of a cache, which grows
        state[0] = torch.cat([state[0], self.table(ids[:, seen:])], 1)
        return state[0], state


class Condition(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.of_condition = nn.Linear(11, 11), nn.Linear(3, 11, bias=False)

    def forward(self, ids: Tensor, properties: Tensor) -> Tensor:
        return self.table(ids) + self.of_condition(properties.float())[:, None]


class Batch(Plain):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.table(batch["input_ids"]) * batch["attention_mask"][..., None]


class Named(Plain):
    def forward(self, *, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


class DeviceFirst(Plain):
    def forward(self, device: str, index: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.table(index) * torch.ones(index.shape[1], 1, device=device)


class VectorOfEachToken(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 11, bias=False)

    def forward(self, ids: Tensor, ratings: Tensor) -> Tensor:
        assert ratings.shape == (*ids.shape, 3)
        return self.table(ids) + self.project(ratings)


class Flags(Plain):
    def forward(self, ids: Tensor, training: bool, causal: bool, temperature: float) -> Tensor:
        assert training is False and causal is True
        return self.table(ids) / temperature


class MaskOfHeads(Plain):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert attention_mask.ndim == 4
        return self.table(ids)


class Pair(Plain):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, _ = batch
        return self.table(ids)


class Tokens(Plain):
    def forward(self, batch: Any) -> Tensor:
        return self.table(batch.tokens) * batch["mask"][..., None]


class Last(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)[:, -1]


@pytest.mark.parametrize(
    "cls",
    [
        Ids,
        Targets,
        Mask,
        MaskOfTokens,
        OptionalMask,
        Positions,
        Decoder,
        PaddingId,
        Lengths,
        State,
        Condition,
        Batch,
        Pair,
        Tokens,
        Named,
        DeviceFirst,
        VectorOfEachToken,
        Flags,
        MaskOfHeads,
    ],
)
def test_required_arguments_are_recognized_by_their_names(cls: Callable[[], Plain]) -> None:
    model = cls().train()
    signature = find_signature(model, IDS)
    assert signature.targets is (cls is Targets) and not signature.last
    assert (signature.batch is not None) is (cls in (Batch, Pair, Tokens))
    logits = signature(model, IDS)
    if cls is MaskOfTokens:
        assert torch.equal(model.calls[-1]["input_mask"], torch.ones_like(IDS))
    if cls is Mask:
        assert torch.equal(model.calls[-1]["mask"], torch.ones(5, 5, dtype=torch.bool).tril())
        logits = logits - 15
    if cls is OptionalMask:
        assert model.calls[-1]["mask"] is None
    if cls is Positions:
        assert model.calls[-1]["positions"].tolist() == [0, 1, 2, 3, 4]
    if cls is Decoder:
        assert torch.equal(model.calls[-1]["target"], IDS)
        assert torch.equal(model.calls[-1]["mask"], torch.ones_like(IDS))
    torch.testing.assert_close(logits, model.table(IDS))
    assert model.training


def test_logits_of_a_condition_before_the_tokens_are_left_out() -> None:
    class Conditioned(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(31, self.table.embedding_dim)

        def forward(self, ids: Tensor, condition: Tensor) -> Tensor:
            return torch.cat([self.project(condition)[:, None], self.table(ids)], dim=1)

    model = Conditioned()
    signature = find_signature(model, IDS)
    assert signature.prefix == 1
    assert torch.equal(signature(model, IDS), model.table(IDS))


def test_a_model_that_returns_only_the_last_position_is_accepted() -> None:
    model = Last()
    signature = find_signature(model, IDS)
    assert signature.last
    assert torch.equal(signature(model, IDS), model.table(IDS)[:, -1:])


class LogitsOnRequest(Plain):
    """A model that returns logits only on request."""

    def forward(self, ids: Tensor, targets: Tensor, return_logits: bool | None = None) -> Any:
        return (self.table(ids), 0.0) if return_logits else (None, 0.0)


def test_logits_are_requested_from_the_model() -> None:
    model = LogitsOnRequest()
    assert torch.equal(find_signature(model, IDS)(model, IDS), model.table(IDS))


class FailingLoss(Plain):
    """A model whose targets are required, and whose loss cannot be computed."""

    def forward(self, ids: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if targets is not None:
            raise NameError("name 'batch_size' is not defined")
        return self.table(ids), None


def test_required_targets_may_be_none() -> None:
    model = FailingLoss()
    assert torch.equal(find_signature(model, IDS)(model, IDS), model.table(IDS))


class Raising(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        raise ValueError("the moon is in the wrong place")


class MissingLibrary(Plain):
    """Some arguments cause an error before a missing library is imported."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        assert mask is not None
        import no_such_library  # type: ignore[import-not-found]

        return self.table(ids) + no_such_library.zero


class ScalarOutput(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).mean()


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Raising, ["Raising returns no logits", "the moon is in the wrong place", __file__]),
        (
            MissingLibrary,
            ["MissingLibrary raises an exception", "pip install no_such_library", __file__],
        ),
        (ScalarOutput, ["model(ids)", "the model returned []", "forward=lambda model, ids"]),
    ],
)
def test_a_model_without_logits_raises_an_error(cls: Callable[[], Plain], words: list[str]) -> None:
    model = cls().train()
    with pytest.raises(AdaptError) as caught:
        find_signature(model, IDS)
    for text in words:
        assert text in str(caught.value)
    assert model.training


# Accepted models


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


def quantized() -> nn.Module:
    model = nn.Linear(2, 2)
    weight = torch.ones(2, 2, dtype=torch.int8)
    model.weight = nn.Parameter(weight, requires_grad=False)
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(2), Model())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda ids: ids, ["the function", "nn.Module"]),
        (torch.nn.functional.gelu, ["the function gelu"]),
        (Model, ["the class Model", "Model()"]),
        (Model().state_dict(), ["OrderedDict of 2 entries", "Load it into its model"]),
        ({"weight": torch.ones(2)}, ["dict of 1 entries"]),
        ("gpt2", ["a value of type str"]),
        (None, ["a value of type NoneType"]),
        (nn.GELU(), ["GELU has no parameters", "nn.ModuleList"]),
        (quantized(), ["torch.int8", "without quantization"]),
        (Model().to("meta"), ["on meta", "CPU"]),
        (lazy(), ["lazy modules"]),
    ],
)
def test_check_model_refuses_other_values(value: Any, words: list[str]) -> None:
    with pytest.raises(AdaptError) as caught:
        check_model(value)
    assert all(word in str(caught.value) for word in words)


def test_check_model_accepts_models() -> None:
    check_model(Model())
    check_model(Model().half())


def test_a_flag_that_requests_logits_is_set() -> None:
    class Model(nn.Module):
        def forward(self, ids: Tensor, get_logits: bool = False) -> dict[str, Tensor | None]:
            return {"logits": LOGITS[:, : ids.shape[1]] if get_logits else None}

    model = Model()
    assert torch.equal(find_signature(model, IDS)(model, IDS), LOGITS)


def test_optional_caches_that_are_read_are_passed() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Identity() for _ in range(3))

        def forward(self, ids: Tensor, kv_caches: list[Any] | None = None) -> Tensor:
            assert kv_caches is not None and kv_caches == [None, None, None]
            return LOGITS

    assert torch.equal(find_signature(Cached(), IDS)(Cached(), IDS), LOGITS)


@pytest.mark.parametrize("default", [None, True])
def test_a_model_whose_cache_cannot_be_built_is_called_without_one(default: bool | None) -> None:
    class Cached(nn.Module):
        def forward(self, ids: Tensor, use_cache: bool | None = default) -> Tensor:
            if use_cache is not False:  # None stands for the config's value
                raise AttributeError("DynamicCache has no from_legacy_cache")
            return LOGITS

    signature = find_signature(Cached(), IDS)
    assert [name for name, _ in signature.arguments] == ["use_cache"]
    assert torch.equal(signature(Cached(), IDS), LOGITS)


@pytest.mark.parametrize("needed", [True, False])
def test_an_optional_padding_mask_is_passed_only_if_it_is_read(needed: bool) -> None:
    class Masked(nn.Module):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            assert (attention_mask is not None) is needed
            return LOGITS * (1 if attention_mask is None else attention_mask[..., None])

    signature = find_signature(Masked(), IDS)
    assert [name for name, _ in signature.arguments] == ["attention_mask"] * needed
    assert torch.equal(signature(Masked(), IDS), LOGITS)


@pytest.mark.parametrize("marks_padding", [True, False])
@pytest.mark.parametrize("required", [True, False])
def test_a_mask_may_mark_tokens_or_padding(marks_padding: bool, required: bool) -> None:
    """Instead of attention, the model computes the mean of the earlier tokens that are visible."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 11)

        def seen(self, ids: Tensor, padding_mask: Tensor | None) -> Tensor:
            assert padding_mask is not None
            T = ids.shape[1]
            visible = (padding_mask == (0 if marks_padding else 1))[:, None] & torch.ones(
                T, T
            ).bool()
            scores = torch.zeros(len(ids), T, T).masked_fill(~(visible.tril()), -1e9)
            return scores.softmax(-1) @ self.table(ids)

    class Required(Masked):
        def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
            return self.seen(ids, padding_mask)

    class Optional(Masked):
        def forward(self, ids: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            return self.seen(ids, padding_mask)

    model = Required() if required else Optional()
    signature = find_signature(model, IDS)
    mask = torch.full_like(IDS, 0 if marks_padding else 1)
    torch.testing.assert_close(signature(model, IDS), model(IDS, mask))


def test_a_required_padding_mask_may_have_to_be_boolean() -> None:
    class Masked(nn.Module):
        def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
            hidden = ~padding_mask[:, :, None]
            return LOGITS.masked_fill(hidden, -1e9)

    assert torch.equal(find_signature(Masked(), IDS)(Masked(), IDS), LOGITS)


def test_caches_are_not_passed_to_a_model_that_does_not_need_them() -> None:
    class Cached(nn.Module):
        def forward(self, ids: Tensor, kv_caches: list[Any] | None = None) -> Tensor:
            assert kv_caches is None
            return LOGITS

    assert find_signature(Cached(), IDS).arguments == ()


@pytest.mark.parametrize(
    "kind",
    ["1 - mask", "~mask", "text", "flag", "padding", "already causal", "wrong", "reversed"],
)
def test_an_optional_mask_is_passed_if_tokens_attend_to_later_ones_without_it(kind: str) -> None:
    """Instead of attention, the model computes the mean of the visible tokens."""
    seen = torch.ones(5, 5).tril()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 11)
            self.calls = 0

        def mean(self, ids: Tensor, seen: Tensor) -> Tensor:
            self.calls += 1
            return seen.float() @ self.table(ids)

    class Subtracted(Model):
        def forward(self, ids: Tensor, tgt_mask: Tensor | None = None) -> Tensor:
            hidden = torch.zeros(5, 5) if tgt_mask is None else (1 - tgt_mask)
            return self.mean(ids, hidden == 0)

    class Inverted(Model):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.mean(ids, torch.ones(5, 5) if mask is None else ~mask)

    class Text(Model):
        def forward(self, ids: Tensor, mask: str | None = None) -> Tensor:
            return self.mean(ids, seen if mask == "causal" else torch.ones(5, 5))

    class Flag(Model):
        def forward(self, ids: Tensor, is_causal: bool = False) -> Tensor:
            return self.mean(ids, seen if is_causal else torch.ones(5, 5))

    class Padding(Model):
        def forward(self, ids: Tensor, pad_mask: Tensor | None = None) -> Tensor:
            return self.mean(ids, torch.ones(5, 5) if pad_mask is None else pad_mask)

    class Causal(Model):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.mean(ids, seen if mask is None else mask)

    class Wrong(Model):
        """By its own mask, each token attends to one later token."""

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.mean(ids, torch.ones(5, 5).tril(1) if mask is None else mask)

    class Reversed(Model):
        """By its own mask, each token attends only to itself and later ones."""

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.mean(ids, torch.ones(5, 5).triu() if mask is None else mask)

    cls, mask = {
        "wrong": (Wrong, ""),
        "reversed": (Reversed, ""),
        "1 - mask": (Subtracted, "tgt_mask=torch.ones(T, T).tril()"),
        "~mask": (Inverted, "mask=torch.ones(T, T, dtype=torch.bool).triu(1)"),
        "text": (Text, "mask='causal'"),
        "flag": (Flag, "is_causal=True"),
        "padding": (Padding, ""),
        "already causal": (Causal, ""),
    }[kind]
    model = cls()
    signature = find_signature(model, IDS)
    assert signature.mask == mask
    if kind == "already causal":  # the model is called once, and once with another last token
        assert model.calls == 3
    own = {"padding": torch.ones(5, 5), "wrong": torch.ones(5, 5).tril(1)}
    expected = {**own, "reversed": torch.ones(5, 5).triu()}.get(kind, seen)
    torch.testing.assert_close(signature(model, IDS), model.mean(IDS, expected))


@pytest.mark.parametrize("width", [5, 8])
def test_a_mask_of_fixed_length_is_refused_by_a_fused_kernel(width: int) -> None:
    """The other kernels do not read the mask if `is_causal=True` is also passed."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            self.tok, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, ids: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(width)
            return self.head(self.encoder(self.tok(ids), mask=mask, is_causal=True))

    if width == IDS.shape[1]:
        assert find_signature(Encoder(), IDS)
    else:
        with pytest.raises(AdaptError, match="returns no logits"):
            find_signature(Encoder(), IDS)
