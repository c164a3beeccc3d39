"""What `compat` raises on bad input, one class per kind, and how its messages list things."""

import re
import reprlib
from collections.abc import Iterable, Sequence

_LONGEST = 8_000


class CompatError(Exception):
    """Base of all errors here; the message says what, where, found, expected and the next step.

    Names from a file stand in it: none of them can fill the screen, or send the terminal commands.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
        return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class ConfigError(CompatError):
    """A model configuration that is malformed, out of range or not understood."""


class CheckpointError(CompatError):
    """A checkpoint that cannot be found or read, or whose tensors are not the expected ones."""


class HubError(CheckpointError):
    """A checkpoint that could not be fetched from the Hugging Face hub."""


class NameMapError(CompatError):
    """A name map that does not fit the model or the checkpoint."""


class AdaptError(CompatError):
    """A model that cannot be imported, built, or read as a GPT-2."""


class ParityError(CompatError):
    """A comparison that cannot be made."""


class TokenizerError(CompatError):
    """A vocabulary that is missing or broken, or ids that it cannot decode."""


class GenerationError(CompatError):
    """A generation request that cannot be met."""


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python does not write numbers out that are longer than this.
        return (
            super().repr_int(x, level)
            if x.bit_length() < 10_000
            else "a number of thousands of digits"
        )


_REPR = _Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 200


def short_repr(value: object) -> str:
    """A value from a file as Python writes it, in a line, however long it is or deeply nested."""
    return _REPR.repr(value)


def described(value: object) -> str:
    """An argument of a wrong kind: its type and its value, in a line."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = short_repr(value)
    return f"{text} ({type(value).__name__})" if "\n" not in text else f"a {type(value).__name__}"


def listed(names: Sequence[str], most: int = 10) -> str:
    """The first names and how many more there are, in one line."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def lines(headline: str, faults: Sequence[str], most: int = 10) -> str:
    """A headline and the first faults below it, a line each, and how many more there are."""
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return "\n  ".join([headline, *faults[:most], *more])


def collapse_layers(names: Sequence[str]) -> list[str]:
    """Names that differ in the layer alone written once: h.{0…11}.attn.c_attn.bias."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        # The first number in it is the layer; one of zeros in front, or endless, is none.
        found = re.fullmatch(r"(\D*\.)?(0|[1-9][0-9]{0,8})(\..+)", name, re.DOTALL)
        place = (found[1] or "", found[3]) if found else (name, "")
        layers.setdefault(place, []).extend([int(found[2])] if found else [])
    return [
        before + (_ranges(numbers) if numbers else "") + after
        for (before, after), numbers in layers.items()
    ]


def folded_faults(faults: Iterable[tuple[str, str]]) -> list[str]:
    """`name: what is wrong` in lines, one for all the layers of which the same is wrong."""
    by_text: dict[str, list[str]] = {}
    for name, text in faults:
        by_text.setdefault(text, []).append(name)
    return [f"{name}: {text}" for text, names in by_text.items() for name in collapse_layers(names)]


def _ranges(numbers: Sequence[int]) -> str:
    """`{0…3,7}`; a lone number bare."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}…{run[-1]}" for run in runs]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"
