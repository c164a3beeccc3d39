"""The exceptions of `compat`, one class per kind, and helpers for their messages."""

import re
import reprlib
from collections.abc import Iterable, Sequence

_LONGEST = 8_000


class CompatError(Exception):
    """Base class of all errors of `compat`.

    The message says what is wrong and where, what was found and expected, and the next step. Since
    it may quote names from a file, it is shortened, and control characters in it are escaped.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
        return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class ConfigError(CompatError):
    """A model configuration is malformed, out of range or not supported."""


class CheckpointError(CompatError):
    """A checkpoint cannot be found or read, or its tensors are not the expected ones."""


class HubError(CheckpointError):
    """A checkpoint could not be fetched from the Hugging Face hub."""


class NameMapError(CompatError):
    """A name map does not fit the model or the checkpoint."""


class AdaptError(CompatError):
    """A model cannot be imported, built, or recognised as a GPT-2."""


class ParityError(CompatError):
    """A comparison is not possible."""


class TokenizerError(CompatError):
    """A vocabulary is missing or damaged, or cannot decode an id."""


class GenerationError(CompatError):
    """A generation request cannot be met."""


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to convert longer numbers to decimal.
        return (
            super().repr_int(x, level)
            if x.bit_length() < 10_000
            else "a number of thousands of digits"
        )


_REPR = _Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 200


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened to one line, even for long or deeply nested values."""
    return _REPR.repr(value)


def described(value: object) -> str:
    """Return the type and the value of an argument of the wrong type, in one line."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = short_repr(value)
    return f"{text} ({type(value).__name__})" if "\n" not in text else f"a {type(value).__name__}"


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return "a, b and c", or "a, b and 5 more" where there are more names than `most`."""
    parts = list(names)
    if len(names) > most:
        parts = [*names[:most], f"{len(names) - most} more"]
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def lines(headline: str, faults: Sequence[str]) -> str:
    """Return a headline, the first ten faults on lines below it, and the number of the others."""
    more = [f"and {len(faults) - 10} more"] if len(faults) > 10 else []
    return "\n  ".join([headline, *faults[:10], *more])


def collapse_layers(names: Sequence[str]) -> list[str]:
    """Write names that differ only in the layer once, as in h.{0…11}.attn.c_attn.bias."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        # The first number is the layer, unless it has leading zeros or is very long.
        found = re.fullmatch(r"(\D*\.)?(0|[1-9][0-9]{0,8})(\..+)", name, re.DOTALL)
        place = (found[1] or "", found[3]) if found else (name, "")
        layers.setdefault(place, []).extend([int(found[2])] if found else [])
    return [
        before + (_ranges(numbers) if numbers else "") + after
        for (before, after), numbers in layers.items()
    ]


def counted(*faults: tuple[str, Sequence[str]]) -> list[str]:
    """Return one line for each fault that names have, with their number and the names by layer."""
    return [f"{len(n)} {fault}: {listed(collapse_layers(n))}" for fault, n in faults if n]


def collapse_faults(faults: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines of the form `name: fault`, one for all layers that have the same fault."""
    by_text: dict[str, list[str]] = {}
    for name, text in faults:
        by_text.setdefault(text, []).append(name)
    return [f"{name}: {text}" for text, names in by_text.items() for name in collapse_layers(names)]


def _ranges(numbers: Sequence[int]) -> str:
    """Return `{0…3,7}`, or a single number without braces."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}…{run[-1]}" for run in runs]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"
