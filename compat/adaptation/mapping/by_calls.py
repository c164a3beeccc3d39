"""A name map without a graph, for code that cannot be traced: by the order of first use.

Less is known than from a graph: q, k and v are told by name or order, and only the logits can be
compared. Parity of the logits decides whether the guess was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from compat.adaptation.mapping.role_names import ROLES
from compat.adaptation.tracing.calling import Forward, eval_mode, reason
from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.name_map import NameMap, Row
from compat.ops import Op, Rearrange, Same, Split, Transpose

Called = tuple[str, nn.Module]
ATTENTION, MLP = ("attn.c_attn", "attn.c_proj"), ("mlp.c_fc", "mlp.c_proj")


def map_by_calls(model: nn.Module, call: Forward, ids: Tensor, config: GPT2Config) -> NameMap:
    """Embeddings, then norm, attention, norm, MLP for each layer, norm, head.

    Raises:
        AdaptError: the modules are not called in that order.
    """
    called = _calls(model, call, ids)
    tables = [c for c in called if _is_table(c[1])]
    rest = [c for c in called if c not in tables]
    head = rest.pop() if rest and not _is_norm(rest[-1][1]) else None
    groups: list[list[Called]] = []
    for one in rest:
        if _is_norm(one[1]):
            groups.append([])
        if not groups:
            raise AdaptError(f"{one[0]} is called before any norm; cannot be mapped by calls")
        groups[-1].append(one)
    if len(groups) != 2 * config.n_layer + 1 or not tables:
        raise AdaptError(
            f"{len(groups)} norms are called; expected {2 * config.n_layer + 1} for "
            f"{config.n_layer} layers"
        )
    rows = [Row("wte.weight", (_parameter(tables[0], 2),), Same())]
    rows.append(_position_row(model, tables, config))
    for number, group in enumerate(groups[:-1]):
        layer, second = divmod(number, 2)
        rows += _norm_rows(f"h.{layer}.ln_{second + 1}", group[0])
        rows += _branch_rows(f"h.{layer}.", group[1:], MLP if second else ATTENTION)
    rows += _norm_rows("ln_f", groups[-1][0])
    if head is not None and head[1] is not tables[0][1]:
        rows.append(Row("lm_head.weight", (_parameter(head, 2),), Same()))
    zeros = _biases(head) if head is not None else []
    return NameMap(tuple(rows), zeros=tuple(zeros))


class _Uses(TorchFunctionMode):
    """Notes which parameters torch's functions are called with, each when it is first used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        named = model.named_parameters(remove_duplicate=False)
        self.names = {id(parameter): name for name, parameter in reversed(list(named))}
        self.used: dict[str, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A question about a parameter, such as for its data type, is not a use of it.
        if any(isinstance(value, Tensor) for value in tree_leaves(result)):
            for value in tree_leaves((args, kwargs)):
                if id(value) in self.names:
                    self.used.setdefault(self.names[id(value)])
        return result


def _calls(model: nn.Module, call: Forward, ids: Tensor) -> list[Called]:
    """The modules with parameters of their own, in the order in which these are first used."""
    uses = _Uses(model)
    try:
        with eval_mode(model), uses:
            call(model, ids)
    except Exception as error:
        raise AdaptError(f"it cannot be run: {reason(error)}") from error
    owners = dict.fromkeys(name.rpartition(".")[0] for name in uses.used)
    return [(path, model.get_submodule(path)) for path in owners if path]


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


def _is_norm(module: nn.Module) -> bool:
    return all(p.ndim == 1 for p in module.parameters(recurse=False))


def _parameter(one: Called, ndim: int) -> str:
    path, module = one
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == ndim:
            return f"{path}.{name}"
    raise AdaptError(f"{path} has no parameter with {ndim} axes; cannot be mapped by calls")


def _biases(one: Called) -> list[str]:
    named = one[1].named_parameters(recurse=False)
    return [f"{one[0]}.{name}" for name, parameter in named if parameter.ndim == 1]


def _position_row(model: nn.Module, tables: Sequence[Called], config: GPT2Config) -> Row:
    """The second table, or a parameter of its shape that no module holds."""
    if len(tables) > 1:
        return Row("wpe.weight", (_parameter(tables[1], 2),), Same())
    shape = (config.n_positions, config.n_embd)
    ops: dict[tuple[int, ...], Op] = {shape: Same(), (1, *shape): Rearrange("r c -> 1 r c")}
    for name, parameter in model.named_parameters(recurse=False):
        if tuple(parameter.shape) in ops:
            return Row("wpe.weight", (name,), ops[tuple(parameter.shape)])
    raise AdaptError(f"no positions: no second embedding, no parameter of shape {list(shape)}")


def _norm_rows(hf: str, one: Called) -> list[Row]:
    """The scale is what starts at one, or comes first."""
    path, module = one
    named = dict(module.named_parameters(recurse=False))
    scales = [name for name, p in named.items() if bool((p == 1).all())] or list(named)[:1]
    shifts = [name for name in named if name not in scales[:1]]
    rows = [Row(f"{hf}.weight", (f"{path}.{scales[0]}",), Same())]
    return rows + [Row(f"{hf}.bias", (f"{path}.{name}",), Same()) for name in shifts[:1]]


def _branch_rows(layer: str, called: Sequence[Called], names: tuple[str, str]) -> list[Row]:
    """A branch's projections: one or three, then one."""
    if len(called) not in (2, 4) or (len(called) == 4 and names is not ATTENTION):
        raise AdaptError(f"{layer}{names[0]}: {len(called)} projections are called; expected 2")
    first, last = list(called[:-1]), called[-1]
    if len(first) == 3:
        first.sort(key=lambda one: "qkv".find(_role(one)))
    transposed = isinstance(last[1], nn.Linear)
    weight: Op = Split(3, transpose=transposed) if len(first) == 3 else _orient(transposed)
    bias: Op = Split(3) if len(first) == 3 else Same()
    rows = [
        Row(f"{layer}{names[0]}.weight", tuple(_parameter(one, 2) for one in first), weight),
        Row(f"{layer}{names[1]}.weight", (_parameter(last, 2),), _orient(transposed)),
    ]
    for name, ones, op in ((names[0], first, bias), (names[1], [last], Same())):
        biases = [b for one in ones for b in _biases(one)]
        if len(biases) == len(ones):
            rows.append(Row(f"{layer}{name}.bias", tuple(biases), op))
    return rows


def _role(one: Called) -> str:
    """Of which of q, k and v the module's own name speaks."""
    last = one[0].rpartition(".")[2]
    return next((role for role, pattern in ROLES.items() if pattern.search(last)), "q")


def _orient(transposed: bool) -> Op:
    return Transpose() if transposed else Same()
