"""The measured libraries: one file for each, which converts a checkpoint and generates greedily.

Such a file has `load(folder, kind, batch, threads)`, which returns a `Generate`. Libraries that
also run on a GPU take a `device`. Where a library has a file format of its own, its file also has
`convert(source, kind, folder)`, which writes such files.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

# Generates greedily, without stop ids, from prompts of one length and a number of new tokens. The
# function passed last is called after every decode step.
Generate = Callable[[list[list[int]], int, Callable[[], None]], list[list[int]]]


class Peer(NamedTuple):
    """A row of the table."""

    family: str  # name in the table and in --peers
    kind: str  # argument of `load`
    precision: str  # the group it is compared in
    file: str  # script in this folder
    package: str  # package that must be installed
    batches: bool = True  # whether it can run several sequences at once
    instead_of: str = ""  # the peer whose place it takes where that one fails
    devices: tuple[str, ...] = ("cpu",)

    @property
    def name(self) -> str:
        return f"{self.family} {self.kind}"

    @property
    def ours(self) -> bool:
        return self.family in ("plain", "engine")

    @property
    def converts(self) -> bool:
        """Whether the library reads files in a format of its own."""
        return self.family in ("ctranslate2", "llama.cpp")

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


BOTH = ("cpu", "cuda")
PEERS = (
    Peer("transformers", "float32", "float32", "transformers", "transformers", devices=BOTH),
    Peer("ctranslate2", "float32", "float32", "ctranslate2", "ctranslate2"),
    Peer("llama.cpp", "f32", "float32", "llama_cpp", "llama_cpp"),
    Peer("plain", "linear", "float32", "plain", "compat", devices=BOTH),
    Peer("plain", "conv1d", "float32", "plain", "compat", devices=BOTH),
    Peer("engine", "float32", "float32", "engine", "compat", devices=BOTH),
    Peer("engine", "float32+none", "float32", "engine", "compat", batches=False),
    Peer("engine", "float32+lookup", "float32", "engine", "compat", batches=False),
    Peer("transformers", "bfloat16", "bfloat16", "transformers", "transformers", devices=BOTH),
    # Decode steps on a static cache, which transformers compiles.
    Peer(
        "transformers",
        "bfloat16+static",
        "bfloat16",
        "transformers",
        "transformers",
        devices=("cuda",),
    ),
    Peer("llama.cpp", "bf16", "bfloat16", "llama_cpp", "llama_cpp"),
    Peer("engine", "bfloat16", "bfloat16", "engine", "compat", devices=BOTH),
    Peer("engine", "bfloat16+none", "bfloat16", "engine", "compat", batches=False),
    Peer("ctranslate2", "int8", "int8", "ctranslate2", "ctranslate2"),
    Peer("llama.cpp", "q8_0", "int8", "llama_cpp", "llama_cpp"),
    # Its AMX kernels crash on some machines as soon as two tokens are read at once.
    Peer("llama.cpp", "q8_0 by id", "int8", "llama_cpp", "llama_cpp", False, "llama.cpp q8_0"),
    Peer("llama.cpp", "q8_0 no AMX", "int8", "llama_cpp", "llama_cpp", True, "llama.cpp q8_0"),
    Peer("engine", "int8", "int8", "engine", "compat", devices=BOTH),
)
INSTALL = "pip install -c constraints.txt -e '.[bench]'"
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # of a weight, scales left out
