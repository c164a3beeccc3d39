"""All public functions that accept a source have the same options for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import compat


def functions_of_sources() -> Iterator[Any]:
    """Yield the public functions that accept a source."""
    for name in compat.__all__:
        public = getattr(compat, name)
        function = getattr(public, "from_pretrained", public)
        if inspect.isclass(function) or not callable(function):  # for example, errors
            continue
        if "source" in inspect.signature(function).parameters:
            yield pytest.param(function, id=name)


FUNCTIONS = list(functions_of_sources())


def test_functions_that_accept_a_source_are_found() -> None:
    assert len(FUNCTIONS) > 8


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_source_has_the_same_options_in_every_function(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    for name, default in (("revision", None), ("verify", False), ("n_head", None)):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == default
