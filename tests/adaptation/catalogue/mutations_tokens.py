"""Mutations that mix tokens, change tensors in place, or treat some ids differently."""

from __future__ import annotations

from tests.adaptation.catalogue.entries import Mutation as M

# fmt: off
MUTATIONS = [
    # mask_value
    M("mingpt", "mask_value", 'float("-inf")', "0.0", "== 0, 0.0)"),
    M("book", "mask_value", "masked_fill_(mask_bool, -torch.inf)",
      "masked_fill_(mask_bool, 1e-9)", "masked_fill_(mask_bool, 1e-9)"),
    # norm_axis
    M("book", "norm_axis", "mean = x.mean(dim=-1,", "mean = x.mean(dim=1,", "x.mean(dim=1,"),
    M("tf_port", "norm_axis", "u = x.mean(-1,", "u = x.mean(1,", "u = x.mean(1,",
      (".pow(2).mean(",)),
    # bias_before_scale
    M("book", "bias_before_scale", "self.scale * norm_x + self.shift",
      "self.scale * (norm_x + self.shift)", "self.scale * (norm_x"),
    M("tf_port", "bias_before_scale", "self.g * x + self.b", "(self.b + x) * self.g",
      "(self.b + x) * self.g"),
    M("lens", "bias_before_scale", "residual / scale * self.w + self.b",
      "(residual / scale + self.b) * self.w", "(residual / scale + self.b) * self.w"),
    # doubled_residual
    M("book", "doubled_residual",
      "        x = self.norm1(x)\n"
      "        x = self.att(x)\n"
      "        x = self.drop_shortcut(x)\n"
      "        x = x + shortcut\n",
      "        x += self.drop_shortcut(self.att(self.norm1(x)))\n"
      "        x = x + shortcut\n", "x = x + shortcut"),
    M("mingpt", "doubled_residual", "        x = x + self.mlp(self.ln2(x))\n",
      "        y = x\n"
      "        x += self.mlp(self.ln2(x))\n"
      "        x = y + x\n", "x = y + x"),
    M("nano", "doubled_residual", "return self.resid_dropout(self.c_proj(y))",
      "return x + self.resid_dropout(self.c_proj(y))", "return x + self.resid_dropout("),
    M("lecture", "doubled_residual", "return self.net(x)", "return x + self.net(x)",
      "return x + self.net(x)"),
    # time_shift
    M("mingpt", "time_shift", "k = self.key(x).", "k = self.key(x).roll(1, 1).", ".roll(1, 1)"),
    M("nano", "time_shift", "        tok_emb = self.transformer.wte(idx)\n",
      "        idx = torch.cat([torch.zeros_like(idx[:, :1]), idx[:, :-1]], dim=1)\n"
      "        tok_emb = self.transformer.wte(idx)\n", "idx = torch.cat("),
    # id_condition
    M("mingpt", "id_condition", "        x = self.blocks(x)\n",
      "        x = self.blocks(x * (idx != 0)[..., None])\n", "(idx != 0)"),
    M("nano", "id_condition", "tok_emb = self.transformer.wte(idx)",
      "tok_emb = self.transformer.wte(idx) * (idx > 0).unsqueeze(-1)", "(idx > 0)"),
]
