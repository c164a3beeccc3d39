"""A GPT-2 in torch with a correct forward pass and optional faults in its backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Name of the fault → code that must be reported, and the first wrong array.
FAULTS = {
    "summed": ("other_loss", "loss"),
    "not shifted": ("other_loss", "loss"),
    "accumulated": ("scaled_gradient", "grad.logits"),
    "head forgotten": ("missing_gradient", "grad.wte.weight"),
    "no scale": ("scaled_gradient", "grad.h.2.k"),
    "detached": ("missing_gradient", "grad.h.1.out"),
    "erf": ("wrong_backward", "grad.h.2.fc"),
    "norm": ("wrong_backward", "grad.h.2.out"),
    "softmax": ("wrong_backward", "grad.h.2.k"),
    "last row": ("partial_gradient", "grad.wpe.weight"),
    "overwritten": ("partial_gradient", "grad.ln_f.bias"),
    "typing error": ("wrong_backward", "grad.h.2.fc"),
    "decay": ("weight_decay", "grad.ln_f.bias"),
    "no bias": ("no_gradient", "grad.h.2.attn.c_proj.bias"),
}


def mistyped(x: Tensor) -> Tensor:
    """Return the tanh GELU, with a derivative that lacks the factor 3 of the cube."""
    root = math.sqrt(2 / math.pi)
    tanh = torch.tanh(root * (x + 0.044715 * x**3)).detach()
    slope = (1 + tanh + x * (1 - tanh**2) * root * (1 + 0.044715 * x**2)).detach() / 2
    return slope * x


def replaced(value: Tensor, other: Tensor) -> Tensor:
    """Return a value with the gradient of another tensor."""
    return value.detach() + other - other.detach()


def gradients(
    parameters: Mapping[str, Tensor], ids: Tensor, n_layer: int, n_head: int, fault: str = ""
) -> dict[str, Tensor]:
    """Return the loss, and its gradients at all taps and with respect to all parameters."""
    (B, T), C = ids.shape, parameters["wte.weight"].shape[1]
    w = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    taps: dict[str, Tensor] = {}

    def tap(name: str, value: Tensor) -> Tensor:
        value.retain_grad()
        taps[name] = value
        return value

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        if fault == "norm":
            mean, var = mean.detach(), var.detach()
        normed = (x - mean) / torch.sqrt(var + 1e-5)
        return normed * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = tap("embed", w["wte.weight"][ids] + w["wpe.weight"][:T])
    for i in range(n_layer):
        h = f"h.{i}"
        a = tap(f"{h}.ln_1", norm(x.detach() if fault == "detached" else x, f"{h}.ln_1"))
        qkv = linear(a, f"{h}.attn.c_attn").chunk(3, -1)
        q, k, v = (
            tap(f"{h}.{name}", t).view(B, T, n_head, -1).transpose(1, 2)
            for name, t in zip("qkv", qkv, strict=True)
        )
        product = q @ k.mT
        scores = product / math.sqrt(C // n_head)
        if fault == "no scale":
            scores = replaced(scores, product)
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e30)
        probs = scores.softmax(-1)
        if fault == "softmax":
            probs = (scores - scores.logsumexp(-1, keepdim=True).detach()).exp()
        heads = tap(f"{h}.probs", probs) @ v
        heads = tap(f"{h}.heads", heads.transpose(1, 2).reshape(B, T, C))
        x = tap(f"{h}.resid_mid", x + tap(f"{h}.attn", linear(heads, f"{h}.attn.c_proj")))
        fc = tap(f"{h}.fc", linear(tap(f"{h}.ln_2", norm(x, f"{h}.ln_2")), f"{h}.mlp.c_fc"))
        act = F.gelu(fc, approximate="tanh")
        if fault in ("erf", "typing error"):
            act = replaced(act, F.gelu(fc) if fault == "erf" else mistyped(fc))
        act = tap(f"{h}.act", act)
        x = tap(f"{h}.out", x + tap(f"{h}.mlp", linear(act, f"{h}.mlp.c_proj")))
    head = w["wte.weight"].detach() if fault == "head forgotten" else w["wte.weight"]
    logits = tap("logits", tap("ln_f", norm(x, "ln_f")) @ head.T)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    if fault == "summed":
        loss = loss * B * (T - 1)
    if fault == "not shifted":
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    backward: Any = (loss / 4 if fault == "accumulated" else loss).backward
    backward()
    found = {"loss": loss.detach()}
    for name, value in (taps | w).items():
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        if fault == "last row" and name == "wpe.weight":
            gradient = F.pad(found["grad.embed"][-1], (0, 0, 0, len(value) - T))
        if fault == "overwritten" and name == "ln_f.bias":
            gradient = found["grad.ln_f"][-1, -2]
        if fault == "decay" and name in w:
            gradient = gradient + 0.1 * value.detach()
        if fault == "no bias" and name.endswith("attn.c_proj.bias"):
            gradient = torch.zeros_like(gradient)
        found[f"grad.{name}"] = gradient
    return found
