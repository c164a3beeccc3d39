"""The inputs on which a model is compared: their shapes, their ids, and how the model is run.

GPT-2 is causal, so the logits of a prefix are those of the whole sequence up to its end. The
reference therefore runs on a few sequences only, and every input is a batch of their prefixes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

import torch
from torch import Tensor

from compat.config import GPT2Config

Mode = Literal["no_grad", "gradients", "inference", "thread", "hooks"]
IdsForm = Literal["plain", "int32", "strided", "overwritten"]

LENGTH = 16  # ids of each short sequence
LONG = 0  # the number of the sequence that fills the context
MAX_IDS = 4096  # ids in the inputs built from one set of constants
MAX_SEQUENCES = 32  # sequences built from the constants in the code
MAX_ROWS = 65  # rows of a batch that is built to reach a condition


@dataclass(frozen=True)
class ProofInput:
    """A batch of prefixes of the proof's sequences.

    Args:
        name: a description of the input.
        rows: numbers of the sequences.
        length: the length of every prefix.
        mode: how the model runs: without gradients, with them, in inference mode, in another
            thread, or with a forward hook on every module.
        form: the form of the ids: "plain"; "int32" or "strided", for that data type or memory
            layout; "overwritten" if they are written into the tensor of the previous input.
    """

    name: str
    rows: tuple[int, ...]
    length: int
    mode: Mode = "no_grad"
    form: IdsForm = "plain"

    @property
    def optional(self) -> bool:
        """Whether a model may refuse the input."""
        return self.form in ("int32", "strided")


def special_ids(config: GPT2Config) -> list[int]:
    """Return the ids that models often treat differently: first, last, bos, eos and padding."""
    named = [config.bos_token_id, config.pad_token_id, *config.stop_ids]
    ids = [0, config.vocab_size - 1, *named]
    return list(dict.fromkeys(i for i in ids if i is not None and 0 <= i < config.vocab_size))


def sequences(config: GPT2Config, longest: int) -> list[Tensor]:
    """Return the sequences of the designed inputs: one of `longest` ids, then short ones.

    - The first short sequence contains only id 0. In the second every other id is the same.
    - The ids of the third ascend, those of the fourth descend.
    - Each of the others begins with one of the special ids twice in a row and ends with it.
    - The last two repeat the sequence before them, with two neighbouring ids exchanged in the first
      or in the second half.
    """
    generator = torch.Generator().manual_seed(0)
    special = special_ids(config)

    def random(length: int) -> Tensor:
        return torch.randint(config.vocab_size, (length,), generator=generator)

    def place(ids: Tensor, at: int, values: Sequence[int]) -> None:
        at = max(0, at)
        values = values[: max(0, len(ids) - at)]
        ids[at : at + len(values)] = torch.tensor(values, dtype=torch.long)

    S = min(LENGTH, longest)
    long, repeated, alternating = random(longest), random(S), random(S)
    place(long, longest // 3, [x for i in special for x in (i, i)])
    place(long, longest // 2, [int(long[0])] * min(40, longest // 4))
    place(long, longest - len(special), special[::-1])
    repeated[:] = 0  # all of them, for conditions such as `ids.any()`
    alternating[1::2] = alternating[S // 2]
    ascending = (torch.arange(S) + config.vocab_size // 3) % config.vocab_size
    rows = [long, repeated, alternating, ascending, ascending.flip(0)]
    for token_id in special:
        row = random(S)
        place(row, S // 2, special)
        place(row, 0, [token_id, token_id])
        place(row, S - 1, [token_id])
        rows.append(row)
    return [*rows, _exchanged(rows[-1], S // 4), _exchanged(rows[-1], S - 4)]


def _exchanged(row: Tensor, at: int) -> Tensor:
    """Exchange two neighbouring ids, so that their number and sum stay the same."""
    other = row.clone()
    if 0 <= at < len(row) - 1:
        other[[at, at + 1]] = row[[at + 1, at]]
    return other


def sequences_with(ids: Collection[int], config: GPT2Config, longest: int) -> list[Tensor]:
    """Return for each of the ids a short sequence that begins with it twice and ends with it.

    The sequence also contains the id below and the id above. Of more than MAX_SEQUENCES ids the
    lowest and the highest are used.
    """
    generator = torch.Generator().manual_seed(1)
    S, wanted = min(LENGTH, longest), sorted(ids)
    if len(wanted) > MAX_SEQUENCES:
        wanted = wanted[: MAX_SEQUENCES // 2] + wanted[-MAX_SEQUENCES // 2 :]
    found = []
    for token_id in wanted:
        row = torch.randint(config.vocab_size, (S,), generator=generator)
        near = [i for i in (token_id - 1, token_id + 1) if 0 <= i < config.vocab_size]
        row[S // 2 : S // 2 + len(near)] = torch.tensor(near)[: S - S // 2]
        row[: min(2, S)] = token_id
        row[-1] = token_id
        found.append(row)
    return found


def sequences_of(phrases: Iterable[Sequence[int]], longest: int) -> list[Tensor]:
    """Return for each phrase of ids a short sequence that repeats it and ends with it."""
    S = min(LENGTH, longest)
    found = []
    for phrase in islice(phrases, MAX_SEQUENCES):
        row = torch.tensor(list(islice(cycle(phrase), S)))
        row[-len(phrase) :] = torch.tensor(phrase)[-S:]
        found.append(row)
    return found


def designed_inputs(count: int, longest: int) -> list[ProofInput]:
    """Return the inputs that every proof begins with, in their order.

    A model may keep state between calls, so the order matters. A short text comes before the
    longest one and after it, inputs of one shape with other ids follow each other, and neither a
    text that is one id longer than the one before nor a single id continues it.

    Args:
        count: how many sequences there are, as returned by `sequences`.
        longest: the length of the long sequence.
    """
    S, every = min(LENGTH, longest), tuple(range(1, count))
    repeated, alternating, first = 1, 2, 5
    early, late, last = count - 2, count - 1, count - 3
    half, most = max(1, S // 2), max(1, S - 1)
    return [
        ProofInput("a short text before the longest", (last,), half),
        ProofInput("the full context", (LONG,), longest),
        ProofInput("a short text after the longest", (first,), half),
        ProofInput(f"a batch of {len(every)}", every, S),
        ProofInput("the same batch again", every, S),
        ProofInput("other ids of the same shape", every[::-1], S),
        ProofInput("one id per row", every, 1),
        ProofInput(
            "rows permuted and cut, with gradients", (alternating, last, first), most, "gradients"
        ),
        ProofInput("a row of the same length", (first,), most),
        ProofInput("one row alone", (last,), S),
        ProofInput("the row with two ids exchanged", (early,), S, "thread"),
        ProofInput("the row with two other ids exchanged", (late,), S, "hooks"),
        ProofInput("a single id", (repeated,), 1),
        ProofInput("one id throughout", (repeated,), S),
        ProofInput("two rows", (last, repeated), half),
        ProofInput("one id for each of two rows", (repeated, first), 1),
        ProofInput("equal rows", (first, first, last), half),
        ProofInput("two rows after three", (last, alternating), half),
        ProofInput("other ids in the same tensor", (last, first), half, form="overwritten"),
        ProofInput("inference mode", (first, alternating), max(1, S // 2 - 1), "inference"),
        ProofInput("ids as int32", (last, first), half, form="int32"),
        ProofInput("ids with gaps in memory", (first, last), half, form="strided"),
    ]


def inputs_reaching(
    constants: Iterable[int], count: int, longest: int, tried: Collection[ProofInput]
) -> list[ProofInput]:
    """Return inputs with lengths, batch sizes and numbers of ids near the constants.

    Near means at most 1 below or above. Inputs of few ids come first, equal shapes one after the
    other, and the number of ids of all inputs is limited.
    """
    near = sorted({n + step for n in constants for step in (-1, 0, 1)})
    S, rows = min(LENGTH, longest), range(1, count)
    inputs = [ProofInput(f"length {n}", (LONG,), n) for n in near if 1 <= n <= longest]
    # A model may keep its results by their shape, so each short length is tried with other ids too.
    inputs += [ProofInput(f"length {n} again", (count - 1,), n) for n in near if 1 <= n <= S]
    shapes = [(n, min(2, longest)) for n in near if 1 <= n <= MAX_ROWS]
    shapes += [(-(-n // S), S) for n in near if longest < n <= MAX_IDS]
    inputs += [
        ProofInput(f"a batch of {n}", tuple(islice(cycle(rows), n)), length)
        for n, length in dict.fromkeys(shapes)
    ]
    chosen, ids = [], 0
    for candidate in sorted(inputs, key=lambda item: len(item.rows) * item.length):
        ids += len(candidate.rows) * candidate.length
        if ids <= max(MAX_IDS, longest) and candidate not in tried:
            chosen.append(candidate)
    return chosen
