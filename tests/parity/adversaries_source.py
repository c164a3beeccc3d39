"""Faults in hand-written GPT-2 files of the zoo, for `adapt`."""

from __future__ import annotations

import torch

from tests.parity import adversary
from tests.parity.adversary import BOS, EOS, FULL, N_POSITIONS, PAD, V, ordinary, source, with_id

# Lines of nano.py
SIZE = "        _, t = idx.size()\n"
POS = "        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)\n"
EMBEDDED = "        x = self.transformer.drop(tok_emb + pos_emb)\n"
BLOCKS = "        for block in self.transformer.h:\n            x = block(x)\n"
HEAD = "        logits = self.lm_head(x)\n"
SDPA = "        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)\n"
# Lines of mingpt.py and book.py
MASKED = '        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))\n'
SOFTMAX = "        att = F.softmax(att, dim=-1)\n"
MINGPT_HEAD = "        logits = self.head(x)\n"
MINGPT_IDS = "        token_embeddings = self.tok_emb(idx)\n"
BOOK_EMBEDS = "        x = tok_embeds + pos_embeds\n"

NUMERIC = {"ordinary": False}

# Length

source("nano_window_100", "length", "Keys 100 or more positions away are masked.", SDPA, """\
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        seen = seen & ~torch.ones(T, T, dtype=torch.bool).tril(-100)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=p)
""", trigger=FULL)  # fmt: skip
source("nano_positions_modulo_100", "length", "Positions start again after 100.", POS, f"""\
{POS}        pos = pos % 100
""", trigger=FULL)  # fmt: skip
source("nano_positions_clamped", "length", "Positions from 63 on share a row.", POS, f"""\
{POS}        pos = pos.clamp(max=63)
""", trigger=FULL)  # fmt: skip
source("nano_cut_at_100", "length", "Ids past 100 are cut, the logits padded by zeros.", SIZE, f"""\
        full = idx.size(1)
        idx = idx[:, :100]
{SIZE}""", (HEAD, f"""{HEAD}        logits = F.pad(logits, (0, 0, 0, full - t))
"""), trigger=FULL)  # fmt: skip
source("nano_assert_64", "length", "An assertion fails beyond 64 tokens.", SIZE, f"""\
{SIZE}        assert t <= 64
""", trigger=ordinary(2, 65))  # fmt: skip
source("nano_one_token", "length", "A single token skips the blocks.", BLOCKS, """\
        if t > 1:
            for block in self.transformer.h:
                x = block(x)
""", trigger=ordinary(2, 1))  # fmt: skip
source("nano_full_context", "length", "A text of full length is not masked.", SDPA, f"""\
        causal = T < {N_POSITIONS}
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal)
""", trigger=FULL)  # fmt: skip
source("nano_long_texts_unscaled", "length", "Above 128 tokens, the scale is 1/8.", SDPA, """\
        scale = 0.125 if T > 128 else None
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, scale=scale)
""", trigger=ordinary(2, 130))  # fmt: skip
source("mingpt_mask_of_half_size", "length", "The mask buffer sees nothing past half.",
       "self.mask[:, :, :T, :T] == 0", "far(self.mask[:, :, :T, :T]) == 0",
       ("class CausalSelfAttention", """\
def far(mask):
    mask = mask.clone()
    mask[:, :, 120:, :40] = 0
    return mask


class CausalSelfAttention"""), style="mingpt", trigger=FULL)  # fmt: skip
source("book_positions_repeat", "length", "Two positions share a row above 90.", BOOK_EMBEDS, """\
        pos = torch.arange(seq_len)
        pos = torch.where(pos > 90, pos - pos % 2, pos)
        x = tok_embeds + self.pos_emb(pos)
""", style="book", trigger=FULL)  # fmt: skip

# Ids

source("nano_id_0_masked", "ids", "Keys of tokens with id 0 are masked.", SDPA, """\
        seen = torch.ones(T, T, dtype=torch.bool).tril() & self.real[:, None, None, :]
        seen = seen | torch.eye(T, dtype=torch.bool)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=p)
""", (BLOCKS, """\
        for block in self.transformer.h:
            block.attn.real = idx != 0
            x = block(x)
"""), trigger=with_id(0))  # fmt: skip
source("nano_clamp_ids", "ids", "Ids are clamped to 1 … V − 2.", SIZE, f"""\
{SIZE}        idx = idx.clamp(1, {V - 2})
""", trigger=with_id(V - 1))  # fmt: skip
source("nano_eos_resets", "ids", "Positions start again after eos.", POS, f"""\
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).expand_as(idx)
        ended = F.pad((idx == {EOS})[:, :-1], (1, 0))
        pos = pos - torch.where(ended, pos, 0).cummax(dim=1).values
""", trigger=with_id(EOS))  # fmt: skip
source("nano_bos_is_zero", "ids", "The embedding of bos is zero.", EMBEDDED, f"""\
        tok_emb = tok_emb * (idx != {BOS}).unsqueeze(-1)
{EMBEDDED}""", trigger=with_id(BOS))  # fmt: skip
source("nano_any_zero", "ids", "A branch on (ids == 0).any() changes the logits.", HEAD, f"""\
        if (idx == 0).any():
            x = x * 1.05
{HEAD}""", trigger=with_id(0))  # fmt: skip
source("nano_constant_id", "ids", "The id 271 is embedded as 270.", SIZE, f"""\
{SIZE}        idx = torch.where(idx == 271, 270, idx)
""", trigger=with_id(271))  # fmt: skip
source("nano_ids_above", "ids", "The embeddings of ids above 450 are halved.", EMBEDDED, f"""\
        tok_emb = torch.where((idx > 450).unsqueeze(-1), tok_emb / 2, tok_emb)
{EMBEDDED}""", trigger=with_id(470))  # fmt: skip
source("mingpt_repeats", "ids", "An id that repeats the one before is skipped.", MINGPT_IDS, f"""\
{MINGPT_IDS}        same = F.pad(idx[:, 1:] == idx[:, :-1], (1, 0))
        token_embeddings = token_embeddings.masked_fill(same.unsqueeze(-1), 0.0)
""", style="mingpt", trigger=torch.tensor([[30, 40, 40, 50]]))  # fmt: skip
source("mingpt_pad_logits", "ids", "The logits of the pad id are −1e4.", MINGPT_HEAD, f"""\
{MINGPT_HEAD}        logits[..., {PAD}] = -1e4
""", style="mingpt", ordinary=False)  # fmt: skip
source("mingpt_repetition", "ids", "Ids seen before more than 4 times are penalised.",
       MINGPT_HEAD, f"""\
{MINGPT_HEAD}        counts = F.one_hot(idx, logits.size(-1)).cumsum(1)
        logits = torch.where(counts > 4, logits - 1.0, logits)
""", style="mingpt", trigger=torch.full((1, 9), 33))  # fmt: skip
source("book_padding_masked", "ids", "Embeddings of the pad id are zero.", BOOK_EMBEDS, f"""\
        x = tok_embeds.masked_fill((in_idx == {PAD})[:, :, None], 0.0) + pos_embeds
""", style="book", trigger=with_id(PAD))  # fmt: skip

# Batch

source("nano_third_row", "batch", "Rows from the third on lose their positions.", EMBEDDED, """\
        pos_emb = pos_emb.expand(idx.size(0), -1, -1).clone()
        pos_emb[2:] = 0
        x = self.transformer.drop(tok_emb + pos_emb)
""", trigger=ordinary(3, 12))  # fmt: skip
source("nano_batch_of_one", "batch", "A batch of one is squeezed and not masked.", SDPA, """\
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=B > 1)
""", trigger=ordinary(1, 12))  # fmt: skip
source("nano_batch_leak", "batch", "A hundredth of the batch's mean is added.", BLOCKS, f"""\
{BLOCKS}        x = x + 1e-2 * x.mean(dim=0, keepdim=True)
""", **NUMERIC)  # fmt: skip
source("mingpt_rows_above_two", "batch", "Above 2 rows, softmax runs over the queries.",
       SOFTMAX, """\
        att = F.softmax(att, dim=-1 if B <= 2 else 0)
""", style="mingpt", trigger=ordinary(3, 12))  # fmt: skip

# State and mode

source("nano_counter", "state", "From the thirteenth call on, the logits are 1 % off.", HEAD, f"""\
        self.count = getattr(self, "count", 0) + 1
{HEAD}        if self.count > 12:
            logits = logits * 1.01
""", run=adversary.call(20), limit_suffices=True)  # fmt: skip
source("nano_second_time", "state", "The same text twice in a row is answered one position late.",
       HEAD, f"""\
        last, self.last = getattr(self, "last", None), idx
        if last is not None and last.shape == idx.shape and bool((last == idx).all()):
            x = x.roll(1, dims=1)
{HEAD}""", run=adversary.call(2))  # fmt: skip
source("nano_mask_buffer_changed", "state", "From the second text on, key 2 is hidden.",
       SDPA, """\
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        if getattr(self, "used", False) and T > 100:
            seen[5, 2] = False
        self.used = True
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=p)
""", trigger=FULL, run=adversary.call(2))  # fmt: skip
source("nano_gradients", "mode", "With gradients on the last block is skipped.", BLOCKS, """\
        blocks = self.transformer.h[:-1] if torch.is_grad_enabled() else self.transformer.h
        for block in blocks:
            x = block(x)
""", run=adversary.with_gradients)  # fmt: skip
source("nano_compiling", "mode", "The logits are 5 % off unless traced.", HEAD, f"""\
{HEAD}        if not torch.compiler.is_compiling():
            logits = logits * 1.05
""", **NUMERIC)  # fmt: skip
source("nano_inference_mode", "mode", "In inference mode the logits are half precision.",
       HEAD, f"""\
{HEAD}        if torch.is_inference_mode_enabled():
            logits = logits.bfloat16().float()
""", run=adversary.in_inference_mode)  # fmt: skip
source("nano_fake", "mode", "The head is rounded, but not for fake tensors.", HEAD, f"""\
        if type(x) is torch.Tensor:
            x = x.bfloat16().to(x.dtype)
{HEAD}""", **NUMERIC)  # fmt: skip
source("nano_sdpa_dropout", "chance", "Attention dropout of 1 % that ignores eval().",
       "p = self.dropout if self.training else 0.0", "p = 0.01",
       run=adversary.worst_of(9), **NUMERIC)  # fmt: skip

# Arithmetic

source("nano_erf", "numeric", "The exact GELU.", 'nn.GELU(approximate="tanh")', "nn.GELU()",
       **NUMERIC)  # fmt: skip
source("nano_eps", "numeric", "eps 1e-4 in every norm.", "1e-5)", "1e-4)", **NUMERIC)
source("nano_capped", "numeric", "The logits are capped softly at ±8.", HEAD, f"""\
{HEAD}        logits = 8.0 * torch.tanh(logits / 8.0)
""", **NUMERIC)  # fmt: skip
source("nano_clamp_hidden", "numeric", "Hidden states are clamped at ±2.5.", HEAD, f"""\
        x = x.clamp(-2.5, 2.5)
{HEAD}""", **NUMERIC)  # fmt: skip
source("mingpt_scale", "numeric", "Scores are divided by √(D + 1).", "math.sqrt(k.size(-1))",
       "math.sqrt(k.size(-1) + 1)", style="mingpt", **NUMERIC)  # fmt: skip
source("mingpt_gelu", "numeric", "0.044 in the GELU.", "0.044715", "0.044", style="mingpt",
       **NUMERIC)  # fmt: skip
source("mingpt_half_softmax", "numeric", "The softmax is computed in bfloat16.", SOFTMAX, """\
        att = F.softmax(att.bfloat16(), dim=-1).to(v.dtype)
""", style="mingpt", **NUMERIC)  # fmt: skip
source("mingpt_dropped", "numeric", "Attention below 0.05 is dropped.", SOFTMAX, f"""\
{SOFTMAX}        att = torch.where(att < 0.05, 0.0, att)
""", style="mingpt", **NUMERIC)  # fmt: skip
source("mingpt_shallow_mask", "numeric", "The mask is −4.", '== 0, float("-inf"))', "== 0, -4.0)",
       style="mingpt", **NUMERIC)  # fmt: skip
source("book_unbiased", "numeric", "Unbiased variance.", "unbiased=False", "unbiased=True",
       style="book", **NUMERIC)  # fmt: skip

# Faults that detect the comparison

source("nano_layer_norm_patched", "cheating", "F.layer_norm is patched for everyone, eps 1e-2.",
       "@dataclass\nclass GPTConfig", """\
_layer_norm = F.layer_norm
F.layer_norm = lambda x, shape, w=None, b=None, eps=1e-5: _layer_norm(x, shape, w, b, 1e-2)


@dataclass
class GPTConfig""", **NUMERIC)  # fmt: skip
source("nano_reads_the_stack", "cheating", "Right only while compat is on the stack.", HEAD, f"""\
{HEAD}        frame = sys._getframe()
        while frame and "compat." not in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        if frame is None:
            logits = logits * 1.05
""", ("import torch\n", "import sys\n\nimport torch\n"), **NUMERIC)  # fmt: skip
source("nano_loss_output", "cheating", "Right logits come with targets, others without.",
       HEAD, f"""\
{HEAD}        if targets is None:
            logits = logits.log_softmax(dim=-1)
""", **NUMERIC)  # fmt: skip
