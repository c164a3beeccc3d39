"""Ids and settings in the forms that users pass are accepted or raise one clear error."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from compat import CompatError, ConfigError, GenerationError, generate, stream
from compat.layers import KVCache, as_ids
from tests.generation_common import PROMPT, each_dialect, ours

IDS = [[5, 17, 60], [0, 96, 3]]


def read_only() -> np.ndarray:
    array = np.array(IDS)
    array.flags.writeable = False
    return array


CONTAINERS: dict[str, Callable[[], Any]] = {
    "lists": lambda: IDS,
    "tuples": lambda: tuple(map(tuple, IDS)),
    "array": lambda: np.array(IDS),
    "uint16 array": lambda: np.array(IDS, dtype=np.uint16),
    "big-endian array": lambda: np.array(IDS, dtype=">i4"),
    "reversed array": lambda: np.array(IDS)[:, ::-1][:, ::-1],
    "read-only array": read_only,
    "list of arrays": lambda: [np.array(row) for row in IDS],
    "list of tensors": lambda: [torch.tensor(row) for row in IDS],
    "numbers of NumPy": lambda: [[np.int32(i) for i in row] for row in IDS],
    "int32 tensor": lambda: torch.tensor(IDS, dtype=torch.int32),
    "uint8 tensor": lambda: torch.tensor(IDS, dtype=torch.uint8),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_ids_are_accepted_in_any_container(tiny: Path, container: str) -> None:
    settings: Any = {"max_new_tokens": 5, "temperature": 0, "stop_ids": ()}
    expected = generate(ours(tiny), torch.tensor(IDS), **settings)
    value = CONTAINERS[container]()
    assert torch.equal(generate(ours(tiny), value, **settings).long(), expected)
    steps = torch.stack(list(stream(ours(tiny), value, **settings)), dim=1)
    assert torch.equal(steps, expected[:, 3:])


NOT_IDS: dict[str, tuple[Any, str]] = {
    "text": ("Hello", "input_ids is the text 'Hello', but must be token ids"),
    "bytes": (b"Hello", "input_ids is the text b'Hello'"),
    "texts": ([["Hello"]], "input_ids is a list, but must be integers"),
    "none": (None, "input_ids is a NoneType"),
    "ragged": ([[1, 2], [3]], "all rows of one length"),
    "flat": ([1, 2, 3], r"shape \[3\]"),
    "a number": (3, r"shape \[\]"),
    "nothing": ([], r"shape \[0\]"),
    "fractions": ([[1.5]], "float32"),
    "whole fractions": (np.array([[1.0]]), "float32"),
    "truth values": ([[True]], "bool"),
    "huge": ([[2**70]], "must be integers"),
    "beyond": (np.array([[97]]), "contains 97, but the vocabulary has ids 0 to 96"),
    "below": ([[-1]], "contains -1"),
    "objects": (np.array([[object()]]), "must be integers"),
    "a dictionary": ({"input_ids": IDS}, "input_ids is a dict"),
    "without values": (torch.zeros(1, 2, dtype=torch.long, device="meta"), "on meta"),
    "sparse": (torch.tensor([[1, 2]]).to_sparse(), "sparse"),
}


@pytest.mark.parametrize("kind", NOT_IDS)
def test_values_that_are_not_ids_raise_one_error(tiny: Path, kind: str) -> None:
    value, message = NOT_IDS[kind]
    with pytest.raises(GenerationError, match=message):
        generate(ours(tiny), value, max_new_tokens=1)
    with pytest.raises(ConfigError, match=message):
        as_ids(value, 97, ConfigError)


SETTINGS = [
    *[("temperature", value) for value in (None, "hot", math.nan, True, torch.tensor(0.5), [1])],
    *[("top_k", value) for value in (2.5, 2.0, "5", True, torch.tensor(3), math.nan, [5])],
    *[("top_p", value) for value in ("0.9", True, torch.tensor(0.9), [0.9])],
    *[("min_p", value) for value in ("0.1", False, torch.tensor(0.1))],
    *[("repetition_penalty", value) for value in ("1.2", True, 10**400, torch.tensor(1.2))],
    *[
        ("max_new_tokens", value)
        for value in (2.0, None, "2", True, math.nan, torch.tensor(2), [2], -1)
    ],
    *[("suppress_tokens", value) for value in (5, "5", [1.5], [True], [None])],
    *[("stop_ids", value) for value in (5, "stop", [1.5], ["."], [None])],
    *[("generator", value) for value in (0, "seed", torch.default_generator.initial_seed)],
    *[("attention_mask", value) for value in ("110", [[1, 1, 1]], 1)],
]


def repr_of(value: object) -> str:
    """Return a text that is the same in every process; `str` of a function contains its address."""
    return getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=repr_of)
def test_settings_of_a_wrong_type_raise_one_error(tiny: Path, name: str, value: Any) -> None:
    request = {"max_new_tokens": 2, name: value}
    with pytest.raises(GenerationError, match=rf"^{name} "):
        generate(ours(tiny), PROMPT, **request)


def test_numpy_numbers_are_accepted_as_settings(tiny: Path) -> None:
    def sample(**settings: Any) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return generate(ours(tiny), PROMPT, generator=generator, stop_ids=(), **settings)

    found = sample(max_new_tokens=np.int64(4), top_k=np.int32(5), temperature=np.float32(0.5))
    assert torch.equal(found, sample(max_new_tokens=4, top_k=5, temperature=0.5))


# The forward pass of the models


@each_dialect
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 33, dtype=torch.long), "33 ids exceed the 32 positions of the model"),
        (torch.tensor([[97]]), "contains 97, but the vocabulary has ids 0 to 96"),
        (torch.tensor([[-1]]), "contains -1"),
        (torch.tensor([[0.5]]), "float32"),
        (torch.tensor([1, 2]), r"shape \[2\]"),
        ([[1, 2]], "input_ids is a list, but must be a tensor"),
        ("Hello", "input_ids is a str"),
    ],
)
def test_ids_outside_the_vocabulary_raise_one_error(
    tiny: Path, dialect: str, ids: Any, message: str
) -> None:
    with pytest.raises(CompatError, match=message):
        ours(tiny, dialect)(ids)


@each_dialect
@torch.no_grad()
def test_too_many_ids_for_the_positions_raise_one_error_even_with_a_cache(
    tiny: Path, dialect: str
) -> None:
    model = ours(tiny, dialect)
    cache = [KVCache(32) for _ in range(3)]
    model(torch.zeros(1, 30, dtype=torch.long), cache)
    with pytest.raises(CompatError, match=r"3 ids after 30 cached ones exceed the 32"):
        model(torch.zeros(1, 3, dtype=torch.long), cache)
    assert model(torch.zeros(1, 2, dtype=torch.long), cache).shape == (1, 2, 97)
    larger = [KVCache(40) for _ in range(3)]
    model(torch.zeros(1, 30, dtype=torch.long), larger)
    with pytest.raises(CompatError, match="3 ids after 30 cached ones exceed the 32"):
        model(torch.zeros(1, 3, dtype=torch.long), larger)
    with pytest.raises(CompatError, match="1 ids after 4 cached ones exceed the 4"):
        short = [KVCache(4) for _ in range(3)]
        model(torch.zeros(1, 4, dtype=torch.long), short)
        model(torch.zeros(1, 1, dtype=torch.long), short)


@each_dialect
@torch.no_grad()
def test_the_checks_are_not_part_of_a_traced_graph(tiny: Path, dialect: str) -> None:
    model, ids = ours(tiny, dialect), torch.tensor(IDS)
    expected = model(ids)
    exported = torch.export.export(model, (ids,), strict=False).module()
    assert torch.equal(exported(ids), expected)
    assert torch.equal(make_fx(model)(ids)(ids), expected)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for T in (1, 2, 7, 32):
        longer = torch.arange(T)[None]
        assert torch.equal(compiled(longer), model(longer))


@torch.no_grad()
def test_a_graph_for_any_length_can_be_exported(tiny: Path) -> None:
    model = ours(tiny, "conv1d")
    lengths = torch.export.Dim("T", min=1, max=32)
    program = torch.export.export(
        model, (torch.tensor(IDS),), dynamic_shapes=({1: lengths},), strict=False
    )
    for T in (1, 2, 32):
        ids = torch.arange(2 * T).view(2, T)
        torch.testing.assert_close(program.module()(ids), model(ids))
