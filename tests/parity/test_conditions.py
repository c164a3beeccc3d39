"""BranchObserver records the conditions in a user's code and their operands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compat.parity.conditions import BranchObserver


class Holder:
    """An object with attributes whose representation must not be computed."""

    def __init__(self, step: int) -> None:
        self.step, self.cache = step, torch.zeros(64, 64)

    def __repr__(self) -> str:
        raise AssertionError("printed")


def condition_on(value: Any) -> bool:
    if value == 3:
        return True
    return False


def operands(*values: Any) -> set[str]:
    """Return what the observer records of the condition's first operand."""
    observer = BranchObserver()
    for value in values:
        with observer.watch(5):
            condition_on(value)
    [found] = observer.conditions.values()
    return found.operands[0]


def test_objects_are_distinguished_by_their_attributes_and_not_printed() -> None:
    assert len(operands(Holder(1), Holder(1))) == 1
    assert len(operands(Holder(1), Holder(2))) == 2
    [kept] = operands([Holder(1)] * 3)
    assert len(kept) < 1000


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ("a", "b"),
        ([torch.zeros(2)], [torch.ones(2)]),
        ([torch.zeros(2)], [torch.zeros(3)]),
        (SimpleNamespace(a=(1, 2)), SimpleNamespace(a=(1, 3))),
        (torch.float32, torch.float16),
    ],
)
def test_different_values_are_distinguished(one: Any, other: Any) -> None:
    assert len(operands(one, one)) == 1
    assert len(operands(one, other)) == 2
