"""What a file is by its first bytes, whatever its name says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_TRANSFORMERS_4 = (
    "with transformers 4 and TensorFlow installed, GPT2LMHeadModel.from_pretrained(FOLDER, "
    "from_tf=True).save_pretrained(NEW_FOLDER) converts it"
)


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Args:
        name: in short, as `inspect` reports it.
        phrase: what follows "it is".
        advice: what to do with such a file; empty where that is to fetch another one.
        endings: of names that promise this kind of file.
    """

    name: str
    phrase: str
    advice: str = ""
    endings: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """What a file is and what to do with it."""
        return f"it is {self.phrase}" + (f"; {self.advice}" if self.advice else "")


SAFETENSORS = Format(
    "safetensors",
    "a safetensors file under another name",
    "give it the ending .safetensors",
    (".safetensors",),
)
PYTORCH = Format(
    "pickle",
    "a pickle of PyTorch's, under another name",
    "give it the ending .pt or .bin",
    (".bin", ".pt", ".pth"),
)
OLD_PICKLE = Format(
    "pickle of the old form, no zip file", PYTORCH.phrase, PYTORCH.advice, PYTORCH.endings
)
JSON = Format("JSON", "a JSON file, without tensors", "", (".json",))
LFS = Format(
    "Git LFS pointer",
    "a Git LFS pointer, not the file itself",
    "run `git lfs pull` in its repository",
)
HTML = Format(
    "HTML page",
    "a web page, saved under this name",
    "use the link to the file itself (on the hub /resolve/ instead of /blob/)",
)
GGUF = Format(
    "GGUF",
    "a GGUF file of llama.cpp",
    "load the checkpoint that it was converted from",
)
LLM_C = Format(
    "llm.c checkpoint",
    "a checkpoint of llm.c",
    "convert it with llm.c's dev/eval/export_hf.py",
)
HDF5 = Format("HDF5 (Keras, TensorFlow)", "an HDF5 file of Keras or TensorFlow", _TRANSFORMERS_4)
TENSORFLOW = Format(
    "TensorFlow checkpoint",
    "a part of a TensorFlow checkpoint",
    "with transformers 4 and TensorFlow installed, its module transformers.models.gpt2."
    "convert_gpt2_original_tf_checkpoint_to_pytorch converts it; `python -m` with -h says how",
)
FLAX = Format(
    "msgpack (Flax)",
    "a msgpack file of Flax",
    "with transformers 4 and Flax installed, GPT2LMHeadModel.from_pretrained(FOLDER, "
    "from_flax=True).save_pretrained(NEW_FOLDER) converts it",
)
ONNX = Format("ONNX", "an ONNX graph", "load the checkpoint that it was exported from")
NPY = Format("NumPy .npy array", "a NumPy array", "save a dictionary of named tensors instead")
NPZ = Format(
    "NumPy .npz archive",
    "a NumPy archive",
    "save its arrays with safetensors.numpy.save_file, under GPT-2's names",
)
GZIP = Format("gzip file", "a gzip file", "unpack it first")
ZIP = Format("zip archive", "a zip archive", "unpack it first")
TAR = Format("tar archive", "a tar archive", "unpack it first")
COMPRESSED = Format("compressed file", "a compressed file", "unpack it first")
EMPTY = Format("empty file", "a file of 0 bytes, empty (truncated?)")

_STARTS = (
    (b"GGUF", GGUF),
    (b"\x89HDF\r\n\x1a\n", HDF5),
    (b"\x93NUMPY", NPY),
    (b"\x1f\x8b", GZIP),
    (b"BZh", COMPRESSED),
    (b"\xfd7zXZ\0", COMPRESSED),
    (b"\x28\xb5\x2f\xfd", COMPRESSED),
    (b"7z\xbc\xaf\x27\x1c", COMPRESSED),
    ((20240326).to_bytes(4, "little"), LLM_C),
    ((20240801).to_bytes(4, "little"), LLM_C),
)
_TENSORFLOW_NAME = re.compile(r".+\.ckpt(-\d+)?\.(index|meta|data-\d+-of-\d+)")
# What torch.save and torch.jit.save write first into their archives.
_IN_PYTORCH = re.compile(rb"(?i)[^/]+/(data\.pkl|version|byteorder|\..+|constants\.pkl|data/.+)")
_BY_ENDING = {".onnx": ONNX, ".msgpack": FLAX, ".h5": HDF5, ".gguf": GGUF, ".npz": NPZ}


def recognized(path: Path) -> Format | None:
    """The format of a file by its first bytes and, where these say nothing, by its name."""
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
    for magic, known in _STARTS:
        if start.startswith(magic):
            return known
    if start.startswith(b"PK\x03\x04"):
        return _kind_of_zip(start)
    if start[:1] == b"\x80" and start[1:2] in (b"\1", b"\2", b"\3", b"\4", b"\5"):  # the protocol
        return OLD_PICKLE
    if start[257:262] == b"ustar":
        return TAR
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<!--")):
        return HTML
    if text.startswith(b"version https://git-lfs"):
        return LFS
    return JSON if re.match(rb'(\{\s*("|\}|$)|\[)', text) else None


def _kind_of_zip(start: bytes) -> Format:
    """By the name of the first file in it."""
    length = int.from_bytes(start[26:28], "little")
    name = start[30 : 30 + length]
    if name.endswith(b".npy"):
        return NPZ
    return PYTORCH if _IN_PYTORCH.fullmatch(name) else ZIP


def looks_like(path: Path) -> str | None:
    """What a file is and what to do with it, where its name says something else."""
    found = recognized(path)
    return found.sentence if found and path.suffix not in found.endings else None
