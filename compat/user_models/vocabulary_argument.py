"""A stand-in for the tokenizer, the vocabulary or the data set that a constructor takes or loads.

The constructor reads the number of tokens from it, and ids such as that of padding.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from compat.config import GPT2Config
from compat.user_models.missing import CallableSize
from compat.user_models.synonyms import plain, size_role, value_of
from compat.user_models.usage import init_source, users_nodes

# Names of what maps tokens to ids or ids to tokens, such as `stoi` and `word2idx`.
_SIDE = r"(s|str|ch|chars?|words?|tok(en)?s?|pieces?|i|ix|idx|ids?|int|ind(ex)?)"
_TABLE = re.compile(
    rf"(get)?({_SIDE}(to|2){_SIDE}|{_SIDE}(map|dict)|vocab(ulary)?|stoi|itos|encoder|decoder|base)"
)
# Names of the number of tokens, of an id, and of methods that look up an id.
_COUNT = re.compile(
    r"(get)?(n|num)?(vocab(ulary)?|pieces?|words?|tokens?|chars?)(size|len|count)?|len|size"
)
_ID = re.compile(r".*(id|idx|index|token)")
_LOOKUP = re.compile(
    r"(convert)?(tok(en)?s?|pieces?|words?)to(ids?|idx|index)|encode|index|get|lookup.*"
)
# Names of methods of a tokenizer that no constructor calls.
_TEXT = re.compile("(batch)?decode|tokenize|encodebatch")
# Names of arguments that may be such an object.
_NAMES = re.compile(
    rf".*(vocab(ulary)?|tokeni[sz]ers?|dictionary|data(set)?|corpus)|{_TABLE.pattern}"
)


class Vocabulary:
    """What has as many tokens as the checkpoint's vocabulary, under any of the usual names.

    A data set has other sizes too, such as the length of its sequences.
    """

    def __init__(self, config: GPT2Config) -> None:
        self._config, self._size = config, config.vocab_size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[str]:
        return map(chr, range(0x100, 0x100 + self._size))

    def __contains__(self, token: object) -> bool:
        return True

    def __getitem__(self, token: object) -> Any:
        return self._id(token) if isinstance(token, str) else chr(0x100 + int(str(token)))

    def __call__(self, *_: object, **__: object) -> Vocabulary:
        return self

    def keys(self) -> list[str]:
        return list(self)

    def values(self) -> range:
        return range(self._size)

    def items(self) -> list[tuple[str, int]]:
        return list(zip(self, self.values(), strict=True))

    def __getattr__(self, name: str) -> Any:
        short = plain(name)
        if name.startswith("__") or len(name) == 1:
            raise AttributeError(name)
        if short.startswith("add"):  # add_special_tokens
            return lambda *_, **__: 0
        if _TEXT.fullmatch(short):
            return lambda *_, **__: []
        if _LOOKUP.fullmatch(short):
            return lambda token="", *_: self._id(token)
        if _TABLE.fullmatch(short) or short.endswith("specialtokens"):
            return self
        if _COUNT.fullmatch(short):
            return CallableSize(self._size)
        if role := size_role(name.removeprefix("get_")):
            return CallableSize(value_of(role, self._config))
        if _ID.fullmatch(short):
            return CallableSize(self._id(name))
        raise AttributeError(f"the vocabulary has no {name!r}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"<a vocabulary of {self._size}>"

    def _id(self, token: object) -> int:
        """Of padding −1, which masks no id; of others the last one."""
        return -1 if "pad" in str(token).lower() else self._size - 1


def vocabulary_for(
    cls: Callable[..., Any], parameter: inspect.Parameter, config: GPT2Config
) -> Vocabulary | None:
    """Return a stand-in if a constructor uses a required parameter as one with a vocabulary."""
    if parameter.default is not parameter.empty or not _NAMES.fullmatch(plain(parameter.name)):
        return None
    own = ast.parse(textwrap.dedent(init_source(cls)) or "0")
    inner = [  # constructors that it may be passed on to
        node for node in users_nodes(cls)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        and parameter.name in {argument.arg for argument in node.args.args}
    ]  # fmt: skip
    made, needed = Vocabulary(config), False
    for node in [each for body in (own, *inner) for each in ast.walk(body)]:
        match node:
            case ast.Call(ast.Name("len" | "enumerate" | "list" | "sorted"), [used]):
                needed |= _is(used, parameter.name)
            case ast.Subscript(owner, ast.Constant(str(key))) if _is(owner, parameter.name):
                if size_role(key):
                    return None
                needed = True
            case ast.Attribute(owner, name) if _is(owner, parameter.name):
                if not hasattr(made, name):
                    return None
                needed = True
    return made if needed else None


def _is(node: ast.expr, name: str) -> bool:
    """Return whether an expression is the parameter, or the `self` attribute of its name."""
    return ast.unparse(node) in (name, f"self.{name}")
