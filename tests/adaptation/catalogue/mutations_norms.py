"""Mutations of the formulas and the parameters of norms."""

from __future__ import annotations

from tests.adaptation.catalogue.entries import Mutation as M

# fmt: off
MUTATIONS = [
    # unbiased_var
    M("book", "unbiased_var", "unbiased=False", "unbiased=True", "unbiased=True"),
    M("annotated", "unbiased_var", ", correction=0", "", "x.var(-1, keepdim=True)"),
    # eps_outside_sqrt
    M("book", "eps_outside_sqrt", "torch.sqrt(var + self.eps)", "(torch.sqrt(var) + self.eps)",
      "(torch.sqrt(var) + self.eps)"),
    M("annotated", "eps_outside_sqrt",
      "std = torch.sqrt(x.var(-1, keepdim=True, correction=0) + self.eps)",
      "std = torch.sqrt(x.var(-1, keepdim=True, correction=0))", "/ (std + self.eps)",
      more=(("/ std + self.b_2", "/ (std + self.eps) + self.b_2"),)),
    M("lens", "eps_outside_sqrt",
      "(residual.pow(2).mean(-1, keepdim=True) + self.cfg.ln_eps).sqrt()",
      "residual.pow(2).mean(-1, keepdim=True).sqrt() + self.cfg.ln_eps",
      ".sqrt() + self.cfg.ln_eps"),
    # eps_value
    M("nano", "eps_value", "self.bias, 1e-5)", "self.bias, 1e-3)", "1e-3"),
    M("stacked", "eps_value", "x.shape[-1],), scale, shift)", "x.shape[-1],), scale, shift, 1e-3)",
      "1e-3)"),
    M("hub_style", "eps_value", "layer_norm_eps=1e-5", "layer_norm_eps=1e-12",
      "layer_norm_eps=1e-12", ("eps=config.layer_norm_eps", "self.layernorm_before(hidden_states)",
      "self.layernorm_after(hidden_states)", "self.final_layernorm(hidden_states)")),
    M("vkq_fused", "eps_value", "self.mlp_norm = nn.LayerNorm(args.d_model, eps=1e-5)",
      "self.mlp_norm = nn.LayerNorm(args.d_model, eps=1e-6)", "eps=1e-6", ("self.mlp_norm(x)",)),
    M("scratch", "eps_value", "eps=1e-5", "eps=1e-8", "eps=1e-8", ("variance + self.eps",)),
    M("tf_port", "eps_value", "e=1e-5", "e=1e-12", "e=1e-12", ("torch.sqrt(s + self.e)",)),
    # rmsnorm
    M("scratch", "rmsnorm",
      "        m = x.mean(dim=-1, keepdim=True)\n"
      "        variance = torch.mean((x - m) ** 2, dim=-1, keepdim=True)\n"
      "        return (x - m) * torch.rsqrt(variance + self.eps)",
      "        square = torch.mean(x**2, dim=-1, keepdim=True)\n"
      "        return x * torch.rsqrt(square + self.eps)", "torch.mean(x**2",
      ("x * torch.rsqrt(square",)),
    M("lens", "rmsnorm", "        residual = residual - residual.mean(-1, keepdim=True)\n", "",
      "residual.pow(2).mean(-1, keepdim=True)", ("residual / scale * self.w",)),
    M("vkq_fused", "rmsnorm", "self.attn_norm = nn.LayerNorm(", "self.attn_norm = nn.RMSNorm(",
      "self.attn_norm = nn.RMSNorm(",
      ("nn.RMSNorm(", "self.attn_norm(x)", "self.mlp_norm(x)", "self.norm(x)"),
      (("self.mlp_norm = nn.LayerNorm(", "self.mlp_norm = nn.RMSNorm("),
      ("self.norm = nn.LayerNorm(", "self.norm = nn.RMSNorm("))),
    # no_ln_bias
    M("vit_qkv", "no_ln_bias", "self.norm1 = nn.LayerNorm(dim)",
      "self.norm1 = nn.LayerNorm(dim, bias=False)", "self.norm1 = nn.LayerNorm(dim, bias=False)",
      ("self.norm1(x)",)),
    M("nano", "no_ln_bias", "self.ln_1 = LayerNorm(config.n_embd, config.bias)",
      "self.ln_1 = LayerNorm(config.n_embd, bias=False)",
      "self.ln_1 = LayerNorm(config.n_embd, bias=False)",
      ("self.ln_2 = LayerNorm(config.n_embd, bias=False)",
      "ln_f=LayerNorm(config.n_embd, bias=False)", "F.layer_norm(", "self.ln_1(x)"),
      (("self.ln_2 = LayerNorm(config.n_embd, config.bias)",
      "self.ln_2 = LayerNorm(config.n_embd, bias=False)"),
      ("ln_f=LayerNorm(config.n_embd, config.bias)", "ln_f=LayerNorm(config.n_embd, bias=False)"))),
    M("scratch", "no_ln_bias", "        self.shift = nn.Parameter(torch.zeros(dim))\n", "",
      "* self.gain", ("self.norm_a = Norm(dim)",),
      ((" * self.gain + self.shift", " * self.gain"),)),
    # no_ln_weight
    M("scratch", "no_ln_weight", "        self.gain = nn.Parameter(torch.ones(dim))\n", "",
      "(x - m) * torch.rsqrt(", ("self.norm_a = Norm(dim)",),
      ((" * self.gain + self.shift", " + self.shift"),)),
    M("conv_proj", "no_ln_weight", "        self.gamma = nn.Parameter(torch.ones(channels))\n", "",
      "None, self.beta", ("ChannelNorm(channels)",),
      (("self.gamma, self.beta, self.eps", "None, self.beta, self.eps"),)),
]
# fmt: on
