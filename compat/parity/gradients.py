"""Comparison of the gradients of a loss by every parameter with the reference's.

The loss is the mean cross-entropy of the logits against the next ids. The name map turns the
reference's gradients into those of the model's own parameters, by the chain rule where a tensor is
computed from several parameters or a parameter is a part of several tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.checkpoint.layout import EMBEDDING, HEAD, expected_shapes
from compat.config import GPT2Config
from compat.name_map import NameMap, Row, all_parameters, names_of, sliced
from compat.parity.compare import compare_accumulated
from compat.parity.reference import Reference
from compat.parity.report import GradientResult, GradientsProof
from compat.user_code import exception_summary
from compat.validation import check_names, is_dropped

SAME = 1e-5  # relative difference of a tensor's gradients that is only rounding


def prove_gradients(
    model: nn.Module,
    reference: Reference,
    name_map: NameMap,
    ids: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    *,
    same_suffices: bool = False,
) -> GradientsProof:
    """Compare the gradient of every parameter with the reference's, calibrated on float64.

    Frozen parameters are compared too. The model's gradients and `requires_grad` are restored
    afterwards.

    Args:
        model: the model, in the data type of the reference, with the checkpoint's weights.
        reference: the reference, in float32 or float64.
        name_map: the model's name map.
        ids: (B, T).
        logits_of: runs the model on ids and returns logits (B, T, V), or (B, 1, V) of the last
            position.
        same_suffices: return a proof without results if all gradients agree with the reference's
            to within `SAME`. The comparison in float64 takes two thirds of the time.

    Raises:
        NameMapError: the map does not fit the model.
    """
    proof = GradientsProof()
    config = reference.checkpoint.config
    rows = name_map.expand(config.n_layer)
    wholes = all_parameters(model)
    parameters = sliced(wholes, names_of(rows))
    check_names(model, rows, parameters, name_map.expand_zeros(config.n_layer))
    rows = [row for row in rows if not is_dropped(row, parameters)]
    proof.frozen = [name for name, p in wholes.items() if not p.requires_grad]
    positions = 0

    def loss(ids: Tensor) -> Tensor:
        nonlocal positions
        logits = logits_of(ids)[..., : config.vocab_size]
        positions = logits.shape[1]
        return next_token_loss(logits, ids)

    try:
        gradients = sliced(_own_gradients(wholes, loss, ids), names_of(rows))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # such as exit() in the user's code
        proof.error = exception_summary(error).rstrip(".")
        return proof

    ours = {id(parameter): gradients.pop(name, None) for name, parameter in parameters.items()}

    def theirs(exact: bool, work: torch.dtype = torch.float64) -> dict[int, Tensor | None]:
        last = reference.gradients(lambda x: next_token_loss(x[:, -positions:], ids), ids, exact)
        dtype = torch.float64 if exact else reference.dtype
        return _pulled_back(last, rows, parameters, dtype, work)

    tensors = _by_first_row(rows, parameters, config)

    def joined(gradients: dict[int, Tensor | None], hf: str, last: bool = True) -> Tensor:
        """Join the gradients of a tensor's parameters to one vector, zero where there are none."""
        owned = [parameters[name] for name in tensors[hf]]
        take = gradients.pop if last else gradients.get  # to free their memory
        flat = [torch.zeros_like(p) if (g := take(id(p))) is None else g for p in owned]
        return torch.cat([g.flatten() for g in flat])

    if same_suffices:
        near = theirs(exact=False, work=reference.dtype)
        pairs = ([joined(g, hf, last=False) for g in (ours, near)] for hf in tensors)
        if all((mine - other).norm() <= SAME * other.norm() for mine, other in pairs):
            return proof
    found = theirs(exact=False)
    exact = theirs(exact=True)
    unused = {key for key, gradient in ours.items() if gradient is None}
    compared = compare_accumulated(
        (hf, joined(ours, hf), joined(found, hf), joined(exact, hf)) for hf in tensors
    )
    for hf, difference in compared:
        names = tuple(tensors[hf])
        missed = tuple(name for name in names if id(parameters[name]) in unused)
        proof.results.append(GradientResult(hf, names, difference, missed))
    return proof


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, T, V) against the ids that follow.

    The last position, which may be the only one that a model returns, is compared with the first
    id, so that every position has a gradient.
    """
    labels = ids.roll(-1, dims=1)[:, -logits.shape[1] :]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten().long())


def _own_gradients(
    parameters: Mapping[str, Tensor], loss: Callable[[Tensor], Tensor], ids: Tensor
) -> dict[str, Tensor]:
    """Return the gradients of the parameters that the backward pass reaches, by name.

    `backward` is called, as in training; reentrant checkpointing refuses `torch.autograd.grad`.
    """
    unique = {id(parameter): parameter for parameter in parameters.values()}
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in unique.values()]
    try:
        for parameter in unique.values():
            parameter.requires_grad_(True)
            parameter.grad = None
        with torch.enable_grad():
            loss(ids).backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}
    finally:
        for parameter, requires_grad, gradient in before:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


def _pulled_back(
    gradients: dict[str, Tensor],
    rows: Sequence[Row],
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    work: torch.dtype,
) -> dict[int, Tensor | None]:
    """Return the gradients of the model's parameters, from those by the checkpoint's tensors.

    They are computed in `work`, returned in `dtype`, and removed from `gradients`. A tensor is
    `row.op.save` of its parameters, so the gradient of a parameter is the sum over its rows of the
    vector-Jacobian products of these functions.
    """
    has_head = any(row.hf == HEAD for row in rows)
    total: dict[int, Tensor | None] = {id(p): None for p in parameters.values()}
    for row in rows:
        unique = {id(parameters[name]): parameters[name] for name in row.ours}
        leaves = {
            key: parameter.detach().to(work).requires_grad_() for key, parameter in unique.items()
        }
        gradient = gradients.pop(row.hf).to(work)
        if row.hf == EMBEDDING and not has_head:  # the model multiplies by the embedding itself
            gradient = gradient + gradients.pop(HEAD).to(work)
        with torch.enable_grad():
            tensor = row.op.save([leaves[id(parameters[name])] for name in row.ours])
        gradient = gradient[tuple(slice(n) for n in tensor.shape)]  # a model of fewer positions
        pulled = torch.autograd.grad(
            tensor, list(leaves.values()), gradient.reshape(tensor.shape), allow_unused=True
        )
        for key, part in zip(leaves, pulled, strict=True):
            known = total.get(key)
            if part is not None:
                total[key] = part.to(dtype) if known is None else known + part.to(dtype)
    return total


def _by_first_row(
    rows: Sequence[Row], parameters: Mapping[str, Tensor], config: GPT2Config
) -> dict[str, list[str]]:
    """Group parameters by tensor, each parameter once, in the order of the backward pass."""
    seen: set[int] = set()
    found: dict[str, list[str]] = {}
    for row in rows:
        for name in row.ours:
            if id(parameters[name]) not in seen:
                seen.add(id(parameters[name]))
                found.setdefault(row.hf, []).append(name)
    modules = dict.fromkeys(hf.rpartition(".")[0] for hf in reversed(expected_shapes(config)))
    order = [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]
    return {hf: found[hf] for hf in order if hf in found}
