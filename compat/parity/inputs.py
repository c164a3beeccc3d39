"""The inputs that a model is compared on: what shape they have, and which ids are where.

GPT-2 is causal: the logits of a prefix are those of the whole sequence up to there. So the
reference runs on a few sequences only, and every input is a batch of prefixes of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

import torch
from torch import Tensor

from compat.config import GPT2Config

LENGTH = 16  # of the short sequences
LONG = 0  # the number of the sequence that fills the context
MOST_EXTRA = 4096  # ids in the inputs made from one set of constants
MOST_SEQUENCES = 32  # made for the constants of the code
MOST_ROWS = 65  # in a batch made to reach a condition


@dataclass(frozen=True)
class ProofInput:
    """A batch of prefixes of the known sequences.

    Args:
        name: what is special about it, in words.
        rows: numbers of the sequences.
        length: of every prefix.
        mode: in which the model runs: without gradients, with them, in inference mode, in another
            thread, or with a forward hook on every module.
        as_given: "int32" or "strided" for ids of that data type or layout, which a model need not
            take: what it raises then does not count. "overwritten" for the tensor of the input
            before, which now holds these ids.
    """

    name: str
    rows: tuple[int, ...]
    length: int
    mode: Literal["no_grad", "gradients", "inference", "thread", "hooks"] = "no_grad"
    as_given: Literal["", "int32", "strided", "overwritten"] = ""

    @property
    def optional(self) -> bool:
        """A model may refuse it."""
        return self.as_given in ("int32", "strided")


def special_ids(config: GPT2Config) -> list[int]:
    """Ids that models treat in a way of their own: the first, the last, bos, eos and padding."""
    named = [config.bos_token_id, config.pad_token_id, *config.stop_ids]
    ids = [0, config.vocab_size - 1, *named]
    return list(dict.fromkeys(i for i in ids if i is not None and 0 <= i < config.vocab_size))


def sequences(config: GPT2Config, room: int) -> list[Tensor]:
    """The known sequences: one of `room` ids, then short ones.

    The first short one is id 0 throughout, in the second every other id is the same; the ids
    of the third ascend and those of the fourth descend. Each of the others begins and ends with one
    of the special ids, twice in a row where it begins, but for the last two: they are the sequence
    before them, with two of its ids exchanged in the first or in the second half.
    """
    generator = torch.Generator().manual_seed(0)
    special = special_ids(config)

    def random(length: int) -> Tensor:
        return torch.randint(config.vocab_size, (length,), generator=generator)

    def place(ids: Tensor, at: int, values: Sequence[int]) -> None:
        at = max(0, at)
        values = values[: max(0, len(ids) - at)]
        ids[at : at + len(values)] = torch.tensor(values, dtype=torch.long)

    S = min(LENGTH, room)
    long, repeated, alternating = random(room), random(S), random(S)
    place(long, room // 3, [x for i in special for x in (i, i)])
    place(long, room // 2, [int(long[0])] * min(40, room // 4))
    place(long, room - len(special), special[::-1])
    repeated[:] = 0  # all of them: what `ids.any()` asks about
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
    """The same ids, of which two neighbours have changed places; their count and sum are equal."""
    other = row.clone()
    if 0 <= at < len(row) - 1:
        other[[at, at + 1]] = row[[at + 1, at]]
    return other


def sequences_with(ids: Collection[int], config: GPT2Config, room: int) -> list[Tensor]:
    """For each of these ids a short sequence in which it comes first, last and twice in a row.

    Its neighbours are in the sequence as well. Of more than MOST_SEQUENCES ids the lowest and the
    highest are taken.
    """
    generator = torch.Generator().manual_seed(1)
    S, wanted = min(LENGTH, room), sorted(ids)
    if len(wanted) > MOST_SEQUENCES:
        wanted = wanted[: MOST_SEQUENCES // 2] + wanted[-MOST_SEQUENCES // 2 :]
    found = []
    for token_id in wanted:
        row = torch.randint(config.vocab_size, (S,), generator=generator)
        near = [i for i in (token_id - 1, token_id + 1) if 0 <= i < config.vocab_size]
        row[S // 2 : S // 2 + len(near)] = torch.tensor(near)[: S - S // 2]
        row[: min(2, S)] = token_id
        row[-1] = token_id
        found.append(row)
    return found


def sequences_of(phrases: Iterable[Sequence[int]], room: int) -> list[Tensor]:
    """For each of these series of ids a short sequence that repeats it and ends with it."""
    S = min(LENGTH, room)
    found = []
    for phrase in islice(phrases, MOST_SEQUENCES):
        row = torch.tensor(list(islice(cycle(phrase), S)))
        row[-len(phrase) :] = torch.tensor(phrase)[-S:]
        found.append(row)
    return found


def designed_inputs(count: int, room: int) -> list[ProofInput]:
    """The inputs that every proof begins with, of `count` sequences of `sequences`, in their order.

    A model may keep something from one call to the next, so the order matters: a short text comes
    before the longest and after it, equal shapes with other ids follow each other, a text that is
    one id longer is not a continuation of the one before, nor is a single id.
    """
    S, every = min(LENGTH, room), tuple(range(1, count))
    repeated, alternating, first = 1, 2, 5
    early, late, last = count - 2, count - 1, count - 3
    half = max(1, S // 2)
    return [
        ProofInput("a short text before the longest", (last,), half),
        ProofInput("the full context", (LONG,), room),
        ProofInput("a short text after the longest", (first,), half),
        ProofInput(f"a batch of {len(every)}", every, S),
        ProofInput("the same batch again", every, S),
        ProofInput("other ids of the same shape", every[::-1], S),
        ProofInput("one id per row", every, 1),
        ProofInput(
            "rows permuted and cut, with gradients",
            (alternating, last, first),
            max(1, S - 1),
            "gradients",
        ),
        ProofInput("a row of the same length", (first,), max(1, S - 1)),
        ProofInput("one row alone", (last,), S),
        ProofInput("the row with two ids exchanged", (early,), S, "thread"),
        ProofInput("the row with two other ids exchanged", (late,), S, "hooks"),
        ProofInput("a single id", (repeated,), 1),
        ProofInput("one id throughout", (repeated,), S),
        ProofInput("two rows", (last, repeated), half),
        ProofInput("one id for each of two rows", (repeated, first), 1),
        ProofInput("equal rows", (first, first, last), half),
        ProofInput("two rows after three", (last, alternating), half),
        ProofInput("other ids in the same tensor", (last, first), half, as_given="overwritten"),
        ProofInput("inference mode", (first, alternating), max(1, S // 2 - 1), "inference"),
        ProofInput("ids as int32", (last, first), half, as_given="int32"),
        ProofInput("ids with gaps in memory", (first, last), half, as_given="strided"),
    ]


def inputs_reaching(
    constants: Iterable[int], count: int, room: int, tried: Collection[ProofInput]
) -> list[ProofInput]:
    """Lengths, batch sizes and numbers of ids at, below and above these constants.

    Those of few ids come first, equal shapes in a row; the sum of all is limited.
    """
    near = sorted({n + step for n in constants for step in (-1, 0, 1)})
    S, rows = min(LENGTH, room), range(1, count)
    inputs = [ProofInput(f"length {n}", (LONG,), n) for n in near if 1 <= n <= room]
    # Again with other ids, as an answer may be kept by its shape.
    inputs += [ProofInput(f"length {n} again", (count - 1,), n) for n in near if 1 <= n <= S]
    shapes = [(n, min(2, room)) for n in near if 1 <= n <= MOST_ROWS]
    shapes += [(-(-n // S), S) for n in near if room < n <= MOST_EXTRA]
    inputs += [
        ProofInput(f"a batch of {n}", tuple(islice(cycle(rows), n)), length)
        for n, length in dict.fromkeys(shapes)
    ]
    chosen, ids = [], 0
    for candidate in sorted(inputs, key=lambda item: len(item.rows) * item.length):
        ids += len(candidate.rows) * candidate.length
        if ids <= max(MOST_EXTRA, room) and candidate not in tried:
            chosen.append(candidate)
    return chosen
