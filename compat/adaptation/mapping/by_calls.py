"""A name map without a graph, from the order in which parameters are first used.

It is used for models that cannot be traced, such as those that convert hidden states to NumPy (the
zoo's mutations `untraced`), and for graphs in which no GPT-2 is recognised. The map is a guess: q,
k and v are distinguished by name or, without such names, by order. Only the logits can be compared
here, and they show whether the guess is right. Without this module these models would be refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from compat.adaptation.tracing.calling import Forward, describe_error
from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.name_map import NameMap, Row
from compat.ops import Op, Rearrange, Same, Split, Transpose
from compat.user_models.eval_mode import eval_mode

Called = tuple[str, nn.Module]
ATTENTION, MLP = ("attn.c_attn", "attn.c_proj"), ("mlp.c_fc", "mlp.c_proj")

# Names by which query, key and value are distinguished.
ROLES = {
    "q": re.compile(r"(^|[_.])(w?_?q|query|queries|to_?q|q_?proj|w_?query)([_.]|$)", re.I),
    "k": re.compile(r"(^|[_.])(w?_?k|key|keys|to_?k|k_?proj|w_?key)([_.]|$)", re.I),
    "v": re.compile(r"(^|[_.])(w?_?v|value|values|to_?v|v_?proj|w_?value)([_.]|$)", re.I),
}


def map_by_calls(model: nn.Module, call: Forward, ids: Tensor, config: GPT2Config) -> NameMap:
    """Map modules called in GPT-2's order: embeddings, the layers' norms and branches, norm, head.

    Raises:
        AdaptError: the modules are not called in that order.
    """
    called = _calls(model, call, ids)
    tables = [c for c in called if isinstance(c[1], nn.Embedding)]
    rest = [c for c in called if c not in tables]
    head = rest.pop() if rest and not _is_norm(rest[-1][1]) else None
    groups: list[list[Called]] = []
    for one in rest:
        if _is_norm(one[1]):
            groups.append([])
        if not groups:
            raise AdaptError(f"{one[0]} is called before any norm")
        groups[-1].append(one)
    if len(groups) != 2 * config.n_layer + 1 or not tables:
        raise AdaptError(
            f"{len(groups)} norms and {len(tables)} embeddings are called, but "
            f"{2 * config.n_layer + 1} norms were expected for {config.n_layer} layers"
        )
    rows = [Row("wte.weight", (_parameter(tables[0], 2),), Same())]
    rows.append(_position_row(model, tables, config))
    for number, (norm, *branch) in enumerate(groups[:-1]):
        layer, second = divmod(number, 2)
        rows += _norm_rows(f"h.{layer}.ln_{second + 1}", norm)
        rows += _branch_rows(f"h.{layer}.", branch, MLP if second else ATTENTION)
    rows += _norm_rows("ln_f", groups[-1][0])
    if head is not None and head[1] is not tables[0][1]:
        rows.append(Row("lm_head.weight", (_parameter(head, 2),), Same()))
    return NameMap(tuple(rows), zeros=tuple(_biases(head) if head is not None else []))


class _Uses(TorchFunctionMode):
    """Records the names of parameters in the order in which torch functions first use them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        named = model.named_parameters(remove_duplicate=False)
        self.names = {id(parameter): name for name, parameter in reversed(list(named))}
        self.used: dict[str, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Reading an attribute of a parameter, such as its data type, does not count as a use.
        if any(isinstance(value, Tensor) for value in tree_leaves(result)):
            for value in tree_leaves((args, kwargs)):
                if id(value) in self.names:
                    self.used.setdefault(self.names[id(value)])
        return result


def _calls(model: nn.Module, call: Forward, ids: Tensor) -> list[Called]:
    """Return the modules with parameters of their own, in the order of the first use of these."""
    uses = _Uses(model)
    try:
        with eval_mode(model), uses:
            call(model, ids)
    except Exception as error:
        raise AdaptError(f"the model cannot be run: {describe_error(error)}") from error
    owners = dict.fromkeys(name.rpartition(".")[0] for name in uses.used)
    return [(path, model.get_submodule(path)) for path in owners if path]


def _is_norm(module: nn.Module) -> bool:
    return all(p.ndim == 1 for p in module.parameters(recurse=False))


def _parameter(one: Called, ndim: int) -> str:
    path, module = one
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == ndim:
            return f"{path}.{name}"
    raise AdaptError(f"{path} has no parameter with {ndim} axes")


def _biases(one: Called) -> list[str]:
    named = one[1].named_parameters(recurse=False)
    return [f"{one[0]}.{name}" for name, parameter in named if parameter.ndim == 1]


def _position_row(model: nn.Module, tables: Sequence[Called], config: GPT2Config) -> Row:
    """Return the second embedding, or a parameter of its shape that the model itself holds."""
    if len(tables) > 1:
        return Row("wpe.weight", (_parameter(tables[1], 2),), Same())
    shape = (config.n_positions, config.n_embd)
    ops: dict[tuple[int, ...], Op] = {shape: Same(), (1, *shape): Rearrange("r c -> 1 r c")}
    for name, parameter in model.named_parameters(recurse=False):
        if tuple(parameter.shape) in ops:
            return Row("wpe.weight", (name,), ops[tuple(parameter.shape)])
    raise AdaptError(f"there is no second embedding and no parameter of shape {list(shape)}")


def _norm_rows(hf: str, one: Called) -> list[Row]:
    """Return a norm's rows. Its scale is the parameter that is 1 everywhere, or else the first."""
    path, module = one
    named = dict(module.named_parameters(recurse=False))
    scales = [name for name, p in named.items() if bool((p == 1).all())] or list(named)[:1]
    shifts = [name for name in named if name not in scales[:1]]
    rows = [Row(f"{hf}.weight", (f"{path}.{scales[0]}",), Same())]
    return rows + [Row(f"{hf}.bias", (f"{path}.{name}",), Same()) for name in shifts[:1]]


def _branch_rows(layer: str, called: Sequence[Called], names: tuple[str, str]) -> list[Row]:
    """Return the one or three projections at the beginning of a branch, and the one at its end."""
    if len(called) not in (2, 4) or (len(called) == 4 and names is not ATTENTION):
        raise AdaptError(
            f"{len(called)} projections are called for {layer}{names[0]} and {layer}{names[1]}, "
            "but 2 were expected"
        )
    *first, last = called
    transposed = isinstance(last[1], nn.Linear)
    oriented: Op = Transpose() if transposed else Same()
    ops: tuple[Op, Op] = (oriented, Same())  # of the first weight and bias
    if len(first) == 3:
        first.sort(key=lambda one: "qkv".find(_role(one)))
        ops = Split(3, transpose=transposed), Split(3)
    rows = []
    for name, ones, weight, bias in (
        (layer + names[0], first, *ops),
        (layer + names[1], [last], oriented, Same()),
    ):
        rows.append(Row(f"{name}.weight", tuple(_parameter(one, 2) for one in ones), weight))
        biases = [b for one in ones for b in _biases(one)]
        if len(biases) == len(ones):
            rows.append(Row(f"{name}.bias", tuple(biases), bias))
    return rows


def _role(one: Called) -> str:
    """Return which of q, k and v the module is by its name; "q" for any other name."""
    last = one[0].rpartition(".")[2]
    return next((role for role, pattern in ROLES.items() if pattern.search(last)), "q")
