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
        mode: in which the model runs: without gradients, with them, or in inference mode.
        as_given: "int32" or "strided" for ids of that data type or layout, which a model need not
            take: what it raises then does not count.
    """

    name: str
    rows: tuple[int, ...]
    length: int
    mode: Literal["no_grad", "gradients", "inference"] = "no_grad"
    as_given: Literal["", "int32", "strided"] = ""


def special_ids(config: GPT2Config) -> list[int]:
    """Ids that models treat in a way of their own: the first, the last, bos, eos and padding."""
    named = [config.bos_token_id, config.pad_token_id, *config.stop_ids]
    ids = [0, config.vocab_size - 1, *named]
    return list(dict.fromkeys(i for i in ids if i is not None and 0 <= i < config.vocab_size))


def sequences(config: GPT2Config, room: int) -> list[Tensor]:
    """The known sequences: one of `room` ids, then short ones.

    In the first short one a single id repeats, in the second every other id is the same. Each of
    the others begins and ends with one of the special ids, twice in a row where it begins.
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
    repeated[:] = repeated[0]
    alternating[1::2] = alternating[S // 2]
    rows = [long, repeated, alternating]
    for token_id in special:
        row = random(S)
        place(row, S // 2, special)
        place(row, 0, [token_id, token_id])
        place(row, S - 1, [token_id])
        rows.append(row)
    return rows


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


def designed_inputs(count: int, room: int) -> list[ProofInput]:
    """The inputs that every proof begins with, of `count` sequences of `sequences`."""
    S, every = min(LENGTH, room), tuple(range(1, count))
    repeated, alternating, first, last = 1, 2, 3, every[-1]
    return [
        ProofInput("the full context", (LONG,), room),
        ProofInput(f"a batch of {len(every)}", every, S),
        ProofInput("the same batch again", every, S),
        ProofInput("other ids of the same shape", every[::-1], S),
        ProofInput("one id per row", every, 1),
        ProofInput("a single id", (last,), 1),
        ProofInput(
            "rows permuted and cut, with gradients",
            (alternating, last, first),
            max(1, S - 3),
            "gradients",
        ),
        ProofInput("one row alone", (last,), S),
        ProofInput("two rows", (last, repeated), max(1, S // 2)),
        ProofInput("equal rows", (first, first, last), max(1, S // 2)),
        ProofInput("inference mode", (first, alternating), max(1, S // 2 - 1), "inference"),
        ProofInput("ids as int32", (last, first), max(1, S // 2), as_given="int32"),
        ProofInput("ids with gaps in memory", (first, last), max(1, S // 2), as_given="strided"),
    ]


def inputs_reaching(
    constants: Iterable[int], count: int, room: int, tried: Collection[ProofInput]
) -> list[ProofInput]:
    """Lengths, batch sizes and numbers of ids at, below and above these constants.

    Those of few ids come first; the sum of all is limited.
    """
    near = sorted({n + step for n in constants for step in (-1, 0, 1)})
    S, rows = min(LENGTH, room), range(1, count)
    inputs = [ProofInput(f"length {n}", (LONG,), n) for n in near if 1 <= n <= room]
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
