"""Faults of `.bin` and `.pt` files."""

from __future__ import annotations

import zipfile

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

FAULTS = {
    "pickle: empty": Fault(cut(PICKLE, 0), _UNREADABLE, layout="bin"),
    "pickle: cut at the start": Fault(cut(PICKLE, 0.01), _UNREADABLE, layout="bin"),
    "pickle: cut at the end": Fault(cut(PICKLE, 0.999), (*_UNREADABLE, "cut short"), layout="bin"),
    "pickle: 4 GB of nothing": Fault(sparse(PICKLE, 4 << 30), _UNREADABLE, layout="bin"),
    "pickle: a web page": Fault(
        content(PICKLE, b"<!DOCTYPE html>"), (*_UNREADABLE, "web page"), layout="bin"
    ),
    "pickle: two bytes": Fault(content(PICKLE, b"h\n"), _UNREADABLE, layout="bin"),
    "pickle: code by torch.save": Fault(
        pickled(lambda folder: {"wte.weight": Malice(folder)}),
        (*_UNREADABLE, "getattr", "not executed"),
        layout="bin",
    ),
    "pickle: code by torch.save, old style": Fault(
        pickled(lambda folder: {"wte.weight": Malice(folder)}, **OLD),
        (*_UNREADABLE, "not executed"),
        layout="legacy",
    ),
    "pickle: code by eval": Fault(
        pickled(lambda folder: {**state(), "x": MaliceByEval(folder)}),
        (*_UNREADABLE, "eval", "not executed"),
        layout="bin",
    ),
    "pickle: code by pickle": Fault(plain_pickle, _UNREADABLE, layout="bin"),
    "pickle: code beside nanoGPT's tensors": Fault(
        lambda folder: torch.save({**nanogpt(), "config": Malice(folder)}, folder / "ckpt.pt"),
        ("ckpt.pt", "not executed"),
        layout="nanogpt",
    ),
    "pickle: a module": Fault(
        pickled(lambda folder: torch.nn.Linear(2, 2)), (*_UNREADABLE, "not executed"), layout="bin"
    ),
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
    "pickle: a sparse tensor": Fault(
        pickled(wte(torch.Tensor.to_sparse)),
        (*_UNREADABLE, "_rebuild_sparse_tensor"),
        layout="bin",
    ),
    "pickle: a tensor on meta": Fault(
        pickled(wte(lambda t: t.to("meta"))), (*_UNREADABLE, "_rebuild_meta"), layout="bin"
    ),
    "pickle: a nested tensor": Fault(
        pickled(wte(nested)),
        (*_UNREADABLE, "_rebuild_nested_tensor"),
        layout="bin",
    ),
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
    "pickle: a zip bomb of 200 MB": Fault(
        bomb, (*_UNREADABLE, "would unpack to 200,0", "may take at most"), layout="bin"
    ),
    "pickle: compressed": Fault(compressed, (*_UNREADABLE, "compressed"), layout="bin"),
    "pickle: a record that claims to be a folder": Fault(
        flagged, (*_UNREADABLE, "compressed or folders"), layout="bin"
    ),
    "pickle: an archive with two tables of contents": Fault(
        two_ends, (*_UNREADABLE, "does not end with its table of contents"), layout="bin"
    ),
    "pickle: an archive without a pickle": Fault(
        lambda folder: zipfile.ZipFile(folder / PICKLE, "w").writestr("archive/version", "3"),
        (*_UNREADABLE, "0 files data.pkl"),
        layout="bin",
    ),
    "pickle: a million tuples in tuples": Fault(
        zip_around(_TUPLES), (*_UNREADABLE, "nests more than 10,000 tuples"), layout="bin"
    ),
    "pickle: a million opcodes": Fault(
        zip_around(b"\x80\x02" + b"Nq\0" * 500_000 + b"}."),
        (*_UNREADABLE, "more than 400,000 opcodes"),
        layout="bin",
    ),
    "pickle: a string with an invalid escape": Fault(
        zip_around(b"\x80\x02}S'\\z'\n."), (*_UNREADABLE, "the opcode STRING"), layout="bin"
    ),
    "pickle: of 100 MB": Fault(
        zip_around(b"\x80\x02}" + b"N" * 100_000_000 + b"."),
        (*_UNREADABLE, "its pickle takes 100,000,004 bytes, but may take at most 4,194,304"),
        layout="bin",
    ),
    "pickle: a number of 16 bytes": Fault(
        zip_around(b"\x80\x02}\x8a\x10" + b"\x7f" * 16 + b"Ns."),
        (*_UNREADABLE, "more than 64 bits"),
        layout="bin",
    ),
    "pickle: 20,000 tuples in tuples": Fault(
        zip_around(b"\x80\x02})" + b"\x85" * 20_000 + b"Ns."),
        (*_UNREADABLE, "nests more than 10,000 tuples"),
        layout="bin",
    ),
    "pickle: a tuple of 2^60 tuples": Fault(
        zip_around(_DOUBLING), (*_UNREADABLE, "nests more than 10,000 tuples"), layout="bin"
    ),
    "pickle: a bytearray of 1 GB": Fault(
        zip_around(_BYTEARRAY), (*_UNREADABLE, "builtins.bytearray"), layout="bin"
    ),
    "pickle: a tensor of whatever is in memory": Fault(
        zip_around(_UNFILLED), (*_UNREADABLE, "torch.FloatTensor"), layout="bin"
    ),
    "pickle: protocol 3": Fault(
        pickled(lambda folder: state(), pickle_protocol=3),
        (*_UNREADABLE, "has protocol 3", "protocol 2", "without pickle_protocol"),
        layout="bin",
    ),
    "pickle: a quantized storage": Fault(
        zip_around(
            storage(b"K\x04", b"K\2K\2\x86", b"K\2K\1\x86").replace(b"Float", b"QInt8"),
            **{"data/0": bytes(4)},
        ),
        (*_UNREADABLE, "torch.QInt8Storage"),
        layout="bin",
    ),
    "pickle: a TorchScript program": Fault(
        zip_around(b"\x80\x02}.", **{"constants.pkl": b"\x80\x02)."}),
        (*_UNREADABLE, "a TorchScript program", "state_dict()"),
        layout="bin",
    ),
    "pickle: a storage larger than its record": Fault(
        zip_around(
            storage(int(10**9), int(10**9) + b"\x85", b"K\1\x85"),
            **{"data/0": bytes(64)},
        ),
        _UNREADABLE,
        layout="bin",
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
        f"old style: cut to {size} bytes": Fault(cut_to(size), _UNREADABLE, layout="legacy")
        for size in (1, 18, 28, 52, 100)
    },
    "old style: cut in the pickle": Fault(cut(PICKLE, 0.05), _UNREADABLE, layout="legacy"),
    "old style: cut in the data": Fault(cut(PICKLE, 0.9), _UNREADABLE, layout="legacy"),
    "old style: 10^12 numbers claimed": Fault(
        old_style(
            storage(int(10**12), int(10**12) + b"\x85", b"K\1\x85", b"N"),
            b"]X\1\0\0\x000a",
            bytes(8),
        ),
        _UNREADABLE,
        layout="legacy",
    ),
    "old style: no data listed": Fault(
        keys_as(lambda keys: []), (PICKLE, "the data of all of its tensors"), layout="legacy"
    ),
    "old style: data of one tensor not listed": Fault(
        keys_as(lambda keys: keys[:-1]), (PICKLE, "the data of all of its tensors"), layout="legacy"
    ),
    "old style: data of one tensor listed twice": Fault(
        keys_as(lambda keys: [*keys[:-1], "".join([*keys[0]])]),  # equal, but another object
        (*_UNREADABLE, "its list of the data that follows is damaged"),
        layout="legacy",
    ),
    "old style: trailing bytes": Fault(
        lambda folder: (
            (folder / PICKLE).write_bytes((folder / PICKLE).read_bytes() + b"\0") and None
        ),
        (PICKLE, "its tensors need", "Download it again"),
        layout="legacy",
    ),
    "old style: a bytearray of 1 GB": Fault(
        old_style(_BYTEARRAY), (*_UNREADABLE, "builtins.bytearray"), layout="legacy"
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
