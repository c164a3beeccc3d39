"""A candidate's arrays under the names and in the layout of the golden arrays."""

from __future__ import annotations

import difflib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compat.errors import CompatError, ParityError, described, lines, listed
from compat.golden_files.arrays import Array, Arrays, as_array, describe, open_arrays
from compat.golden_files.contents import (
    BOUND,
    DECODE_IDS,
    DECODE_LOGITS,
    GRADIENT,
    IDS,
    LOSS,
    WEIGHT,
)
from compat.golden_files.file import Golden
from compat.golden_files.layouts import LAYOUTS, Layout, layouts_of
from compat.golden_files.pieces import split_name
from compat.tap import BLOCK_TAPS, tap_names
from compat.user_code import exception_summary

FUSED = ("qkv", "c_attn")  # names of q, k and v side by side
KEPT = 32  # arrays in memory
FEWEST = 64  # values from which a data type can be recognised
NARROW = (torch.float16, torch.bfloat16)


@dataclass
class Entry:
    """One array of the candidate.

    Args:
        label: its name in the candidate's file.
        array: as it is stored.
        layouts: the orders of axes that its shape allows; empty for a scalar.
        third: 0, 1 or 2 for q, k or v of a fused array.
        vocab: the number of columns that are logits, if there are more.
        last_only: whether it holds the logits of the last position only.
    """

    label: str
    array: Array
    layouts: list[Layout]
    third: int | None = None
    vocab: int | None = None
    last_only: bool = False

    def read(self, layout: Layout | None) -> Tensor:
        """The values in the golden file's order of axes.

        Raises:
            ParityError: they are not floating-point numbers.
        """
        tensor = self.array.load()
        if not tensor.is_floating_point():
            raise ParityError(
                f"{self.label} holds {tensor.dtype} values; expected floating-point numbers."
            )
        if layout is None:
            return tensor.reshape(())
        if self.vocab is not None:
            tensor = tensor[..., : self.vocab]
        tensor = layout.arrange(tensor)
        return tensor if self.third is None else tensor.chunk(3, dim=-1)[self.third]


@dataclass
class Candidate:
    """The arrays of a candidate by the name of the golden array.

    Args:
        name: of the candidate.
        entries: by golden name.
        notes: what was accepted, as sentences.
        chosen: the layout of an array that was compared.
    """

    name: str
    entries: dict[str, Entry]
    notes: list[str]
    chosen: dict[str, Layout | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def read(self, name: str) -> Tensor:
        """An array in the chosen layout and in its own data type. The last ones are kept."""
        if name not in self._kept:
            entry = self.entries[name]
            default = entry.layouts[0] if entry.layouts else None
            self._kept[name] = entry.read(self.chosen.get(name, default))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name]

    def choose(self, name: str, layout: Layout | None) -> None:
        """Read an array in this layout from now on."""
        if self.chosen.get(name) is not layout:
            self._kept.pop(name, None)
        self.chosen[name] = layout


def as_candidate(
    golden: Golden,
    candidate: str | Path | Mapping[str, object] | Callable[[Any], object],
    rename: Mapping[str, str | None] | None,
) -> Candidate:
    """Read the names and shapes of a candidate's arrays, and match them with the golden ones.

    Raises:
        ParityError: a name is unknown or occurs twice, a shape is wrong, the ids are others, or
            there is nothing to compare.
    """
    if isinstance(candidate, (str, Path)):
        name, arrays = Path(candidate).name or str(candidate), open_arrays(Path(candidate))
    elif isinstance(candidate, Mapping):
        name, arrays = "the candidate", _from_mapping(candidate)
    elif callable(candidate):
        name = getattr(candidate, "__name__", type(candidate).__name__)
        arrays = _from_function(golden, candidate)
    else:
        raise ParityError(
            f"the candidate is {described(candidate)}; expected a file, a folder, arrays by name, "
            "or a function of the ids."
        )
    named = _renamed(arrays, rename or {}, golden)
    _check_ids(golden, named)
    notes: list[str] = []
    entries: dict[str, Entry] = {}
    faults: list[str] = []
    for golden_name, (label, array) in named.items():
        if golden_name not in (IDS, DECODE_IDS):
            try:
                held = _entries(golden, golden_name, label, array, notes)
                faults += [f"{entries[n].label} and {label} both hold {n}" for n in held
                           if n in entries]  # fmt: skip
                entries |= held
            except ParityError as error:
                faults.append(str(error))
    if faults:
        raise ParityError(lines("these arrays are not what their names say:", faults))
    if not any(entry in golden.judged for entry in entries):
        raise ParityError(
            f"{name} has none of the golden arrays. Name its arrays like taps, such as h.0.act or "
            f"logits, or pass a map of names. A block has the taps {listed(BLOCK_TAPS, 20)}."
        )
    found = Candidate(name, entries, notes)
    extra = [entry for entry in entries if entry not in golden.judged]
    if extra:
        notes.append(f"not compared, because the golden arrays lack them: {listed(extra)}")
    return found


def _from_mapping(candidate: Mapping[str, object]) -> Arrays:
    for name in candidate:
        if not isinstance(name, str):
            raise ParityError(
                f"an array has the name {described(name)}; expected the name of a tap."
            )
    return {name: as_array(name, value) for name, value in candidate.items()}


def _from_function(golden: Golden, function: Callable[[Any], object]) -> Arrays:
    """What a function returns for the golden ids."""
    ids: Any = golden.ids.clone() if isinstance(function, nn.Module) else golden.ids.numpy().copy()
    try:
        with torch.no_grad():
            found = function(ids)
    except (KeyboardInterrupt, CompatError):
        raise
    except BaseException as error:  # such as exit() in the user's code
        raise ParityError(
            f"{exception_summary(error)}. Call the function with an array of ids of shape "
            f"{list(ids.shape)} to see the whole traceback."
        ) from error
    if isinstance(found, Mapping):
        return _from_mapping(found)
    return {"logits": as_array("the result of the function", getattr(found, "logits", found))}


def _renamed(
    arrays: Arrays, rename: Mapping[str, str | None], golden: Golden
) -> dict[str, tuple[str, Array]]:
    """The arrays by golden name, each with the name that it has in the candidate.

    Raises:
        ParityError: a name is unknown, or two arrays get the same one.
    """
    known = _known_names(golden)
    found: dict[str, tuple[str, Array]] = {}
    unknown: list[str] = []
    for label, array in arrays.items():
        name = _new_name(label, rename)
        if name is None or name.startswith((WEIGHT, BOUND)) or name == "metadata":
            continue
        if name not in known:
            unknown.append(_unknown(label, name, known))
        elif name in found:
            raise ParityError(
                f"{found[name][0]} and {label} are both {name}. Rename one of them, or ignore it "
                "by renaming it to null."
            )
        else:
            found[name] = label, array
    if unknown:
        head = "these arrays have names that are not taps:"
        tail = 'Rename them, as with --rename map.json and {"their name": "h.{i}.act"}; null ' \
               "ignores an array."  # fmt: skip
        raise ParityError(f"{lines(head, unknown)}\n{tail}")
    return found


def _known_names(golden: Golden) -> set[str]:
    n_layer = golden.config.n_layer
    taps = tap_names(n_layer)
    taps += [f"h.{i}.{fused}" for i in range(n_layer) for fused in FUSED]
    known = {IDS, LOSS, DECODE_IDS, DECODE_LOGITS, *golden.judged, *taps}
    return known | {GRADIENT + tap for tap in taps}


def _new_name(label: str, rename: Mapping[str, str | None]) -> str | None:
    """The name that a map gives an array; `{i}` stands for the same number on both sides."""
    if label in rename:
        return rename[label]
    for pattern, name in rename.items():
        if "{i}" in pattern:
            before, _, after = pattern.partition("{i}")
            regex = re.escape(before) + r"(\d+)" + re.escape(after).replace(r"\{i\}", r"\1")
            if match := re.fullmatch(regex, label):
                return None if name is None else name.replace("{i}", str(int(match[1])))
    return label


def _unknown(label: str, name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    shown = label if label == name else f"{label} (renamed to {name})"
    return f"{shown}; did you mean {close[0]}?" if close else shown


def _check_ids(golden: Golden, named: dict[str, tuple[str, Array]]) -> None:
    """Raise an error if the candidate states other ids than those of the golden arrays."""
    for name in (IDS, DECODE_IDS):
        if name not in named or name not in golden.arrays:
            continue
        label, array = named[name]
        ours = golden.read(name)
        if math.prod(array.shape) != ours.numel():
            raise ParityError(
                f"{label} has shape {list(array.shape)}; expected {list(ours.shape)}. Run the "
                "candidate on the ids of the golden file."
            )
        theirs = array.load().reshape(ours.shape)
        wrong = (theirs != ours).nonzero()
        if len(wrong):
            b, t = wrong[0].tolist()
            raise ParityError(
                f"{label}[{b}, {t}] is {theirs[b, t].item():g}, but the golden arrays were "
                f"computed for {ours[b, t].item()}. Run the candidate on the golden file's ids."
            )


def _entries(
    golden: Golden, name: str, label: str, array: Array, notes: list[str]
) -> dict[str, Entry]:
    """The golden arrays that one array of the candidate holds.

    Raises:
        ParityError: its shape fits no layout.
    """
    prefix = GRADIENT if name.startswith(GRADIENT) else ""
    tap, config = name.removeprefix(prefix), golden.config
    B, T = golden.ids.shape
    N = golden.arrays[DECODE_IDS].shape[1] if DECODE_IDS in golden.arrays else 0
    sizes = {
        "B": B, "T": T, "S": T, "C": config.n_embd, "H": config.n_head, "D": config.d_head,
        "F": config.d_inner, "V": config.vocab_size, "N": N, "3": 3,
    }  # fmt: skip
    shape = array.shape
    if name == LOSS:
        if array.shape in ((), (1,)):
            return {name: Entry(label, array, [])}
        raise _wrong_shape(label, array, [()])
    if tap not in tap_names(config.n_layer) and tap != DECODE_LOGITS and not tap.endswith(FUSED):
        return {name: _parameter(golden, name, label, array)}
    vocab = None
    if tap in ("logits", DECODE_LOGITS) and shape and shape[-1] > config.vocab_size:
        vocab, shape = config.vocab_size, (*shape[:-1], config.vocab_size)
        extra = array.shape[-1] - vocab
        notes.append(f"{label}: the last {extra:,} columns were ignored (a padded vocabulary)")
    if tap.endswith(FUSED):
        block = tap.rpartition(".")[0]
        found = layouts_of(f"{block}.qkv", shape, sizes)
        if not found:
            raise _wrong_shape(label, array, _shapes("qkv", sizes))
        note = "fused arrays were divided into q, k and v"
        notes += [] if note in notes else [note]
        return {
            f"{prefix}{block}.{part}": Entry(label, array, found, third)
            for third, part in enumerate("qkv")
        }
    found = layouts_of(tap, shape, sizes)
    if (
        not found
        and tap == "logits"
        and (
            last := layouts_of(
                tap, (*shape[:-1], 1, shape[-1]) if len(shape) == 2 else shape, {**sizes, "T": 1}
            )
        )
    ):
        notes.append(f"{label}: only the logits of the last position were compared")
        return {name: Entry(label, array, last, vocab=vocab, last_only=True)}
    if not found:
        kind = tap if tap == DECODE_LOGITS else split_name(tap)[1]
        raise _wrong_shape(label, array, _shapes(kind, sizes))
    return {name: Entry(label, array, found, vocab=vocab)}


def _parameter(golden: Golden, name: str, label: str, array: Array) -> Entry:
    """The gradient of a parameter, which may be stored [out, in]."""
    expected = golden.arrays[name].shape
    axes = "IO" if len(expected) == 2 else "I"
    sizes = dict(zip(axes, expected, strict=True))
    texts = LAYOUTS["matrix"] if len(expected) == 2 else ("I",)
    found = [Layout(text, texts[0], sizes) for text in texts]
    found = [layout for layout in found if layout.shape == array.shape]
    if not found:
        raise _wrong_shape(label, array, [expected])
    return Entry(label, array, found)


def _shapes(kind: str, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    known = LAYOUTS.get(kind, ("B T C", "T B C"))
    return [Layout(text, known[0], sizes).shape for text in known[:2]]


def _wrong_shape(label: str, array: Array, expected: list[tuple[int, ...]]) -> ParityError:
    shapes = " or ".join(dict.fromkeys(str(list(shape)) for shape in expected))
    return ParityError(f"{label} is {describe(array)}; expected {shapes}")


def precision(tensor: Tensor) -> torch.dtype:
    """The narrowest data type that holds all values, if there are enough to tell.

    A port in half precision may store its arrays as float32.
    """
    if tensor.dtype in NARROW or tensor.count_nonzero() < FEWEST:
        return tensor.dtype
    for dtype in NARROW:
        if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
            return dtype
    return tensor.dtype
