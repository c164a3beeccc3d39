"""Mutations of the order of norms and branches, of residual connections, and of shared modules."""

from __future__ import annotations

from tests.adaptation.catalogue.entries import Mutation as M

NANO_BLOCK = """\
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
"""
MINGPT_BLOCK = """\
        x = x + self.attn(self.ln1(x))
        x = x + self.mlp(self.ln2(x))
"""
INTERLEAVED_BLOCK = """\
        x = self.attn(self.norm_1(x), mask) + x
        return self.mlp(self.norm_2(x)) + x
"""

# fmt: off
MUTATIONS = [
    # post_ln
    M("nano", "post_ln", NANO_BLOCK,
      "        x = self.ln_1(x + self.attn(x))\n"
      "        x = self.ln_2(x + self.mlp(x))\n", "x = self.ln_1(x + self.attn(x))",
      ("x = self.ln_2(x + self.mlp(x))",)),
    M("interleaved", "post_ln", INTERLEAVED_BLOCK,
      "        x = self.norm_1(self.attn(x, mask) + x)\n"
      "        return self.norm_2(self.mlp(x) + x)\n", "x = self.norm_1(self.attn(x, mask) + x)",
      ("return self.norm_2(self.mlp(x) + x)",)),
    M("encoder_stack", "post_ln", "norm_first=True", "norm_first=False", "norm_first=False",
      ("nn.TransformerEncoderLayer(", "self.transformer(x,")),
    M("mha_seq_first", "post_ln",
      "        y = self.ln_1(x)\n"
      "        a, _ = self.attn(y, y, y, attn_mask=attn_mask, need_weights=False)\n"
      "        x = x + a\n"
      "        m = self.mlp(self.ln_2(x))\n"
      "        x = x + m\n",
      "        a, _ = self.attn(x, x, x, attn_mask=attn_mask, need_weights=False)\n"
      "        x = self.ln_1(x + a)\n"
      "        m = self.mlp(x)\n"
      "        x = self.ln_2(x + m)\n", "x = self.ln_1(x + a)", ("x = self.ln_2(x + m)",)),
    # norm_on_output
    M("nano", "norm_on_output", NANO_BLOCK,
      "        x = x + self.ln_1(self.attn(x))\n"
      "        x = x + self.ln_2(self.mlp(x))\n", "x = x + self.ln_1(self.attn(x))",
      ("x = x + self.ln_2(self.mlp(x))",)),
    M("mingpt", "norm_on_output", MINGPT_BLOCK,
      "        x = x + self.ln1(self.attn(x))\n"
      "        x = x + self.ln2(self.mlp(x))\n", "x = x + self.ln1(self.attn(x))",
      ("x = x + self.ln2(self.mlp(x))",)),
    # swapped_ln
    M("nano", "swapped_ln", NANO_BLOCK,
      "        x = x + self.attn(self.ln_2(x))\n"
      "        x = x + self.mlp(self.ln_1(x))\n", "x = x + self.attn(self.ln_2(x))",
      ("x = x + self.mlp(self.ln_1(x))",)),
    M("mingpt", "swapped_ln", MINGPT_BLOCK,
      "        x = x + self.attn(self.ln2(x))\n"
      "        x = x + self.mlp(self.ln1(x))\n", "x = x + self.attn(self.ln2(x))",
      ("x = x + self.mlp(self.ln1(x))",)),
    M("functional", "swapped_ln", 'mha(layer_norm(x, p["ln1_g"], p["ln1_b"])',
      'mha(layer_norm(x, p["ln2_g"], p["ln2_b"])', 'mha(layer_norm(x, p["ln2_g"], p["ln2_b"])',
      ('ffn(layer_norm(x, p["ln1_g"], p["ln1_b"])',),
      (('ffn(layer_norm(x, p["ln2_g"], p["ln2_b"])',
      'ffn(layer_norm(x, p["ln1_g"], p["ln1_b"])'),)),
    M("conv_proj", "swapped_ln", "self.attn_layers[i](self.norm_layers_1[i](x))",
      "self.attn_layers[i](self.norm_layers_2[i](x))",
      "self.attn_layers[i](self.norm_layers_2[i](x))",
      ("self.ffn_layers[i](self.norm_layers_1[i](x))",),
      (("self.ffn_layers[i](self.norm_layers_2[i](x))",
      "self.ffn_layers[i](self.norm_layers_1[i](x))"),)),
    # missing_ln
    M("nano", "missing_ln", "self.attn(self.ln_1(x))", "self.attn(x)", "self.attn(x)",
      more=(("        self.ln_1 = LayerNorm(config.n_embd, config.bias)\n", ""),)),
    M("flat", "missing_ln",
      "            y = self.norm2[i](x)\n"
      "            y = self.w2[i](F.gelu(self.w1[i](y)",
      "            y = self.w2[i](F.gelu(self.w1[i](x)", "self.w1[i](x)"),
    M("hub_style", "missing_ln", "        hidden_states = self.layernorm_after(hidden_states)\n",
      "", None, ("self.output(self.activation(",)),
    # no_final_ln
    M("nano", "no_final_ln", "        x = self.transformer.ln_f(x)\n", "", None,
      ("logits = self.lm_head(x)", "ln_f=")),
    M("stacked", "no_final_ln", "self.norm(x, self.norm_scale, self.norm_shift)", "x",
      "F.linear(x, self.embed)"),
    M("vkq_fused", "no_final_ln", "return self.norm(x) @", "return x @",
      "return x @ self.embed.weight.T",
      more=(("        self.norm = nn.LayerNorm(args.d_model, eps=1e-5)\n", ""),)),
    M("wrappers", "no_final_ln",
      "nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens, bias=False))",
      "nn.Linear(dim, num_tokens, bias=False)",
      "self.to_logits = nn.Linear(dim, num_tokens, bias=False)", ("return self.to_logits(x)",)),
    M("lens", "no_final_ln", "self.unembed(self.ln_final(residual))", "self.unembed(residual)",
      "self.unembed(residual)", ("self.ln_final = LayerNorm",)),
    M("renormalised", "no_final_ln", "hidden = self.ln_out(x)", "hidden = x", "hidden = x",
      ("self.to_logits(hidden)",)),
    # extra_ln
    M("nano", "extra_ln", "self.transformer.drop(tok_emb + pos_emb)",
      "self.transformer.drop(F.layer_norm(tok_emb + pos_emb, tok_emb.shape[-1:]))",
      "F.layer_norm(tok_emb + pos_emb"),
    M("hub_style", "extra_ln", "self.dropout(inputs_embeds + position_embeds)",
      "self.dropout(self.embeddings_layernorm(inputs_embeds + position_embeds))",
      "self.embeddings_layernorm(", ("self.embeddings_layernorm = nn.LayerNorm(",),
      (("        self.layer = nn.ModuleList(",
      "        self.embeddings_layernorm = nn.LayerNorm(config.hidden_size)\n"
      "        self.layer = nn.ModuleList("),)),
    M("mha", "extra_ln", "x = x + self.dropout(attended)",
      "x = x + self.dropout(self.ln_after(attended))", "self.ln_after(attended)",
      ("self.ln_after = nn.LayerNorm(",),
      (("        self.ln_mlp = ",
      "        self.ln_after = nn.LayerNorm(n_embd)\n"
      "        self.ln_mlp = "),)),
    # parallel_block
    M("nano", "parallel_block", NANO_BLOCK,
      "        x = x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))\n",
      "self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))"),
    M("interleaved", "parallel_block", INTERLEAVED_BLOCK,
      "        a = self.attn(self.norm_1(x), mask)\n"
      "        m = self.mlp(self.norm_2(x))\n"
      "        return x + a + m\n", "m = self.mlp(self.norm_2(x))", ("return x + a + m",)),
    M("megatron", "parallel_block", "self.post_attention_layernorm(residual)",
      "self.post_attention_layernorm(hidden_states)",
      "self.post_attention_layernorm(hidden_states)", ("return residual + ",)),
    # missing_residual
    M("stacked", "missing_residual", "x = x + self.attend(", "x = self.attend(",
      "x = self.attend("),
    M("mingpt", "missing_residual", "x = x + self.mlp(self.ln2(x))", "x = self.mlp(self.ln2(x))",
      "x = self.mlp(self.ln2(x))"),
    M("hub_style", "missing_residual",
      "        hidden_states = residual + self.dropout(hidden_states)\n"
      "\n",
      "        hidden_states = self.dropout(hidden_states)\n"
      "\n", "        hidden_states = self.dropout(hidden_states)",
      ("self.attention(hidden_states, attention_mask)",)),
    M("wrappers", "missing_residual", "Residual(PreNorm(dim, feed_forward))",
      "PreNorm(dim, feed_forward)", "PreNorm(dim, feed_forward)",
      ("x = ff(attn(x))", "return self.fn(self.norm(x))")),
    M("tf_port", "missing_residual", "x = x + m", "x = m", "x = m",
      ("m = self.mlp(self.ln_2(x))",)),
    M("head_loop", "missing_residual", "x = x + self.attention(", "x = self.attention(",
      "x = self.attention("),
    # residual_from_norm
    M("megatron", "residual_from_norm",
      "        attention_output = self.attention("
      "self.input_layernorm(hidden_states), attention_mask)\n",
      "        hidden_states = self.input_layernorm(hidden_states)\n"
      "        attention_output = self.attention(hidden_states, attention_mask)\n",
      "residual = hidden_states + self.hidden_dropout(attention_output)",
      ("hidden_states = self.input_layernorm(hidden_states)",)),
    M("book", "residual_from_norm",
      "        shortcut = x\n"
      "        x = self.norm1(x)\n",
      "        x = self.norm1(x)\n"
      "        shortcut = x\n", "x = self.norm1(x)", ("shortcut = x", "x = x + shortcut")),
    # shared_parameters
    M("mingpt", "shared_parameters", "self.mlp(self.ln2(x))", "self.mlp(self.ln1(x))",
      "self.mlp(self.ln1(x))",
      more=(("        self.ln2 = nn.LayerNorm(n_embd)\n", ""),)),
    M("mha", "shared_parameters", "[DecoderBlock(n_embd, n_head) for _ in range(n_layer)]",
      "[DecoderBlock(n_embd, n_head)] * n_layer", "* n_layer", ("x = block(x, mask)",)),
    M("encoder_layers", "shared_parameters",
      "        for resblock in self.resblocks:\n"
      "            x = resblock(",
      "        for _ in self.resblocks:\n"
      "            x = self.resblocks[0](", "x = self.resblocks[0]("),
    M("stacked", "shared_parameters", "F.gelu(x @ self.up_weight[i] + self.up_bias[i]",
      "F.gelu(x @ self.up_weight[0] + self.up_bias[0]", "x @ self.up_weight[0]"),
    M("mha_seq_first", "shared_parameters", "self.mlp(self.ln_2(x))", "self.mlp(self.ln_1(x))",
      "self.mlp(self.ln_1(x))"),
    # residual_weights
    M("nano", "residual_weights", NANO_BLOCK, NANO_BLOCK.replace("self.attn(", "0.5 * self.attn("),
      "x = x + 0.5 * self.attn(self.ln_1(x))"),
    M("interleaved", "residual_weights", "return self.mlp(self.norm_2(x)) + x",
      "return self.mlp(self.norm_2(x)) + 0.25 * x", "+ 0.25 * x"),
]
# fmt: on
