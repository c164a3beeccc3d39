"""Mutations of sizes, dropout and parameters, and code that is hard to trace."""

from __future__ import annotations

from tests.adaptation.catalogue.entries import Mutation as M

# fmt: off
MUTATIONS = [
    # inner_dim
    M("nano", "inner_dim", "nn.Linear(config.n_embd, 4 * config.n_embd",
      "nn.Linear(config.n_embd, 3 * config.n_embd", "self.c_fc = nn.Linear(config.n_embd, 3 *",
      ("self.c_proj = nn.Linear(3 *", "x = self.c_fc(x)", "x = self.c_proj(x)"),
      (("nn.Linear(4 * config.n_embd", "nn.Linear(3 * config.n_embd"),)),
    M("vit_qkv", "inner_dim", "mlp_ratio=4.0", "mlp_ratio=2.0", "mlp_ratio=2.0",
      ("hidden = int(", "self.fc1", "self.fc2")),
    # head_width
    M("lecture", "head_width", "head_size = n_embd // num_heads", "head_size = n_embd",
      "head_size = n_embd", ("self.query = nn.Linear(n_embd, head_size)",
      "self.key = nn.Linear(n_embd, head_size)"),
      (("self.proj = nn.Linear(n_embd, n_embd)",
      "self.proj = nn.Linear(num_heads * n_embd, n_embd)"),)),
    M("lens", "head_width", "h, c, d = cfg.n_heads, cfg.d_model, cfg.d_head",
      "h, c, d = cfg.n_heads, cfg.d_model, cfg.d_head // 2", "cfg.d_head // 2",
      ("self.W_Q = nn.Parameter(",)),
    # no_mlp_bias
    M("lecture", "no_mlp_bias", "nn.Linear(n_embd, 4 * n_embd),",
      "nn.Linear(n_embd, 4 * n_embd, bias=False),", "nn.Linear(n_embd, 4 * n_embd, bias=False),",
      ("nn.Linear(4 * n_embd, n_embd, bias=False),", "return self.net(x)"),
      (("nn.Linear(4 * n_embd, n_embd),", "nn.Linear(4 * n_embd, n_embd, bias=False),"),)),
    M("flat", "no_mlp_bias", "nn.Linear(4 * d, d)", "nn.Linear(4 * d, d, bias=False)",
      "nn.Linear(4 * d, d, bias=False)", ("self.w2[i](",)),
    # context_too_short
    M("nano", "context_too_short", "wpe=nn.Embedding(config.block_size,", "wpe=nn.Embedding(16,",
      "wpe=nn.Embedding(16,", ("self.transformer.wpe(pos)",)),
    M("mingpt", "context_too_short", "        self.block_size = block_size\n",
      "        self.block_size = block_size = 16\n", "block_size = 16", ("self.pos_emb",)),
    # vocab_mismatch
    M("nano", "vocab_mismatch", "wte=nn.Embedding(config.vocab_size,", "wte=nn.Embedding(128,",
      "wte=nn.Embedding(128,", ("nn.Linear(config.n_embd, 128", "self.transformer.wte.weight",
      "self.transformer.wte(idx)", "self.lm_head(x)"),
      (("nn.Linear(config.n_embd, config.vocab_size", "nn.Linear(config.n_embd, 128"),)),
    M("vkq_fused", "vocab_mismatch", "nn.Embedding(args.n_tokens,",
      "nn.Embedding((args.n_tokens + 63) // 64 * 64,", "(args.n_tokens + 63) // 64 * 64",
      ("self.embed(tokens)", "self.embed.weight.T")),
    # n_layer_mismatch
    M("mingpt", "n_layer_mismatch", "for _ in range(n_layer)]", "for _ in range(1)]", "range(1)",
      ("self.blocks = nn.Sequential(", "x = self.blocks(x)")),
    M("einsum_heads", "n_layer_mismatch", "range(cfg.layers)", "range(4)", "range(4)",
      ("for block in self.blocks",)),
    M("scratch", "n_layer_mismatch",
      "        for layer in self.layers:\n            x = layer(x)\n",
      "        x = self.layer(x)\n", "self.layer = Layer(n_embd, n_head)", (),
      (("self.layers = nn.ModuleList([Layer(n_embd, n_head) for _ in range(n_layer)])",
      "self.layer = Layer(n_embd, n_head)"),)),
    # dropout_always_on
    M("nano", "dropout_always_on", "p = self.dropout if self.training else 0.0", "p = self.dropout",
      "p = self.dropout", ("F.scaled_dot_product_attention(",)),
    M("bmm_time_first", "dropout_always_on",
      "F.dropout(attn_weights, p=self.dropout, training=self.training)",
      "F.dropout(attn_weights, p=self.dropout)", "F.dropout(attn_weights, p=self.dropout)"),
    M("hub_style", "dropout_always_on", "self.dropout(inputs_embeds + position_embeds)",
      "nn.functional.dropout(inputs_embeds + position_embeds, 0.1)", "nn.functional.dropout("),
    # train_mode
    M("nano", "train_mode", "dropout: float = 0.1", "dropout: float = 0.5", None, ("nn.Dropout(",)),
    M("lecture", "train_mode", "dropout=0.1", "dropout=0.5", None, ("nn.Dropout(",)),
    # random_parameters
    M("nano", "random_parameters", "x = x + self.attn(self.ln_1(x))",
      "x = x + self.gate * self.attn(self.ln_1(x))", "self.gate * self.attn(",
      ("self.gate = nn.Parameter(",),
      (("        self.attn = CausalSelfAttention(config)\n",
      "        self.attn = CausalSelfAttention(config)\n"
      "        self.gate = nn.Parameter(0.5 * torch.ones(config.n_embd))\n"),)),
    M("vit_qkv", "random_parameters", "x = x + self.mlp(self.norm2(x))",
      "x = x + self.mlp(self.norm2(x)) * self.layer_scale", "* self.layer_scale",
      ("self.layer_scale = nn.Parameter(",),
      (("        self.mlp = Mlp(dim)\n",
      "        self.mlp = Mlp(dim)\n"
      "        self.layer_scale = nn.Parameter(0.1 * torch.ones(dim))\n"),)),
    # unused_parameters
    M("nano", "unused_parameters", "        self.lm_head = nn.Linear(",
      "        self.value_head = nn.Linear(config.n_embd, 1)\n"
      "        self.lm_head = nn.Linear(", "self.value_head ="),
    M("cached", "unused_parameters", "        self.ln_f = ",
      "        self.ln_emb = nn.LayerNorm(hidden)\n"
      "        self.ln_f = ", "self.ln_emb ="),
    # untraced
    M("mingpt", "untraced", "        x = self.ln_f(x)\n",
      "        x = self.ln_f(torch.tensor(x.tolist()))\n", None, ("x.tolist()",)),
    M("nano", "untraced", "        x = self.transformer.ln_f(x)\n",
      "        x = torch.as_tensor(x.detach().cpu().numpy() * 1)\n"
      "        x = self.transformer.ln_f(x)\n", None, ("x.detach().cpu().numpy()",)),
    # changed_logits
    M("nano", "changed_logits", "= self.lm_head(x)", "= self.lm_head(x).clamp(max=99)",
      "self.lm_head(x).clamp(max=99)"),
    M("mingpt", "changed_logits", "= self.head(x)", "= torch.tanh(self.head(x) / 9) * 9",
      "torch.tanh(self.head(x) / 9) * 9"),
]
# fmt: on
