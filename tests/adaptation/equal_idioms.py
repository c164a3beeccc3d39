"""Hand-written models that compute GPT-2's logits in unusual but equivalent ways.

Every class has the tiny checkpoint's sizes, but two layers: V = 97, 32 positions, C = 24, 4 heads.
`IDIOMS` maps their names to them. Some have parameters that do not affect the logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

V, N, C, H, L = 97, 32, 24, 4, 2
D = C // H


class PreNorm(nn.Module):
    """The wiring of a pre-norm block, whose parts a subclass defines."""

    ln_1: nn.LayerNorm
    ln_2: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear

    def attend(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Block(PreNorm):
    """A plainly written pre-norm block; each idiom overrides one method."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.add_attention()
        self.add_mlp()

    def add_attention(self) -> None:
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def add_mlp(self) -> None:
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each (B, H, T, D)."""
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, H, D).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return q, k, v

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        scores = q @ k.transpose(-2, -1) / D**0.5
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v

    def attend(self, x: Tensor) -> Tensor:
        y = self.mix(*self.heads(x))
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class GPT(nn.Module):
    """A plainly written GPT-2; each idiom overrides one method."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(N, C)
        self.blocks: Any = nn.ModuleList(self.block() for _ in range(L))
        self.ln_f = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, V, bias=False)
        self.lm_head.weight = self.wte.weight

    def tokens(self, ids: Tensor) -> Tensor:
        return self.wte(ids)

    def positions(self, ids: Tensor) -> Tensor:
        return self.wpe(torch.arange(ids.shape[1]))

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def head(self, x: Tensor) -> Tensor:
        return self.lm_head(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.run_blocks(self.tokens(ids) + self.positions(ids))
        return self.head(self.ln_f(x))


def with_block(block: type[Block]) -> type[GPT]:
    return type(block.__name__, (GPT,), {"block": block})


# Context managers


class AutocastOffBlocks(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        with torch.autocast(device_type="cpu", enabled=False):
            return super().run_blocks(x)


class AutocastOffAttention(Block):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().mix(q.float(), k.float(), v.float())


class AutocastOffEverywhere(GPT):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.amp.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return super().forward(ids)


class NoGradEmbedding(GPT):
    def tokens(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return super().tokens(ids)


class GradientsOnHead(GPT):
    def head(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().head(x)


# The head


class HeadInVocabularyChunks(GPT):
    def head(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, w) for w in self.wte.weight.split(40)], dim=-1)


class HeadInPositionChunks(GPT):
    def head(self, x: Tensor) -> Tensor:
        return torch.cat([self.lm_head(part) for part in x.split(8, dim=1)], dim=1)


class HeadFilledIn(GPT):
    """The logits are written into an empty tensor, some ids at a time."""

    def head(self, x: Tensor) -> Tensor:
        logits = x.new_empty(*x.shape[:2], V)
        for start in range(0, V, 25):
            part = self.wte.weight[start : start + 25]
            logits[..., start : start + 25] = x @ part.T
        return logits


class HeadPerPosition(GPT):
    def head(self, x: Tensor) -> Tensor:
        return torch.stack([self.lm_head(x[:, t]) for t in range(x.shape[1])], dim=1)


class PaddedVocabulary(GPT):
    """Tables padded to a multiple of 64, the surplus logits cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(128, C)
        self.lm_head = nn.Linear(C, 128, bias=False)
        self.lm_head.weight = self.wte.weight

    def head(self, x: Tensor) -> Tensor:
        return super().head(x)[..., :V]


class PaddedHead(GPT):
    """An untied head padded to a multiple of 64, the surplus logits cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(C, 128, bias=False)

    def head(self, x: Tensor) -> Tensor:
        return super().head(x)[:, :, :V]


class StaleHead(GPT):
    """A head that is never used: the logits come from the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(C, V, bias=False)

    def head(self, x: Tensor) -> Tensor:
        return x @ self.wte.weight.T


class StaleHeadCalled(StaleHead):
    """The same, but the head is called and its result is dropped."""

    def head(self, x: Tensor) -> Tensor:
        self.lm_head(x)
        return x @ self.wte.weight.T


class UntiedHead(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(C, V, bias=False)


# Embeddings


class ColumnEmbedding(GPT):
    """The embedding of a token is a column of a parameter (C, V), which the head shares."""

    def __init__(self) -> None:
        super().__init__()
        del self.wte, self.lm_head
        self.columns = nn.Parameter(torch.randn(C, V))

    def tokens(self, ids: Tensor) -> Tensor:
        return torch.einsum("cbt -> btc", self.columns[:, ids])

    def head(self, x: Tensor) -> Tensor:
        return x @ self.columns


class OneHotTokens(GPT):
    def tokens(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, V).to(self.wte.weight.dtype) @ self.wte.weight


class OneHotByComparison(GPT):
    def tokens(self, ids: Tensor) -> Tensor:
        return (ids.unsqueeze(-1) == torch.arange(V)).float() @ self.wte.weight


class OneHotByScatter(GPT):
    def tokens(self, ids: Tensor) -> Tensor:
        rows = torch.zeros(*ids.shape, V).scatter_(-1, ids.unsqueeze(-1), 1.0)
        return F.linear(rows, self.wte.weight.T)


class OneHotByEye(GPT):
    def tokens(self, ids: Tensor) -> Tensor:
        return torch.eye(V)[ids] @ self.wte.weight


class OneHotEverything(OneHotTokens):
    def positions(self, ids: Tensor) -> Tensor:
        return F.one_hot(torch.arange(ids.shape[1]), N).float() @ self.wpe.weight


class CumsumPositions(GPT):
    def positions(self, ids: Tensor) -> Tensor:
        return self.wpe(torch.ones_like(ids).cumsum(dim=1) - 1)


class ExpandedPositions(GPT):
    def positions(self, ids: Tensor) -> Tensor:
        return self.wpe(torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids))


class BufferPositions(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position_ids", torch.arange(N)[None], persistent=False)

    def positions(self, ids: Tensor) -> Tensor:
        return self.wpe(self.position_ids[:, : ids.shape[1]])


class PositionsOfMask(GPT):
    """Positions from a padding mask that contains only ones."""

    def positions(self, ids: Tensor) -> Tensor:
        seen = (ids >= 0).long()
        return self.wpe((seen.cumsum(-1) - 1).masked_fill(seen == 0, 1))


class ShiftedPositions(GPT):
    """A table with two rows in front that are never read, as OPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.wpe = nn.Embedding(N + 2, C)

    def positions(self, ids: Tensor) -> Tensor:
        return self.wpe(torch.arange(ids.shape[1]) + 2)


class SlicedPositions(GPT):
    """A position parameter whose first row is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.wpe = nn.Parameter(torch.zeros(1, N + 1, C))

    def positions(self, ids: Tensor) -> Tensor:
        return self.wpe[:, 1 : ids.shape[1] + 1]


class PositionsPerToken(GPT):
    """Tokens and positions are summed one position at a time."""

    def positions(self, ids: Tensor) -> Tensor:
        return torch.stack([self.wpe.weight[t].expand(len(ids), C) for t in range(ids.shape[1])], 1)


# Loops


class LoopOverRows(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        return torch.cat([GPT.run_blocks(self, row) for row in x.split(1)])


class LoopOverRowsOfIds(GPT):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([GPT.forward(self, row[None])[0] for row in ids])


class RowsOfAttention(Block):
    def attend(self, x: Tensor) -> Tensor:
        return torch.stack([Block.attend(self, row[None]).squeeze(0) for row in x.unbind()])


class LoopOverHeads(Block):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [
            Block.mix(self, q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1]) for h in range(H)
        ]
        return torch.cat(heads, dim=1)


class SecondProductPerHead(Block):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = q @ k.transpose(-2, -1) / D**0.5
        probs = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.stack([probs[:, h] @ v[:, h] for h in range(H)], dim=1)


class ScoresPerHead(Block):
    """q·kᵀ is computed head by head, and the rest of attention for all heads together."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = torch.stack([q[:, h] @ k[:, h].mT for h in range(H)], dim=1) / D**0.5
        return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v


class SeparateHeads(Block):
    """Every head has its own projections; the output projection is shared."""

    def add_attention(self) -> None:
        self.q = nn.ModuleList(nn.Linear(C, D) for _ in range(H))
        self.k = nn.ModuleList(nn.Linear(C, D) for _ in range(H))
        self.v = nn.ModuleList(nn.Linear(C, D) for _ in range(H))
        self.proj = nn.Linear(C, C)

    def head(self, x: Tensor, h: int) -> Tensor:
        q, k, v = (layers[h](x)[:, None] for layers in (self.q, self.k, self.v))
        return Block.mix(self, q, k, v)[:, 0]

    def attend(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([self.head(x, h) for h in range(H)], dim=-1))


class SlicedProjections(Block):
    """Every head uses its slice of one projection's weight."""

    def attend(self, x: Tensor) -> Tensor:
        heads = []
        for h in range(H):
            rows = [slice(n * C + h * D, n * C + (h + 1) * D) for n in range(3)]
            q, k, v = (F.linear(x, self.qkv.weight[r], self.qkv.bias[r]) for r in rows)
            heads.append(Block.mix(self, q[:, None], k[:, None], v[:, None])[:, 0])
        return self.proj(torch.cat(heads, dim=-1))


class SummedOutputSlices(Block):
    """Every head goes through its slice of the output projection, and the results are summed."""

    def attend(self, x: Tensor) -> Tensor:
        y = self.mix(*self.heads(x))
        out = self.proj.bias.expand_as(x)
        for h in range(H):
            out = out + y[:, h] @ self.proj.weight[:, h * D : (h + 1) * D].T
        return out


class LargestHeads(Block):
    """The heads with the largest results are kept by a mask, and these are all heads."""

    def attend(self, x: Tensor) -> Tensor:
        y = self.mix(*self.heads(x)).transpose(1, 2)  # (B, T, H, D)
        out = torch.einsum("bthd,hdc->bthc", y, self.proj.weight.T.view(H, D, C))
        norms = out.norm(dim=-1)
        mask = torch.zeros_like(norms).scatter(-1, norms.topk(H, dim=-1).indices, 1.0)
        return (out * mask[..., None]).sum(dim=2) + self.proj.bias


class OutputPerHead(SeparateHeads):
    """Every head has its own output projection; the bias is added once."""

    def add_attention(self) -> None:
        super().add_attention()
        del self.proj
        self.out = nn.ModuleList(nn.Linear(D, C, bias=False) for _ in range(H))
        self.out_bias = nn.Parameter(torch.zeros(C))

    def attend(self, x: Tensor) -> Tensor:
        return sum(self.out[h](self.head(x, h)) for h in range(H)) + self.out_bias


class OutputColumnsPerHead(Block):
    """The output projection in column blocks, concatenated."""

    def attend(self, x: Tensor) -> Tensor:
        y = self.mix(*self.heads(x)).transpose(1, 2).reshape(x.shape)
        rows = zip(self.proj.weight.chunk(H), self.proj.bias.chunk(H), strict=True)
        return torch.cat([F.linear(y, w, b) for w, b in rows], dim=-1)


class InterleavedHeads(Block):
    """Channel c of q, k, v and of the merged heads belongs to head c % H."""

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.qkv(x).chunk(3, dim=-1)
        return tuple(part.unflatten(-1, (D, H)).movedim(-1, 1) for part in parts)

    def attend(self, x: Tensor) -> Tensor:
        return self.proj(self.mix(*self.heads(x)).movedim(1, -1).flatten(-2))


class LoopOverQueries(Block):
    """Every query is computed with the keys up to its own position, without a mask."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for t in range(q.shape[2]):
            scores = q[:, :, t : t + 1] @ k[:, :, : t + 1].mT / D**0.5
            rows.append(scores.softmax(-1) @ v[:, :, : t + 1])
        return torch.cat(rows, dim=2)


class LoopOverQueriesEinsum(Block):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for t in range(q.shape[2]):
            scores = torch.einsum("bhd,bhsd->bhs", q[:, :, t], k[:, :, : t + 1]) / D**0.5
            rows.append(torch.einsum("bhs,bhsd->bhd", scores.softmax(-1), v[:, :, : t + 1]))
        return torch.stack(rows, dim=2)


class LoopOverPositions(Block):
    """The MLP one position at a time."""

    def mlp(self, x: Tensor) -> Tensor:
        return torch.stack([Block.mlp(self, x[:, t]) for t in range(x.shape[1])], dim=1)


class QueryChunks(Block):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        parts = []
        for rows, mask in zip(q.split(4, dim=2), hidden.split(4), strict=True):
            scores = (rows @ k.mT / D**0.5).masked_fill(mask, float("-inf"))
            parts.append(scores.softmax(-1) @ v)
        return torch.cat(parts, dim=2)


class MlpInWidthChunks(Block):
    """The inner width is split into halves, whose results are summed."""

    def mlp(self, x: Tensor) -> Tensor:
        out = self.down.bias
        for up, bias, down in zip(
            self.up.weight.chunk(2), self.up.bias.chunk(2), self.down.weight.chunk(2, dim=1),
            strict=True,
        ):  # fmt: skip
            out = out + F.linear(F.gelu(F.linear(x, up, bias), approximate="tanh"), down)
        return out


class BiasAfterSum(Block):
    """`x + y @ w + b`, which Python reads as `(x + y @ w) + b`."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(*self.heads(self.ln_1(x))).transpose(1, 2).reshape(x.shape)
        x = x + heads @ self.proj.weight.t() + self.proj.bias
        up = F.gelu(self.up(self.ln_2(x)), approximate="tanh")
        return x + up @ self.down.weight.t() + self.down.bias


class VmapOverRows(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: GPT.run_blocks(self, row[None])[0])(x)


class VmapOverHeads(Block):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            T = q.shape[1]
            hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
            scores = q @ k.mT / D**0.5
            return torch.where(hidden, float("-inf"), scores).softmax(-1) @ v

        return torch.vmap(one, in_dims=1, out_dims=1)(q, k, v)


class VmapEverything(GPT):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.vmap(lambda row: GPT.forward(self, row[None])[0])(ids)


# Dead code


class UnusedSecondCall(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        after = super().run_blocks(x)
        self.blocks[0](after)
        return after


class UnusedFirstCall(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        self.blocks[-1](x.flip(1))
        return super().run_blocks(x)


class DeadAttention(Block):
    """Attention weights are computed a second time for inspection and then dropped."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, _ = self.heads(x)
        self.weights = (q @ k.mT).softmax(-1)
        y = super().attend(x)
        self.weights = None
        return y


class DeadHead(GPT):
    """A value head, as for reinforcement learning, whose result is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(C, 1)

    def head(self, x: Tensor) -> Tensor:
        self.value(x)
        return super().head(x)


class TimesZero(GPT):
    """A second branch that is multiplied with zero."""

    def head(self, x: Tensor) -> Tensor:
        return super().head(x) + 0.0 * self.lm_head(self.blocks[0](x))


# Parameters without effect


class FrozenMask(Block):
    def add_attention(self) -> None:
        super().add_attention()
        hidden = torch.ones(N, N).triu(1) * -1e30
        self.mask = nn.Parameter(hidden, requires_grad=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        scores = q @ k.mT / D**0.5 + self.mask[:T, :T]
        return scores.softmax(-1) @ v


class FrozenMaskFilled(Block):
    def add_attention(self) -> None:
        super().add_attention()
        self.mask = nn.Parameter(torch.ones(N, N).tril(), requires_grad=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        scores = (q @ k.mT / D**0.5).masked_fill(self.mask[:T, :T] == 0, float("-inf"))
        return scores.softmax(-1) @ v


class LayerScaleOne(Block):
    def add_attention(self) -> None:
        super().add_attention()
        self.extra_1, self.extra_2 = nn.Parameter(torch.ones(C)), nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.extra_1 * self.attend(self.ln_1(x))
        return x + self.extra_2 * self.mlp(self.ln_2(x))


class ResidualBiasZero(Block):
    def add_attention(self) -> None:
        super().add_attention()
        self.extra = nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x)) + self.extra
        return x + self.mlp(self.ln_2(x))


class ResidualGateOne(Block):
    """One scalar per branch, as in ReZero after training, that is 1."""

    def add_attention(self) -> None:
        super().add_attention()
        self.extra = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.extra * self.attend(self.ln_1(x))
        return x + self.extra * self.mlp(self.ln_2(x))


class Lora(Block):
    def add_mlp(self) -> None:
        super().add_mlp()
        self.lora_a, self.extra = nn.Linear(C, 4, bias=False), nn.Linear(4, 3 * C, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        qkv = self.qkv(x) + 0.5 * self.extra(self.lora_a(x))
        q, k, v = (t.view(B, T, H, D).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        return q, k, v


class LoraLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a = nn.Parameter(torch.randn(inputs, 4))
        self.extra_b = nn.Parameter(torch.zeros(4, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_a) @ self.extra_b


class LoraEverywhere(Block):
    def add_attention(self) -> None:
        self.qkv, self.proj = LoraLinear(C, 3 * C), LoraLinear(C, C)

    def add_mlp(self) -> None:
        self.up, self.down = LoraLinear(C, 4 * C), LoraLinear(4 * C, C)


class EmbeddingScaleOne(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.extra_scale = nn.Parameter(torch.ones(1))

    def tokens(self, ids: Tensor) -> Tensor:
        return super().tokens(ids) * self.extra_scale


class LogitTemperatureOne(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.extra_temperature = nn.Parameter(torch.ones(()))

    def head(self, x: Tensor) -> Tensor:
        return super().head(x) / self.extra_temperature


class HeadBiasZero(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(V))

    def head(self, x: Tensor) -> Tensor:
        return super().head(x) + self.extra


class TokenTypesZero(GPT):
    """Token types, as in BERT, whose table is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.extra_types = nn.Embedding(2, C)

    def tokens(self, ids: Tensor) -> Tensor:
        return super().tokens(ids) + self.extra_types(torch.zeros_like(ids))


class UnusedParameters(GPT):
    """Parameters that no code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler, self.marker = nn.Linear(C, C), nn.Parameter(torch.zeros(3))


# Names and parametrizations


class AliasedParameters(GPT):
    """Parameters and complete modules have two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = self.blocks[0], self.ln_f
        self.table = self.wte.weight
        self.also = nn.ModuleDict({"mlp": self.blocks[1].up})


class AliasedFirst(nn.Module):
    """A list of all linear layers precedes the model that uses them."""

    def __init__(self) -> None:
        super().__init__()
        model = GPT()
        self.all = nn.ModuleList(m for m in model.modules() if isinstance(m, nn.Linear))
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


class WeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        for name in ("up", "down"):
            setattr(self, name, weight_norm(getattr(self, name)))


class WeightNormEverywhere(Block):
    def __init__(self) -> None:
        super().__init__()
        for name in ("qkv", "proj", "up", "down"):
            weight_norm(getattr(self, name))


class OldWeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():  # it is deprecated, but still widely used
            warnings.simplefilter("ignore", FutureWarning)
            torch.nn.utils.weight_norm(self.up)


class Transposing(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.T

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.T.clone()


class TransposedParametrization(Block):
    """A parametrization keeps the weight transposed."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.up, "weight", Transposing())


class Doubling(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2.0

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2.0


class ScaledParametrization(Block):
    """The parameter is half of the weight."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.down, "weight", Doubling())


class GainBesideNorm(Block):
    """The norm's scale is stored as its difference from one, as in Gemma."""

    def __init__(self) -> None:
        super().__init__()
        del self.ln_2
        self.gain, self.shift = nn.Parameter(torch.zeros(C)), nn.Parameter(torch.zeros(C))

    def ln_2(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (C,)) * (1 + self.gain) + self.shift


# Modules that forward creates


class GeluInForward(Block):
    def mlp(self, x: Tensor) -> Tensor:
        return self.down(nn.GELU(approximate="tanh")(self.up(x)))


class NormInForward(Block):
    """`forward` creates a norm without parameters; the parameters are the block's."""

    def forward(self, x: Tensor) -> Tensor:
        bare = nn.LayerNorm(C, elementwise_affine=False)
        x = x + self.attend(bare(x) * self.ln_1.weight + self.ln_1.bias)
        return x + self.mlp(self.ln_2(x))


class LinearInForward(Block):
    """`forward` creates a linear layer and assigns the parameters to it."""

    def mlp(self, x: Tensor) -> Tensor:
        up = nn.Linear(C, 4 * C, device="meta")
        up.weight, up.bias = self.up.weight, self.up.bias
        return self.down(F.gelu(up(x), approximate="tanh"))


class SequentialInForward(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        return nn.Sequential(*self.blocks, nn.Dropout(0.1).eval())(x)


class SecondProductOfVkq(SecondProductPerHead):
    """The fused parameter holds v, k and q in this order."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, k, q = super().heads(x)
        return q, k, v


class NanGuard(GPT):
    def head(self, x: Tensor) -> Tensor:
        logits = super().head(x)
        return torch.where(logits.isnan(), torch.zeros_like(logits), logits)


CLASSES: list[type[nn.Module]] = [
    AutocastOffBlocks, with_block(AutocastOffAttention), AutocastOffEverywhere, NoGradEmbedding,
    GradientsOnHead, HeadInVocabularyChunks, HeadInPositionChunks, HeadFilledIn, HeadPerPosition,
    PaddedVocabulary, PaddedHead, StaleHead, StaleHeadCalled, UntiedHead, ColumnEmbedding,
    OneHotTokens,
    OneHotByComparison, OneHotByScatter, OneHotByEye, OneHotEverything, CumsumPositions,
    ExpandedPositions, BufferPositions, PositionsOfMask, ShiftedPositions, SlicedPositions,
    PositionsPerToken, LoopOverRows, LoopOverRowsOfIds, with_block(RowsOfAttention),
    with_block(LoopOverHeads), with_block(SecondProductPerHead), with_block(ScoresPerHead),
    with_block(SeparateHeads), with_block(SlicedProjections), with_block(SummedOutputSlices),
    with_block(LargestHeads), with_block(OutputPerHead), with_block(OutputColumnsPerHead),
    with_block(InterleavedHeads), with_block(LoopOverQueries),
    with_block(LoopOverQueriesEinsum), with_block(LoopOverPositions), with_block(QueryChunks),
    with_block(MlpInWidthChunks), with_block(BiasAfterSum), VmapOverRows,
    with_block(VmapOverHeads), VmapEverything,
    UnusedSecondCall, UnusedFirstCall, with_block(DeadAttention), DeadHead, TimesZero,
    with_block(FrozenMask), with_block(FrozenMaskFilled), with_block(LayerScaleOne),
    with_block(ResidualBiasZero), with_block(ResidualGateOne), with_block(Lora),
    with_block(LoraEverywhere), EmbeddingScaleOne, LogitTemperatureOne, HeadBiasZero,
    TokenTypesZero, UnusedParameters, AliasedParameters, AliasedFirst, with_block(WeightNorm),
    with_block(WeightNormEverywhere), with_block(OldWeightNorm),
    with_block(TransposedParametrization), with_block(ScaledParametrization),
    with_block(GainBesideNorm), with_block(GeluInForward), with_block(NormInForward),
    with_block(LinearInForward), SequentialInForward, with_block(SecondProductOfVkq),
    NanGuard,
]  # fmt: skip
IDIOMS: dict[str, Callable[[], nn.Module]] = {cls.__name__: cls for cls in CLASSES}


def built(name: str) -> nn.Module:
    """Return the model, with noise on the parameters whose values do not make it equivalent."""
    torch.manual_seed(0)
    model = IDIOMS[name]()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "extra" not in path and "mask" not in path:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if path.endswith("extra.weight") or "extra_types" in path:
                parameter.zero_()
    return model
