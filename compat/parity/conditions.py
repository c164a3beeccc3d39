"""What a model's code compares while it runs, and which outcomes it has seen.

A comparison of outputs covers only the branches that its inputs reach. Two observers find the
others: `BranchObserver` follows the `if` statements of the user's Python code, `TensorObserver` the
comparisons and clamps among the tensor operations. Both collect constants, from which inputs are
made that may reach the other side, and both report what stayed one-sided.
"""

from __future__ import annotations

import ast
import linecache
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compat.user_code import is_users

MOST_CONSTANTS = 64  # of one table or container
MOST_EVALUATIONS = 5000  # of one condition in one call, as in a loop over many objects
LONGEST_PHRASE = 8  # numbers in a series of constants


@dataclass(frozen=True)
class Limit:
    """A condition that no input of the proof reached, or another bound on what was compared.

    Args:
        message: what was not covered.
        file: of the user's code, or None where no line is known.
        line: in that file, from 1.
    """

    message: str
    file: str | None = None
    line: int | None = None

    @property
    def source_line(self) -> str:
        return linecache.getline(self.file, self.line or 0).strip() if self.file else ""


@dataclass
class Observed:
    """One condition: the outcomes it had, the constants in it, and whether its operands varied.

    Args:
        file, line, text: of the condition, or of the operation.
        of_tensors: it depends on values of tensors.
        phrases: series of whole numbers that it holds, the same at every evaluation; empty for an
            operand that varies.
    """

    file: str
    line: int
    text: str
    of_tensors: bool = False
    outcomes: set[bool] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    operands: dict[int, set[str]] = field(default_factory=dict)
    not_lengths: set[int] = field(default_factory=set)  # operands that are not always T
    phrases: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by the operand that is one
    tables: dict[int, set[int]] = field(default_factory=dict)  # numbers of an operand, a tensor
    low: float = math.inf  # of the whole numbers that an operation compared or clamped
    high: float = -math.inf

    @property
    def all_constants(self) -> set[int]:
        """The constants, and the numbers in tensors that were the same at every evaluation."""
        return self.constants.union(*self.tables.values())

    def see_phrase(self, operand: int, value: Any) -> None:
        """Keep a series of whole numbers, unless it is another one than before."""
        if isinstance(value, Tensor):
            if value.dim() != 1 or value.is_floating_point() or len(value) > LONGEST_PHRASE:
                return
            value = value.tolist()
        if isinstance(value, (list, tuple)) and 2 <= len(value) <= LONGEST_PHRASE:
            if all(type(number) is int for number in value):
                phrase = tuple(value)
                same = self.phrases.setdefault(operand, phrase) == phrase
                self.phrases[operand] = phrase if same else ()

    def one_sided(self, sizes: Collection[int]) -> bool:
        """Only one outcome was seen, though what it depends on varies with the input.

        A comparison of T with a constant is not: lengths around the constant have been tried, and
        others are not valid. Nor is an operation that ranks or clamps whole numbers, once it has
        seen the lowest and the highest id or position.

        Args:
            sizes: V and N, numbers of the ids and positions that are valid.
        """
        if self.text in _MONOTONE and self.low <= 0:
            if self.high >= max(sizes) - 1 or self.high + 1 in sizes:
                return False
        varying = {number for number, values in self.operands.items() if len(values) > 1}
        return len(self.outcomes) == 1 and (self.of_tensors or bool(varying & self.not_lengths))

    @property
    def message(self) -> str:
        """What was seen on no input."""
        if self.text in _CLAMPS:
            return f"`{self.text}` changed no value on any input"
        what = f"the comparison `{self.text}`" if self.text in _COMPARISONS else f"`{self.text}`"
        return f"{what} was never {'false' if True in self.outcomes else 'true'} on any input"


# Branches of Python code


@dataclass(frozen=True)
class _Test:
    """A condition in the source, compiled, and the lines that run if it holds, or if not."""

    line: int
    text: str
    code: CodeType | None  # None where evaluating it again could change something
    operands: tuple[CodeType, ...]
    parts: tuple[CodeType, ...]  # all expressions within, for the constants among them
    branches: bool  # decides what runs next; else a comparison anywhere
    of_types: bool  # asks what something is, such as `mask is None`, not for a value
    body: range
    orelse: range


# Methods and functions that read and change nothing; a condition of these is evaluated again.
_READ_ONLY = frozenset(
    """
    abs all any bool data_ptr dim equal float get_default_dtype int is_contiguous is_cuda
    is_floating_point is_grad_enabled is_inference_mode_enabled isfinite isinf isnan isinstance
    hasattr item len max min ndimension nelement numel size stride sum
    """.split()
)
_PURE = (
    ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Name, ast.Attribute, ast.Constant,
    ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Set, ast.Call, ast.expr_context,
    ast.operator, ast.boolop, ast.cmpop, ast.unaryop,
)  # fmt: skip


LOAD = ast.Load()


def _is_pure(expression: ast.expr) -> bool:
    for node in ast.walk(expression):
        if not isinstance(node, _PURE):
            return False
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in _READ_ONLY or node.keywords:
                return False
    return True


def _compiled(expression: ast.expr, file: str) -> CodeType:
    return compile(ast.Expression(expression), file, "eval")


def _operands(test: ast.expr) -> list[ast.expr]:
    """What a condition depends on: the operands of its comparisons, or the whole of it."""
    if isinstance(test, ast.BoolOp):
        return [operand for value in test.values for operand in _operands(value)]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _operands(test.operand)
    if isinstance(test, ast.Compare):
        return [test.left, *test.comparators]
    return [test]


def _tests_of(file: str) -> dict[int, list[_Test]]:
    """The conditions of a source file by the line on which each is evaluated."""
    found: dict[int, list[_Test]] = {}
    with suppress(SyntaxError, ValueError):
        for node in _nodes(ast.parse("".join(linecache.getlines(file)))):
            for test in _tests_in(node, file):
                found.setdefault(test.line, []).append(test)
    return found


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without conditions on whose other side is an error alone."""
    if isinstance(node, ast.Assert):
        return
    if isinstance(node, (ast.If, ast.While)) and _only_raises(node.body):
        for statement in (*node.body, *node.orelse):
            yield from _nodes(statement)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _nodes(child)


def _only_raises(statements: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Raise) for statement in statements)


def _tests_in(node: ast.AST, file: str) -> Iterator[_Test]:
    body, orelse = range(0), range(0)
    tests: list[ast.expr] = []
    if isinstance(node, (ast.If, ast.While)):
        tests = [node.test]
        body, orelse = _lines(node.body), _lines(node.orelse)
    elif isinstance(node, ast.IfExp):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = list(node.ifs)
    elif isinstance(node, ast.Compare):
        tests = [node]
    for test in tests:
        indices = {part.slice for part in ast.walk(test) if isinstance(part, ast.Subscript)}
        parts = [part for part in ast.walk(test) if isinstance(part, ast.expr) and _is_pure(part)]
        parts = [part for part in parts if part not in indices]
        parts = [part for part in parts if isinstance(getattr(part, "ctx", None) or LOAD, ast.Load)]
        parts = [part for part in parts if not isinstance(part, (ast.Slice, ast.Call))]
        pure = _is_pure(test)
        yield _Test(
            test.lineno,
            ast.unparse(test),
            _compiled(test, file) if pure else None,
            tuple(_compiled(operand, file) for operand in _operands(test)) if pure else (),
            tuple(_compiled(part, file) for part in parts),
            test is not node,
            isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot)),
            body,
            orelse,
        )


def _lines(statements: list[ast.stmt]) -> range:
    if not statements:
        return range(0)
    return range(statements[0].lineno, (statements[-1].end_lineno or 0) + 1)


class BranchObserver:
    """Follows the conditions of the user's Python code in this thread, line by line."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, str], Observed] = {}
        self._executed: dict[str, set[int]] = {}
        self._unread: dict[tuple[str, int, str], _Test] = {}
        self._tests: dict[str, dict[int, list[_Test]]] = {}  # a file may change between proofs
        self._length = 0
        self._evaluations: Counter[tuple[str, int, str]] = Counter()  # in this call

    @contextmanager
    def watch(self, length: int) -> Iterator[None]:
        """Follow what runs in the block, on ids (B, length); any other tracer pauses."""
        before, self._length = sys.gettrace(), length
        self._evaluations.clear()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)
            self._settle()

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not is_users(file):
            return None
        if file not in self._tests:
            linecache.checkcache(file)
            self._tests[file] = _tests_of(file)
        if not (tests := self._tests[file]):
            return None
        lines = self._executed.setdefault(file, set())

        def on_line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
                for test in tests.get(frame.f_lineno, ()):
                    self._see(file, test, frame)
            return on_line

        return on_line

    def _see(self, file: str, test: _Test, frame: FrameType) -> None:
        key = file, test.line, test.text
        self._evaluations[key] += 1
        if self._evaluations[key] > MOST_EVALUATIONS:
            return
        outcome = ... if test.code is None else _evaluated(test.code, frame)
        if isinstance(outcome, Tensor) and not test.branches:
            return  # a mask, say; the observer of tensors sees its elements
        seen = self.found.setdefault(key, Observed(file, test.line, test.text))
        for number, part in enumerate(test.parts):
            value = _evaluated(part, frame)
            seen.see_phrase(number, value)
            found = _constants([value])
            seen.constants |= found - {self._length - 1, self._length}
        if test.code is None and test.branches:
            self._unread[key] = test
        for number, operand in enumerate(test.operands):
            value = _evaluated(operand, frame)
            if value is ...:
                continue
            if test.of_types:
                value = type(value).__name__
            if isinstance(value, Tensor):
                seen.of_tensors = True
            else:
                seen.operands.setdefault(number, set()).add(repr(value)[:200])
            if type(value) is not int or value != self._length:
                seen.not_lengths.add(number)
        # An array has no truth value; an exception here would be raised in the user's code.
        with suppress(Exception):
            if outcome is not ...:
                seen.outcomes.add(bool(outcome))

    def _settle(self) -> None:
        """The outcome of conditions that cannot be evaluated again, from the lines that ran."""
        for key, test in self._unread.items():
            lines = self._executed.get(key[0], set())
            seen = self.found[key]
            seen.of_tensors = True  # it calls something: what it depends on is not known
            if lines & set(test.body):
                seen.outcomes.add(True)
            if not test.orelse or lines & set(test.orelse):
                seen.outcomes.add(False)


def _evaluated(code: CodeType, frame: FrameType) -> Any:
    try:
        return eval(code, frame.f_globals, frame.f_locals)
    except Exception:  # a name that is not bound yet
        return ...


# Conditions among tensor operations

_COMPARISONS = frozenset("eq ne lt le gt ge isin".split())
_CLAMPS = frozenset("clamp clamp_min clamp_max hardtanh minimum maximum nan_to_num".split())
_MONOTONE = frozenset("lt le gt ge clamp clamp_min clamp_max hardtanh minimum maximum".split())
_DIVISIONS = frozenset("remainder fmod floor_divide div bitwise_and".split())
_LOOKUPS = frozenset("embedding index index_select gather take".split())
_POSITIONS = frozenset("select slice narrow index_fill select_scatter slice_scatter".split())


class TensorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows comparisons, clamps and table lookups among the operations of the user's code.

    Args:
        sizes: of the axes whose indices are ids or positions: V and N.

    Attributes:
        shape: of the ids that the model runs on; its numbers are not constants of the code.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = (0, 0)
        self.found: dict[tuple[str, int, str], Observed] = {}
        self.constants: set[int] = set()
        self._sizes = frozenset(sizes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func.overloadpacket.__name__).removesuffix("_")
        mutated = args[0].clone() if name in _CLAMPS and func._schema.is_mutable else None
        out = func(*args, **(kwargs or {}))
        if name in _COMPARISONS and isinstance(out, Tensor):
            self._see(name, args, bool(out.any()), not bool(out.all()))
        elif name in _CLAMPS and isinstance(out, Tensor):
            before = args[0] if mutated is None else mutated
            same = out == before if out.shape == before.shape else torch.zeros(1, dtype=torch.bool)
            kept = same | (out != out)
            self._see(name, args, not bool(kept.all()), True)
        elif name in _DIVISIONS:
            if isinstance(args[0], Tensor) and not args[0].is_floating_point():
                self.constants |= _constants(args[1:])
        elif name in _LOOKUPS and isinstance(args[0], Tensor):
            self.constants |= self._odd_entries(args[0])
        elif name in _POSITIONS and isinstance(args[0], Tensor):
            axis = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
            sizes = {*self._sizes, self.shape[0] * self.shape[1]}
            if args[0].dim() and args[0].shape[axis] in sizes:
                self.constants |= _constants(args[2:]) - self._own()
        return out

    def _see(self, name: str, args: tuple[Any, ...], true: bool, false: bool) -> None:
        place = _users_line()
        if place is None:
            return
        seen = self.found.setdefault((*place, name), Observed(*place, name, of_tensors=True))
        seen.outcomes |= {True} if true else set()
        seen.outcomes |= {False} if false else set()
        if isinstance(args[0], Tensor) and args[0].numel() and not args[0].is_floating_point():
            seen.low, seen.high = (
                min(seen.low, int(args[0].min())),
                max(seen.high, int(args[0].max())),
            )
        for number, argument in enumerate(args):
            found = _constants([argument]) - self._own()
            if not isinstance(argument, Tensor):
                seen.constants |= found
            elif seen.tables.setdefault(number, found) != found:
                seen.tables[number] = set()  # it varies, as ids do
            seen.see_phrase(number, argument)

    def _own(self) -> set[int]:
        """Numbers that come from the shape of the ids."""
        B, T = self.shape
        return {B, T - 1, T, B * T}

    def _odd_entries(self, table: Tensor) -> set[int]:
        """The indices at which a table of whole numbers is not the identity, or of numbers not
        like the rest; none where that is so for many."""
        if table.dim() != 1 or len(table) < 2 or table.dtype == torch.bool:
            return set()
        usual = table.median() if table.is_floating_point() else torch.arange(len(table))
        odd = (table != usual).nonzero().flatten()
        return set(odd.tolist()) if len(odd) <= MOST_CONSTANTS else set()


def _constants(args: Iterable[Any]) -> set[int]:
    """The whole numbers among the arguments of an operation, in small tensors too."""
    found: set[int] = set()
    for argument in args:
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            if float(argument).is_integer() and abs(argument) < 2**31:
                found.add(int(argument))
        elif isinstance(argument, Tensor) and not argument.is_floating_point():
            if argument.dim() <= 1 and argument.numel() <= MOST_CONSTANTS:
                found |= {int(value) for value in argument.flatten().tolist()}
        elif isinstance(argument, (list, tuple, set, frozenset)):
            found |= _constants(list(argument)[:MOST_CONSTANTS])
    return found


# Where the model is called from.
_CALLERS = tuple(str(Path(__file__).with_name(name)) for name in ("logits.py", "trace.py"))


def _users_line() -> tuple[str, int] | None:
    """The innermost line of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_CALLERS):
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None  # further out is the code that called us, not the model's
