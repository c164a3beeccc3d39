"""Variants that compute GPT-2's logits on every valid input with unusual code."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.adversaries_source import (
    BLOCKS,
    BOOK_EMBEDS,
    HEAD,
    MASKED,
    MINGPT_HEAD,
    POS,
    SDPA,
    SIZE,
    SOFTMAX,
)
from tests.parity.adversary import N_POSITIONS, V, Wrapped, edit, source, wrapper

KIND = "harmless"


def nano(name: str, about: str, old: str, new: str, *others: tuple[str, str]) -> None:
    source(f"equal_{name}", KIND, about, old, new, *others)


def mingpt(name: str, about: str, old: str, new: str, *others: tuple[str, str]) -> None:
    source(f"equal_{name}", KIND, about, old, new, *others, style="mingpt")


nano("sdpa", "SDPA as it is.", SDPA, SDPA)
nano("sdpa_bool_mask", "SDPA gets a boolean mask.", SDPA, """\
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=p)
""")  # fmt: skip
nano("sdpa_float_mask", "SDPA gets a mask with finfo.min above the diagonal.", SDPA, """\
        hide = torch.full((T, T), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=hide, dropout_p=p)
""")  # fmt: skip
nano("clamped_ids", "Ids are clamped to [0, V − 1].", SIZE, f"""\
{SIZE}        idx = idx.clamp(0, {V - 1})
""")  # fmt: skip
nano("clamped_positions", "Positions are clamped to n_positions − 1.", POS, f"""\
{POS}        pos = pos.clamp(max=self.config.block_size - 1)
""")  # fmt: skip
nano("branch_for_one_token", "For T = 1 a branch omits the mask.", SDPA, """\
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=T > 1)
""")  # fmt: skip
nano("checkpointed", "Gradient checkpointing.", "x = block(x)",
     "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
     ("import torch\n", "import torch\nimport torch.utils.checkpoint\n"))  # fmt: skip
nano("autocast_off", "The blocks run under autocast(enabled=False).", BLOCKS, """\
        with torch.autocast(device_type="cpu", enabled=False):
            for block in self.transformer.h:
                x = block(x)
""")  # fmt: skip
nano("chunked_mlp", "The feed-forward blocks run in chunks of 32 positions.",
     "x = x + self.mlp(self.ln_2(x))",
     "x = x + torch.cat([self.mlp(part) for part in self.ln_2(x).split(32, dim=1)], dim=1)",
)  # fmt: skip
nano("head_in_chunks", "The logits are computed in chunks of the vocabulary.", HEAD, """\
        parts = [F.linear(x, part) for part in self.lm_head.weight.split(128)]
        logits = torch.cat(parts, dim=-1)
""")  # fmt: skip
nano("in_place_residual", "The residuals are added in place.", "x = x + self.attn(self.ln_1(x))",
     "x = x.clone()\n        x += self.attn(self.ln_1(x))",
     ("x = x + self.mlp(self.ln_2(x))", "x += self.mlp(self.ln_2(x))"))  # fmt: skip
nano("returns_a_dict", "A dictionary with logits and hidden states.", "return logits, loss",
     'return {"hidden": x, "logits": logits, "loss": loss}')  # fmt: skip
nano("long_ids", "ids.long() before the lookup.", SIZE, f"{SIZE}        idx = idx.long()\n")
nano("positions_by_cumsum", "Positions from a cumulative sum of ones.", POS,
     "        pos = torch.ones_like(idx).cumsum(dim=1) - 1\n")  # fmt: skip
nano("nan_guard", "NaNs are replaced by zeros, but there are none.", HEAD, f"""\
{HEAD}        logits = torch.nan_to_num(logits)
""")  # fmt: skip
nano("where_nan", "A branch on NaN in the hidden states is never taken.", HEAD, f"""\
        x = torch.where(torch.isnan(x), torch.zeros_like(x), x)
{HEAD}""")  # fmt: skip
nano("one_hot_embedding", "The lookup is a product with one-hot rows.",
     "tok_emb = self.transformer.wte(idx)",
     "tok_emb = F.one_hot(idx, self.config.vocab_size).to(x_dtype) @ self.transformer.wte.weight",
     (SIZE, f"{SIZE}        x_dtype = self.lm_head.weight.dtype\n"))  # fmt: skip
nano("transposed_head", "The head as a product with the transposed table.", HEAD,
     "        logits = x @ self.transformer.wte.weight.t()\n")  # fmt: skip
nano("unfused_qkv", "q, k and v by three products with slices of c_attn.",
     "        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)\n", """\
        weights = self.c_attn.weight.chunk(3)
        biases = self.c_attn.bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for w, b in zip(weights, biases))
""")  # fmt: skip
nano("loop_over_rows", "Every row of the batch runs alone.", BLOCKS, """\
        rows = []
        for row in x.split(1):
            for block in self.transformer.h:
                row = block(row)
            rows.append(row)
        x = torch.cat(rows)
""")  # fmt: skip
nano("contiguous_everywhere", "contiguous() and clone() are called needlessly.", BLOCKS, """\
        for block in self.transformer.h:
            x = block(x.clone().contiguous()).contiguous()
""")  # fmt: skip
nano("large_soft_cap_unused", "The argument for a soft cap is None.", HEAD, f"""\
{HEAD}        cap = getattr(self.config, "softcap", None)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
""")  # fmt: skip
nano("range_check", "Ids outside of the vocabulary raise an error.", SIZE, f"""\
{SIZE}        if not torch.compiler.is_compiling():
            assert int(idx.max()) < self.config.vocab_size
""")  # fmt: skip
nano("past_unused", "A KV-cache argument that nobody passes.",
     "def forward(self, idx, targets=None)",
     "def forward(self, idx, targets=None, past=None)",
     (POS, """\
        start = 0 if past is None else past[0].size(2)
        pos = torch.arange(start, start + t, dtype=torch.long, device=idx.device)
"""))  # fmt: skip
mingpt("finfo_min_mask", "finfo.min instead of −∞.", 'float("-inf")',
       "torch.finfo(att.dtype).min")  # fmt: skip
mingpt("mask_in_forward", "The mask is created in forward.", MASKED, """\
        hidden = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        att = att.masked_fill(hidden, float("-inf"))
""")  # fmt: skip
mingpt("einsum", "Attention by einsum.", "att = (q @ k.transpose(-2, -1))",
       'att = torch.einsum("bhtd,bhsd->bhts", q, k)',
       ("y = att @ v", 'y = torch.einsum("bhts,bhsd->bhtd", att, v)'))  # fmt: skip
mingpt("stable_softmax", "The softmax is written out and subtracts the maximum.", SOFTMAX, """\
        att = torch.exp(att - att.amax(dim=-1, keepdim=True))
        att = att / att.sum(dim=-1, keepdim=True)
""")  # fmt: skip
mingpt("loop_over_heads", "Attention is a loop over heads.", "        y = att @ v\n", """\
        y = torch.stack([att[:, i] @ v[:, i] for i in range(self.n_head)], dim=1)
""")  # fmt: skip
mingpt("chunked_queries", "Attention runs in chunks of 64 queries.", "        y = att @ v\n", """\
        y = torch.cat([part @ v for part in att.split(64, dim=2)], dim=2)
""")  # fmt: skip
mingpt("logits_in_float", "Logits are cast to float32, which they are.", MINGPT_HEAD,
       f"{MINGPT_HEAD}        logits = logits.float()\n")  # fmt: skip
source("equal_book_ordered_sum", KIND, "Positions are added to the tokens, not the reverse.",
       BOOK_EMBEDS, "        x = pos_embeds + tok_embeds\n", style="book")  # fmt: skip


@wrapper(KIND)
def equal_wrapped(self, ids):
    """A module that only calls a dialect's model."""
    return self.inner(ids)


@wrapper(KIND)
def equal_rows_alone(self, ids):
    """Every row of a batch runs alone."""
    return torch.cat([self.inner(row) for row in ids.split(1)])


@wrapper(KIND, dialect="conv1d")
def equal_longest_context(self, ids):
    """Assertions check T ≤ n_positions and that all ids are in the vocabulary."""
    assert ids.shape[1] <= N_POSITIONS and int(ids.max()) < V
    return self.inner(ids)


@wrapper(KIND, dialect="conv1d")
def equal_checkpointed_blocks(self, ids):
    """Every block runs under gradient checkpointing."""
    x = self.inner.wte(ids) + self.inner.wpe(torch.arange(ids.shape[1]))
    for block in self.inner.h:
        x = checkpoint(block, x, use_reentrant=False)
    return self.inner.lm_head(self.inner.ln_f(x))


@wrapper(KIND)
def equal_padded_to_a_multiple(self, ids):
    """Texts are padded on the right to a multiple of 8, and the logits of the padding removed."""
    T = ids.shape[1]
    padded = F.pad(ids, (0, min(-T % 8, N_POSITIONS - T)))
    return self.inner(padded)[:, :T]


@wrapper(KIND)
def equal_full_mask(self, ids):
    """The attention mask consists of ones."""
    return self.inner(ids, attention_mask=torch.ones_like(ids))


@wrapper(KIND)
def equal_memoised(self, ids):
    """The logits of the last text are kept and returned for equal ids."""
    last = getattr(self, "last", None)
    if last is None or not torch.equal(last[0], ids):
        self.last = last = ids.clone(), self.inner(ids)
    return last[1].clone()


@edit(KIND)
def equal_scale_on_the_queries(model):
    """The scale is applied to the queries, in a module without taps."""
    for block in model.trf_blocks:
        attention = block.attention
        scale, attention.scale = attention.scale, 1.0
        attention.W_query.register_forward_hook(lambda _m, _a, q, scale=scale: q * scale)
    return Wrapped(model, lambda self, ids: self.inner(ids))


@edit(KIND, dialect="conv1d")
def equal_fused_kernels(model):
    """F.gelu(approximate="tanh") replaces the written-out formula."""
    for block in model.h:
        block.mlp.act.forward = lambda x: F.gelu(x, approximate="tanh")


@edit(KIND)
def equal_observing_hooks(model):
    """Every module has a forward hook that changes nothing."""
    for module in model.modules():
        module.register_forward_hook(lambda _m, _a, out: None)


@edit(KIND)
def equal_frozen(model):
    """All parameters are frozen."""
    model.requires_grad_(False)
