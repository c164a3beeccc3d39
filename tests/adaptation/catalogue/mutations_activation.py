"""Mutations of the activation of the MLP."""

from __future__ import annotations

from tests.adaptation.catalogue.entries import Mutation as M

# fmt: off
MUTATIONS = [
    # erf_gelu
    M("nano", "erf_gelu", 'nn.GELU(approximate="tanh")', "nn.GELU()", "nn.GELU()",
      ("self.gelu(x)",)),
    M("mha", "erf_gelu", '(x), approximate="tanh")', "(x))", "F.gelu(self.fc_in(x))"),
    M("scratch", "erf_gelu", "0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))",
      "0.5 * x * (1 + torch.erf(x / 2**0.5))", "torch.erf(", ("gelu(self.up(x))",)),
    M("encoder_stack", "erf_gelu", 'activation=partial(F.gelu, approximate="tanh")',
      "activation=F.gelu", "activation=F.gelu",
      ("nn.TransformerEncoderLayer(", "self.transformer(x,", "nn.TransformerEncoder(")),
    M("functional", "erf_gelu", "linear(gelu(", "linear(F.gelu(", "linear(F.gelu("),
    M("stacked", "erf_gelu", ', approximate="tanh")', ")", "F.gelu("),
    # relu
    M("lecture", "relu", 'nn.GELU(approximate="tanh")', "nn.ReLU()", "nn.ReLU()",
      ("return self.net(x)",)),
    M("book", "relu", "            GELU(),", "            nn.ReLU(),", "nn.ReLU()",
      ("self.layers(x)",)),
    M("bmm_time_first", "relu", 'F.gelu(self.fc1(x), approximate="tanh")', "F.relu(self.fc1(x))",
      "F.relu(self.fc1(x))"),
    M("conv_proj", "relu", 'F.gelu(self.conv_1(x), approximate="tanh")',
      "torch.relu(self.conv_1(x))", "torch.relu(self.conv_1(x))"),
    # silu
    M("vkq_fused", "silu", 'nn.GELU("tanh")', "nn.SiLU()", "nn.SiLU()", ("self.act(self.up(",)),
    M("interleaved", "silu", 'F.gelu(self.fc(x), approximate="tanh")', "F.silu(self.fc(x))",
      "F.silu(self.fc(x))"),
    M("lens", "silu", "gelu_new(pre)", "torch.nn.functional.silu(pre)", "functional.silu(pre)"),
    # other_activation
    M("quarter_scale", "other_activation", 'lambda x: F.gelu(x, approximate="tanh")',
      "lambda x: x * torch.sigmoid(1.702 * x)", "torch.sigmoid(1.702 * x)",
      ("self.act(self.mlp_in(",)),
    M("flat", "other_activation", 'y = self.w2[i](F.gelu(self.w1[i](y), approximate="tanh"))',
      "y = self.w1[i](y)\n"
      "            y = self.w2[i](y * torch.sigmoid(1.702 * y))", "torch.sigmoid(1.702 * y)"),
    M("nano", "other_activation", "        x = self.gelu(x)\n", "", None, ("self.c_proj(x)",)),
    M("scratch", "other_activation", "self.down(gelu(self.up(x)))", "self.down(self.up(x))",
      "self.down(self.up(x))"),
    # fast_path
    M("encoder_stack", "fast_path", 'activation=partial(F.gelu, approximate="tanh")',
      'activation=nn.GELU(approximate="tanh")', 'activation=nn.GELU(approximate="tanh")',
      ("nn.TransformerEncoderLayer(", "self.transformer(x,", "nn.TransformerEncoder(")),
    M("encoder_layers", "fast_path", "                    norm_first=True,\n",
      "                    norm_first=True,\n"
      "                    batch_first=True,\n", 'activation=nn.GELU(approximate="tanh")',
      ("nn.TransformerEncoderLayer(", "x = resblock("),
      (("        x = x.permute(1, 0, 2)\n", ""), ("        x = x.permute(1, 0, 2)\n", ""))),
]
# fmt: on
