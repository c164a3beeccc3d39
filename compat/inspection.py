"""Description of a source by its headers, and whether it would load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from compat.checkpoint import Checkpoint
from compat.checkpoint.contents import Contents, open_contents
from compat.checkpoint.files import TensorInfo
from compat.checkpoint.find import find_weights
from compat.checkpoint.foreign import IN_OUT, OUT_IN, kind_of, layouts
from compat.checkpoint.formats import recognized
from compat.checkpoint.layout import HEAD, plain_name, vocabulary_files
from compat.checkpoint.source import check, max_unpacked, read_config
from compat.config import ALIASES, GPT2Config, dtype_name
from compat.display import HtmlPage
from compat.errors import CompatError, HubError, TokenizerError, short_repr
from compat.tokenizer import load_tokenizer

MAIN_FIELDS = (
    *("n_layer", "n_head", "n_embd", "n_positions", "vocab_size"),
    *("activation_function", "tie_word_embeddings"),
)
GPT2_TOKENS = 50257


@dataclass(repr=False)
class Inspection(HtmlPage):
    """What is known about a source; None or empty means unknown.

    Args:
        source: the source that was inspected.
        weights: the weights file or index of shards.
        format: the program that wrote it, and its format.
        files: every weights file, with its size in bytes.
        config: the main fields of the config.
        layout: the layout of the projections, `[in, out]` as in GPT-2 or `[out, in]` as in
            `nn.Linear`.
        prefixes: prefixes of tensor names.
        names: the first tensor names in the file, unless it is a GPT-2.
        tensors: number of tensors.
        parameters: number of values in them, with a tied head counted once.
        dtypes: number of tensors of each data type.
        tokenizer: its files, its number of tokens, and what is wrong with it.
        notes: unusual properties, and how loading treats them.
        error: why it would not load, or None.
    """

    _height = 320

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
        """Whether `load_pretrained` would load it."""
        return self.error is None

    @property
    def bytes(self) -> int:
        """Size of the weights on disk."""
        return sum(self.files.values())

    def __repr__(self) -> str:
        size = "" if self.parameters is None else f", {self.parameters:,} parameters"
        verdict = "✓ would load" if self.loads else f"✗ would not load: {self.error}"
        return f"<Inspection {self.source}: {self.format or 'nothing known'}{size}, {verdict}>"

    def to_json(self) -> dict[str, Any]:
        """Return all fields, `bytes` and `loads`, for `json.dumps`."""
        return {**asdict(self), "bytes": self.bytes, "loads": self.loads}


def inspect_checkpoint(
    source: str | Path,
    *,
    revision: str | None = None,
    verify: bool = False,
    n_head: int | None = None,
) -> Inspection:
    """Report what a source is and whether it would load; if it would not, as much as is known.

    Only the headers of safetensors files are read. A pickle (`.bin`, `.pt`) has no header and is
    read completely. Values are not checked.

    Args:
        source, revision, verify, n_head: see `open_checkpoint`.

    Raises:
        HubError: The hub could not be reached or does not have the source.
    """
    found = Inspection(str(source))
    with _recording_error(found):
        weights = find_weights(source, revision, verify, found.notes)
        found.weights, found.format = str(weights), _format_of(weights)
        found.files = {weights.name: weights.stat().st_size}
        found.tokenizer = {"files": vocabulary_files(weights.parent)}
        _inspect_weights(found, weights, n_head)
    return found


def _inspect_weights(found: Inspection, weights: Path, n_head: int | None) -> None:
    """Run the steps of `open_checkpoint`, and record each result before the next step."""
    raw_config: dict[str, Any] | None = None
    with _recording_error(found):
        raw_config = read_config(weights)
        found.config = _main_fields(raw_config or {})
    with _recording_error(found):
        contents = open_contents(weights, max_unpacked(raw_config))
        _report_contents(found, contents)
        kind = kind_of(contents, raw_config)
        found.format = f"{kind} {found.format}"
        if found.loads:
            checkpoint = check(found.source, contents, raw_config, found.notes, n_head)
            _report_checkpoint(found, checkpoint)


@contextmanager
def _recording_error(found: Inspection) -> Iterator[None]:
    """Record the first error. If the hub could not be reached, raise it."""
    try:
        yield
    except HubError:
        raise
    except CompatError as error:
        found.error = found.error or str(error)


def _format_of(weights: Path) -> str:
    """Return the format by the first bytes; for an index, by the shards' names."""
    if weights.name.endswith(".index.json"):
        return "safetensors" if ".safetensors" in weights.suffixes else "pickle"
    found = recognized(weights)
    return found.name if found else "unknown format"


def _report_contents(found: Inspection, contents: Contents) -> None:
    """Record sizes on disk, and what is known about tensors that may not be a GPT-2's."""
    if contents.weights not in contents.files:
        found.format = f"{found.format}, {len(contents.files)} shards"
    found.files |= {path.name: path.stat().st_size for path in contents.files}
    infos = {name: info for file in contents.files.values() for name, info in file.infos.items()}
    prefixes = Counter(name.removesuffix(plain_name(name)) for name in infos if name != HEAD)
    found.prefixes = [prefix for prefix, _ in prefixes.most_common()]
    by_layout = layouts(contents.tensors())
    found.layout = " and ".join(name for name in (IN_OUT, OUT_IN) if name in by_layout) or None
    found.names = [_printable(name) for name in [*infos][:5]]
    _report_tensors(found, infos)


def _report_tensors(found: Inspection, infos: Mapping[str, TensorInfo]) -> None:
    found.tensors = len(infos)
    found.parameters = sum(prod(info.shape) for info in infos.values())
    dtypes = Counter(dtype_name(info.dtype) for info in infos.values())
    found.dtypes = dict(dtypes.most_common())


def _report_checkpoint(found: Inspection, checkpoint: Checkpoint) -> None:
    """Record what is known about a GPT-2, without masks and with a tied head counted once."""
    _report_tensors(found, {name: checkpoint.infos[name] for name in checkpoint.names})
    found.config, found.names = _main_fields(checkpoint.config.to_hf_dict()), []
    found.tokenizer = _tokenizer(checkpoint)
    found.notes += _serving_notes(checkpoint.config)


def _serving_notes(config: GPT2Config) -> Iterator[str]:
    """Yield notes on serving tools that refuse or misread a config with unusual fields.

    Source: the assertions in vLLM's `models/gpt2.py`, and `GPT2Loader` in ctranslate2's
    `converters/transformers.py`. Neither reads `scale_attn_weights`.
    """
    refused = [
        name
        for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
        if getattr(config, name)
    ]
    ignored = {
        "scale_attn_weights = false": not config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
    }
    if refused:
        yield f"vLLM cannot serve it: its GPT-2 refuses {' and '.join(refused)}"
    elif not config.scale_attn_weights:
        yield "vLLM computes other logits: it ignores scale_attn_weights = false"
    if names := [name for name, is_set in ignored.items() if is_set]:
        yield f"ctranslate2 computes other logits: it ignores {' and '.join(names)}"


def _main_fields(raw_config: Mapping[str, Any]) -> dict[str, Any]:
    inner = raw_config.get("model")
    fields = inner if isinstance(inner, dict) else raw_config
    known = {ALIASES.get(name, name): value for name, value in fields.items()}
    return {name: _printable(known[name]) for name in MAIN_FIELDS if known.get(name) is not None}


def _printable(value: Any) -> Any:
    """Return an integer or a printable string unchanged, and the repr of anything else."""
    proper = isinstance(value, int) or (isinstance(value, str) and value.isprintable())
    return value if proper else short_repr(value)


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    files, vocab_size = vocabulary_files(checkpoint.folder), checkpoint.config.vocab_size
    tokens = error = None
    if not files:  # tiktoken would have to download GPT-2's own
        tokens = GPT2_TOKENS if vocab_size >= GPT2_TOKENS else None
    else:
        try:
            tokenizer = load_tokenizer(checkpoint)
            tokens = vocab_size - len(tokenizer.ids_without_text(vocab_size))
        except TokenizerError as failure:
            error = str(failure)
    return {"files": files, "tokens": tokens, "error": error}
