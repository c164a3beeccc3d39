"""Unusual hand-written models yield a finding that names the difference, or one AdaptError."""

from __future__ import annotations

import linecache
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat import AdaptError, adapt
from compat.adaptation.anatomy.dissect import UnknownPart, dissect
from compat.adaptation.anatomy.norms import place_norms
from compat.adaptation.diagnosis.survey import survey
from compat.adaptation.mapping.assignments import find_assignments
from compat.adaptation.tracing.record import to_graph
from compat.checkpoint import open_checkpoint
from tests.adaptation.equal_idioms import PreNorm
from tests.conftest import MakeCheckpoint

pytestmark = pytest.mark.usefixtures("shared_reference")

Build = Callable[[], nn.Module]


class Block(PreNorm):
    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(emb_dim), nn.LayerNorm(emb_dim)
        self.qkv, self.proj = nn.Linear(emb_dim, 3 * emb_dim), nn.Linear(emb_dim, emb_dim)
        self.up, self.down = nn.Linear(emb_dim, inner), nn.Linear(inner, emb_dim)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, C = q.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))

    def attend(self, x: Tensor) -> Tensor:
        return self.mix(*self.qkv(x).chunk(3, dim=-1))


class GPT(nn.Module):
    """A model that is equal to GPT-2 if it has the checkpoint's sizes."""

    def __init__(
        self,
        vocab: int = 97,
        context: int = 32,
        emb_dim: int = 24,
        heads: int = 4,
        layers: int = 3,
        inner: int = 0,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, emb_dim), nn.Embedding(context, emb_dim)
        inner = inner or 4 * emb_dim
        self.blocks: Any = nn.ModuleList(Block(emb_dim, heads, inner) for _ in range(layers))
        self.ln_f = nn.LayerNorm(emb_dim)

    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))

    def final(self, x: Tensor) -> Tensor:
        return self.ln_f(x)

    def head(self, x: Tensor) -> Tensor:
        return x @ self.wte.weight.T

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = self.block(i, block, x)
        return self.head(self.final(x))

    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, ids: Tensor) -> Any:
        return self.logits(ids)


class Configured(GPT):
    def __init__(self, cfg: dict[str, int]) -> None:
        super().__init__(emb_dim=cfg["d_model"], vocab=cfg["vocab_size"])


class ProjectionWithoutBias(GPT):
    """The model is wider, and the output projection of attention has no bias."""

    def __init__(self) -> None:
        super().__init__(emb_dim=48)
        for block in self.blocks:
            block.proj = nn.Linear(48, 48, bias=False)


class SharedBlocks(GPT):
    """The model is wider, and its blocks are one."""

    def __init__(self) -> None:
        super().__init__(emb_dim=48)
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


class HeadsOfWidth(GPT):
    """The heads are not 24 / 4 = 6 channels wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for block in self.blocks:
            block.qkv, block.proj = nn.Linear(24, 12 * width), nn.Linear(4 * width, 24)


class LatentBlock(Block):
    """q, k and v are projected from a vector of 12 channels."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        self.narrow, self.widen = nn.Linear(emb_dim, 12), nn.Linear(12, 2 * emb_dim)
        self.qkv = nn.Linear(emb_dim, emb_dim)

    def attend(self, x: Tensor) -> Tensor:
        return self.mix(self.qkv(x), *self.widen(self.narrow(x)).chunk(2, dim=-1))


class RotatedLatentBlock(LatentBlock):
    """Keys and values of each channel are neighbours, and q and k are rotated by their position."""

    def attend(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        angle = torch.arange(T)[:, None, None] / 100 ** (torch.arange(3) / 3)  # (T, 1, 3)
        keys, values = self.widen(self.narrow(x)).unflatten(-1, (-1, 2)).unbind(-1)
        turned = []
        for y in (self.qkv(x), keys):
            a, b = y.unflatten(-1, (self.heads, 3, 2)).unbind(-1)
            c, s = angle.cos(), angle.sin()
            turned.append(self.joined(a * c - b * s, a * s + b * c).flatten(-3))
        return self.mix(*turned, values)

    def joined(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a, b], dim=-1)


class WrittenRotation(RotatedLatentBlock):
    """The turned channels are written into an empty tensor."""

    def joined(self, a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(*a.shape, 2)
        out[..., 0] = a
        out[..., 1] = b.double()
        return out


class SlicedBlock(Block):
    """Every head projects only its own channels."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        D = emb_dim // heads
        self.qkv: Any = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(heads))

    def attend(self, x: Tensor) -> Tensor:
        slices = x.split(x.shape[-1] // self.heads, dim=-1)
        projected = [
            project(part).chunk(3, dim=-1) for project, part in zip(self.qkv, slices, strict=True)
        ]
        return self.mix(*(torch.cat(heads, dim=-1) for heads in zip(*projected, strict=True)))


class SharedAcrossLayers(GPT):
    """Every other layer attends to the keys and values of the layer before it."""

    def logits(self, ids: Tensor) -> Tensor:
        x, shared = self.embed(ids), None
        for i, block in enumerate(self.blocks):
            q, k, v = block.qkv(block.ln_1(x)).chunk(3, dim=-1)
            shared = (k, v) if i % 2 == 0 else shared
            x = x + block.mix(q, *shared)
            x = x + block.down(F.gelu(block.up(block.ln_2(x)), approximate="tanh"))
        return self.head(self.final(x))


class RoundedLinear(nn.Linear):
    """The weights are rounded to −1, 0 and 1 times their mean magnitude, as in BitNet."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean()
        rounded = (self.weight / scale).round().clamp(-1, 1) * scale
        return F.linear(x, rounded, self.bias)


class RoundedBlock(Block):
    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        self.qkv = RoundedLinear(emb_dim, 3 * emb_dim, bias=False)
        self.proj = RoundedLinear(emb_dim, emb_dim, bias=False)
        self.down = RoundedLinear(inner, emb_dim)


class ScaledQueries(Block):
    """The channels of each head's query are multiplied by learned factors."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        self.factors = nn.Parameter(torch.linspace(0.5, 2.0, emb_dim))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(q * self.factors, k, v)


class Sigmoid(Block):
    """A sigmoid replaces the softmax, and each head adds a learned bias."""

    causal = True

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        self.bias = nn.Parameter(torch.randn(heads, 1, 1))

    def weights(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores + self.bias)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, C = q.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        weights = self.weights(q @ k.mT / q.shape[-1] ** 0.5)
        y = (weights.tril() if self.causal else weights) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class NoSoftmax(Sigmoid):
    """The scores are the weights, and every token attends to all tokens."""

    causal = False

    def weights(self, scores: Tensor) -> Tensor:
        return scores


def with_blocks(kind: type[Block]) -> Build:
    def build() -> nn.Module:
        model = GPT()
        model.blocks = nn.ModuleList(kind(24, 4, 96) for _ in range(3))
        return model

    return build


def test_a_known_part_is_reported_with_its_sizes_if_there_is_no_map(tiny: Path) -> None:
    config = open_checkpoint(tiny).config
    model = with_blocks(SlicedBlock)()
    graph = to_graph(model, lambda model, ids: model(ids), torch.arange(26).view(2, 13))
    anatomy = dissect(graph, accepts_others=True)
    with pytest.raises(UnknownPart) as raised:
        find_assignments(anatomy, place_norms(anatomy), config)
    first = survey(graph, model, config, raised.value, graph.nodes)[0]
    assert first.code == "sliced_heads" and "only 6 of the 24 channels" in first.message


class PlainList(GPT):
    """The blocks are in a plain list, so that `parameters()` does not find them."""

    def __init__(self) -> None:
        super().__init__()
        blocks = list(self.blocks)
        del self.blocks
        self.blocks = blocks


class StackedNorms(GPT):
    """One parameter holds the scales of all norms."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(7, 24)), nn.Parameter(torch.zeros(7, 24))

    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        one, two = (
            lambda x, n=n: F.layer_norm(x, (24,), self.scale[n], self.shift[n])
            for n in (2 * i, 2 * i + 1)
        )
        x = x + block.attend(one(x))
        return x + block.mlp(two(x))


class StackedMlp(GPT):
    """One parameter holds the weights of all layers' MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(3, 96, 24))

    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        x = x + block.attend(block.ln_1(x))
        return x + F.gelu(block.up(block.ln_2(x)), approximate="tanh") @ self.down[i]


class StackedList(GPT):
    """The weights are in a list and are stacked in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ParameterList(nn.Parameter(torch.randn(24, 96)) for _ in range(3))

    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        x = x + block.attend(block.ln_1(x))
        up = torch.stack(list(self.ups))[i]
        return x + block.down(F.gelu(block.ln_2(x) @ up, approximate="tanh"))


class NormInForward(GPT):
    def final(self, x: Tensor) -> Tensor:
        return nn.LayerNorm(24)(x)


class LinearInForward(GPT):
    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        return nn.Linear(24, 24)(block(x))


class HeadInForward(GPT):
    def head(self, x: Tensor) -> Tensor:
        return nn.Linear(24, 97)(x)


class MixedTypes(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.ln_f.bfloat16()

    def final(self, x: Tensor) -> Tensor:
        return self.ln_f(x.bfloat16()).float()


class DoubleBuffer(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(24, dtype=torch.float64))

    def head(self, x: Tensor) -> Tensor:
        return (x * self.one).float() @ self.wte.weight.T


class NoParameters(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, 97).float()


class ReturnsTuple(GPT):
    def forward(self, ids: Tensor) -> Any:
        return self.logits(ids), None, [1]


class ReturnsDict(GPT):
    def forward(self, ids: Tensor) -> Any:
        return {"hidden": self.embed(ids), "logits": self.logits(ids), 1: 2}


class ReturnsNone(GPT):
    def forward(self, ids: Tensor) -> Any:
        self.logits(ids)


class ReturnsArray(GPT):
    def forward(self, ids: Tensor) -> Any:
        return self.logits(ids).detach().numpy()


class ReturnsLoss(GPT):
    def forward(self, ids: Tensor) -> Any:
        return self.logits(ids).logsumexp(-1).mean()


class OneSequence(GPT):
    """Accepts ids (T,) and returns logits (T, V)."""

    def forward(self, ids: Tensor) -> Any:
        (T,) = ids.shape
        return self.logits(ids[None]).view(T, -1)


class PackedSequence(GPT):
    """Accepts ids (T,), targets of the same shape and a number of tokens, and returns a loss."""

    def forward(self, ids: Tensor, targets: Tensor, window_tokens: Tensor) -> Any:
        assert ids.ndim == 1
        assert window_tokens.ndim == 0 and window_tokens >= len(ids)
        return F.cross_entropy(self.logits(ids[None])[0], targets)


class PackedInPython(PackedSequence):
    """Reads the ids outside of torch, which vmap does not support."""

    def forward(self, ids: Tensor, targets: Tensor, window_tokens: Tensor) -> Any:
        assert max(ids.tolist()) < 97
        return super().forward(ids, targets, window_tokens)


class StaticCache(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, *shape))

    def update(self, positions: Tensor, k: Tensor, v: Tensor) -> Any:
        self.kept[:, :, :, positions] = torch.stack([k, v])
        return self.kept


class CachedBlock(Block):
    kv_cache: StaticCache | None = None

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, C = q.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(self.positions, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class SetUpFirst(GPT):
    """Has masks and caches only after a method has made them, which it does once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachedBlock(24, 4, 96) for _ in range(3))
        self.max_seq_length, self.causal_mask = -1, None

    def setup_caches(self, max_batch_size: int, max_seq_length: int, dtype: Any) -> None:
        if self.max_seq_length >= max_seq_length:
            return
        self.max_seq_length = max_seq_length
        self.causal_mask = torch.ones(max_seq_length, max_seq_length).tril().bool()
        for block in self.blocks:
            block.kv_cache = StaticCache(max_batch_size, 4, max_seq_length, 6)

    def forward(self, ids: Tensor, input_pos: Tensor | None = None) -> Any:
        assert self.causal_mask is not None, "setup_caches must be called first"
        x = self.wte(ids) + self.wpe(input_pos)
        for block in self.blocks:
            block.mask, block.positions = self.causal_mask[input_pos], input_pos
            x = block(x)
        return self.head(self.final(x))


class SetUpFirstWithoutMask(SetUpFirst):
    def setup_caches(self, max_batch_size: int, max_seq_length: int, dtype: Any) -> None:
        super().setup_caches(max_batch_size, max_seq_length, dtype)
        self.causal_mask = torch.ones(max_seq_length, max_seq_length).bool()


class NarrowIds(GPT):
    """Accepts only 32-bit ids."""

    def forward(self, ids: Tensor) -> Any:
        assert ids.dtype == torch.int32
        return self.logits(ids)


class FloatIds(GPT):
    """Accepts ids that are floating-point numbers."""

    def forward(self, ids: Tensor) -> Any:
        assert ids.is_floating_point()
        return self.logits(ids.long())


class OneHotVectors(GPT):
    """Accepts one-hot vectors (B, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Linear(97, 24, bias=False)

    def head(self, x: Tensor) -> Tensor:
        return x @ self.wte.weight

    def forward(self, vectors: Tensor) -> Any:
        return self.logits(vectors)


class FixedShape(GPT):
    """Accepts exactly four sequences of full length."""

    batch_size = 4

    def forward(self, ids: Tensor) -> Any:
        return self.logits(ids.view(self.batch_size, 32))


class FixedLength(GPT):
    """Accepts sequences of 20 ids only, fewer than its positions."""

    def forward(self, ids: Tensor) -> Any:
        return self.logits(ids + torch.zeros(20, dtype=torch.long))


class LengthOfItsMask(GPT):
    """Accepts exactly one sequence, of the length of its mask, which the error does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(20, 20).tril())

    def forward(self, ids: Tensor) -> Any:
        return self.logits(ids.view(1, 20))


class EmptyLength(GPT):
    """Refuses every sequence with an error that names a length of 0."""

    def forward(self, ids: Tensor) -> Any:
        return torch.zeros(0) + torch.zeros(7)


class MaskOfTheBatch(GPT):
    """Accepts a mask with an axis for the batch."""

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            B, T, C = x.shape
            q, k, v = block.qkv(block.ln_1(x)).chunk(3, dim=-1)
            q, k, v = (t.view(B, T, block.heads, -1).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))
            x = x + block.proj(y.transpose(1, 2).reshape(B, T, C))
            x = x + block.mlp(block.ln_2(x))
        return self.head(self.final(x))


class EinsumNorm(nn.Module):
    """A LayerNorm whose weight is applied by an einsum that sums over no axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(24)), nn.Parameter(torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (24,))
        return torch.einsum("c, b t c -> b t c", self.weight, x) + self.bias


class EinsumNorms(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.ln_f: Any = EinsumNorm()
        for block in self.blocks:
            block.ln_1, block.ln_2 = EinsumNorm(), EinsumNorm()


class EinsumOfLastPosition(GPT):
    """The head is an einsum on the last position with a fixed number of axes."""

    def head(self, x: Tensor) -> Tensor:
        return torch.einsum("b c, v c -> b v", x[:, -1, :], self.wte.weight)


class WideNorm(nn.Module):
    """An RMSNorm over tokens and channels that has a weight for each token."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.centred, self.weight = centred, nn.Parameter(torch.ones(32, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean((1, 2), keepdim=True) if self.centred else x
        rms = torch.linalg.norm(x, dim=(1, 2)) * x[0].numel() ** -0.5
        return self.weight[: x.shape[1]] * x / rms[:, None, None]


class FromWideNorm(GPT):
    """Both residual connections start from the result of a norm, which all branches share."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        named = OrderedDict((f"block_{i}", block) for i, block in enumerate(self.blocks))
        self.blocks = nn.Sequential(named)
        for block in self.blocks:
            block.ln_1 = block.ln_2 = WideNorm(centred)

    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        x = block.ln_1(x)
        x = x + block.attend(x)
        x = block.ln_2(x)
        return x + block.mlp(x)


class WideNormWithoutPositions(FromWideNorm):
    """The norms have weights for each position, which are not position embeddings."""

    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids)


class SummedHeads(Block):
    """Each head has its own output projection, and an einsum sums the results."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        self.proj: Any = None
        self.out = nn.Parameter(torch.randn(heads, emb_dim // heads, emb_dim))
        self.out_bias = nn.Parameter(torch.zeros(emb_dim))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, _ = q.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        each = torch.einsum("bhtd,hdc->bthc", z, self.out)
        return torch.einsum("bthc->btc", each) + self.out_bias


class SummedHeadsGPT(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SummedHeads(24, 4, 96) for _ in range(3))


class OneBlockOfHeads(GPT):
    """The only block is not a module, and the checkpoint has as many blocks as this has heads."""

    def __init__(self) -> None:
        super().__init__(layers=1, heads=3)
        self.blocks[0].qkv = nn.Identity()
        self.one, self.blocks = self.blocks[0], nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def logits(self, ids: Tensor) -> Tensor:
        x, one = self.embed(ids), self.one
        projected = [head(one.ln_1(x)).chunk(3, dim=-1) for head in self.blocks]
        x = x + one.mix(*(torch.cat(parts, -1) for parts in zip(*projected, strict=True)))
        x = x + one.down(F.gelu(one.up(one.ln_2(x)), approximate="tanh"))
        return self.head(self.final(x))


def test_a_list_of_heads_is_not_one_of_blocks(make_checkpoint: MakeCheckpoint) -> None:
    adaptation = adapt(noisy_model(OneBlockOfHeads), make_checkpoint(n_head=3))
    [found] = adaptation.deviations
    assert found.code == "n_layer_mismatch"
    assert found.message == "the number of layers is 1, but the checkpoint's is 3"


class ViewsIds(GPT):
    """Views its ids as code does for the loss, which fails for a slice of longer ones."""

    def forward(self, ids: Tensor) -> Any:
        return self.logits(ids.view(-1).view(ids.shape))


def test_ids_that_a_model_views_do_not_limit_its_length(tiny: Path) -> None:
    assert adapt(noisy_model(ViewsIds), tiny).findings == []


class PostNorms(GPT):
    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        x = block.ln_1(x + block.attend(x))
        return block.ln_2(x + block.down(F.gelu(block.up(x), approximate="tanh")))


class SoftmaxAfterPostNorms(PostNorms):
    def final(self, x: Tensor) -> Tensor:
        return self.ln_f(F.softmax(x, -1))


def test_an_operation_between_the_last_post_norm_and_ln_f_is_found(tiny: Path) -> None:
    adaptation = adapt(noisy_model(SoftmaxAfterPostNorms), tiny)
    assert [f.code for f in adaptation.deviations] == ["post_ln", "extra_operation"]
    assert "softmax between h.2.out and ln_f" in adaptation.deviations[1].message


class ReluOfTheEmbeddings(PostNorms):
    def embed(self, ids: Tensor) -> Tensor:
        return F.relu(super().embed(ids))


def test_an_operation_between_the_embeddings_and_a_post_norm_block_is_found(tiny: Path) -> None:
    adaptation = adapt(noisy_model(ReluOfTheEmbeddings), tiny)
    assert [f.code for f in adaptation.deviations] == ["post_ln", "extra_operation"]
    assert "relu between embed and the projection of q" in adaptation.deviations[1].message
    assert all(f.evidence.startswith("confirmed") for f in adaptation.deviations)


class ValuesOfTheEmbeddings(GPT):
    """Computes the values of each layer from its norm and from the embeddings."""

    def logits(self, ids: Tensor) -> Tensor:
        self.embedded = self.embed(ids)
        x = self.embedded
        for block in self.blocks:
            q, k, _ = block.qkv(self.ln_1(block, x)).chunk(3, dim=-1)
            v = block.qkv(self.ln_1(block, x) / 2 + self.embedded / 2).chunk(3, dim=-1)[2]
            x = x + block.mix(q, k, v)
            x = x + block.down(F.gelu(block.up(block.ln_2(x)), approximate="tanh"))
        return self.head(self.final(x))

    def ln_1(self, block: Block, x: Tensor) -> Tensor:
        return block.ln_1(x)


class ValuesOfTheEmbeddingsWithoutNorm(ValuesOfTheEmbeddings):
    def ln_1(self, block: Block, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("build", "codes"),
    [
        (ValuesOfTheEmbeddings, ["unknown_part"]),
        (ValuesOfTheEmbeddingsWithoutNorm, ["unknown_part", "missing_ln"]),
    ],
)
def test_a_norm_in_attention_of_an_unknown_form_is_not_missing(
    tiny: Path, build: Build, codes: list[str]
) -> None:
    adaptation = adapt(noisy_model(build), tiny)
    assert [f.code for f in adaptation.deviations] == codes


class AddsTheNormsInput(GPT):
    """Attention reads the sum of the residual stream and its norm."""

    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        x = x + block.attend(x + block.ln_1(x))
        return x + block.down(F.gelu(block.up(block.ln_2(x)), approximate="tanh"))


def test_the_weight_of_a_norm_of_an_unknown_form_is_not_said_to_be_missing(tiny: Path) -> None:
    adaptation = adapt(noisy_model(AddsTheNormsInput), tiny)
    assert adaptation.unmatched == []
    assert {f.code for f in adaptation.deviations} == {"other_norm", "unexplained"}


class StartsWithAVector(GPT):
    """Puts a learned vector before the embeddings, along the axis of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(24))

    def embed(self, ids: Tensor) -> Tensor:
        first = torch.ones(1, ids.shape[1], 24) * self.start
        return torch.cat([first, self.wte(ids)[:-1]]) + self.wpe.weight[: ids.shape[1]]


def test_a_vector_before_the_tokens_is_not_said_to_be_the_positions(tiny: Path) -> None:
    messages = {f.code: f.message for f in adapt(noisy_model(StartsWithAVector), tiny).deviations}
    assert "start" in messages["random_parameters"]
    assert not any("concatenated" in message for message in messages.values())


class PositionsInEachBlock(PostNorms):
    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        added = self.wpe.weight[: x.shape[1]] if i else 0
        return super().block(i, block, x + added)


def test_an_operation_between_a_post_norm_and_the_next_block_is_found(tiny: Path) -> None:
    adaptation = adapt(noisy_model(PositionsInEachBlock), tiny)
    assert [f.code for f in adaptation.deviations] == ["post_ln", "extra_operation"]
    assert "add between h.0.out and the projection of q" in adaptation.deviations[1].message
    assert all(f.evidence.startswith("confirmed") for f in adaptation.deviations)


class AttentionAgain(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.attend(self.ln_2(x))


def test_attention_in_place_of_the_mlp_leaves_nothing_unexplained(tiny: Path) -> None:
    adaptation = adapt(noisy_model(with_blocks(AttentionAgain)), tiny)
    assert {f.code for f in adaptation.deviations} == {"no_mlp", "shared_parameters"}


class HiddenOnly(GPT):
    def head(self, x: Tensor) -> Tensor:
        return x


class ExtraArguments(GPT):
    def forward(self, ids: Tensor, sharpness: float, cache: Any) -> Any:
        return self.logits(ids) / sharpness


class NoArguments(GPT):
    def forward(self) -> Any:
        return self.logits(torch.zeros(1, 4, dtype=torch.long))


class NarrowTable(GPT):
    """The token table is narrower than the model and is projected to its width."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.widen = nn.Embedding(97, 8), nn.Linear(8, 24, bias=False)
        self.lm_head = nn.Linear(24, 97, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.widen(self.wte(ids)) + self.wpe(torch.arange(ids.shape[1]))

    def head(self, x: Tensor) -> Tensor:
        return self.lm_head(x)


class JoinedTables(GPT):
    """Half of each vector is the token's embedding, and half that of its position."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(97, 12), nn.Embedding(64, 12)
        self.lm_head = nn.Linear(24, 97, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        positions = self.wpe(torch.arange(ids.shape[1])).expand(len(ids), -1, -1)
        return torch.cat([self.wte(ids), positions], dim=-1)

    def head(self, x: Tensor) -> Tensor:
        return self.lm_head(x)


class TwoTables(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Embedding(97, 24)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) + self.second(ids)


class Factors(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((), 0.5))

    def block(self, i: int, block: Block, x: Tensor) -> Tensor:
        x = x + self.alpha * block.attend(block.ln_1(x))
        return x + block.mlp(block.ln_2(x))


def another_block(number: int = 1, **sizes: int) -> nn.Module:
    model = GPT()
    model.blocks[number] = Block(**{"emb_dim": 24, "heads": 4, "inner": 96, **sizes})
    return model


def sized(**sizes: int) -> Build:
    return lambda: GPT(**sizes)


# Each model, with a part of the message of every finding that is expected.
FINDINGS: dict[str, tuple[Build, dict[str, str]]] = {
    "width": (sized(emb_dim=48), {"n_embd_mismatch": "emb_dim is 48, but the checkpoint has 24"}),
    "width and shared blocks": (
        SharedBlocks,
        {"n_embd_mismatch": "width is 48", "shared_parameters": "share one set of parameters"},
    ),
    "narrower": (
        sized(emb_dim=12),
        {"n_embd_mismatch": "emb_dim is 12, but the checkpoint has 24"},
    ),
    "width in a config": (
        lambda: Configured({"d_model": 48, "vocab_size": 50}),
        {"n_embd_mismatch": "d_model is 48, but the checkpoint has 24", "vocab_mismatch": "of 50"},
    ),
    "width and vocabulary": (
        sized(emb_dim=48, vocab=128),
        {"n_embd_mismatch": "emb_dim is 48", "vocab_mismatch": "128, but the checkpoint's is 97"},
    ),
    "width and layers": (
        sized(emb_dim=48, layers=2),
        {
            "n_embd_mismatch": "emb_dim is 48",
            "n_layer_mismatch": "the number of layers is 2, but the checkpoint's is 3",
        },
    ),
    "width and context": (
        sized(emb_dim=48, context=16),
        {"n_embd_mismatch": "emb_dim is 48", "context_too_short": "16 positions"},
    ),
    "width and heads": (
        sized(emb_dim=48, heads=2),
        {"n_embd_mismatch": "emb_dim is 48", "n_head_mismatch": "2 heads"},
    ),
    "width and inner width": (
        sized(emb_dim=48, inner=100), {"n_embd_mismatch": "48", "inner_dim": "100 wide"}
    ),
    "a bias that is missing in another width": (
        ProjectionWithoutBias, {"n_embd_mismatch": "48", "no_proj_bias": "no bias"}
    ),
    "everything": (
        sized(emb_dim=48, vocab=128, layers=5, inner=100, context=16, heads=3),
        {"n_embd_mismatch": "48", "vocab_mismatch": "128", "n_layer_mismatch": "layers is 5",
         "inner_dim": "100", "context_too_short": "16", "n_head_mismatch": "3 heads"},
    ),
    "layers": (sized(layers=1), {"n_layer_mismatch": "layers is 1"}),
    "heads": (sized(heads=12), {"n_head_mismatch": "12 heads"}),
    "inner width": (sized(inner=200), {"inner_dim": "200 wide, but the checkpoint's is 96"}),
    "wider heads": (lambda: HeadsOfWidth(24), {"head_width": "a head has 24 channels"}),
    "narrower heads": (lambda: HeadsOfWidth(3), {"head_width": "4 heads, 6 for each"}),
    "latent attention": (with_blocks(LatentBlock), {"latent_attention": "projected twice"}),
    "rotated latent attention": (
        with_blocks(RotatedLatentBlock),
        {"latent_attention": "projected twice", "rope": "rotated by their position"},
    ),
    "a rotation that is written in place": (
        with_blocks(WrittenRotation),
        {"latent_attention": "projected twice", "rope": "rotated by their position"},
    ),
    "keys of another layer": (
        SharedAcrossLayers,
        {"unknown_part": "reads the keys and values of attention 1, but in GPT-2 each layer"},
    ),
    "rounded weights": (
        with_blocks(RoundedBlock),
        {"rounded_weights": "weights of h.{0…2}.attn.c_attn, h.{0…2}.attn.c_proj and h.{0…2}.mlp",
         "no_qkv_bias": "no bias", "no_proj_bias": "no bias"},
    ),
    "sliced heads": (with_blocks(SlicedBlock), {"sliced_heads": "only 6 of the 24 channels"}),
    "vocabulary": (sized(vocab=24), {"vocab_mismatch": "vocabulary of 24"}),
    "vocabulary and layers": (
        sized(vocab=50, layers=2), {"vocab_mismatch": "50", "n_layer_mismatch": "layers is 2"}
    ),
    "one block's inner width": (lambda: another_block(inner=48), {"inner_dim": "48 wide"}),
    "one block's heads": (
        lambda: another_block(heads=2),
        {"n_head_mismatch": "2 heads, but the checkpoint has 4 (only in h.1)"},
    ),
    "the first block's heads": (
        lambda: another_block(0, heads=2),
        {"n_head_mismatch": "2 heads, but the checkpoint has 4 (only in h.0)"},
    ),
    "a stacked list": (StackedList, {"no_mlp_bias": "no bias"}),
    "a stacked parameter": (StackedMlp, {"no_mlp_bias": "no bias"}),
    "a norm made in forward": (NormInForward, {"no_ln_weight": "ln_f.weight"}),
    "a head made in forward": (
        HeadInForward, {"unknown_part": "not one projection", "random_in_forward": "random numbers"}
    ),
    "a projection made in forward": (LinearInForward, {"random_in_forward": "random numbers"}),
    "a narrow table": (
        NarrowTable,
        {"extra_projection": "applied to the embeddings", "other_shape": "8] and not"},
    ),
    "tables side by side": (JoinedTables, {"other_embedding": "are concatenated, but"}),
    "seven tokens": (sized(vocab=7), {"vocab_mismatch": "a vocabulary of 7"}),
    "mixed data types": (MixedTypes, {"low_precision": "bfloat16", "mixed_types": "ln_f.weight"}),
    "no layers": (sized(layers=0), {"n_layer_mismatch": "layers is 0"}),
    "two tables": (TwoTables, {"random_parameters": "second.weight"}),
    "returns hidden states": (HiddenOnly, {"no_head": "returns hidden states"}),
    "a factor": (Factors, {"random_parameters": "multiplied by learned factors"}),
    "a norm over tokens": (
        lambda: FromWideNorm(False),
        {"norm_axis": "over axes 1 and 2 of 3", "rmsnorm": "RMSNorm",
         "residual_from_norm": "starts after the norm", "no_ln_bias": "no bias",
         "random_parameters": "weight"},
    ),
    "a norm over tokens, without positions": (
        lambda: WideNormWithoutPositions(False),
        {"norm_axis": "over axes 1 and 2 of 3", "no_pos": "there is no position embedding"},
    ),
    "a centred norm over tokens": (
        lambda: FromWideNorm(True),
        {"norm_axis": "over axes 1 and 2 of 3", "no_ln_bias": "no bias",
         "residual_from_norm": "starts after the norm", "random_parameters": "weight"},
    ),
    "a sigmoid": (
        with_blocks(Sigmoid),
        {"other_softmax": "the sigmoid of each score", "random_parameters": "bias"},
    ),
    "no softmax": (
        with_blocks(NoSoftmax),
        {"other_softmax": "each score is the weight", "no_mask": "no causal mask"},
    ),
    "factors of the query": (with_blocks(ScaledQueries), {"random_parameters": "factors"}),
}  # fmt: skip
ERRORS: dict[str, tuple[Build, str]] = {
    "no parameters": (NoParameters, "parameters"),
    "returns None": (ReturnsNone, "returned no tensor"),
    "returns an array": (ReturnsArray, "returned no tensor"),
    "returns a loss": (ReturnsLoss, r"returned \[\]"),
    "extra arguments": (ExtraArguments, "sharpness"),
    "no arguments": (NoArguments, "positional argument"),
    "a length of 0": (EmptyLength, r"size of tensor \w \(0\)"),
}
EQUAL: dict[str, Build] = {
    "a plain GPT-2": GPT,
    "returns a tuple": ReturnsTuple,
    "returns a dict": ReturnsDict,
    "a float64 buffer": DoubleBuffer,
    "float64": lambda: GPT().double(),
    "a longer context": sized(context=64),
    "one sequence": OneSequence,
    "32-bit ids": NarrowIds,
    "ids as floating-point numbers": FloatIds,
    "one-hot vectors": OneHotVectors,
    "four full sequences": FixedShape,
    "sequences of 20 ids": FixedLength,
    "logits of which the tokens are the last axis": lambda: ReturnsTokensLast(),
    "a mask of the batch": MaskOfTheBatch,
    "norms with an einsum": EinsumNorms,
    "one parameter for all norms": StackedNorms,
    "heads summed by an einsum": SummedHeadsGPT,
    "an einsum of the last position": EinsumOfLastPosition,
}


def noisy_model(build: Build) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_name_the_difference(tiny: Path, name: str) -> None:
    build, expected = FINDINGS[name]
    adaptation = adapt(noisy_model(build), tiny)
    assert not adaptation.compatible
    messages = {finding.code: finding.message for finding in adaptation.findings}
    for code, words in expected.items():
        assert words in messages.get(code, f"no {code} among {messages}")
    breaking = {f.code for f in adaptation.findings if f.severity == "breaks"}
    if "n_embd_mismatch" in expected or name in ("a narrow table", "keys of another layer"):
        assert breaking <= expected.keys()  # consequences of the width are not reported
    assert "unexamined" not in messages
    if "other_softmax" in expected:
        assert ("no_mask" in messages) is (
            "no_mask" in expected
        ) and "other_attention" not in messages


@pytest.mark.parametrize("name", ERRORS)
def test_an_unusable_model_raises_one_adapt_error(tiny: Path, name: str) -> None:
    build, words = ERRORS[name]
    with pytest.raises(AdaptError, match=words):
        adapt(noisy_model(build), tiny)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_code_that_relies_on_half_precision_is_compared_in_it(tiny: Path, factor: float) -> None:
    class CastsEmbeddings(GPT):
        def embed(self, ids: Tensor) -> Tensor:
            return (factor * super().embed(ids)).type(torch.bfloat16)

    adaptation = adapt(noisy_model(lambda: CastsEmbeddings().to(torch.bfloat16)), tiny)
    assert adaptation.compatible is (factor == 1.0)
    assert adaptation.parity is not None and adaptation.parity.dtype == "bfloat16"


@pytest.mark.parametrize("name", EQUAL)
def test_equal_models_are_compatible(tiny: Path, name: str) -> None:
    assert adapt(noisy_model(EQUAL[name]), tiny).compatible


class ReturnsTokensLast(GPT):
    def forward(self, ids: Tensor) -> Any:
        logits = self.logits(ids)
        return logits.transpose(1, 2)  # (B, V, T), as F.cross_entropy expects them


class ReturnsTokensFirst(GPT):
    def forward(self, ids: Tensor) -> Any:
        x = ids.transpose(0, 1)  # as for nn.TransformerEncoder without batch_first
        return self.logits(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("build", "shape", "fix", "line"),
    [
        (ReturnsTokensLast, "(B, V, T)", "transpose(1, 2)", "return logits.transpose(1, 2)"),
        (ReturnsTokensFirst, "(T, B, V)", "transpose(0, 1)", "x = ids.transpose(0, 1)"),
    ],
)
def test_the_shape_of_the_logits_is_reported(
    tiny: Path, build: Build, shape: str, fix: str, line: str
) -> None:
    adaptation = adapt(noisy_model(build), tiny)
    assert adaptation
    [found] = [f for f in adaptation.findings if f.code == "output_shape"]
    assert f"returns logits of shape {shape}" in found.message
    assert found.fix == f"logits.{fix}"
    assert line in (found.source_line or "")


@pytest.mark.parametrize("build", [FixedLength, LengthOfItsMask])
def test_the_only_length_that_a_model_accepts_is_reported(tiny: Path, build: Build) -> None:
    adaptation = adapt(noisy_model(build), tiny)
    [found] = [f for f in adaptation.findings if f.code == "fixed_length"]
    assert "accepts only sequences of 20 ids" in found.message


class FailsOnFullLength(GPT):
    def embed(self, ids: Tensor) -> Tensor:
        self.wte(ids) + self.wpe.weight
        raise ValueError("the moon is in the wrong place")


def test_the_error_on_the_full_length_is_reported(tiny: Path) -> None:
    with pytest.raises(AdaptError, match=r"with 32 ids: ValueError: the moon is in"):
        adapt(noisy_model(FailsOnFullLength), tiny)


class FullLengthOfFewIds(GPT):
    def __init__(self) -> None:
        super().__init__(vocab=20)

    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe.weight


def test_a_model_of_few_ids_that_accepts_only_the_full_context_is_examined(tiny: Path) -> None:
    adaptation = adapt(noisy_model(FullLengthOfFewIds), tiny)
    assert {f.code for f in adaptation.deviations} == {"vocab_mismatch"}
    assert any(f.code == "fixed_length" for f in adaptation.findings)


def test_the_shape_of_the_ids_is_reported(tiny: Path) -> None:
    [found] = [f for f in adapt(noisy_model(OneSequence), tiny).findings if f.severity == "info"]
    assert found.code == "input_shape" and "takes ids of shape (T,), but" in found.message
    assert "def forward(self, ids: Tensor)" in (found.source_line or "")


@pytest.mark.parametrize("cls", [PackedSequence, PackedInPython])
def test_an_assertion_about_the_axes_of_the_ids_is_none_about_their_number(
    tiny: Path, cls: type[GPT]
) -> None:
    adaptation = adapt(noisy_model(cls), tiny)
    assert not adaptation.deviations
    assert {"input_shape", "loss_only"} <= {f.code for f in adaptation.findings}


def test_a_model_whose_masks_a_method_makes_is_called_after_it(tiny: Path) -> None:
    model = noisy_model(SetUpFirst)
    before = {*model.state_dict()}
    adaptation = adapt(model, tiny)
    [found] = [f for f in adaptation.findings if f.code == "setup_first"]
    assert adaptation and found.severity == "info" and "self.setup_caches(…)" in found.message
    assert (found.source_line or "").strip().startswith("def setup_caches(")
    assert {*model.state_dict()} == before and model.causal_mask is None
    adaptation = adapt(noisy_model(SetUpFirstWithoutMask), tiny)
    assert {f.code for f in adaptation.deviations} == {"no_mask"}


def test_modules_in_a_plain_list_are_loaded_and_reported(tiny: Path) -> None:
    model = PlainList()
    adaptation = adapt(model, tiny)
    assert not adaptation
    [found] = [finding for finding in adaptation.findings if finding.severity == "breaks"]
    assert found.code == "plain_list" and found.line is not None
    assert adaptation.parity and type(model.blocks) is list
    assert not any(name.startswith("blocks") for name, _ in model.named_parameters())
    named = {name for row in adaptation.name_map.expand(3) for name in row.ours}
    assert "blocks.0.ln_1.weight" in named


def test_a_plain_list_of_modules_without_parameters_is_not_reported(tiny: Path) -> None:
    """A comma after `nn.Dropout(0.1)` makes it a tuple."""
    model = noisy_model(ViewsIds)
    vars(model)["drop"] = (nn.Dropout(0.1),)
    assert adapt(model, tiny)


class SharedKeys(Block):
    """Two query heads share one key and one value."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, C = q.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        k, v = (t[:, ::2].repeat_interleave(2, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class OneHead(Block):
    """All heads share one projection."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.qkv = nn.Linear(6, 18)

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        parts = self.qkv(x.view(B, T, self.heads, -1)).chunk(3, dim=-1)
        q, k, v = (part.reshape(B, T, C) for part in parts)
        return self.mix(q, k, v)


class KeyOfTheQuery(Block):
    """The query is also the key."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.qkv = nn.Linear(24, 48)

    def attend(self, x: Tensor) -> Tensor:
        q, v = self.qkv(x).chunk(2, dim=-1)
        return self.mix(q, q.clone(), v)


class RepeatedHead(Block):
    """One projection computes the same head again for each head."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.qkv = nn.Linear(24, 18)

    def attend(self, x: Tensor) -> Tensor:
        heads = []
        for _ in range(4):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            heads.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.proj(torch.cat(heads, dim=-1))


def test_a_head_that_is_computed_several_times_is_reported(tiny: Path) -> None:
    """The rows of the output projection cannot be distinguished, but the rest is examined."""
    model = GPT()
    model.blocks = nn.ModuleList(RepeatedHead(emb_dim=24, heads=4, inner=100) for _ in range(3))
    adaptation = adapt(model, tiny)
    breaking = {f.code: f for f in adaptation.findings if f.severity == "breaks"}
    assert breaking.keys() == {"shared_parameters", "inner_dim", "n_head_mismatch"}
    found = breaking["shared_parameters"]
    assert "the heads of q, k and v share one set" in found.message
    assert "torch.cat(heads" in (found.source_line or "")
    assert (
        "the model has 1 head of 6 channels, but the checkpoint has 4"
        in breaking["n_head_mismatch"].message
    )


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (OneHead, "the heads of q, k and v share one set of parameters"),
        (KeyOfTheQuery, "q and k share one set of parameters"),
    ],
)
def test_parts_beside_a_projection_that_cannot_be_loaded_are_examined(
    tiny: Path, block: type[Block], message: str
) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(block(emb_dim=24, heads=4, inner=100) for _ in range(3))
    adaptation = adapt(model, tiny)
    breaking = {f.code: f for f in adaptation.findings if f.severity == "breaks"}
    assert breaking.keys() == {"shared_parameters", "inner_dim"}
    found = breaking["shared_parameters"]
    assert message in found.message and found.tap == "h.0.q"
    assert found.source_line is not None and "self.qkv = nn.Linear(" in found.source_line
    loaded = {row.hf for row in adaptation.name_map.rows}
    assert "h.{i}.attn.c_proj.weight" in loaded and "h.{i}.attn.c_attn.weight" not in loaded


class NormedSharedKeys(SharedKeys):
    """Queries and keys are normalized with the sequences and the heads on one axis."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, C = q.shape
        D = C // self.heads
        q, k, v = (t.view(B, T, self.heads, D).transpose(1, 2) for t in (q, k, v))
        k, v = k[:, ::2], v[:, ::2]
        q, k = (F.rms_norm(t.reshape(-1, T, D), (D,)).view(t.shape) for t in (q, k))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class KeysShifted(Block):
    """Every token has the key of the token before it."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(q, F.pad(k, (0, 0, 1, -1)), v)


class RotationOfOneSequence(Block):
    """The rotation of q and k supports one sequence, or as many as there are heads."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, C = q.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        angle = torch.arange(T)[:, None] / 100 ** (torch.arange(0, C // self.heads, 2) / C)
        c, s = (t.repeat_interleave(2, -1).expand(B, -1, -1) for t in (angle.cos(), angle.sin()))
        turned = [torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2) for t in (q, k)]
        q, k = (t * c + other * s for t, other in zip((q, k), turned, strict=True))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Bfloat16Attention(Block):
    """Attention is computed in bfloat16."""

    def attend(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().attend(x).float()


@pytest.mark.parametrize(
    ("block", "code", "line"),
    [
        (SharedKeys, "grouped_query_attention", ""),
        (NormedSharedKeys, "grouped_query_attention", ""),
        (NormedSharedKeys, "qk_norm", "F.rms_norm(t.reshape("),
        (KeysShifted, "time_shift", "F.pad(k"),
        (RotationOfOneSequence, "rope", "turned = [torch.stack("),
        (Bfloat16Attention, "low_precision", "self.qkv(x)"),
    ],
)
def test_attention_that_differs_from_gpt2_is_reported(
    tiny: Path, block: type[Block], code: str, line: str
) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(block(24, 4, 96) for _ in range(3))
    adaptation = adapt(model, tiny)
    assert not adaptation
    [found] = [finding for finding in adaptation.findings if finding.code == code]
    assert found.severity == "breaks" and line in (found.source_line or "")
    assert "h.0.mlp.c_fc.weight" not in adaptation.unmatched  # the rest is mapped


class HalvesOfTheMlp(Block):
    """The MLP is computed in two halves, as by two devices, and their results are added."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        self.ups = nn.ModuleList(nn.Linear(24, 48) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(48, 24, bias=False) for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(24))

    def mlp(self, x: Tensor) -> Tensor:
        both = zip(self.ups, self.downs, strict=True)
        halves = [down(F.gelu(up(x), approximate="tanh")) for up, down in both]
        return torch.stack(halves).sum(0) + self.shift


def test_mlps_side_by_side_are_reported_as_one_part(tiny: Path) -> None:
    adaptation = adapt(noisy_model(with_blocks(HalvesOfTheMlp)), tiny)
    assert [f.code for f in adaptation.deviations] == ["unknown_mlp"]
    assert "4 projections run here" in adaptation.deviations[0].message


class GatheredDistances(Block):
    """q is multiplied by a vector for each distance, and the products are gathered."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        self.distances = nn.Embedding(9, emb_dim // heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, C = q.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        by_distance = q @ self.distances(torch.arange(1 - T, T).clamp(-4, 4) + 4).T
        place = torch.arange(T) - torch.arange(T)[:, None] + T - 1  # (T, T)
        scores = q @ k.mT + by_distance.gather(3, place.expand(B, self.heads, T, T))
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
        y = (scores / 6**0.5).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


def test_products_of_q_with_distances_are_a_part_of_attention(tiny: Path) -> None:
    adaptation = adapt(noisy_model(with_blocks(GatheredDistances)), tiny)
    [found] = adaptation.deviations
    assert found.code == "position_bias" and found.evidence.startswith("confirmed")


class ProjectedHeads(Block):
    """Each head is projected before the heads are concatenated."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        self.projs = nn.ModuleList(nn.Linear(6, 6) for _ in range(heads))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = []
        for proj, *head in zip(self.projs, *(t.chunk(4, -1) for t in (q, k, v)), strict=True):
            result = F.scaled_dot_product_attention(*head, is_causal=True)
            found.append(proj(result))
        return torch.cat(found, dim=-1)


class GroupedHeads(Block):
    """Two heads of keys and values, each for two modules of queries."""

    def __init__(self, emb_dim: int, heads: int, inner: int, bias: bool = False) -> None:
        super().__init__(emb_dim, heads, inner)
        del self.qkv
        self.queries = nn.ModuleList(nn.Linear(emb_dim, 6, bias) for _ in range(heads))
        self.keys = nn.ModuleList(nn.Linear(emb_dim, 6, bias) for _ in range(2))
        self.values = nn.ModuleList(nn.Linear(emb_dim, 6, bias) for _ in range(2))

    def turned(self, x: Tensor) -> Tensor:
        return x

    def attend(self, x: Tensor) -> Tensor:
        groups = [(self.turned(k(x)), v(x)) for k, v in zip(self.keys, self.values, strict=True)]
        return self.joined(
            F.scaled_dot_product_attention(self.turned(q(x)), *groups[i // 2], is_causal=True)
            for i, q in enumerate(self.queries)
        )

    def joined(self, heads: Iterable[Tensor]) -> Tensor:
        return self.proj(torch.cat([*heads], dim=-1))


class TurnedGroups(GroupedHeads):
    """Queries and keys are turned by the same angle at every position, which changes no score."""

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.view(*x.shape[:-1], 3, 2).unbind(-1)
        return torch.stack([0.6 * a - 0.8 * b, 0.8 * a + 0.6 * b], dim=-1).flatten(-2)


@pytest.mark.parametrize("block", [GroupedHeads, TurnedGroups])
def test_heads_that_share_keys_may_be_modules(tiny: Path, block: type[GroupedHeads]) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(block(24, 4, 96) for _ in range(3))
    found = {f.code: f for f in adapt(model, tiny).deviations}
    assert found.keys() == {"grouped_query_attention", "no_qkv_bias"}
    assert "nn.Linear(emb_dim, 6, bias)" in (found["no_qkv_bias"].source_line or "")


def test_biases_of_shared_keys_are_not_reported_as_missing(tiny: Path) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(GroupedHeads(24, 4, 96, bias=True) for _ in range(3))
    assert {f.code for f in adapt(model, tiny).deviations} == {"grouped_query_attention"}


class ProjectedGroups(GroupedHeads):
    """The heads of each group are projected to all channels, and the results once more."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner, bias=True)
        self.groups = nn.ModuleList(nn.Linear(12, emb_dim) for _ in range(2))
        self.proj = nn.Linear(2 * emb_dim, emb_dim)

    def joined(self, heads: Iterable[Tensor]) -> Tensor:
        a, b, c, d = heads
        one, two = (torch.cat(pair, dim=-1) for pair in ((a, b), (c, d)))
        return self.proj(torch.cat([self.groups[0](one), self.groups[1](two)], dim=-1))


class WideGroups(GroupedHeads):
    """Each head has 12 channels and not 6."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner, bias=True)
        self.queries = nn.ModuleList(nn.Linear(emb_dim, 12) for _ in range(heads))
        self.keys = nn.ModuleList(nn.Linear(emb_dim, 12) for _ in range(2))
        self.values = nn.ModuleList(nn.Linear(emb_dim, 12) for _ in range(2))
        self.proj = nn.Linear(12 * heads, emb_dim)


def test_the_width_of_heads_that_share_keys_is_reported_at_its_line(tiny: Path) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(WideGroups(24, 4, 96) for _ in range(3))
    found = {f.code: f for f in adapt(model, tiny).deviations}
    assert found.keys() == {"grouped_query_attention", "head_width"}
    assert "nn.Linear(emb_dim, 12)" in (found["head_width"].source_line or "")


def test_projections_of_groups_of_heads_are_reported(tiny: Path) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(ProjectedGroups(24, 4, 96) for _ in range(3))
    found = {f.code: f for f in adapt(model, tiny).deviations}
    codes = {"grouped_query_attention", "per_head_projection", "extra_projection"}
    assert found.keys() == codes
    assert "projected in 2 groups" in found["per_head_projection"].message


def test_projections_of_heads_without_a_bias_are_reported(tiny: Path) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(ProjectedHeads(24, 4, 96) for _ in range(3))
    for proj in (proj for block in model.blocks for proj in block.projs):
        proj.bias = None
    found = {f.code: f for f in adapt(model, tiny).deviations}
    assert found.keys() == {"per_head_projection", "no_proj_bias"}
    assert "nn.Linear(6, 6)" in (found["no_proj_bias"].source_line or "")


def test_a_projection_for_each_head_is_reported(tiny: Path) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(ProjectedHeads(24, 4, 96) for _ in range(3))
    [found] = [f for f in adapt(model, tiny).findings if f.severity == "breaks"]
    assert found.code == "per_head_projection" and "torch.cat(found" in (found.source_line or "")
    assert "to 6 of the 24 channels" in found.message
    lines = [linecache.getline(__file__, int(p.rpartition(":")[2])) for p in found.also]
    assert any("proj(result)" in line for line in lines)


class Differential(Block):
    """The difference of two attention matrices is multiplied by v."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        weights = (q1 @ k1.mT).softmax(-1) - 0.5 * (q2 @ k2.mT).softmax(-1)
        return self.proj(weights.tril() @ v)


def test_differential_attention_is_reported(tiny: Path) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(Differential(24, 4, 96) for _ in range(3))
    [found] = [f for f in adapt(model, tiny).findings if f.code == "other_attention"]
    assert "weights.tril() @ v" in (found.source_line or "")
    assert "from 2 products of queries and keys" in found.message


class WideDifferential(Block):
    """Each product of queries and keys reads a half of projections of their own."""

    def __init__(self, emb_dim: int, heads: int, inner: int) -> None:
        super().__init__(emb_dim, heads, inner)
        self.q, self.k = (nn.Linear(emb_dim, 2 * emb_dim) for _ in range(2))
        self.v = nn.Linear(emb_dim, emb_dim)
        self.gate = nn.Parameter(torch.ones(emb_dim))

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        hidden = torch.ones(T, T).triu(1).bool()
        one, two = (
            (a @ b.mT / 6**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
            for a, b in ((q1, k1), (q2, k2))
        )
        out = (one - 0.3 * two) @ v
        return self.gate * self.proj(out.transpose(1, 2).reshape(B, T, C))


class MixedEmbedding(GPT):
    """The embedding is added to an activated convolution of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.gamma = nn.Conv1d(24, 24, 3, padding=1), nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList(WideDifferential(24, 4, 96) for _ in range(3))

    def embed(self, ids: Tensor) -> Tensor:
        x = super().embed(ids)
        return x + self.gamma * torch.tanh(self.mixing(x.mT).mT)


def test_each_deviation_of_a_differential_transformer_has_one_finding(tiny: Path) -> None:
    findings = adapt(MixedEmbedding(), tiny).findings
    breaking = [found.code for found in findings if found.severity == "breaks"]
    assert sorted(breaking) == ["extra_operation", "other_attention"]
    [gates] = [found for found in findings if found.code == "random_parameters"]
    assert gates.severity == "info" and "learned factors (here 1)" in gates.message


class OtherSizes(GPT):
    """The width is fixed by the code, as is what the embeddings are computed from."""

    def __init__(self, kind: str) -> None:
        super().__init__(emb_dim=48, vocab=12)
        self.kind = kind
        angles = torch.arange(32)[:, None] / 10000 ** (torch.arange(0, 48, 2) / 48)
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def embed(self, ids: Tensor) -> Tensor:
        x, T = self.wte(ids), ids.shape[1]
        if self.kind == "no_pos":
            return x
        if self.kind == "pos_offset":
            return x + self.wpe(torch.arange(1, T + 1))
        return 7 * x + self.pe[:T] if self.kind == "sinusoidal_pos" else 7 * x + self.wpe.weight[:T]


@pytest.mark.parametrize("kind", ["no_pos", "pos_offset", "sinusoidal_pos", "scaled_embedding"])
def test_embeddings_of_other_sizes_are_examined(kind: str, tiny: Path) -> None:
    adaptation = adapt(OtherSizes(kind), tiny)
    found = {finding.code for finding in adaptation.deviations}
    expected = {kind, "scaled_embedding"} if kind == "sinusoidal_pos" else {kind}
    assert found - {"vocab_mismatch"} == {"n_embd_mismatch", *expected}
    assert adaptation.parity is None and "because of n_embd_mismatch" in adaptation.why_unchecked


class Stacked(GPT):
    """torch's stack of post-norm layers has no norm after the last one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 96, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3)

    def logits(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.blocks(self.embed(ids), mask))


def test_the_stack_that_lacks_a_final_norm_is_named(tiny: Path) -> None:
    [found] = [f for f in adapt(Stacked(), tiny).findings if f.code == "no_final_ln"]
    lines = [linecache.getline(__file__, int(p.rpartition(":")[2])).strip() for p in found.also]
    assert "self.blocks = nn.TransformerEncoder(layer, 3)" in lines


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class RMSNorms(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.ln_f: Any = RMSNorm()


def test_the_line_that_builds_the_users_module_is_named_as_well(tiny: Path) -> None:
    adaptation = adapt(RMSNorms(), tiny)
    [found] = [finding for finding in adaptation.findings if finding.code == "rmsnorm"]
    lines = Path(__file__).read_text().splitlines()
    assert found.source_line is not None and ".rsqrt()" in found.source_line
    assert [lines[int(place.rpartition(":")[2]) - 1].strip() for place in found.also] == [
        "self.ln_f: Any = RMSNorm()"
    ]


class OptionalMask(GPT):
    """Without the mask, tokens attend to later ones."""

    def forward(self, ids: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + self.masked(block, block.ln_1(x), attn_mask)
            x = x + block.down(F.gelu(block.up(block.ln_2(x)), approximate="tanh"))
        return self.ln_f(x) @ self.wte.weight.T

    def masked(self, block: Any, x: Tensor, mask: Tensor | None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, 4, -1).transpose(1, 2) for t in block.qkv(x).chunk(3, dim=-1))
        scores = q @ k.mT / (C // 4) ** 0.5
        if mask is not None:
            scores = scores + (1 - mask) * -1e9
        return block.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


def test_an_optional_mask_is_passed_and_reported(tiny: Path) -> None:
    adaptation = adapt(noisy_model(OptionalMask), tiny)
    assert adaptation.compatible
    [found] = [finding for finding in adaptation.findings if finding.severity == "limit"]
    assert found.code == "mask_argument" and "attn_mask=torch.ones(T, T).tril()" in found.message
    assert found.source_line and "def forward" in found.source_line


class LinesBeforeMask(OptionalMask):
    """Another line with the name of the mask stands before the arguments of `forward`."""

    attn_mask = None

    def forward(
        self,
        ids: Tensor,
        attn_mask: Tensor | None = None,
    ) -> Any:
        return super().forward(ids, attn_mask)


def test_the_line_of_an_optional_mask_is_that_of_the_argument(tiny: Path) -> None:
    findings = adapt(noisy_model(LinesBeforeMask), tiny).findings
    [found] = [finding for finding in findings if finding.code == "mask_argument"]
    assert found.source_line == "attn_mask: Tensor | None = None,"


class NeededMask(OptionalMask):
    """The optional mask is read, with an axis for each query."""

    def forward(self, ids: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        assert attn_mask is not None
        return super().forward(ids, attn_mask.tril())


def test_an_optional_mask_that_is_needed_is_passed(tiny: Path) -> None:
    assert adapt(noisy_model(NeededMask), tiny).compatible
    with pytest.raises(AdaptError, match=r"attn_mask=ones\): AssertionError"):
        adapt(RefusedMask(), tiny)


class RefusedMask(OptionalMask):
    def forward(self, ids: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        raise AssertionError


class PositionsFromTokens(GPT):
    def embed(self, ids: Tensor) -> Tensor:
        tokens = self.wte(ids)
        places = self.wte(torch.arange(ids.shape[1]))
        return tokens + places


class MultipliedByPosition(GPT):
    """Each channel of the embedding is multiplied by a function of the position."""

    def embed(self, ids: Tensor) -> Tensor:
        angles = torch.arange(ids.shape[1])[:, None] / 1.3 ** torch.arange(24)
        return self.wte(ids) * (2 + angles.sin())


def test_positions_that_are_looked_up_in_the_token_table_are_reported(tiny: Path) -> None:
    adaptation = adapt(noisy_model(PositionsFromTokens), tiny)
    assert not adaptation.compatible
    [found] = [finding for finding in adaptation.findings if finding.severity == "breaks"]
    assert found.code == "no_pos" and "looked up in the token embedding" in found.message
    assert found.source_line and "places = " in found.source_line
    assert "confirmed" in found.evidence


def test_an_embedding_that_is_multiplied_by_position_is_not_reported_as_scaled(tiny: Path) -> None:
    adaptation = adapt(noisy_model(MultipliedByPosition), tiny)
    found = {finding.code: finding for finding in adaptation.findings}
    assert found["other_embedding"].tap == "embed" and "scaled_embedding" not in found


class GatedBlock(Block):
    """A gated MLP, with the activation in one of several places."""

    def __init__(self, kind: str) -> None:
        super().__init__(24, 4, 96)
        self.kind = kind
        self.gate, self.both = nn.Linear(24, 96, bias=kind != "ReLU"), nn.Linear(24, 192)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.down(self.product(self.ln_2(x)))

    def product(self, x: Tensor) -> Tensor:
        if self.kind == "GLU":
            return F.glu(self.both(x))
        if self.kind == "GELU":
            one, two = self.both(x).chunk(2, dim=-1)
            return one * F.gelu(two)
        gate = self.gate(x)
        if self.kind == "SiLU":
            gate = gate * torch.sigmoid(gate)
        return self.up(x) * (F.relu(gate) if self.kind == "ReLU" else gate)


@pytest.mark.parametrize(
    ("kind", "like"),
    [
        ("SiLU", "projections, one of them after SiLU, as in SwiGLU)"),
        ("GELU", "projections, one of them after the exact (erf) GELU, as in GEGLU)"),
        ("ReLU", "projections, one of them after ReLU, as in ReGLU)"),
        ("GLU", "projections, one of them after a sigmoid, as in GLU)"),
        ("none", "projections), but"),
    ],
)
def test_the_activation_of_a_gated_mlp_is_named(kind: str, like: str, tiny: Path) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(GatedBlock(kind) for _ in range(3))
    [found] = [f for f in adapt(model, tiny).findings if f.code == "gated_mlp"]
    assert like in found.message


def test_a_gate_that_reads_the_stream_before_the_norm_is_reported(tiny: Path) -> None:
    class RawGate(GatedBlock):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attend(self.ln_1(x))
            return x + self.down(self.up(self.ln_2(x)) * F.silu(self.gate(x)))

    model = GPT()
    model.blocks = nn.ModuleList(RawGate("SiLU") for _ in range(3))
    found = {f.code: f for f in adapt(model, tiny).deviations}
    assert found.keys() == {"gated_mlp", "missing_ln"}
    assert "one projection of the gated MLP reads the residual" in found["missing_ln"].message


class FusedParallel(Block):
    """One projection computes q, k, v and the input of the MLP's activation."""

    def __init__(self, cut: str) -> None:
        super().__init__(24, 4, 96)
        self.cut, self.fused = cut, nn.Linear(24, 3 * 24 + 96)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fused(self.ln_1(x))
        if self.cut == "split":
            q, k, v, inner = y.split([24, 24, 24, 96], dim=-1)
        else:
            q, k, v, inner = y[..., :24], y[..., 24:48], y[..., 48:72], y[..., -96:]
        return x + self.mix(q, k, v) + self.down(F.relu(inner))


@pytest.mark.parametrize("cut", ["split", "slices"])
def test_parallel_branches_of_one_projection_are_examined(cut: str, tiny: Path) -> None:
    model = GPT()
    model.blocks = nn.ModuleList(FusedParallel(cut) for _ in range(3))
    adaptation = adapt(model, tiny)
    assert {f.code for f in adaptation.deviations} == {
        "parallel_block", "relu", "shared_parameters",
    }  # fmt: skip
    assert "h.0.mlp.c_proj.weight" not in adaptation.unmatched
    assert "h.0.attn.c_attn.weight" in adaptation.unmatched


def test_logits_of_flattened_tokens_that_are_changed_are_reported(tiny: Path) -> None:
    class Capped(GPT):
        def head(self, x: Tensor) -> Tensor:
            logits = x.flatten(0, 1) @ self.wte.weight.T  # (B·T, V)
            return (3.0 * torch.tanh(logits / 3.0)).view(*x.shape[:2], -1)

    assert {f.code for f in adapt(Capped(), tiny).deviations} == {"changed_logits"}


def test_a_length_that_another_axis_has_may_be_the_only_one(tiny: Path) -> None:
    """The mask is for 8 tokens, and 8 is twice the number of heads."""

    class Masked(Block):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            B, T, C = q.shape
            q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
            scores = (q @ k.mT / 6**0.5).masked_fill(torch.ones(8, 8).tril() == 0, -torch.inf)
            return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))

    model = GPT()
    model.blocks = nn.ModuleList(Masked(24, 4, 96) for _ in range(3))
    adaptation = adapt(model, tiny)
    assert [f.code for f in adaptation.findings if f.severity != "info"] == ["fixed_length"]


def test_heads_that_are_merged_with_a_wrong_transpose_are_reported(tiny: Path) -> None:
    class Merged(Block):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            B, T, C = q.shape
            q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
            return self.proj(y.transpose(2, 3).reshape(B, T, C))

    model = GPT()
    model.blocks = nn.ModuleList(Merged(24, 4, 96) for _ in range(3))
    [found] = adapt(model, tiny).deviations
    assert found.code == "no_head_merge_transpose" and "confirmed" in found.evidence
