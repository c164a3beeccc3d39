"""The layouts in which candidates store arrays, and their conversion to the golden layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from compat.golden_files.pieces import split_name
from compat.ops import axis_groups, rearrange

# A layout lists the axes in the order in which they are stored; axes in parentheses are flattened
# into one. Axes: B batch, T time, C channels, H heads, D head size, S keys, F inner width,
# V vocabulary, N decode steps, 3 for q, k and v, I inputs, O outputs. The first layout is that of
# the golden file. B may be absent if it is 1.
STREAM = ("B T C", "T B C", "(B T) C")
HEADS = ("B T (H D)", "T B (H D)", "(B T) (H D)", "B T H D", "B H T D", "T B H D", "(B H) T D",
         "(B T) H D")  # fmt: skip
LAYOUTS = {
    "q": HEADS,
    "k": HEADS,
    "v": HEADS,
    "heads": HEADS,
    "qkv": ("B T (3 H D)", "T B (3 H D)", "(B T) (3 H D)", "B T 3 (H D)", "3 B T (H D)",
            "B T 3 H D", "3 B T H D", "3 B H T D", "B 3 H T D"),
    "probs": ("B H T S", "H B T S", "(B H) T S", "T B H S"),
    "fc": ("B T F", "T B F", "(B T) F"),
    "act": ("B T F", "T B F", "(B T) F"),
    "logits": ("B T V", "T B V", "(B T) V"),
    "decode.logits": ("B N V", "N B V", "(B N) V"),
    "matrix": ("I O", "O I"),
    "vector": ("I",),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """One layout of an array.

    Args:
        text: the layout, as in LAYOUTS.
        canonical: the layout of the golden file.
        sizes: the sizes of the axes.
    """

    text: str
    canonical: str
    sizes: Mapping[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        groups = axis_groups(self.text)
        return tuple(math.prod(self.sizes[axis] for axis in group) for group in groups)

    def arrange(self, tensor: Tensor) -> Tensor:
        """Convert a tensor to the layout of the golden file."""
        # Logits of the last position only may be stored without the axis T, which is 1 then.
        return rearrange(tensor.reshape(self.shape), self.text, self.canonical, self.sizes)


def known_layouts(name: str) -> tuple[str, ...]:
    """Return the layouts of an array such as "h.0.q", or of a key of LAYOUTS."""
    return LAYOUTS.get(name if name in LAYOUTS else split_name(name)[1], STREAM)


def layouts_of(name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[Layout]:
    """Return the layouts that an array of this shape may have, the golden file's first.

    Args:
        name: the name of the array, such as "h.0.q" or "logits", or a key of LAYOUTS.
        shape: the shape of the candidate's array.
        sizes: the sizes of all axes.
    """
    known = known_layouts(name)
    found = [Layout(text, known[0], sizes) for text in known]
    if sizes.get("B") == 1:
        found += [Layout(_without_batch(text), known[0], sizes) for text in known]
    distinct = {layout.text: layout for layout in found if layout.shape == shape}
    return list(distinct.values())


def _without_batch(text: str) -> str:
    groups = [[axis for axis in group if axis != "B"] for group in axis_groups(text)]
    kept = [group for group in groups if group]
    return " ".join(f"({' '.join(g)})" if len(g) > 1 else g[0] for g in kept)
