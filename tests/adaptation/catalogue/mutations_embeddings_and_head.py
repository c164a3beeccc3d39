"""Mutations of the embeddings, the positions and the head."""

from __future__ import annotations

from tests.adaptation.catalogue.entries import Mutation as M

SINUSOID = """
def sinusoid(length, width, device):
    place = torch.arange(length, device=device)[:, None]
    angle = place / 10000 ** (torch.arange(0, width, 2, device=device) / width)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
"""
ROTARY = """
def rotary(x):
    t, d = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, d, 2, device=x.device) / d)
    angle = torch.arange(t, device=x.device)[:, None] * frequency
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
"""

# fmt: off
MUTATIONS = [
    # sinusoidal_pos
    M("scratch", "sinusoidal_pos", "self.places(torch.arange(ids.shape[1], device=ids.device))",
      "sinusoid(ids.shape[1], self.width, ids.device)", "sinusoid(ids.shape[1]",
      ("torch.stack((angle.sin()",),
      (("self.places = Embedding(block_size, n_embd)", "self.width = n_embd"),
      ("\n"
      "def gelu(x):", "" + SINUSOID + "\n\ndef gelu(x):"))),
    M("annotated", "sinusoidal_pos", "        self.position = nn.Embedding(max_len, d_model)\n",
      '        self.register_buffer("pe", sinusoid(max_len, d_model, None))\n',
      "self.pe[: tgt.size(-1)]", ('self.register_buffer("pe"', "torch.stack((angle.sin()"),
      (("self.position(torch.arange(tgt.size(-1), device=tgt.device))", "self.pe[: tgt.size(-1)]"),
      ("\n"
      "def attention(", "" + SINUSOID + "\n\ndef attention("))),
    # rope
    M("nano", "rope", "F.scaled_dot_product_attention(q, k, v,",
      "F.scaled_dot_product_attention(rotary(q), rotary(k), v,", "rotary(q), rotary(k)",
      ("angle.cos() - b * angle.sin()", "self.transformer.drop(tok_emb)"),
      (("                wpe=nn.Embedding(config.block_size, config.n_embd),\n", ""),
      ("        pos_emb = self.transformer.wpe(pos)\n", ""), ("drop(tok_emb + pos_emb)",
      "drop(tok_emb)"),
      ("\n"
      "class CausalSelfAttention(", "" + ROTARY + "\n\nclass CausalSelfAttention("))),
    M("einsum_heads", "rope", "        logits = torch.einsum(",
      "        q = rotary(q.transpose(1, 2)).transpose(1, 2)\n"
      "        k = rotary(k.transpose(1, 2)).transpose(1, 2)\n"
      "        logits = torch.einsum(", "q = rotary(",
      ("k = rotary(", "angle.cos() - b * angle.sin()"),
      (("        self.positions = nn.Embedding(cfg.context, cfg.width)\n", ""),
      ("        t = ids.shape[1]\n"
      "        x = self.tokens(ids) + self.positions(self.position_ids[:, :t])\n",
      "        x = self.tokens(ids)\n"),
      ("\n"
      "class SelfAttention(", "" + ROTARY + "\n\nclass SelfAttention("))),
    # no_pos
    M("mha", "no_pos", "self.drop(self.tok(ids) + self.pos(torch.arange(t, device=ids.device)))",
      "self.drop(self.tok(ids))", "self.drop(self.tok(ids))"),
    M("flat", "no_pos",
      "x = self.token(tokens) + self.position(torch.arange(t, device=tokens.device))",
      "x = self.token(tokens)", "x = self.token(tokens)",
      more=(("        self.position = nn.Embedding(max_t, d)\n", ""),)),
    # pos_offset
    M("nano", "pos_offset", "torch.arange(0, t, dtype", "torch.arange(1, t + 1, dtype",
      "torch.arange(1, t + 1", ("self.transformer.wpe(pos)",)),
    M("hub_style", "pos_offset", "self.position_ids[:, :length]",
      "self.position_ids[:, 1 : length + 1]", "self.position_ids[:, 1 : length + 1]"),
    M("vit_qkv", "pos_offset", "self.pos_embed[:, : x.shape[1]]",
      "self.pos_embed[:, 1 : x.shape[1] + 1]", "self.pos_embed[:, 1 : x.shape[1] + 1]"),
    M("cached", "pos_offset", "start = 0 if", "start = 2 if", "start = 2 if",
      ("position = torch.arange(start", "self.wpe(position)")),
    # position_ids
    M("nano", "position_ids", "torch.arange(0, t, dtype", "torch.zeros(t, dtype",
      "torch.zeros(t, dtype"),
    M("hub_style", "position_ids", "self.position_ids[:, :length]",
      "self.position_ids[:, :length] // 2", "self.position_ids[:, :length] // 2"),
    # scaled_embedding
    M("annotated", "scaled_embedding", "self.embed(tgt) +",
      "self.embed(tgt) * math.sqrt(self.embed.embedding_dim) +",
      "math.sqrt(self.embed.embedding_dim)"),
    M("mha", "scaled_embedding", "self.tok(ids) +", "self.tok(ids) * self.tok.embedding_dim**0.5 +",
      "self.tok.embedding_dim**0.5"),
    M("functional", "scaled_embedding", "self.wte[inputs]",
      "self.wte[inputs] * self.wte.shape[1] ** 0.5", "self.wte.shape[1] ** 0.5"),
    # untied_head
    M("nano", "untied_head", "        self.transformer.wte.weight = self.lm_head.weight\n", "",
      None, ("self.lm_head = nn.Linear(", "logits = self.lm_head(x)")),
    M("mha", "untied_head", "        self.head.weight = self.tok.weight\n", "", None,
      ("self.head = nn.Linear(", "return self.head(")),
    M("vkq_fused", "untied_head", "self.norm(x) @ self.embed.weight.T", "self.head(self.norm(x))",
      "self.head(self.norm(x))", ("self.head = nn.Linear(",),
      (("        self.norm = ",
      "        self.head = nn.Linear(args.d_model, args.n_tokens, bias=False)\n"
      "        self.norm = "),)),
    M("scratch", "untied_head", "self.norm(x) @ self.tokens.table.transpose(0, 1)",
      "self.head(self.norm(x))", "self.head = Linear(n_embd, vocab_size)", (),
      (("        self.norm = Norm(n_embd)\n",
      "        self.norm = Norm(n_embd)\n        self.head = Linear(n_embd, vocab_size)\n"),)),
    # head_bias
    M("scratch", "head_bias", "self.norm(x) @ self.tokens.table.transpose(0, 1)",
      "self.head(self.norm(x))", "self.head = Linear(n_embd, vocab_size)", (),
      (("        self.norm = Norm(n_embd)\n",
      "        self.norm = Norm(n_embd)\n        self.head = Linear(n_embd, vocab_size)\n"),)),
    M("book", "head_bias", 'cfg["vocab_size"], bias=False)', 'cfg["vocab_size"])',
      'nn.Linear(cfg["emb_dim"], cfg["vocab_size"])', ("return self.out_head(x)",)),
    M("hub_style", "head_bias", "nn.Linear(config.hidden_size, config.vocab_size, bias=False)",
      "nn.Linear(config.hidden_size, config.vocab_size)",
      "nn.Linear(config.hidden_size, config.vocab_size)",
      ("logits = self.lm_head(hidden_states)",)),
    M("nano", "head_bias", "config.vocab_size, bias=False)", "config.vocab_size, bias=True)",
      "config.vocab_size, bias=True)", ("logits = self.lm_head(x)",)),
    # last_position_only
    M("nano", "last_position_only", "logits = self.lm_head(x)",
      "logits = self.lm_head(x[:, [-1], :] if targets is None else x)", "x[:, [-1], :]"),
    M("mha_seq_first", "last_position_only", "logits = self.head(h)", "logits = self.head(h[-1:])",
      "h[-1:]"),
    M("nano", "last_position_only", "x = self.transformer.ln_f(x)",
      "x = self.transformer.ln_f(x[:, -1:])", "x[:, -1:]"),
    M("scratch", "last_position_only", "return self.norm(x) @", "return self.norm(x[:, -1]) @",
      "x[:, -1]"),
    # loss_only
    M("nano", "loss_only", "        return logits, loss", "        return loss",
      "loss = F.cross_entropy("),
    M("lecture", "loss_only", "        return logits, loss", "        return loss",
      "loss = F.cross_entropy("),
    # scaled_logits
    M("nano", "scaled_logits", "logits = self.lm_head(x)", "logits = self.lm_head(x) / 8.0",
      "logits = self.lm_head(x) / 8.0"),
    M("vkq_fused", "scaled_logits", "@ self.embed.weight.T",
      "@ self.embed.weight.T * self.embed.embedding_dim**-0.5", "self.embed.embedding_dim**-0.5"),
    # softmax_output
    M("mingpt", "softmax_output", "            return logits, None",
      "            return F.softmax(logits, dim=-1), None", "F.softmax(logits, dim=-1)"),
    M("annotated", "softmax_output", "return self.proj(x)",
      "return torch.log_softmax(self.proj(x), dim=-1)", "torch.log_softmax("),
]
# fmt: on
