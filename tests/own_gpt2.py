"""A user's GPT-2 with its own names and layout, and the map for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat import NameMap, Row, Same, Transpose


class MyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(24), nn.LayerNorm(24)
        self.query_key = nn.Linear(24, 48)
        self.value = nn.Linear(24, 24)
        self.merge = nn.Linear(24, 24)
        self.wide, self.narrow = nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)
        q, k, v = (
            t.unflatten(-1, (4, 6)).transpose(1, 2)
            for t in (*self.query_key(y).chunk(2, dim=-1), self.value(y))
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(heads.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.before_mlp(x)), approximate="tanh"))


class MyGPT2(nn.Module):
    """A GPT-2 with its own names and layout: `query_key` is fused, `value` is not, no `config`."""

    def __init__(self, head: str | None = "tied") -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(97, 24), nn.Embedding(32, 24)
        self.stack = nn.Sequential(*[MyBlock() for _ in range(3)])
        self.end = nn.LayerNorm(24)
        if head is not None:
            self.head = nn.Linear(24, 97, bias=False)
        if head == "tied":
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        x = self.end(self.stack(x))
        return self.head(x) if hasattr(self, "head") else x @ self.tokens.weight.t()


class SplitValue:
    """A user-defined op that splits fused q, k, v into fused q, k and a separate v."""

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        q, k, v = tensor.t().chunk(3)
        return torch.cat([q, k]), v.contiguous()

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).t().contiguous()


ROWS = [
    Row("wte.weight", ("tokens.weight",), Same()),
    Row("wpe.weight", ("places.weight",), Same()),
    *[
        Row(f"h.{{i}}.{hf}.{kind}", tuple(f"stack.{{i}}.{name}.{kind}" for name in ours), op)
        for hf, ours, op in [
            ("ln_1", ["before_attention"], Same()),
            ("attn.c_attn", ["query_key", "value"], SplitValue()),
            ("attn.c_proj", ["merge"], Transpose()),
            ("ln_2", ["before_mlp"], Same()),
            ("mlp.c_fc", ["wide"], Transpose()),
            ("mlp.c_proj", ["narrow"], Transpose()),
        ]
        for kind in ("weight", "bias")
    ],
    Row("ln_f.weight", ("end.weight",), Same()),
    Row("ln_f.bias", ("end.bias",), Same()),
    Row("lm_head.weight", ("head.weight",), Same()),
]


def my_map(*changed: Row, without: str = "") -> NameMap:
    """Return the map of MyGPT2, without one row, or with some rows replaced or added."""
    rows = {row.hf: row for row in [*ROWS, *changed]}
    return NameMap(tuple(row for row in rows.values() if row.hf != without))
