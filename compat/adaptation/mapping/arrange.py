"""From "this element is that element" to an op of the name map that says it in one word."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import prod

import torch
from torch import Tensor

from compat.ops import Fused, Op, Part, Rearrange, Same, Split, Transpose


def single_op(content: Tensor, shape: Sequence[int], n_head: int) -> Op | None:
    """The op that turns a Hugging Face tensor into one parameter.

    Args:
        content: of the parameter's shape; which element (counted from 0) of the Hugging Face tensor
            each of its elements is.
        shape: of the Hugging Face tensor.
        n_head: for parameters with an axis of heads.
    """
    count = torch.arange(prod(shape)).view(*shape)
    ops: list[Op] = [Same()]
    if len(shape) == 2:
        ops.append(Transpose())
    for axes, sizes in _axes(shape, n_head):
        for order in permutations(range(len(axes))):
            right = _merged([axes[i] for i in order], [sizes[i] for i in order], content.shape)
            if right is not None:
                left = "(h d) c" if len(axes) > len(shape) else " ".join(axes)
                known = (("h", n_head),) if len(axes) > len(shape) else ()
                ops.append(Rearrange(f"{left} -> {right}", known))
    return next((op for op in ops if _makes(op, count, [content])), None)


def _axes(shape: Sequence[int], n_head: int) -> list[tuple[str, tuple[int, ...]]]:
    if len(shape) == 1:
        return [("c", tuple(shape))]
    whole = ("io", tuple(shape))
    if shape[0] % n_head:
        return [whole]
    return [whole, ("hdc", (n_head, shape[0] // n_head, shape[1]))]


def split_op(contents: Sequence[Tensor], shape: Sequence[int]) -> Op | None:
    """The op from one tensor to parameters that hold equal shares of its rows or columns."""
    count, parts = torch.arange(prod(shape)).view(*shape), len(contents)
    ops = [Split(parts)]
    if len(shape) == 2:
        ops = [Split(parts, flip, dim) for dim in (0, -1) for flip in (True, False)]
    return next((op for op in ops if _makes(op, count, contents)), None)


def fused_op(contents: Sequence[Tensor], shape: Sequence[int], n_head: int) -> Op | None:
    """The op for q, k, v: from one tensor `"c (q h d)"` to any number of parameters."""
    count = torch.arange(prod(shape)).view(*shape)
    simple: list[Op] = [Same(), Transpose()] if len(shape) == 2 else [Same()]
    if len(contents) == 3:
        simple = [Split(3, transpose=True), Split(3)]
    for op in simple:
        if (len(shape) == 2 or not getattr(op, "transpose", False)) and _makes(op, count, contents):
            return op
    parts = [_part(content, count, n_head) for content in contents]
    if any(part is None for part in parts):
        return None
    fused = Fused(n_head, tuple(part for part in parts if part is not None))
    return fused if _makes(fused, count, contents) else None


def _part(content: Tensor, count: Tensor, n_head: int) -> Part | None:
    """What one parameter holds, in which order of axes."""
    channels = count.shape[0] if count.ndim == 2 else 1
    whole = count.view(channels, 3, n_head, -1)
    D = whole.shape[-1]
    flat = content.reshape(-1)
    which = _in_order(flat // (n_head * D) % 3)
    heads = _in_order(flat // D % n_head)
    chosen = whole[:, which][:, :, heads]
    for order in permutations(range(4)):
        if not torch.equal(chosen.permute(order).reshape(-1), flat):
            continue
        letters = [("cqhd"[i], chosen.shape[i]) for i in order if chosen.shape[i] > 1]
        axes = _merged([x for x, _ in letters], [n for _, n in letters], content.shape)
        if axes is not None:
            every = heads == list(range(n_head))
            return Part("".join("qkv"[w] for w in which), axes, None if every else tuple(heads))
    return None


def _in_order(values: Tensor) -> list[int]:
    """The different values, in the order in which they first come."""
    return list(dict.fromkeys(values.tolist()))


def _merged(letters: Sequence[str], sizes: Sequence[int], shape: Sequence[int]) -> str | None:
    """The axes written as those of a shape, neighbours merged in brackets: "(q h d) c"."""
    groups, place = [], 0
    for length in shape:
        group: list[str] = []
        size = 1
        while size < length and place < len(letters):
            group.append(letters[place])
            size *= sizes[place]
            place += 1
        if size != length:
            return None
        groups.append(group)
    if place != len(letters):
        return None
    return " ".join(f"({' '.join(g)})" if len(g) > 1 else g[0] if g else "1" for g in groups)


def _makes(op: Op, count: Tensor, contents: Sequence[Tensor]) -> bool:
    try:
        made = op.load(count)
    except (RuntimeError, ValueError, NameMapError):
        return False
    return len(made) == len(contents) and all(map(torch.equal, made, contents))
