"""Matching a candidate's arrays with the names and layouts of the golden arrays."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from compat.checkpoint.layout import EMBEDDING, HEAD
from compat.config import HALF
from compat.errors import ParityError, collapse_layers, described, lines, listed
from compat.golden_files.arrays import Array, Arrays, as_array, describe, open_arrays
from compat.golden_files.contents import (
    BOUND,
    DECODE_IDS,
    DECODE_LOGITS,
    GRADIENT,
    IDS,
    LOSS,
    WEIGHT,
    sizes_of,
)
from compat.golden_files.file import CandidateSource, Golden, Rename
from compat.golden_files.layouts import Layout, known_layouts, layouts_of
from compat.golden_files.names import LENS, layer_of, recognise
from compat.parity.functions import call_function
from compat.tap import BLOCK_TAPS, tap_names

FUSED = ("qkv", "c_attn")  # names of q, k and v in one array
# TransformerLens applies a norm's weight and bias before this hook, after it, or folds them away.
PLAIN_NORMS = [label for label in LENS.taps if label.endswith(".hook_normalized")]
KEPT = 32  # arrays in the cache
FEWEST = 64  # the fewest values from which a data type is inferred


@dataclass
class Entry:
    """One array of the candidate.

    Args:
        array: the stored array.
        layouts: the layouts that its shape allows; empty for a scalar.
        shape: the shape without the padding of a padded vocabulary.
        third: 0, 1 or 2 for q, k or v of a fused array.
        last_only: whether it holds the logits of the last position only.
        short: whether it lacks the last position, whose id is only a target in training.
        padding: the zeros to append to a gradient that lacks the last position, as
            `torch.nn.functional.pad` expects them.
        norm: the tap of a norm whose weight and bias may not have been applied yet.
        chosen: the index of the layout in which the array is read.
    """

    array: Array
    layouts: list[Layout]
    shape: tuple[int, ...]
    third: int | None = None
    last_only: bool = False
    short: bool = False
    padding: tuple[int, ...] | None = None
    norm: str | None = None
    chosen: int = 0

    def read(self, chosen: int) -> Tensor:
        """Read the values in the golden file's layout.

        Args:
            chosen: the index of the layout in which they are stored.

        Raises:
            ParityError: the values are not floating-point numbers.
        """
        tensor = self.array.load()
        if not tensor.is_floating_point():
            raise ParityError(
                f"{self.array.name} has {tensor.dtype} values, but must have floating-point "
                "values. Store it as float32."
            )
        if not self.layouts:
            return tensor.reshape(())
        tensor = self.layouts[chosen].arrange(tensor[tuple(slice(size) for size in self.shape)])
        tensor = tensor if self.third is None else tensor.chunk(3, dim=-1)[self.third]
        return tensor if self.padding is None else F.pad(tensor, self.padding)


@dataclass
class Candidate:
    """The arrays of a candidate by the names of the golden arrays.

    Args:
        name: the name of the candidate.
        entries: its arrays by golden name.
        notes: how the arrays were interpreted, for the report.
    """

    name: str
    entries: dict[str, Entry]
    notes: list[str]

    def __post_init__(self) -> None:
        self._read = lru_cache(KEPT)(lambda name, number: self.entries[name].read(number))

    def read(self, name: str) -> Tensor:
        """Read an array in its own data type. The most recent arrays are cached."""
        return self._read(name, self.entries[name].chosen)


def as_candidate(
    golden: Golden,
    candidate: CandidateSource,
    rename: Rename | None,
) -> Candidate:
    """Read the names and shapes of a candidate's arrays, and match them with the golden ones.

    Raises:
        ParityError: a name is unknown or occurs twice, a shape is wrong, the ids differ, or there
            is nothing to compare.
    """
    if isinstance(candidate, (str, Path)):
        name, arrays = Path(candidate).name or str(candidate), open_arrays(Path(candidate))
    elif isinstance(candidate, Mapping):
        name, arrays = "the candidate", _from_mapping(candidate)
    elif callable(candidate):
        name = getattr(candidate, "__name__", type(candidate).__name__)
        with torch.no_grad():
            arrays = _from_mapping(call_function(candidate, golden.ids))
    else:
        raise ParityError(
            f"the candidate is {described(candidate)}, but must be a file, a folder, arrays by "
            "name, or a function of the ids."
        )
    notes: list[str] = []
    named = _named(arrays, rename or {}, golden, notes)
    _check_ids(golden, named)
    entries: dict[str, Entry] = {}
    faults: list[str] = []
    for golden_name, array in named.items():
        if golden_name not in (IDS, DECODE_IDS):
            try:
                held = _entries(golden, golden_name, array, notes)
                faults += [
                    f"{entries[n].array.name} and {array.name} both contain {n}"
                    for n in held
                    if n in entries
                ]
                entries |= held
            except ParityError as error:
                faults.append(str(error))
    if faults:
        text = lines("these arrays do not match their names:", collapse_layers(faults))
        raise ParityError(f"{text}{_hint_about_extra_tokens(golden, named)}")
    if not any(entry in golden.judged for entry in entries):
        raise ParityError(
            f"{name} contains none of the golden arrays. Name its arrays after taps, such as "
            "h.0.act or logits, or pass a map of their names as rename (--rename). A block has the "
            f"taps {listed(BLOCK_TAPS, 20)}."
        )
    found = Candidate(name, entries, notes)
    extra = [entry for entry in entries if entry not in golden.judged]
    if extra:
        notes.append(f"not compared, because the golden file does not have them: {listed(extra)}")
    return found


def _from_mapping(candidate: Mapping[str, object]) -> Arrays:
    for name in candidate:
        if not isinstance(name, str):
            raise ParityError(
                f"an array has the name {described(name)}, but must have the name of a tap, as a "
                'string, such as "h.0.act".'
            )
    return {name: as_array(name, value) for name, value in candidate.items()}


def _named(arrays: Arrays, rename: Rename, golden: Golden, notes: list[str]) -> Arrays:
    """Return the arrays by golden name.

    Raises:
        ParityError: a name is unknown, or two arrays have the same golden name.
    """
    known, n_layer = _known_names(golden), golden.config.n_layer
    found: Arrays = {}
    unknown: list[tuple[str, str]] = []
    recognised: dict[str, list[tuple[int, Array]]] = {}  # with their ranks, by golden name
    ignored: list[str] = []
    for label, array in arrays.items():
        name = _new_name(label, rename)
        if name is None or name.startswith((WEIGHT, BOUND)) or name == "metadata":
            continue
        if name.replace("{i}", "0") in known:
            for own, part in _by_layer(array, name, n_layer):
                if own in found:
                    raise ParityError(
                        f"{found[own].name} and {part.name} both stand for {own}. Rename one of "
                        "them, or ignore it by renaming it to null."
                    )
                found[own] = part
            continue
        # A new name that is not a tap is an error: only original names are recognised.
        readings = recognise(label, n_layer) if name == label else ()
        for reading in readings:
            if reading.golden is None:
                ignored.append(label)
                break
            if reading.golden.replace("{i}", "0") in known:
                for own, part in _by_layer(array, reading.golden, n_layer):
                    recognised.setdefault(own, []).append((reading.rank, part))
                break
        else:
            unknown.append((label, name))
    if unknown:
        raise _unknown_names(unknown, known)
    others = _add_recognised(found, recognised)
    if recognised:
        read = [
            f"{array.name} as {own}"
            for own, array in found.items()
            if own in recognised and (own.startswith("h.0.") or not own.startswith("h."))
        ]
        notes.append(f"names were recognised, such as {listed(read, 2)}")
    if others:
        notes.append(f"not compared, because other arrays contain the same tap: {_shown(others)}")
    if ignored:
        notes.append(f"not compared, because they are not taps: {_shown(ignored)}")
    return found


def _add_recognised(found: Arrays, recognised: dict[str, list[tuple[int, Array]]]) -> list[str]:
    """Add the arrays whose names were recognised, and return the labels of duplicates."""
    others: list[str] = []
    for own, entries in sorted(recognised.items(), key=lambda item: item[0].endswith(FUSED)):
        entries.sort(key=lambda entry: entry[0])
        block = own.rpartition(".")[0]
        known = [own, *(f"{block}.{part}" for part in "qkv" if own.endswith(FUSED))]
        if not any(name in found for name in known):
            found[own] = entries.pop(0)[1]
        others += [array.name for _, array in entries]
    return others


def _by_layer(array: Array, name: str, n_layer: int) -> Iterator[tuple[str, Array]]:
    """Yield golden name and array; one for each layer if the first axis is the layer.

    Raises:
        ParityError: the first axis has another size than the number of layers.
    """
    if "{i}" not in name:
        yield name, array
        return
    if array.shape[:1] != (n_layer,):
        raise ParityError(
            f"{array.name} is {describe(array)}, but must have all {n_layer} blocks along the "
            f"first axis, as {name.replace('{i}', '{0…' + str(n_layer - 1) + '}')}."
        )
    for i in range(n_layer):
        load = partial(lambda i: array.load()[i], i)
        layer = replace(array, name=f"{array.name}[{i}]", shape=array.shape[1:], load=load)
        yield name.replace("{i}", str(i)), layer


def _shown(labels: list[str]) -> str:
    return listed(collapse_layers([label.replace("/", ".") for label in labels]), 4)


def _unknown_names(unknown: list[tuple[str, str]], known: set[str]) -> ParityError:
    """Return the error about names that are not taps, with a suggestion for each."""
    collapsed = dict.fromkeys(collapse_layers([label for label, _ in unknown]))
    if len(collapsed) < len(unknown):
        faults = list(collapsed)
    else:
        faults = [_unknown(label, name, known) for label, name in unknown]
    head = "these arrays have names that are not taps:"
    tail = 'Rename them with --rename map.json, such as {"their name": "h.{i}.act"}, where {i} ' \
           "is the layer and null ignores an array."  # fmt: skip
    return ParityError(f"{lines(head, faults)}\n{tail}")


def _known_names(golden: Golden) -> set[str]:
    n_layer = golden.config.n_layer
    taps = tap_names(n_layer)
    taps += [f"h.{i}.{fused}" for i in range(n_layer) for fused in FUSED]
    known = {IDS, LOSS, DECODE_IDS, DECODE_LOGITS, *golden.judged, *taps}
    return known | {GRADIENT + tap for tap in taps}


def _new_name(label: str, rename: Rename) -> str | None:
    """Return the new name of an array; `{i}` stands for the same number in both names.

    If only the new name contains `{i}`, the array holds all layers, see `_by_layer`.
    """
    if label in rename:
        return rename[label]
    for pattern, name in rename.items():
        if "{i}" in pattern and (i := layer_of(label, pattern)) is not None:
            return None if name is None else name.replace("{i}", i)
    return label


def _unknown(label: str, name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    shown = label if label == name else f"{label} (renamed to {name})"
    return f"{shown}. Did you mean {close[0]}?" if close else shown


def _check_ids(golden: Golden, named: Arrays) -> None:
    """Raise an error if the candidate contains ids that differ from the golden ones."""
    for name in (IDS, DECODE_IDS):
        if name not in named or name not in golden.arrays:
            continue
        array, ours = named[name], golden.read(name)
        if name == IDS and math.prod(array.shape) == ours[:, :-1].numel():
            ours = ours[:, :-1]  # the inputs of a training step
        if math.prod(array.shape) != ours.numel():
            raise ParityError(
                f"{array.name} has shape {list(array.shape)}, but must have {list(ours.shape)}. "
                "Run the candidate on the ids of the golden file."
            )
        theirs = array.load().reshape(ours.shape)
        wrong = (theirs != ours).nonzero()
        if len(wrong):
            b, t = wrong[0].tolist()
            raise ParityError(
                f"{array.name}[{b}, {t}] is {theirs[b, t].item():g}, but must be "
                f"{ours[b, t].item()}. Run the candidate on the ids of the golden file."
            )


def _entries(golden: Golden, name: str, array: Array, notes: list[str]) -> dict[str, Entry]:
    """Return the entries for one array of the candidate: three for fused q, k and v, else one.

    Raises:
        ParityError: the shape does not fit any layout.
    """
    prefix = GRADIENT if name.startswith(GRADIENT) else ""
    tap, config, sizes = name.removeprefix(prefix), golden.config, _sizes(golden)
    if name == LOSS:
        if array.shape in ((), (1,)):
            return {name: Entry(array, [], array.shape)}
        raise _wrong_shape(array, [()])
    fused = tap.endswith(FUSED)
    if tap not in tap_names(config.n_layer) and tap != DECODE_LOGITS and not fused:
        return {name: _parameter(golden, name, array, notes)}
    shape = array.shape
    if tap in ("logits", DECODE_LOGITS) and shape[-1:] > (config.vocab_size,):
        shape = _without_padding(array.name, shape, -1, config.vocab_size, notes)
    block = tap.rpartition(".")[0]
    kind = f"{block}.qkv" if fused else tap
    entry = Entry(array, layouts_of(kind, shape, sizes), shape)
    if any(layer_of(array.name, each) is not None for each in PLAIN_NORMS):
        entry.norm = tap
    if not entry.layouts and sizes["T"] > 1 and tap != DECODE_LOGITS:
        T = sizes["T"] - 1
        entry.layouts = layouts_of(kind, shape, {**sizes, "T": T, "S": T})
        entry.short = bool(entry.layouts) and not prefix
        if entry.layouts and prefix:
            entry.padding = (0, 1, 0, 1) if tap.endswith("probs") else (0, 0, 0, 1)
    if not entry.layouts and tap == "logits":
        with_time = (*shape[:-1], 1, shape[-1]) if len(shape) == 2 else shape
        entry.layouts = layouts_of(tap, with_time, {**sizes, "T": 1})
        entry.last_only = bool(entry.layouts)
        if entry.last_only:
            notes.append(f"{array.name} contains the last position only, so only that was compared")
    if not entry.layouts:
        texts = known_layouts(kind)
        raise _wrong_shape(array, [Layout(t, texts[0], sizes).shape for t in texts[:2]])
    if not fused:
        return {name: entry}
    note = "fused arrays were split into q, k and v"
    notes += [] if note in notes else [note]
    return {
        f"{prefix}{block}.{part}": replace(entry, third=third) for third, part in enumerate("qkv")
    }


def _without_padding(
    label: str, shape: tuple[int, ...], axis: int, size: int, notes: list[str]
) -> tuple[int, ...]:
    """Return the shape without the padding of the vocabulary, and add a note about it."""
    what = "columns" if axis else "rows"
    extra = shape[axis] - size
    notes.append(f"the last {extra:,} {what} of {label} were ignored (a padded vocabulary)")
    return (*shape[:-1], size) if axis else (size, *shape[1:])


def _sizes(golden: Golden) -> dict[str, int]:
    """Return the size of every axis, see `compat.golden_files.layouts`."""
    B, T = golden.ids.shape
    N = golden.arrays[DECODE_IDS].shape[1] if DECODE_IDS in golden.arrays else 0
    return {**sizes_of(golden.config, B, T), "N": N, "3": 3}


def _hint_about_extra_tokens(golden: Golden, named: Arrays) -> str:
    """Return a hint if every sequence of the arrays is one token too long, else an empty string."""
    T, own = golden.ids.shape[1] + 1, set(golden.taps)
    for name, array in named.items():
        if name in own and layouts_of(name, array.shape, {**_sizes(golden), "T": T, "S": T}):
            return (
                f"\nThey have {T} positions, but input_ids has {T - 1}. Run the candidate without "
                "a BOS token, for example with prepend_bos=False."
            )
    return ""


def _parameter(golden: Golden, name: str, array: Array, notes: list[str]) -> Entry:
    """Return the entry for the gradient of a parameter, which may be stored as [out, in]."""
    expected, shape = golden.arrays[name].shape, array.shape
    if name.endswith((EMBEDDING, HEAD)) and len(shape) == 2 and shape[0] > expected[0]:
        shape = _without_padding(array.name, shape, 0, expected[0], notes)
    kind = "matrix" if len(expected) == 2 else "vector"
    found = layouts_of(kind, shape, dict(zip("IO", expected, strict=False)))
    if not found:
        raise _wrong_shape(array, [expected])
    return Entry(array, found, shape)


def _wrong_shape(array: Array, expected: list[tuple[int, ...]]) -> ParityError:
    shapes = " or ".join(dict.fromkeys(str(list(shape)) for shape in expected))
    return ParityError(f"{array.name} is {describe(array)}, but must have shape {shapes}")


def precision(tensor: Tensor) -> torch.dtype:
    """Return the narrowest data type that represents all values exactly.

    A port in half precision may store its arrays as float32. An array with few non-zero values
    keeps its own data type.
    """
    if tensor.dtype in HALF or tensor.count_nonzero() < FEWEST:
        return tensor.dtype
    for dtype in HALF:
        if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
            return dtype
    return tensor.dtype
