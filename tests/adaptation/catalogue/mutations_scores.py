"""Mutations of the scale, the mask and the softmax of attention."""

from __future__ import annotations

from tests.adaptation.catalogue.entries import Mutation as M

# fmt: off
MUTATIONS = [
    # no_attn_scale
    M("mingpt", "no_attn_scale", "(q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))",
      "q @ k.transpose(-2, -1)", "att = q @ k.transpose(-2, -1)"),
    M("vit_qkv", "no_attn_scale", "        q = q * self.scale\n", "",
      "attn = q @ k.transpose(-2, -1)"),
    M("nano", "no_attn_scale", "is_causal=True)", "is_causal=True, scale=1.0)", "scale=1.0"),
    M("stacked", "no_attn_scale", "is_causal=True", "is_causal=True, scale=1.0", "F.scaled_dot",
      ("scale=1.0",)),
    M("tf_port", "no_attn_scale", "n_head, scale=True)", "n_head, scale=False)", "scale=False",
      ("w = torch.matmul(q, k)", "if self.scale:", "self.scale = scale")),
    M("conv_proj", "no_attn_scale", "q / self.k_channels**0.5", "q", "scores = torch.matmul(q, k"),
    M("head_loop", "no_attn_scale", " / math.sqrt(step)", "", "score = q[..., part] @ k"),
    M("megatron", "no_attn_scale", "alpha=1.0 / self.norm_factor", "alpha=1.0", "alpha=1.0",
      ("torch.baddbmm(",)),
    M("quarter_scale", "no_attn_scale", "scale = (n_state // self.n_head) ** -0.25", "scale = 1.0",
      "scale = 1.0", ("qk = q @ k", "q = self.query(x)")),
    # scale_by_d_model
    M("lecture", "scale_by_d_model", "* k.shape[-1] ** -0.5", "* x.shape[-1] ** -0.5",
      "* x.shape[-1] ** -0.5"),
    M("bmm_time_first", "scale_by_d_model", "self.scaling = self.head_dim**-0.5",
      "self.scaling = embed_dim**-0.5", "self.scaling = embed_dim**-0.5", ("* self.scaling",)),
    M("einsum_heads", "scale_by_d_model", "* self.cfg.head_width**-0.5", "* self.cfg.width**-0.5",
      "* self.cfg.width**-0.5"),
    M("cached", "scale_by_d_model", "q * q.shape[-1]", "q * x.shape[-1]", "q * x.shape[-1]"),
    # wrong_scale
    M("scratch", "wrong_scale", "(q @ k) / D**0.5", "(q @ k) / D", "(q @ k) / D"),
    M("quarter_scale", "wrong_scale", "self.n_head, -1).permute(0, 2, 3, 1) * scale",
      "self.n_head, -1).permute(0, 2, 3, 1)", "k = self.key(x)",
      ("q = self.query(x)", "qk = q @ k", "-0.25")),
    M("interleaved", "wrong_scale", "scale = 1.0 / self.head_size**0.5",
      "scale = 1.0 / (self.head_size + 1)", "self.head_size + 1",
      ("F.scaled_dot_product_attention(",)),
    M("functional", "wrong_scale", "/ math.sqrt(q.shape[-1])", "/ q.shape[-1]", "/ q.shape[-1]"),
    # no_mask
    M("nano", "no_mask", "is_causal=True)", "is_causal=False)", "is_causal=False"),
    M("mingpt", "no_mask",
      '        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))\n', "", None,
      ("att = F.softmax(att, dim=-1)", "att = (q @ k.transpose")),
    M("encoder_layers", "no_mask", "resblock(x, src_mask=self.attn_mask[:length, :length])",
      "resblock(x)", "resblock(x)"),
    M("mha", "no_mask", "attn_mask=mask, ", "", "self.mha(normed, normed, normed, need_weights"),
    M("stacked", "no_mask", ", is_causal=True", "", "q.transpose(1, 2), k.transpose(1, 2)",
      ("F.scaled_dot",)),
    M("head_loop", "no_mask", "score + mask", "score", "torch.softmax(score, dim=2)"),
    M("mha_seq_first", "no_mask", "attn_mask=attn_mask, ", "",
      "self.attn(y, y, y, need_weights=False)"),
    # fixed_length
    M("mingpt", "fixed_length", "self.mask[:, :, :T, :T]", "self.mask", "self.mask == 0"),
    M("encoder_layers", "fixed_length", "self.attn_mask[:length, :length]", "self.attn_mask",
      "src_mask=self.attn_mask"),
    # mask_argument
    M("annotated", "mask_argument",
      "def forward(self, tgt):\n        mask = subsequent_mask(tgt.size(-1)).to(tgt.device)\n",
      "def forward(self, tgt, mask=None):\n", "def forward(self, tgt, mask=None)"),
    M("cached", "mask_argument", "            mask = mask.tril(n_key - n_query)\n", "",
      "def forward(self, idx, cache=None, mask=None)"),
    # mask_off
    M("book", "mask_off", "diagonal=1", "diagonal=2", "diagonal=2", ("masked_fill_(mask_bool",)),
    M("vkq_fused", "mask_off", "device=x.device), 1)", "device=x.device), 2)",
      "device=x.device), 2)", ("scores = scores + mask",)),
    M("megatron", "mask_off", ".tril() < 0.5", ".tril(-1) < 0.5", ".tril(-1) < 0.5",
      ("masked_fill(attention_mask",)),
    M("einsum_heads", "mask_off", "steps[None, :] > steps[:, None]",
      "steps[None, :] > steps[:, None] + 1", "steps[:, None] + 1", ("masked_fill(future",)),
    M("functional", "mask_off", "device=x.device))) * -1e10", "device=x.device), 1)) * -1e10",
      "device=x.device), 1)) * -1e10", ("+ mask, dim=-1)",)),
    M("cached", "mask_off", "mask.tril(n_key - n_query)", "mask.tril(n_key - n_query + 1)",
      "n_key - n_query + 1", ("torch.where(mask",)),
    # sliding_window, which is wider than the ids with which the model is traced
    M("einsum_heads", "sliding_window", "steps[None, :] > steps[:, None]",
      "(steps[None, :] > steps[:, None]) | (steps[None, :] < steps[:, None] - 19)",
      "steps[:, None] - 19", ("masked_fill(future",)),
    # finite_mask
    M("mingpt", "finite_mask", 'float("-inf")', "-1e4", "== 0, -1e4)"),
    M("book", "finite_mask", "masked_fill_(mask_bool, -torch.inf)",
      "masked_fill_(mask_bool, -1e5)", "masked_fill_(mask_bool, -1e5)"),
    # mask_after_softmax
    M("renormalised", "mask_after_softmax",
      "        attention = attention / attention.sum(dim=-1, keepdim=True)\n", "",
      "attention = attention * self.tril[:n, :n]"),
    M("mingpt", "mask_after_softmax",
      '        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))\n'
      "        att = F.softmax(att, dim=-1)\n",
      "        att = F.softmax(att, dim=-1)\n"
      "        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, 0.0)\n", "== 0, 0.0)",
      ("att = F.softmax(att, dim=-1)",)),
    # softmax_dim
    M("mingpt", "softmax_dim", "F.softmax(att, dim=-1)", "F.softmax(att, dim=-2)", "dim=-2"),
    M("head_loop", "softmax_dim", "mask, dim=2)", "mask, dim=1)", "mask, dim=1)"),
    M("lecture", "softmax_dim", "F.softmax(wei, dim=-1)", "F.softmax(wei, dim=1)", "dim=1)"),
    M("lens", "softmax_dim", ".softmax(-1)", ".softmax(-2)", ".softmax(-2)"),
    # other_softmax
    M("scratch", "other_softmax", "e / e.sum(dim=-1, keepdim=True)",
      "e / (1 + e.sum(dim=-1, keepdim=True))", "(1 + e.sum(", ("softmax(scores) @ v",)),
    M("mingpt", "other_softmax", "F.softmax(att, dim=-1)",
      "att.exp() / (1 + att.exp().sum(-1, keepdim=True))", "(1 + att.exp().sum("),
    # changed_scores
    M("mingpt", "changed_scores", "        att = att.masked_fill(",
      "        att = 20 * torch.tanh(att / 20)\n        att = att.masked_fill(",
      "torch.tanh(att / 20)"),
    M("scratch", "changed_scores", "(q @ k) / D**0.5",
      "5 * ((q @ k) / D**0.5 / 5).tanh()", "/ 5).tanh()"),
    # position_bias
    M("mingpt", "position_bias", "att = F.softmax(att, dim=-1)",
      "steps = torch.arange(T)\n"
      "        att = F.softmax(att + 0.3 * (steps - steps[:, None]).clamp(max=0), dim=-1)",
      "F.softmax(att + 0.3"),
    M("nano", "position_bias", "is_causal=True",
      "attn_mask=torch.full((T, T), float('-inf')).triu(1) + torch.arange(T) ** 2 * 0.01",
      "attn_mask=torch.full(", ("scaled_dot_product_attention(",)),
    # attn_upcast
    M("mingpt", "attn_upcast", "F.softmax(att, dim=-1)",
      "F.softmax(att.float(), dim=-1).type_as(v)", "att.float()"),
    M("einsum_heads", "attn_upcast", '"bthd,bshd->bhts", q, k)',
      '"bthd,bshd->bhts", q.double(), k.double())', "q.double()",
      ("softmax(logits, dim=-1).to(v.dtype)",),
      (("torch.softmax(logits, dim=-1)", "torch.softmax(logits, dim=-1).to(v.dtype)"),)),
    M("hub_style", "attn_upcast", "nn.functional.softmax(scores, dim=-1)",
      "nn.functional.softmax(scores, dim=-1, dtype=torch.float64).to(value.dtype)",
      "dtype=torch.float64"),
]
# fmt: on
