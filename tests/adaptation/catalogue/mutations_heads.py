"""Mutations of the projections of q, k and v, and of the heads."""

from __future__ import annotations

from tests.adaptation.catalogue.entries import Mutation as M

# fmt: off
MUTATIONS = [
    # head_interleaved_qkv
    M("nano", "head_interleaved_qkv",
      "        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)\n"
      "        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)\n"
      "        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)\n"
      "        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)\n",
      "        qkv = self.c_attn(x).view(B, T, self.n_head, 3 * C // self.n_head)\n"
      "        q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)\n", "qkv = self.c_attn(x).view(",
      ("qkv.transpose(1, 2).chunk(3, dim=-1)",)),
    M("renormalised", "head_interleaved_qkv",
      "        q, k, v = self.qkv(x).chunk(3, dim=-1)\n"
      "        q = q.view(b, n, self.heads, self.head_dim).transpose(1, 2)\n"
      "        k = k.view(b, n, self.heads, self.head_dim).transpose(1, 2)\n"
      "        v = v.view(b, n, self.heads, self.head_dim).transpose(1, 2)\n",
      "        qkv = self.qkv(x).view(b, n, self.heads, 3, self.head_dim)\n"
      "        q, k, v = qkv.permute(3, 0, 2, 1, 4)\n", "self.qkv(x).view(b, n, self.heads, 3",
      ("q, k, v = qkv.permute(3, 0, 2, 1, 4)",)),
    M("stacked", "head_interleaved_qkv", "qkv.view(b, t, 3, self.heads, c // self.heads).unbind(2)",
      "qkv.view(b, t, self.heads, 3, c // self.heads).unbind(3)", "qkv.view(b, t, self.heads, 3"),
    # no_head_merge_transpose
    M("mingpt", "no_head_merge_transpose", "y.transpose(1, 2).contiguous().view(B, T, C)",
      "y.contiguous().view(B, T, C)", "y.contiguous().view(B, T, C)"),
    M("vkq_fused", "no_head_merge_transpose", "(weights @ value).transpose(1, 2).flatten(2)",
      "(weights @ value).reshape(x.shape)", "(weights @ value).reshape(x.shape)"),
    # qk_swapped
    M("nano", "qk_swapped", "q, k, v = self.c_attn(x)", "k, q, v = self.c_attn(x)",
      "k, q, v = self.c_attn(x)"),
    M("mingpt", "qk_swapped", "k = self.key(x)", "k = self.query(x)", "k = self.query(x)",
      ("q = self.key(x)",),
      (("q = self.query(x)", "q = self.key(x)"),)),
    M("hub_style", "qk_swapped", "self._shape(self.q_proj(hidden_states))",
      "self._shape(self.k_proj(hidden_states))", "query = self._shape(self.k_proj(",
      ("key = self._shape(self.q_proj(",),
      (("key = self._shape(self.k_proj(hidden_states))",
      "key = self._shape(self.q_proj(hidden_states))"),)),
    M("tf_port", "qk_swapped", "query, key, value = ", "key, query, value = ",
      "key, query, value ="),
    M("lens", "qk_swapped", '"bqhd,bkhd->bhqk", q, k)', '"bqhd,bkhd->bhqk", k, q)',
      '"bqhd,bkhd->bhqk", k, q)', ('k = einsum("bpc,hcd->bphd", x, self.W_K)',)),
    # kv_swapped
    M("nano", "kv_swapped", "q, k, v = self.c_attn(x)", "q, v, k = self.c_attn(x)",
      "q, v, k = self.c_attn(x)"),
    M("book", "kv_swapped", "keys = self.W_key(x)", "keys = self.W_value(x)",
      "keys = self.W_value(x)", ("values = self.W_key(x)",),
      (("values = self.W_value(x)", "values = self.W_key(x)"),)),
    M("functional", "kv_swapped", "q, k, v = (", "q, v, k = (", "q, v, k = (",
      ("qkv = torch.split(",)),
    M("cached", "kv_swapped", "k, v = self.kv_proj(x)", "v, k = self.kv_proj(x)",
      "v, k = self.kv_proj(x)"),
    # shared_kv
    M("nano", "shared_kv", "attention(q, k, v,", "attention(q, k, k,", "attention(q, k, k,"),
    M("vkq_fused", "shared_kv", "(weights @ value)", "(weights @ key)", "(weights @ key)",
      ("scores = query @ key.mT",)),
    # n_head_mismatch
    M("nano", "n_head_mismatch", "self.n_head = config.n_head", "self.n_head = config.n_head // 2",
      "config.n_head // 2",
      ("q.view(B, T, self.n_head", "q = q.view", "y = F.scaled_dot_product_attention(")),
    M("mha", "n_head_mismatch", "DecoderBlock(n_embd, n_head) for",
      "DecoderBlock(n_embd, 2 * n_head) for", "2 * n_head",
      ("self.mha = nn.MultiheadAttention(", "self.mha(")),
    # no_qkv_bias
    M("nano", "no_qkv_bias", "3 * config.n_embd, bias=config.bias)",
      "3 * config.n_embd, bias=False)", "3 * config.n_embd, bias=False)", ("self.c_attn(x)",)),
    M("book", "no_qkv_bias", '            qkv_bias=cfg["qkv_bias"],\n', "", "qkv_bias=False",
      ("bias=qkv_bias", "self.att = MultiHeadAttention(", "keys = self.W_key(x)",
      "queries = self.W_query(x)", "values = self.W_value(x)")),
    M("vit_qkv", "no_qkv_bias", "qkv_bias=True", "qkv_bias=False", "qkv_bias=False", ("self.qkv",)),
    M("stacked", "no_qkv_bias", " + self.qkv_bias[i]", "", "x @ self.qkv_weight[i]",
      ("self.qkv_weight =",),
      (("        self.qkv_bias = nn.Parameter(torch.zeros(layers, 3 * width))\n", ""),)),
    # no_proj_bias
    M("mingpt", "no_proj_bias", "self.proj = nn.Linear(n_embd, n_embd)",
      "self.proj = nn.Linear(n_embd, n_embd, bias=False)",
      "self.proj = nn.Linear(n_embd, n_embd, bias=False)", ("self.proj(y)",)),
    M("wrappers", "no_proj_bias", "nn.Sequential(nn.Linear(dim, dim), ",
      "nn.Sequential(nn.Linear(dim, dim, bias=False), ", "nn.Linear(dim, dim, bias=False)",
      ("return self.to_out(",)),
    # no_out_proj
    M("mingpt", "no_out_proj", "self.resid_drop(self.proj(y))", "self.resid_drop(y)",
      "self.resid_drop(y)", ("y = y.transpose(1, 2)", "self.attn(self.ln1(x))"),
      (("        self.proj = nn.Linear(n_embd, n_embd)\n", ""),)),
    M("head_loop", "no_out_proj", "self.project_out(torch.cat(results, dim=2))",
      "torch.cat(results, dim=2)", "return torch.cat(results, dim=2)", ("self.attention(",)),
    # no_head_split_transpose
    M("mingpt", "no_head_split_transpose",
      "k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)",
      "k = self.key(x).view(B, self.n_head, T, C // self.n_head)",
      "k = self.key(x).view(B, self.n_head, T,", ("q = self.query(x)", "v = self.value(x)"),
      (("q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)",
      "q = self.query(x).view(B, self.n_head, T, C // self.n_head)"),
      ("v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)",
      "v = self.value(x).view(B, self.n_head, T, C // self.n_head)"))),
    M("book", "no_head_split_transpose",
      "values = values.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)",
      "values = values.view(b, self.num_heads, num_tokens, self.head_dim)",
      "values = values.view(b, self.num_heads, num_tokens"),
    # qk_norm
    M("nano", "qk_norm", "        v = v.view(",
      "        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)\n        v = v.view(",
      "F.normalize(q, dim=-1)"),
    M("mingpt", "qk_norm", "        v = self.value(x)",
      "        q = F.layer_norm(q, q.shape[-1:])\n"
      "        k = F.layer_norm(k, k.shape[-1:])\n"
      "        v = self.value(x)", "q = F.layer_norm(q,", ("k = F.layer_norm(k,",)),
    # sliding_window
    M("einsum_heads", "sliding_window", "steps[None, :] > steps[:, None]",
      "(steps[None, :] > steps[:, None]) | (steps[None, :] < steps[:, None] - 3)",
      "steps[:, None] - 3", ("masked_fill(future",)),
    M("megatron", "sliding_window", ".tril() < 0.5", ".tril().triu(-4) < 0.5",
      ".triu(-4) < 0.5", ("masked_fill(attention_mask",)),
    # gated_mlp
    M("nano", "gated_mlp", "x = self.c_fc(x)", "x = self.c_fc(x) * self.c_gate(x)",
      "self.c_gate(x)", ("self.c_gate =",),
      (("        self.c_fc = nn.Linear(",
      "        self.c_gate = nn.Linear(config.n_embd, 4 * config.n_embd)\n"
      "        self.c_fc = nn.Linear("),)),
    M("vit_qkv", "gated_mlp", "self.fc1(x)", "self.fc1(x) * torch.sigmoid(self.fc3(x))",
      "self.fc3(x)", ("self.fc3 =",),
      (("        self.fc1 = ", "        self.fc3 = nn.Linear(dim, hidden)\n        self.fc1 = "),)),
]
# fmt: on
