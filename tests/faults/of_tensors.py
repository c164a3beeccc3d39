"""Faults of the tensors: their names, shapes, data types and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.faults.builder import C, State, V
from tests.faults.fault import WEIGHTS, Fault, tensors

_UNEXPECTED = (WEIGHTS, "does not hold the tensors that its config requires", "Check that")
C_FC = "h.1.mlp.c_fc.weight"


def _fault(breaks: Callable[[Path], Any], *says: str) -> Fault:
    return Fault(breaks, (*_UNEXPECTED, *says))


def _to(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return tensors(lambda state: state.update({name: state[name].to(dtype)}))


def _renamed(old: str, new: str) -> Callable[[Path], None]:
    return tensors(lambda state: state.update({new: state.pop(old)}))


def _with(name: str, tensor: torch.Tensor, **config: Any) -> Callable[[Path], None]:
    return tensors(lambda state: state.update({name: tensor}), **config)


def _value(bad: float) -> Callable[[Path], None]:
    def change(state: State) -> None:
        state[C_FC][[2, 3], [1, 0]] = bad

    return tensors(change)


def _twice(folder: Path) -> None:
    state = load_file(folder / WEIGHTS)
    save_file({**state, "transformer.ln_f.bias": state["ln_f.bias"].clone()}, folder / WEIGHTS)


FAULTS = {
    "tensors: one missing": _fault(
        tensors(lambda state: state.pop("h.1.attn.c_proj.bias")), "1 missing: h.1.attn.c_proj.bias"
    ),
    "tensors: the embedding missing": _fault(
        tensors(lambda state: state.pop("wte.weight")), "missing: wte.weight"
    ),
    "tensors: an untied head missing": _fault(
        tensors(lambda state: None, tie_word_embeddings=False), "1 missing: lm_head.weight"
    ),
    "tensors: one unexpected": _fault(
        _with("h.0.adapter", torch.ones(2)), "1 unexpected: h.0.adapter"
    ),
    "tensors: one renamed": _fault(
        _renamed("h.0.ln_1.weight", "h.0.ln1.weight"),
        "1 missing: h.0.ln_1.weight",
        "1 unexpected: h.0.ln1.weight",
    ),
    "tensors: a layer with a zero in front": _fault(
        _renamed("h.0.ln_1.weight", "h.00.ln_1.weight"),
        "1 missing: h.0.ln_1.weight",
        "1 unexpected: h.00.ln_1.weight",
    ),
    "tensors: a layer of 5,000 digits": _fault(
        _with(f"h.{'1' * 5000}.x", torch.ones(2)), "1 unexpected: h.111"
    ),
    "tensors: a name of a megabyte": _fault(
        _with("x" * 1_000_000, torch.ones(2)), "1 unexpected: xxx"
    ),
    "tensors: a name that clears the screen": _fault(
        _with("h.0.\x1b[2J\n", torch.ones(2)), "1 unexpected: h.0.\\x1b[2J"
    ),
    "tensors: a name with and without prefix": Fault(
        _twice, (WEIGHTS, "ln_f.bias a second time", "with each tensor once")
    ),
    "tensors: transposed": _fault(
        tensors(lambda state: state.update({C_FC: state[C_FC].t()})),
        f"{C_FC}: looks transposed: expected [8, 32], found [32, 8]",
    ),
    "tensors: of another shape": _fault(
        _with(C_FC, torch.ones(C, 3)), f"{C_FC}: expected [8, 32], found [8, 3]"
    ),
    "tensors: an embedding with more rows": _fault(
        _with("wte.weight", torch.ones(V + 2, C)),
        "wte.weight: expected [262, 8], found [264, 8]",
        "config.json has vocab_size",
    ),
    "tensors: positions with fewer rows": _fault(
        _with("wpe.weight", torch.ones(4, C)),
        "wpe.weight: expected [8, 8], found [4, 8]",
        "config.json has n_positions",
    ),
    "tensors: a number without axes": _fault(
        _with("ln_f.bias", torch.tensor(1.0)), "ln_f.bias: expected [8], found []"
    ),
    **{
        f"tensors: {dtype}": _fault(_to(C_FC, dtype), C_FC, "floating-point")
        for dtype in (torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn)
    },
    **{
        f"tensors: {bad} in a weight": Fault(
            _value(bad),
            (
                WEIGHTS,
                "non-finite weights",
                f"{C_FC} has 2 NaN or infinite",
                "[2, 1]",
                "check_finite=False",
            ),
        )
        for bad in (math.nan, math.inf, -math.inf)
    },
    "tensors: mixed data types load": Fault(
        _to(C_FC, torch.float16), ("several data types", "widest"), None
    ),
    "tensors: a stored head equal to the embedding loads": Fault(
        tensors(lambda state: state.update({"lm_head.weight": state["wte.weight"].clone()})),
        ("equal to wte.weight",),
        None,
    ),
    "tensors: a stored head that differs is untied": Fault(
        tensors(lambda state: state.update({"lm_head.weight": state["wte.weight"] + 1})),
        ("lm_head.weight differs", "untied"),
        None,
    ),
    "tensors: old masks load": Fault(
        _with("h.0.attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.uint8)), ("mask",), None
    ),
}
