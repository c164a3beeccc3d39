"""Arguments of a wrong type raise a CompatError that states the found and the expected value."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compat import (
    CheckpointError,
    CompatError,
    ConfigError,
    NameMap,
    NameMapError,
    Row,
    Same,
    TokenizerError,
    Transpose,
    inspect_checkpoint,
    load_block,
    load_into,
    load_pretrained,
    load_tokenizer,
    save_pretrained,
    to_hf_state_dict,
)
from compat.checkpoint import open_checkpoint
from compat.config import as_dtype
from compat.dialects import linear
from tests.own_gpt2 import MyGPT2, my_map

LAYER = Row("ln_f.weight", ("end.weight",), Same())


def check_refused(error: type[CompatError], message: str, *calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(error, match=message):
            call()


# Data types


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64"])
def test_a_dtype_may_be_a_string(tiny: Path, name: str) -> None:
    wanted = getattr(torch, name)
    for dtype in (name, f"torch.{name}", wanted):
        assert as_dtype(dtype) is wanted
    assert {p.dtype for p in load_pretrained(tiny, dtype=name).parameters()} == {wanted}
    assert {p.dtype for p in load_block(tiny, 0, dtype=name).parameters()} == {wanted}


def test_as_dtype_returns_none_for_none() -> None:
    assert as_dtype(None) is None


@pytest.mark.parametrize(
    "dtype",
    [
        *("fp8", "", "int8", "float", "cpu", 16, 0, True, 32.0, float, np.float32, b"float32"),
        *(["float32"], {}, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn),
    ],
)
def test_other_dtypes_are_refused_and_the_supported_ones_are_listed(tiny: Path, dtype: Any) -> None:
    check_refused(
        ConfigError,
        "^dtype is .*float32, float16, bfloat16 or float64",
        lambda: as_dtype(dtype),
        lambda: load_pretrained(tiny, dtype=dtype),
        lambda: load_block(tiny, 0, dtype=dtype),
    )


# Name maps


@pytest.mark.parametrize(
    ("name_map", "found"),
    [
        ({"wte.weight": "tokens.weight"}, "dict"),
        (my_map().rows, "tuple"),
        (list(my_map().rows), "list"),
        (LAYER, "Row"),
        ("linear", "str"),
        (..., "ellipsis"),
        (NameMap, "class NameMap"),
        (7, "int"),
    ],
)
def test_an_argument_that_is_not_a_name_map_is_described(
    tiny: Path, tmp_path: Path, name_map: Any, found: str
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: load_into(MyGPT2(), name_map, tiny),
        lambda: to_hf_state_dict(MyGPT2(), name_map),
        lambda: to_hf_state_dict(load_pretrained(tiny), name_map),
    ]
    if not isinstance(name_map, str):  # save_pretrained also accepts the name of a dialect
        calls.append(lambda: save_pretrained(MyGPT2(), tmp_path, dialect_or_name_map=name_map))
    check_refused(NameMapError, f"name_map is .*{found}.*must be a NameMap", *calls)


def test_load_into_needs_a_name_map(tiny: Path) -> None:
    with pytest.raises(NameMapError, match="name_map is None, but must be a NameMap"):
        load_into(MyGPT2(), None, tiny)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((...,), r"row 0 is Ellipsis, but must be a Row"),
        ((LAYER, ...), r"row 1 is Ellipsis, but must be a Row"),
        ((LAYER, ("a", ("b",), Same())), r"row 1 is \('a', .*, but must be a Row"),
        ((LAYER, None), r"row 1 is None, but must be a Row"),
        ((Row,), r"row 0 is <class .*Row'>, but must be a Row"),
        (LAYER, r"rows is Row\(.*, but must be a tuple of Rows"),
        ("rows", r"rows is 'rows', but must be a tuple of Rows"),
        (None, r"rows is None, but must be a tuple of Rows"),
        ({"a": "b"}, r"rows is \{'a': 'b'\}, but must be a tuple of Rows"),
        (7, r"rows is 7, but must be a tuple of Rows"),
    ],
)
def test_objects_that_are_not_rows_are_described(rows: Any, message: str) -> None:
    with pytest.raises(NameMapError, match=message):
        NameMap(rows)


def test_rows_may_be_a_list() -> None:
    assert NameMap([LAYER]) == NameMap((LAYER,))  # type: ignore[arg-type]
    assert Row("a", ["b"], Same()) == Row("a", ("b",), Same())  # type: ignore[arg-type]
    assert hash(NameMap([LAYER])) == hash(NameMap((LAYER,)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            ("a", "end.weight", Same()),
            r"ours is 'end.weight', but must be a tuple.*\('end.weight',\)",
        ),
        (("a", (), Same()), r"ours is \(\)"),
        (("a", None, Same()), r"ours is None"),
        (("a", (1,), Same()), r"ours is \(1,\)"),
        (("a", (...,), Same()), r"ours is \(Ellipsis,\)"),
        ((("a",), ("b",), Same()), r"hf is \('a',\), but must be a name"),
        ((..., ("b",), Same()), r"hf is Ellipsis, but must be a name"),
        (("a", ("b",), Same), r"op is <class .*Same'>.*Same\(\)"),
        (("a", ("b",), "transpose"), r"op is 'transpose', but must be an op such as Same\(\)"),
        (("a", ("b",), None), r"op is None"),
        (("a", ("b",), ...), r"op is Ellipsis"),
    ],
)
def test_a_row_with_fields_of_the_wrong_type_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(NameMapError, match=message):
        Row(*fields)


@pytest.mark.parametrize("zeros", ["head.bias", (1,), None, (...,)])
def test_zeros_that_are_not_names_are_refused(zeros: Any) -> None:
    with pytest.raises(NameMapError, match=r"zeros is .*must be a tuple of names"):
        NameMap((LAYER,), zeros=zeros)


@pytest.mark.parametrize("name", ["h.{i}.{j}", "h.{i}.{}", "h.{i}.{", "h.{i}.{0}"])
def test_other_braces_in_names_are_literal(name: str) -> None:
    expanded = NameMap((Row(name, (name,), Same()),), zeros=(f"{name}.zero",))
    assert expanded.expand(1)[0].ours == (name.replace("{i}", "0"),)
    assert expanded.expand_zeros(1) == [f"{name}.zero".replace("{i}", "0")]


def test_counting_the_layers_of_rows_without_a_layer_terminates() -> None:
    """Regression test: counting the layers of such a map did not terminate."""
    model = nn.ModuleDict({"norm": nn.LayerNorm(4)})
    name_map = NameMap(
        tuple(Row(f"h.{{i}}.ln_1.{n}", (f"norm.{n}",), Same()) for n in ("weight", "bias"))
    )
    with pytest.raises(NameMapError, match=r"norm\.\{?weight"):
        to_hf_state_dict(model, name_map)


class Failing:
    """A user-defined op that raises an exception."""

    def load(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise ZeroDivisionError("by zero")

    def save(self, tensors: Any) -> torch.Tensor:
        raise ZeroDivisionError("by zero")


def test_an_op_that_fails_is_named_with_its_row(tiny: Path) -> None:
    name_map = my_map(Row("ln_f.weight", ("end.weight",), Failing()))
    with pytest.raises(NameMapError, match=r"ln_f\.weight: .*Failing.* ZeroDivisionError: by zero"):
        load_into(MyGPT2(), name_map, tiny)


# Models and sources

NOT_SOURCES = [None, 7, 1.5, b"demo", ["demo"], {"a": 1}, ..., torch.zeros(2), nn.Linear]


@pytest.mark.parametrize("source", NOT_SOURCES, ids=repr)
def test_an_argument_that_is_not_a_source_is_described(source: Any) -> None:
    check_refused(
        CheckpointError,
        r"source is .*must be .*a folder",
        lambda: load_pretrained(source),
        lambda: load_block(source, 0),
        lambda: load_into(MyGPT2(), my_map(), source),
        lambda: open_checkpoint(source),
        lambda: load_tokenizer(source),
    )
    assert "must be" in (inspect_checkpoint(source).error or "")


def test_the_error_for_a_module_as_the_source_names_load_into() -> None:
    model = MyGPT2()
    check_refused(
        CheckpointError,
        r"My.*, but must be .*load_into\(module, name_map",
        lambda: load_pretrained(model),  # type: ignore[arg-type]
        lambda: load_block(model.stack[0], 0),  # type: ignore[arg-type]
        lambda: open_checkpoint(model),  # type: ignore[arg-type]
        lambda: load_into(model, my_map(), model),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        lambda tiny: (tiny, my_map(), MyGPT2()),
        lambda tiny: (tiny, MyGPT2(), my_map()),
        lambda tiny: (my_map(), MyGPT2(), tiny),
        lambda tiny: (MyGPT2(), tiny, my_map()),
        lambda tiny: (my_map(), tiny, MyGPT2()),
        lambda tiny: (MyGPT2, my_map(), tiny),
        lambda tiny: (MyGPT2().state_dict(), my_map(), tiny),
        lambda tiny: (None, my_map(), tiny),
    ],
)
def test_swapped_arguments_of_load_into_are_refused(tiny: Path, arguments: Any) -> None:
    with pytest.raises(CompatError, match=r"(model|name_map) is .*, but must be"):
        load_into(*arguments(tiny))


@pytest.mark.parametrize("model", [None, "demo", 7, {}, MyGPT2, lambda x: x, linear.GPTModel, ...])
def test_an_argument_that_is_not_a_module_is_described(tmp_path: Path, model: Any) -> None:
    check_refused(
        ConfigError,
        r"model is .*, but must be a torch\.nn\.Module",
        lambda: load_into(model, my_map(), "demo"),
        lambda: to_hf_state_dict(model),
        lambda: to_hf_state_dict(model, my_map()),
        lambda: save_pretrained(model, tmp_path / "out"),
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layer", [0.0, 1.5, True, False, "0", None, [0], torch.tensor(1.5)])
def test_a_layer_that_is_not_an_integer_is_refused(tiny: Path, layer: Any) -> None:
    with pytest.raises(ConfigError, match=r"layer is .*, but must be an integer from 0 to 2"):
        load_block(tiny, layer)


def test_a_layer_may_be_an_integer_of_any_type(tiny: Path) -> None:
    for layer in (1, np.int64(1), torch.tensor(1)):
        block = load_block(tiny, layer)  # type: ignore[arg-type]
        expected = load_pretrained(tiny).trf_blocks[1]
        assert torch.equal(block.norm1.scale, expected.norm1.scale)


@pytest.mark.parametrize("dialect", [None, 7, ["linear"], linear, ...])
def test_a_dialect_that_is_not_a_name_is_refused(tiny: Path, dialect: Any) -> None:
    with pytest.raises(ConfigError, match="must be one of linear, conv1d"):
        load_pretrained(tiny, dialect)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:99", 7.5, ["cpu"], "meta:x"])
def test_a_device_that_cannot_be_used_is_refused(tiny: Path, device: Any) -> None:
    check_refused(
        ConfigError,
        f"device is {re.escape(repr(device))}",
        lambda: load_pretrained(tiny, device=device),
        lambda: load_block(tiny, 0, device=device),
    )


@pytest.mark.parametrize("folder", [None, 7, b"out", ["out"], ...])
def test_a_folder_that_is_not_a_path_is_refused_when_saving(tiny: Path, folder: Any) -> None:
    with pytest.raises(CheckpointError, match=r"folder is .*, but must be a path"):
        save_pretrained(load_pretrained(tiny), folder)


@pytest.mark.parametrize("tokenizer", [7, b"gpt2", ["gpt2"], ..., Transpose()])
def test_a_tokenizer_that_is_not_a_source_or_a_tokenizer_is_refused_when_saving(
    tiny: Path, tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer is .*, but must be"):
        save_pretrained(load_pretrained(tiny), tmp_path / "out", tokenizer=tokenizer)
