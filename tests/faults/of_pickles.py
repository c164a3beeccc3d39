"""Faults of `.bin` and `.pt` files."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compat.errors import ConfigError
from tests.faults.builder import nanogpt, state
from tests.faults.fault import PICKLE, Fault, both, content, cut, pickled, sparse, values
from tests.faults.pickles import (
    Malice,
    MaliceByEval,
    bomb,
    compressed,
    cut_to,
    flagged,
    int,
    keys_as,
    nano,
    nested,
    old_style,
    plain_pickle,
    storage,
    two_ends,
    wte,
    zip_around,
)

_UNREADABLE = (PICKLE, "cannot be read as a PyTorch file of plain tensors", "ask its author")
OLD = {"_use_new_zipfile_serialization": False}

_TUPLES = b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns."
_DOUBLING = b"\x80\x02})" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"Ns."
_BYTEARRAY = b"\x80\x02}X\x01\0\0\0acbuiltins\nbytearray\nJ\0\xca\x9a;\x85Rs."
_UNFILLED = b"\x80\x02}X\x0a\0\0\0wte.weightctorch\nFloatTensor\nJ\0\0\0\x10\x85Rs."
_NOT_PLAIN = (PICKLE, "holds no plain dictionary of named tensors", "state_dict()")
_NO_DATA = (PICKLE, "wte.weight", "not dense or have no data of their own")


def _unreadable(breaks: Callable[[Path], Any], *says: str, layout: str = "bin") -> Fault:
    return Fault(breaks, (*_UNREADABLE, *says), layout=layout)


FAULTS = {
    "pickle: empty": _unreadable(cut(PICKLE, 0)),
    "pickle: cut at the start": _unreadable(cut(PICKLE, 0.01)),
    "pickle: cut at the end": _unreadable(cut(PICKLE, 0.999), "cut short"),
    "pickle: 4 GB of nothing": _unreadable(sparse(PICKLE, 4 << 30)),
    "pickle: a web page": _unreadable(content(PICKLE, b"<!DOCTYPE html>"), "web page"),
    "pickle: two bytes": _unreadable(content(PICKLE, b"h\n")),
    "pickle: code by torch.save": _unreadable(
        pickled(lambda folder: {"wte.weight": Malice(folder)}), "getattr", "not executed"
    ),
    "pickle: code by torch.save, old style": _unreadable(
        pickled(lambda folder: {"wte.weight": Malice(folder)}, **OLD),
        "not executed",
        layout="legacy",
    ),
    "pickle: code by eval": _unreadable(
        pickled(lambda folder: {**state(), "x": MaliceByEval(folder)}), "eval", "not executed"
    ),
    "pickle: code by pickle": _unreadable(plain_pickle),
    "pickle: code beside nanoGPT's tensors": Fault(
        lambda folder: torch.save({**nanogpt(), "config": Malice(folder)}, folder / "ckpt.pt"),
        ("ckpt.pt", "not executed"),
        layout="nanogpt",
    ),
    "pickle: a module": _unreadable(pickled(lambda folder: torch.nn.Linear(2, 2)), "not executed"),
    "pickle: a list": Fault(pickled(lambda folder: [torch.ones(2)]), _NOT_PLAIN, layout="bin"),
    "pickle: a tensor": Fault(pickled(lambda folder: torch.ones(2)), _NOT_PLAIN, layout="bin"),
    "pickle: keys that are numbers": Fault(
        pickled(lambda folder: {0: torch.ones(2)}), _NOT_PLAIN, layout="bin"
    ),
    "pickle: values that are not tensors": Fault(
        pickled(lambda folder: {**state(), "step": 3}), _NOT_PLAIN, layout="bin"
    ),
    "pickle: tensors one level down": Fault(
        pickled(lambda folder: {"state_dict": state()}), _NOT_PLAIN, layout="bin"
    ),
    "pickle: a sparse tensor": _unreadable(
        pickled(wte(torch.Tensor.to_sparse)), "_rebuild_sparse_tensor"
    ),
    "pickle: a tensor on meta": _unreadable(pickled(wte(lambda t: t.to("meta"))), "_rebuild_meta"),
    "pickle: a nested tensor": _unreadable(pickled(wte(nested)), "_rebuild_nested_tensor"),
    "pickle: whole numbers": Fault(
        pickled(wte(lambda t: t.to(torch.int64))),
        (PICKLE, "wte.weight", "int64", "floating-point"),
        layout="bin",
    ),
    "pickle: transposed and not contiguous loads": Fault(
        pickled(wte(lambda t: t.t().contiguous().t())), (), None, layout="bin"
    ),
    "pickle: parameters load": Fault(pickled(wte(torch.nn.Parameter)), (), None, layout="bin"),
    "pickle: a float8 tensor": Fault(
        pickled(wte(lambda t: t.to(torch.float8_e4m3fn))),
        (PICKLE, "wte.weight", "float8_e4m3fn", "floating-point"),
        layout="bin",
    ),
    "pickle: a zip bomb of 200 MB": _unreadable(bomb, "would unpack to 200,0", "may take at most"),
    "pickle: compressed": _unreadable(compressed, "compressed"),
    "pickle: a record that claims to be a folder": _unreadable(flagged, "compressed or folders"),
    "pickle: an archive with two tables of contents": _unreadable(
        two_ends, "does not end with its table of contents"
    ),
    "pickle: an archive without a pickle": _unreadable(
        lambda folder: zipfile.ZipFile(folder / PICKLE, "w").writestr("archive/version", "3"),
        "0 files data.pkl",
    ),
    "pickle: a million tuples in tuples": _unreadable(
        zip_around(_TUPLES), "nests more than 10,000 tuples"
    ),
    "pickle: a million opcodes": _unreadable(
        zip_around(b"\x80\x02" + b"Nq\0" * 500_000 + b"}."), "more than 400,000 opcodes"
    ),
    "pickle: a string with an invalid escape": _unreadable(
        zip_around(b"\x80\x02}S'\\z'\n."), "the opcode STRING"
    ),
    "pickle: of 100 MB": _unreadable(
        zip_around(b"\x80\x02}" + b"N" * 100_000_000 + b"."),
        "its pickle takes 100,000,004 bytes, but may take at most 4,194,304",
    ),
    "pickle: a number of 16 bytes": _unreadable(
        zip_around(b"\x80\x02}\x8a\x10" + b"\x7f" * 16 + b"Ns."), "more than 64 bits"
    ),
    "pickle: 20,000 tuples in tuples": _unreadable(
        zip_around(b"\x80\x02})" + b"\x85" * 20_000 + b"Ns."), "nests more than 10,000 tuples"
    ),
    "pickle: a tuple of 2^60 tuples": _unreadable(
        zip_around(_DOUBLING), "nests more than 10,000 tuples"
    ),
    "pickle: a bytearray of 1 GB": _unreadable(zip_around(_BYTEARRAY), "builtins.bytearray"),
    "pickle: a tensor of whatever is in memory": _unreadable(
        zip_around(_UNFILLED), "torch.FloatTensor"
    ),
    "pickle: protocol 3": _unreadable(
        pickled(lambda folder: state(), pickle_protocol=3),
        "has protocol 3",
        "protocol 2",
        "without pickle_protocol",
    ),
    "pickle: a quantized storage": _unreadable(
        zip_around(
            storage(b"K\x04", b"K\2K\2\x86", b"K\2K\1\x86").replace(b"Float", b"QInt8"),
            **{"data/0": bytes(4)},
        ),
        "torch.QInt8Storage",
    ),
    "pickle: a TorchScript program": _unreadable(
        zip_around(b"\x80\x02}.", **{"constants.pkl": b"\x80\x02)."}),
        "a TorchScript program",
        "state_dict()",
    ),
    "pickle: a storage larger than its record": _unreadable(
        zip_around(
            storage(int(10**9), int(10**9) + b"\x85", b"K\1\x85"),
            **{"data/0": bytes(64)},
        )
    ),
    "pickle: one number as a tensor of 2^40": Fault(
        both(
            zip_around(
                storage(b"K\1", int(2**31 - 1) + int(512) + b"\x86", b"K\0K\0\x86"),
                **{"data/0": bytes(4)},
            ),
            values("config.json", vocab_size=2**31 - 1, n_embd=512),
        ),
        _NO_DATA,
        layout="bin",
    ),
    **{
        f"old style: cut to {size} bytes": _unreadable(cut_to(size), layout="legacy")
        for size in (1, 18, 28, 52, 100)
    },
    "old style: cut in the pickle": _unreadable(cut(PICKLE, 0.05), layout="legacy"),
    "old style: cut in the data": _unreadable(cut(PICKLE, 0.9), layout="legacy"),
    "old style: 10^12 numbers claimed": _unreadable(
        old_style(
            storage(int(10**12), int(10**12) + b"\x85", b"K\1\x85", b"N"),
            b"]X\1\0\0\x000a",
            bytes(8),
        ),
        layout="legacy",
    ),
    "old style: no data listed": Fault(
        keys_as(lambda keys: []), (PICKLE, "the data of all of its tensors"), layout="legacy"
    ),
    "old style: data of one tensor not listed": Fault(
        keys_as(lambda keys: keys[:-1]), (PICKLE, "the data of all of its tensors"), layout="legacy"
    ),
    "old style: data of one tensor listed twice": _unreadable(
        keys_as(lambda keys: [*keys[:-1], "".join([*keys[0]])]),  # equal, but another object
        "its list of the data that follows is damaged",
        layout="legacy",
    ),
    "old style: trailing bytes": Fault(
        lambda folder: (
            (folder / PICKLE).write_bytes((folder / PICKLE).read_bytes() + b"\0") and None
        ),
        (PICKLE, "its tensors need", "Download it again"),
        layout="legacy",
    ),
    "old style: a bytearray of 1 GB": _unreadable(
        old_style(_BYTEARRAY), "builtins.bytearray", layout="legacy"
    ),
    "old style: loads": Fault(lambda folder: None, (), None, layout="legacy"),
    "nanoGPT: arguments that are a list": Fault(
        nano(model_args=[1]),
        ("ckpt.pt", "model_args is not a dictionary"),
        ConfigError,
        layout="nanogpt",
    ),
    "nanoGPT: 10^9 layers": Fault(
        nano(model_args={**nanogpt()["model_args"], "n_layer": 10**9}),
        ("ckpt.pt", "n_layer", "1000000000", "Check"),
        ConfigError,
        layout="nanogpt",
    ),
    "nanoGPT: loads": Fault(lambda folder: None, ("nanoGPT",), None, layout="nanogpt"),
}
