"""What a source is, told from headers, and whether it would load: for people who were given one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from compat.checkpoint import Checkpoint
from compat.checkpoint.contents import by_name, model_args_of, open_files
from compat.checkpoint.files import TensorFile, TensorInfo
from compat.checkpoint.find import find_weights
from compat.checkpoint.foreign import IN_OUT, OUT_IN, kind_of, layouts
from compat.checkpoint.formats import recognized
from compat.checkpoint.layout import HEAD, plain_name
from compat.checkpoint.source import checked, config_beside, most_unpacked
from compat.config import ALIASES
from compat.errors import CompatError, HubError, TokenizerError, short_repr
from compat.tokenizer import load_tokenizer

MAIN_FIELDS = (
    *("n_layer", "n_head", "n_embd", "n_positions", "vocab_size"),
    *("activation_function", "tie_word_embeddings"),
)
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
GPT2_TOKENS = 50257


@dataclass
class Inspection:
    """What could be told of a source; None or empty is what could not.

    Args:
        source: what the user named.
        weights: the file or index of the weights.
        format: whose file it is and how it is written, in words.
        files: every file of weights, with its size in bytes.
        config: the main fields of the config.
        layout: how projections are stored, `[in, out]` as GPT-2's or `[out, in]` as `nn.Linear`'s.
        prefixes: what stands before the names of tensors.
        names: the first names of tensors as they stand in the file, where they are no GPT-2.
        tensors: how many tensors there are.
        parameters: how many values they hold, a tied head counted once.
        dtypes: how many tensors have each data type.
        tokenizer: its files, how many tokens it has, and what is wrong with it.
        notes: what is unusual, and what becomes of it on loading.
        error: why it would not load; None if it would.
    """

    source: str
    weights: str | None = None
    format: str | None = None
    files: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layout: str | None = None
    prefixes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tensors: int | None = None
    parameters: int | None = None
    dtypes: dict[str, int] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def loads(self) -> bool:
        """Whether `load_pretrained` would take it."""
        return self.error is None

    @property
    def bytes(self) -> int:
        """What the weights take on disk."""
        return sum(self.files.values())

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {**asdict(self), "bytes": self.bytes, "loads": self.loads}


def inspect_checkpoint(
    source: str | Path, *, n_head: int | None = None, revision: str | None = None
) -> Inspection:
    """Say what a source is and whether it would load, as far as it goes where it would not.

    Of safetensors only headers are read. A pickle (`.bin`, `.pt`) has to be read whole, as it has
    no header; whether values are finite is not looked at.

    Args:
        source: as in `load_pretrained`.
        n_head: as in `load_pretrained`.
        revision: branch, tag or commit on the hub.

    Raises:
        HubError: the hub could not be reached or lacks it.
    """
    found = Inspection(str(source))
    with _noting(found):
        weights = find_weights(source, revision, False, found.notes)
        found.weights, found.format = str(weights), _container(weights)
        found.files = {weights.name: weights.stat().st_size}
        found.tokenizer = {"files": _tokenizer_files(weights.parent)}
        _look_into(found, weights, n_head)
    return found


def _look_into(found: Inspection, weights: Path, n_head: int | None) -> None:
    """The steps of `open_checkpoint`, each telling what it shows before the next may fail."""
    beside: dict[str, Any] | None = None
    files: dict[Path, TensorFile] = {}
    most = 0
    with _noting(found):
        beside = config_beside(weights)
        found.config = _main_fields(beside)
        most = most_unpacked(beside)
    with _noting(found):
        files = open_files(weights, most)
        _tell_files(found, weights, files)
        found.format = f"{kind_of(model_args_of(files), beside, by_name(files))} {found.format}"
    if found.loads:
        with _noting(found):
            _tell_checkpoint(
                found, checked(found.source, weights, beside, files, found.notes, n_head)
            )


@contextmanager
def _noting(found: Inspection) -> Iterator[None]:
    """What is wrong belongs in the report, the first of it; a hub out of reach does not."""
    try:
        yield
    except HubError:
        raise
    except CompatError as error:
        found.error = found.error or str(error)


def _container(weights: Path) -> str:
    """How a file is written, by its first bytes; of an index, how its shards are named."""
    if weights.name.endswith(".index.json"):
        return "safetensors" if ".safetensors" in weights.suffixes else "pickle"
    found = recognized(weights)
    return found.name if found else "unknown format"


def _tell_files(found: Inspection, weights: Path, files: Mapping[Path, TensorFile]) -> None:
    """Sizes on disk, and what is known of tensors before they are taken for a GPT-2's."""
    if weights not in files:
        found.format = f"{found.format}, {len(files)} shards"
    found.files |= {path.name: path.stat().st_size for path in files}
    infos = {name: info for file in files.values() for name, info in file.infos.items()}
    prefixes = Counter(name.removesuffix(plain_name(name)) for name in infos if name != HEAD)
    found.prefixes = [prefix for prefix, _ in prefixes.most_common()]
    stored = layouts(by_name(dict(files)))
    found.layout = " and ".join(layout for layout in (IN_OUT, OUT_IN) if layout in stored) or None
    found.names = [_printable(name) for name in [*infos][:5]]
    _tell_tensors(found, infos)


def _tell_tensors(found: Inspection, infos: Mapping[str, TensorInfo]) -> None:
    found.tensors = len(infos)
    found.parameters = sum(prod(info.shape) for info in infos.values())
    dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in infos.values())
    found.dtypes = dict(dtypes.most_common())


def _tell_checkpoint(found: Inspection, checkpoint: Checkpoint) -> None:
    """What is settled once it has proved to be a GPT-2: without masks, a tied head once."""
    config = checkpoint.config
    tied = {HEAD} if config.tie_word_embeddings else set()
    _tell_tensors(found, {k: info for k, info in checkpoint.infos.items() if k not in tied})
    found.config, found.names = _main_fields(config.to_hf_dict()), []
    found.tokenizer = _tokenizer(checkpoint)


def _main_fields(raw: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those that fix the sizes and the arithmetic, as far as they are given."""
    inner = (raw or {}).get("model", raw)
    fields = inner if isinstance(inner, dict) else raw or {}
    given = {ALIASES.get(name, name): value for name, value in fields.items()}
    return {name: _printable(given[name]) for name in MAIN_FIELDS if given.get(name) is not None}


def _printable(value: Any) -> Any:
    """A number or a word as it is, anything else as Python writes it."""
    proper = isinstance(value, int) or (isinstance(value, str) and value.isprintable())
    return value if proper else short_repr(value)


def _tokenizer_files(folder: Path) -> list[str]:
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where the tokenizer comes from, how many tokens it has, and whether it can be used."""
    files, vocab_size = _tokenizer_files(checkpoint.folder), checkpoint.config.vocab_size
    if not files:  # tiktoken would have to fetch its own
        tokens = GPT2_TOKENS if vocab_size >= GPT2_TOKENS else None
        return {"files": files, "tokens": tokens, "error": None}
    try:
        tokenizer = load_tokenizer(checkpoint)
    except TokenizerError as error:
        return {"files": files, "tokens": None, "error": str(error)}
    tokens = vocab_size - len(tokenizer.ids_without_text(vocab_size))
    return {"files": files, "tokens": tokens, "error": None}
