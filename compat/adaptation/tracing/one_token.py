"""Models that take one token per call, and whose attention therefore has no mask."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType

from torch import nn

from compat.adaptation.tracing.calling import NoLogitsError
from compat.adaptation.tracing.graph import Place
from compat.user_models.usage import is_users_class

# An assertion that failed for a sequence, as `describe_error` shows it. One that the ids have one
# axis, as in `assert ids.ndim == 1`, is about sequences.
_ONE_TOKEN = re.compile(
    r"AssertionError\b.* at (.+?):(\d+) assert\b"
    r"(?!.*(?:\.ndim|\.dim\(\)|shape\)) *== *1\b).*== *1\b"
)


def one_token_line(error: NoLogitsError) -> Place | None:
    """Return the line of the assertion that a sequence has one token, if that is what failed."""
    found = filter(None, map(_ONE_TOKEN.search, error.tried))
    return next((Place(match[1], int(match[2])) for match in found), None)


@contextmanager
def without_assertions(model: nn.Module) -> Iterator[None]:
    """Run the body without the assertions in the methods of the user's modules."""
    classes = dict.fromkeys(type(module) for module in model.modules())
    own = (base for cls in classes for base in cls.__mro__ if is_users_class(base))
    methods = (value for cls in dict.fromkeys(own) for value in vars(cls).values())
    with ExitStack() as undo:
        for method in methods:
            if isinstance(method, FunctionType) and (code := _without_assertions(method)):
                undo.callback(setattr, method, "__code__", method.__code__)
                method.__code__ = code
        yield


def _without_assertions(function: FunctionType) -> CodeType | None:
    """Return a function's code without assertions; None if its source is unknown."""
    own = function.__code__
    text = "".join(linecache.getlines(own.co_filename))
    try:
        stack = [compile(text, own.co_filename, "exec", dont_inherit=True, optimize=1)]
    except (SyntaxError, ValueError):
        return None
    for code in stack:  # grows
        if (code.co_name, code.co_firstlineno) == (own.co_name, own.co_firstlineno):
            return code if code.co_freevars == own.co_freevars else None
        stack += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return None
