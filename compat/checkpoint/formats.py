"""Detection of a file's format by its first bytes, regardless of its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PICKLES = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Format:
    """A file format.

    Args:
        name: short name, as `inspect` reports it.
        phrase: the name in a sentence.
        advice: the next step for this format, as a sentence; "" for the usual one.
        endings: file name endings that indicate this format.
        magic: the first bytes that identify it.
    """

    name: str
    phrase: str
    advice: str = ""
    endings: tuple[str, ...] = ()
    magic: tuple[bytes, ...] = ()


_CONVERT = (
    "With transformers 4 and {0} installed, convert it by GPT2LMHeadModel.from_pretrained(FOLDER, "
    "{1}=True).save_pretrained(NEW_FOLDER)."
)
SAFETENSORS = Format(
    "safetensors",
    "a safetensors file under another name",
    "Give it the ending .safetensors.",
    (".safetensors",),
)
PYTORCH = Format(
    "pickle", "a pickle of PyTorch under another name", "Give it the ending .pt or .bin.", PICKLES
)
LEGACY_PICKLE = Format("legacy pickle", PYTORCH.phrase, PYTORCH.advice, PICKLES)
JSON = Format("JSON", "a JSON file without tensors", endings=(".json",))
LFS = Format(
    "Git LFS pointer",
    "a Git LFS pointer, not the file itself",
    "Run `git lfs pull` in its repository.",
)
HTML = Format(
    "HTML page",
    "a web page that was saved under this name",
    "Use the link to the file itself (on the hub /resolve/ instead of /blob/).",
)
GGUF = Format(
    "GGUF",
    "a GGUF file of llama.cpp",
    "Load the checkpoint that it was converted from.",
    magic=(b"GGUF",),
)
LLM_C = Format(
    "llm.c checkpoint",
    "a checkpoint of llm.c",
    "Convert it with llm.c's dev/eval/export_hf.py.",
    magic=((20240326).to_bytes(4, "little"), (20240801).to_bytes(4, "little")),
)
HDF5 = Format(
    "HDF5 (Keras, TensorFlow)",
    "an HDF5 file of Keras or TensorFlow",
    _CONVERT.format("TensorFlow", "from_tf"),
    magic=(b"\x89HDF\r\n\x1a\n",),
)
TENSORFLOW = Format(
    "TensorFlow checkpoint",
    "a part of a TensorFlow checkpoint",
    "With transformers 4 and TensorFlow installed, convert it with its module transformers.models."
    "gpt2.convert_gpt2_original_tf_checkpoint_to_pytorch. Run it by `python -m` with -h for its "
    "arguments.",
)
FLAX = Format("msgpack (Flax)", "a msgpack file of Flax", _CONVERT.format("Flax", "from_flax"))
ONNX = Format("ONNX", "an ONNX graph", "Load the checkpoint that it was exported from.")
NPY = Format(
    "NumPy .npy array",
    "a NumPy array",
    "Save a dictionary of named tensors instead.",
    magic=(b"\x93NUMPY",),
)
NPZ = Format(
    "NumPy .npz archive",
    "a NumPy archive",
    "Save its arrays with safetensors.numpy.save_file under GPT-2's names.",
)
_UNPACK = "Unpack it first."
GZIP = Format("gzip file", "a gzip file", _UNPACK, magic=(b"\x1f\x8b",))
ZIP = Format("zip archive", "a zip archive", _UNPACK)
TAR = Format("tar archive", "a tar archive", _UNPACK)
COMPRESSED = Format(
    "compressed file",
    "a compressed file",
    _UNPACK,
    magic=(b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf\x27\x1c"),
)
EMPTY = Format("empty file", "an empty file of 0 bytes, which may be truncated")

# Weights of other libraries, named when a folder holds nothing else.
OTHER_WEIGHTS = (TENSORFLOW, HDF5, FLAX, GGUF, ONNX, NPZ)

_BY_MAGIC = (GGUF, HDF5, NPY, GZIP, COMPRESSED, LLM_C)
_BY_ENDING = {".onnx": ONNX, ".msgpack": FLAX, ".h5": HDF5, ".gguf": GGUF, ".npz": NPZ}
_TENSORFLOW_NAME = re.compile(r".+\.ckpt(-\d+)?\.(index|meta|data-\d+-of-\d+)")
# What torch.save and torch.jit.save write first into their archives.
_IN_PYTORCH = re.compile(rb"(?i)[^/]+/(data\.pkl|version|byteorder|\..+|constants\.pkl|data/.+)")


def recognized(path: Path) -> Format | None:
    """Return the format of a file by its first bytes or, if these are unknown, by its name."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError:
        return None
    if _TENSORFLOW_NAME.fullmatch(path.name):
        return TENSORFLOW
    return _by_bytes(start) or _BY_ENDING.get(path.suffix)


def _by_bytes(start: bytes) -> Format | None:
    if not start:
        return EMPTY
    if start[8:9] == b"{" and 0 < int.from_bytes(start[:8], "little") < 1 << 40:
        return SAFETENSORS
    for known in _BY_MAGIC:
        if start.startswith(known.magic):
            return known
    if start.startswith(b"PK\x03\x04"):
        return _kind_of_zip(start)
    if start[:1] == b"\x80" and start[1:2] in (b"\1", b"\2", b"\3", b"\4", b"\5"):  # the protocol
        return LEGACY_PICKLE
    if start[257:262] == b"ustar":
        return TAR
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<!--")):
        return HTML
    if text.startswith(b"version https://git-lfs"):
        return LFS
    return JSON if re.match(rb'(\{\s*("|\}|$)|\[)', text) else None


def _kind_of_zip(start: bytes) -> Format:
    """Return the format of a zip archive by the name of its first file."""
    length = int.from_bytes(start[26:28], "little")
    name = start[30 : 30 + length]
    if name.endswith(b".npy"):
        return NPZ
    return PYTORCH if _IN_PYTORCH.fullmatch(name) else ZIP


def looks_like(path: Path) -> Format | None:
    """Return the format of a file, if its name indicates another format."""
    found = recognized(path)
    return found if found and path.suffix not in found.endings else None


def why_unreadable(path: Path, reason: object, next_step: str) -> str:
    """Return the end of a message about an unreadable file: the reason and the next step."""
    if found := looks_like(path):
        reason = " ".join([f"it is {found.phrase}.", found.advice]).strip()
        return f"{reason} {next_step}"
    return f"{reason}. {next_step}"
