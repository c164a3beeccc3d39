"""The conditions in a model's code, and the outcomes that the inputs reached.

A comparison of outputs covers only the branches that its inputs reach. Two observers find the
others: `BranchObserver` follows the `if` statements of the user's Python code, `TensorObserver` the
comparisons and clamps among the tensor operations. Both collect constants, from which further
inputs are built that may reach the other outcome. Both report the conditions for which the inputs
reached only one outcome.
"""

from __future__ import annotations

import ast
import linecache
import math
import reprlib
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compat.parity.dispatch import DispatchMode
from compat.user_code import is_users

MAX_CONSTANTS = 64  # numbers taken from one table or container
MAX_EVALUATIONS = 5000  # evaluations of one condition in one call, as in a long loop
LONGEST_PHRASE = 8  # numbers in a phrase
WITHOUT_VALUES = (type, Enum, FunctionType, ModuleType)  # their attributes are not values

Key = tuple[str, int, str]  # the file, line and text of a condition


@dataclass
class ObservedCondition:
    """The outcomes of one condition, its constants, and whether its operands varied.

    Args:
        file, line, text: the place and the source of the condition, or of the tensor operation.
        depends_on_tensors: whether it depends on values of tensors.
        outcomes: the outcomes that were seen.
        constants: the integers in it, except those that are sizes of the input.
        operands: by number of the operand, the values that it had.
        not_lengths: numbers of the operands that are not always T.
        phrases: by number of the operand, its sequence of integers if that is the same at every
            evaluation; empty if it varies.
        tables: by number of the operand, the numbers in a tensor that is the same at every
            evaluation; empty if it varies.
        low, high: the smallest and the largest integer that an operation compared or clamped.
    """

    file: str
    line: int
    text: str
    depends_on_tensors: bool = False
    outcomes: set[bool] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    operands: dict[int, set[str]] = field(default_factory=dict)
    not_lengths: set[int] = field(default_factory=set)
    phrases: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tables: dict[int, set[int]] = field(default_factory=dict)
    low: float = math.inf
    high: float = -math.inf

    @property
    def all_constants(self) -> set[int]:
        """The constants, and the numbers in tensors that do not vary."""
        return self.constants.union(*self.tables.values())

    def add_phrase(self, operand: int, value: Any) -> None:
        """Record a sequence of integers, unless the operand had another value before."""
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
        """Return whether only one outcome was seen, although the operands vary with the input.

        A comparison of T with a constant is excluded, because lengths near the constant were tried,
        unless they are invalid. So is an operation that orders or clamps integers, once its input
        was the lowest and the highest id or position.

        Args:
            sizes: V and N, the numbers of valid ids and positions.
        """
        if self.text in _MONOTONE and self.low <= 0:
            if self.high >= max(sizes) - 1 or self.high + 1 in sizes:
                return False
        varying = {number for number, values in self.operands.items() if len(values) > 1}
        depends_on_input = self.depends_on_tensors or bool(varying & self.not_lengths)
        return len(self.outcomes) == 1 and depends_on_input

    @property
    def message(self) -> str:
        """The outcome that no input reached."""
        if self.text in _CLAMPS:
            return f"`{self.text}` changed no value on any input"
        what = f"the comparison `{self.text}`" if self.text in COMPARISONS else f"`{self.text}`"
        return f"{what} was never {'false' if True in self.outcomes else 'true'} on any input"


# Conditions of Python code


@dataclass(frozen=True)
class _SourceCondition:
    """A condition in the source.

    Args:
        line, text: the line, and the source.
        code: the condition; None if evaluating it again could have side effects.
        operands: what it depends on.
        parts: the expressions in it, which may hold constants.
        branches: whether it decides which code runs next; otherwise it is a comparison in any
            expression.
        tests_types: whether it tests a type or identity, such as `mask is None`, and not a value.
        body: the lines that run if it holds.
        orelse: the lines that run if it does not.
    """

    line: int
    text: str
    code: CodeType | None
    operands: tuple[CodeType, ...]
    parts: tuple[CodeType, ...]
    branches: bool
    tests_types: bool
    body: range
    orelse: range


# Methods and functions without side effects. Conditions that call no others are evaluated again.
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


def _is_pure(expression: ast.expr) -> bool:
    """Return whether evaluating the expression has no side effects."""
    for node in ast.walk(expression):
        if not isinstance(node, _PURE):
            return False
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in _READ_ONLY or node.keywords:
                return False
    return True


@lru_cache(maxsize=64)
def _conditions_of(source: str, file: str) -> dict[int, list[_SourceCondition]]:
    """Return the conditions of a file's source by the line on which each is evaluated."""
    found: dict[int, list[_SourceCondition]] = {}
    with suppress(SyntaxError, ValueError):
        for node in _nodes(ast.parse(source)):
            for condition in _conditions_in(node, file):
                found.setdefault(condition.line, []).append(condition)
    return found


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, except conditions whose only effect is an exception."""
    if isinstance(node, ast.Assert):
        return
    if isinstance(node, (ast.If, ast.While)) and all(isinstance(s, ast.Raise) for s in node.body):
        for statement in (*node.body, *node.orelse):
            yield from _nodes(statement)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _nodes(child)


def _conditions_in(node: ast.AST, file: str) -> Iterator[_SourceCondition]:
    tests: list[ast.expr] = []
    body, orelse = range(0), range(0)
    if isinstance(node, (ast.If, ast.While)):
        tests, body, orelse = [node.test], _lines(node.body), _lines(node.orelse)
    elif isinstance(node, ast.IfExp):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    elif isinstance(node, ast.Compare):
        tests = [node]

    def compiled(expressions: Iterable[ast.expr]) -> tuple[CodeType, ...]:
        return tuple(compile(ast.Expression(e), file, "eval") for e in expressions)

    for test in tests:
        pure = _is_pure(test)
        yield _SourceCondition(
            line=test.lineno,
            text=ast.unparse(test),
            code=compiled([test])[0] if pure else None,
            operands=compiled(_operands(test)) if pure else (),
            parts=compiled(_parts(test)),
            branches=test is not node,
            tests_types=isinstance(test, ast.Compare)
            and isinstance(test.ops[0], (ast.Is, ast.IsNot)),
            body=body,
            orelse=orelse,
        )


def _lines(statements: list[ast.stmt]) -> range:
    if not statements:
        return range(0)
    return range(statements[0].lineno, (statements[-1].end_lineno or 0) + 1)


def _operands(test: ast.expr) -> list[ast.expr]:
    """Return what a condition depends on: its comparisons' operands, or the condition itself."""
    if isinstance(test, ast.BoolOp):
        return [operand for value in test.values for operand in _operands(value)]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _operands(test.operand)
    if isinstance(test, ast.Compare):
        return [test.left, *test.comparators]
    return [test]


def _parts(test: ast.expr) -> list[ast.expr]:
    """Return the values in a condition, without the indices of its subscripts."""
    nodes = list(ast.walk(test))
    indices = {node.slice for node in nodes if isinstance(node, ast.Subscript)}
    return [
        node
        for node in nodes
        if isinstance(node, ast.expr)
        and _is_pure(node)
        and node not in indices
        and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        and not isinstance(node, (ast.Slice, ast.Call))
    ]


class BranchObserver:
    """Follows the conditions of the user's Python code in this thread, line by line.

    Attributes:
        conditions: those that were evaluated.
    """

    def __init__(self) -> None:
        self.conditions: dict[Key, ObservedCondition] = {}
        self._executed: dict[str, set[int]] = {}  # lines by file
        self._not_evaluated: dict[Key, _SourceCondition] = {}
        self._sources: dict[str, dict[int, list[_SourceCondition]]] = {}  # by file and line
        self._length = 0
        self._evaluations: Counter[Key] = Counter()  # in this call

    @contextmanager
    def watch(self, length: int) -> Iterator[None]:
        """Follow what runs in the block on ids (B, length). Any other tracer pauses."""
        before, self._length = sys.gettrace(), length
        self._evaluations.clear()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)
            self._infer_outcomes()

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not is_users(file):
            return None
        if file not in self._sources:
            linecache.checkcache(file)
            self._sources[file] = _conditions_of("".join(linecache.getlines(file)), file)
        if not (conditions := self._sources[file]):
            return None
        executed = self._executed.setdefault(file, set())

        def on_line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                executed.add(frame.f_lineno)
                for condition in conditions.get(frame.f_lineno, ()):
                    self._observe(file, condition, frame)
            return on_line

        return on_line

    def _observe(self, file: str, condition: _SourceCondition, frame: FrameType) -> None:
        key = file, condition.line, condition.text
        self._evaluations[key] += 1
        if self._evaluations[key] > MAX_EVALUATIONS:
            return
        outcome = ... if condition.code is None else _evaluated(condition.code, frame)
        if isinstance(outcome, Tensor) and not condition.branches:
            return  # such as a mask, whose elements TensorObserver observes
        seen = self.conditions.setdefault(key, ObservedCondition(*key))
        for number, part in enumerate(condition.parts):
            value = _evaluated(part, frame)
            seen.add_phrase(number, value)
            seen.constants |= _constants([value]) - {self._length - 1, self._length}
        if condition.code is None and condition.branches:
            self._not_evaluated[key] = condition
        for number, operand in enumerate(condition.operands):
            value = _evaluated(operand, frame)
            if value is ...:
                continue
            if condition.tests_types:
                value = type(value).__name__
            if isinstance(value, Tensor):
                seen.depends_on_tensors = True
            else:
                seen.operands.setdefault(number, set()).add(_SHORT_REPR.repr(value))
            if type(value) is not int or value != self._length:
                seen.not_lengths.add(number)
        # An array has no truth value, and an exception here would appear in the user's code.
        with suppress(Exception):
            if outcome is not ...:
                seen.outcomes.add(bool(outcome))

    def _infer_outcomes(self) -> None:
        """Infer outcomes of conditions that were not evaluated again from the lines that ran."""
        for key, condition in self._not_evaluated.items():
            executed, seen = self._executed.get(key[0], set()), self.conditions[key]
            seen.depends_on_tensors = True  # it calls a function
            if executed & set(condition.body):
                seen.outcomes.add(True)
            if not condition.orelse or executed & set(condition.orelse):
                seen.outcomes.add(False)


class _ShortRepr(reprlib.Repr):
    """Values in a short time, also of objects that hold large tensors or modules."""

    def repr_instance(self, value: object, level: int) -> str:
        if isinstance(value, nn.Module):
            return f"{type(value).__name__} {id(value)}"
        if isinstance(value, Tensor):
            with suppress(Exception):  # of a tensor without values, as in torch.vmap
                return f"{list(value.shape)} {value.flatten()[:32].tolist()}"
        elif hasattr(value, "__dict__") and not isinstance(value, WITHOUT_VALUES):
            return f"{type(value).__name__}({self.repr1(vars(value), level - 1)})"
        return super().repr_instance(value, level)


_SHORT_REPR = _ShortRepr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = 200
_SHORT_REPR.maxlist = _SHORT_REPR.maxtuple = _SHORT_REPR.maxdict = _SHORT_REPR.maxset = 20


def _evaluated(code: CodeType, frame: FrameType) -> Any:
    """Evaluate an expression in a frame; `...` if it raises, as a name without a value does."""
    try:
        return eval(code, frame.f_globals, frame.f_locals)
    except Exception:
        return ...


# Conditions among tensor operations

COMPARISONS = frozenset("eq ne lt le gt ge isin".split())
_CLAMPS = frozenset("clamp clamp_min clamp_max hardtanh minimum maximum nan_to_num".split())
_MONOTONE = frozenset("lt le gt ge clamp clamp_min clamp_max hardtanh minimum maximum".split())
_DIVISIONS = frozenset("remainder fmod floor_divide div bitwise_and".split())
_LOOKUPS = frozenset("embedding index index_select gather take".split())
_POSITIONS = frozenset("select slice narrow index_fill select_scatter slice_scatter".split())


class TensorObserver(DispatchMode):  # type: ignore[no-untyped-call]
    """Follows comparisons, clamps and table lookups among the operations of the user's code.

    Args:
        sizes: the lengths of the axes whose indices are ids or positions: V and N.

    Attributes:
        shape: (B, T) of the ids on which the model runs, which are not constants of its code.
        conditions: the comparisons and clamps that were executed.
        constants: from all other operations.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = (0, 0)
        self.conditions: dict[Key, ObservedCondition] = {}
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
        before: Any = args[0] if args else None
        if name in _CLAMPS and func._schema.is_mutable:
            before = before.clone()
        out = func(*args, **(kwargs or {}))
        if name in COMPARISONS and isinstance(out, Tensor):
            self._observe(name, args, bool(out.any()), not bool(out.all()))
        elif name in _CLAMPS and isinstance(out, Tensor):
            same = out == before if out.shape == before.shape else torch.zeros(1, dtype=torch.bool)
            kept = same | (out != out)
            self._observe(name, args, not bool(kept.all()), True)
        elif name in _DIVISIONS:
            if isinstance(before, Tensor) and not before.is_floating_point():
                self.constants |= _constants(args[1:])
        elif name in _LOOKUPS and isinstance(before, Tensor):
            self.constants |= _unusual_indices(before)
        elif name in _POSITIONS and isinstance(before, Tensor):
            axis = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
            sizes = {*self._sizes, self.shape[0] * self.shape[1]}
            if before.dim() and before.shape[axis] in sizes:
                self.constants |= _constants(args[2:]) - self._input_sizes()
        return out

    def _observe(self, name: str, args: tuple[Any, ...], true: bool, false: bool) -> None:
        place = _users_line()
        if place is None:
            return
        key = *place, name
        seen = self.conditions.setdefault(key, ObservedCondition(*key, depends_on_tensors=True))
        reached = ((True, true), (False, false))
        seen.outcomes |= {outcome for outcome, was_reached in reached if was_reached}
        if isinstance(args[0], Tensor) and args[0].numel() and not args[0].is_floating_point():
            seen.low = min(seen.low, int(args[0].min()))
            seen.high = max(seen.high, int(args[0].max()))
        for number, argument in enumerate(args):
            found = _constants([argument]) - self._input_sizes()
            if not isinstance(argument, Tensor):
                seen.constants |= found
            elif seen.tables.setdefault(number, found) != found:
                seen.tables[number] = set()  # it varies, as ids do
            seen.add_phrase(number, argument)

    def _input_sizes(self) -> set[int]:
        """Return the numbers that follow from the shape of the ids."""
        B, T = self.shape
        return {B, T - 1, T, B * T}


def _unusual_indices(table: Tensor) -> set[int]:
    """Return the indices at which a table differs from its other entries, if they are few.

    The other entries of a table of integers are the identity, and those of other numbers its
    median.
    """
    if table.dim() != 1 or len(table) < 2 or table.dtype == torch.bool:
        return set()
    usual = table.median() if table.is_floating_point() else torch.arange(len(table))
    unusual = (table != usual).nonzero().flatten()
    return set(unusual.tolist()) if len(unusual) <= MAX_CONSTANTS else set()


def _constants(values: Iterable[Any]) -> set[int]:
    """Return the integers among the values, and in small tensors and containers."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if float(value).is_integer() and abs(value) < 2**31:
                found.add(int(value))
        elif isinstance(value, Tensor) and not value.is_floating_point():
            if value.dim() <= 1 and value.numel() <= MAX_CONSTANTS:
                found |= {int(number) for number in value.flatten().tolist()}
        elif isinstance(value, (list, tuple, set, frozenset)):
            found |= _constants(list(value)[:MAX_CONSTANTS])
    return found


# The files that call the model.
_CALLERS = tuple(str(Path(__file__).with_name(name)) for name in ("logits.py", "trace.py"))


def _users_line() -> tuple[str, int] | None:
    """Return the innermost line of the user's code that is running; None outside of the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_CALLERS):
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
