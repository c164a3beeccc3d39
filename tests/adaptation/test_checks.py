"""`check_model` accepts modules only, and its errors say what to pass instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compat import AdaptError
from compat.adaptation.tracing.calling import check_model


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


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
        (nn.Sequential(Model(), Model().bfloat16()), ["bfloat16, torch.float32", "one data type"]),
        (Model().to("meta"), ["on meta", "CPU"]),
        (lazy(), ["lazy modules"]),
    ],
)
def test_other_values_raise(value: Any, words: list[str]) -> None:
    with pytest.raises(AdaptError) as caught:
        check_model(value)
    assert all(word in str(caught.value) for word in words)


def test_models_are_accepted() -> None:
    check_model(Model())
    check_model(Model().half())
