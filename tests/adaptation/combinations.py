"""Models with random combinations of features, each with the codes of its deviations from GPT-2.

Their parts are those of public models. Every feature is also a part of the others' surroundings, so
that a deviation that is only found, or wrongly found, beside another one is noticed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from textwrap import indent

Features = Mapping[str, str]

# The values of each feature: GPT-2's first, then others with the codes of their deviations.
OPTIONS: dict[str, dict[str, str]] = {
    "norm": {"layer": "", "rms": "rmsnorm", "eps": "eps_value", "rms_eps": "rmsnorm eps_value",
             "unweighted": "rmsnorm no_ln_weight eps_value"},
    "place": {"pre": "", "post": "post_ln", "sandwich": "extra_ln", "output": "norm_on_output",
              "parallel": "parallel_block", "parallel_shared": "parallel_block shared_parameters"},
    "final_norm": {"yes": "", "no": "no_final_ln"},
    "embedding_norm": {"no": "", "yes": "extra_ln"},
    "positions": {"learned": "", "sinusoidal": "sinusoidal_pos", "none": "no_pos",
                  "rotary": "no_pos rope", "alibi": "no_pos position_bias"},
    "embedding_scale": {"no": "", "yes": "scaled_embedding"},
    "qkv": {"separate": "", "fused": "", "heads": ""},
    "qkv_bias": {"yes": "", "no": "no_qkv_bias"},
    "key_heads": {"all": "", "half": "grouped_query_attention"},
    "qk_norm": {"no": "", "plain": "qk_norm", "weighted": "qk_norm random_parameters"},
    "scale": {"usual": "", "query": "", "width": "scale_by_d_model", "none": "no_attn_scale"},
    "kernel": {"written": "", "fused": ""},
    "mask": {"causal": "", "none": "no_mask", "window": "sliding_window"},
    "softmax": {"keys": "", "queries": "softmax_dim"},
    "dropout": {"no": "", "always": "dropout_always_on"},
    "output": {"yes": "", "no_bias": "no_proj_bias", "no": "no_out_proj"},
    "residual": {"usual": "", "norm_1": "residual_from_norm", "norm_2": "residual_from_norm",
                 "no_attn": "missing_residual", "no_mlp": "missing_residual"},
    "branch_weight": {"no": "", "yes": "random_parameters"},
    "mlp": {"tanh": "", "erf": "erf_gelu", "relu": "relu", "silu": "silu",
            "relu2": "other_activation", "swiglu": "gated_mlp", "geglu": "gated_mlp",
            "experts": "unknown_mlp erf_gelu"},
    "mlp_bias": {"yes": "", "no": "no_mlp_bias"},
    "projection": {"no": "", "embedding": "extra_projection",
                   "head": "extra_projection random_parameters"},
    "head": {"tied": "", "untied": "", "bias": ""},
    "cap": {"no": "", "yes": "changed_logits"},
}  # fmt: skip
USUAL = {name: next(iter(values)) for name, values in OPTIONS.items()}


def draw(seed: int) -> Features:
    """Draw features that can be combined, more often those of GPT-2 than others."""
    generator = random.Random(seed)
    features = dict(USUAL)
    for name in generator.sample(list(OPTIONS), generator.choice((2, 4, 6, 10, 16))):
        features[name] = generator.choice([USUAL[name], *OPTIONS[name]])
    if features["place"] != "pre":
        features["residual"] = "usual"
    if features["qkv"] != "separate":
        features["key_heads"] = "all"
    if features["qkv"] == "heads":
        features["qk_norm"] = "no"
    if features["positions"] == "alibi":
        features["mask"] = "causal"
    if features["softmax"] == "queries":
        features |= {"mask": "causal", "dropout": "no", "positions": "learned"}
    is_written = features["positions"] == "alibi" or features["mask"] == "window"
    if is_written or features["softmax"] == "queries" or features["dropout"] == "always":
        features["kernel"] = "written"
    return features


def codes(features: Features) -> set[str]:
    """Return the codes of all deviations that change numbers."""
    found = {code for name, value in features.items() for code in OPTIONS[name][value].split()}
    if features["norm"] == "unweighted":
        found.discard("shared_parameters")
    return found


def source(features: Features) -> str:
    """Return the file of a model with these features."""
    parts = (_norm, _attention, _mlp, _block, _model)
    imports = "import math\n\nimport torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
    return "\n\n".join([imports, ROTATION, *(part(features) for part in parts)])


ROTATION = """def rotated(x):
    T, D = x.shape[-2:]
    angles = torch.outer(torch.arange(T), 10000 ** (-torch.arange(0, D, 2) / D))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
"""


def _class(name: str, arguments: str, constructor: str, forward: str, base: str = "Module") -> str:
    return (
        f"class {name}(nn.{base}):\n    def __init__(self, {arguments}):\n"
        f"{indent(constructor, ' ' * 8)}\n\n    def forward(self, x):\n{indent(forward, ' ' * 8)}\n"
    )


def _bias(features: Features, name: str, value: str = "no") -> str:
    return ", bias=False" if features[name] == value else ""


def _norm(features: Features) -> str:
    eps = "1e-6" if features["norm"] in ("eps", "rms_eps") else "1e-5"
    if features["norm"] == "unweighted":
        return _class("Norm", "dim", "super().__init__()", "return F.rms_norm(x, x.shape[-1:])")
    if features["norm"] in ("rms", "rms_eps"):
        made = "super().__init__()\nself.weight = nn.Parameter(torch.ones(dim))"
        result = f"x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + {eps}) * self.weight"
        return _class("Norm", "dim", made, f"return {result}")
    made = f"super().__init__(dim, eps={eps})"
    return _class("Norm", "dim", made, "return super().forward(x)", "LayerNorm")


def _product(features: Features, size: str, heads: str) -> str:
    """Return the lines that compute y from q, k and v."""
    scale = {"width": "C ** -0.5", "none": "1.0"}.get(features["scale"], f"{size} ** -0.5")
    lines = ["q, k = rotated(q), rotated(k)"] if features["positions"] == "rotary" else []
    if features["scale"] == "query":
        lines, scale = [*lines, f"q = q * {scale}"], "1.0"
    if features["kernel"] == "fused":
        causal = features["mask"] == "causal"
        call = f"F.scaled_dot_product_attention(q, k, v, is_causal={causal}, scale={scale})"
        return "\n".join([*lines, f"y = {call}"])
    lines.append(f"scores = q @ k.transpose(-2, -1) * {scale}")
    if features["positions"] == "alibi":
        lines += [
            "place = torch.arange(T)",
            "distance = (place[:, None] - place).abs()",
            f"slopes = 0.5 ** (torch.arange({heads}) + 1.0)",
            "scores = scores - (slopes[:, None, None] if scores.ndim == 4 else 0.5) * distance",
        ]
    if features["mask"] != "none":
        hidden = "torch.ones(T, T, dtype=torch.bool).triu(1)"
        lines.append(f"hidden = {hidden}")
        if features["mask"] == "window":
            lines.append("hidden = hidden | torch.ones(T, T, dtype=torch.bool).tril(-3)")
        lines.append('scores = scores.masked_fill(hidden, float("-inf"))')
    lines.append(f"weights = scores.softmax({-1 if features['softmax'] == 'keys' else -2})")
    if features["dropout"] == "always":
        lines.append("weights = F.dropout(weights, 0.1)")
    return "\n".join([*lines, "y = weights @ v"])


def _attention(features: Features) -> str:
    bias, projects = _bias(features, "qkv_bias"), features["output"] != "no"
    out = f"self.out = nn.Linear(dim, dim{_bias(features, 'output', 'no_bias')})"
    end = "return self.out(y)" if projects else "return y"
    separate = "q, k, v = self.q(x), self.k(x), self.v(x)"
    begin = ["super().__init__()", "self.size = dim // heads"]
    if features["qkv"] == "heads":
        made = ["super().__init__()", *(f"self.{n} = nn.Linear(dim, size{bias})" for n in "qkv")]
        forward = [
            "B, T, C = x.shape",
            separate,
            _product(features, "k.shape[-1]", "1"),
            "return y",
        ]
        head = _class("Head", "dim, size", "\n".join(made), "\n".join(forward))
        list_of_heads = "nn.ModuleList(Head(dim, self.size) for _ in range(heads))"
        made = [*begin, f"self.heads = {list_of_heads}", *([out] if projects else [])]
        forward = ["y = torch.cat([head(x) for head in self.heads], dim=-1)", end]
        rest = _class("Attention", "dim, heads", "\n".join(made), "\n".join(forward))
        return f"{head}\n\n{rest}"
    width = "dim // 2" if features["key_heads"] == "half" else "dim"
    made = [*begin, f"self.q = nn.Linear(dim, dim{bias})"]
    made += [f"self.{name} = nn.Linear(dim, {width}{bias})" for name in "kv"]
    if features["qkv"] == "fused":
        made, separate = [*begin, f"self.qkv = nn.Linear(dim, 3 * dim{bias})"], (
            "q, k, v = self.qkv(x).chunk(3, dim=-1)"
        )  # fmt: skip
    made += ["self.n_head = heads", *([out] if projects else [])]
    forward = [
        "B, T, C = x.shape",
        separate,
        "q, k, v = (t.view(B, T, -1, self.size).transpose(1, 2) for t in (q, k, v))",
    ]
    if features["key_heads"] == "half":
        forward.append("k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)")
    if features["qk_norm"] == "weighted":
        made.append("self.q_norm, self.k_norm = nn.RMSNorm(self.size), nn.RMSNorm(self.size)")
        forward.append("q, k = self.q_norm(q), self.k_norm(k)")
    elif features["qk_norm"] == "plain":
        forward.append("q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])")
    forward += [_product(features, "self.size", "self.n_head")]
    forward += ["y = y.transpose(1, 2).reshape(B, T, C)", end]
    return _class("Attention", "dim, heads", "\n".join(made), "\n".join(forward))


ACTIVATIONS = {
    "tanh": 'F.gelu({}, approximate="tanh")', "erf": "F.gelu({})", "relu": "F.relu({})",
    "silu": "F.silu({})", "relu2": "F.relu({}).square()", "swiglu": "F.silu({})",
    "geglu": "F.gelu({})", "experts": "F.gelu({})",
}  # fmt: skip
ROUTED = """weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
out = torch.zeros_like(x)
for i, expert in enumerate(self.experts):
    out = out + (weights * (chosen == i)).sum(-1, keepdim=True) * expert(x)
return out"""


def _mlp(features: Features) -> str:
    kind, bias = features["mlp"], _bias(features, "mlp_bias")
    made = f"super().__init__()\nself.up = nn.Linear(dim, 4 * dim{bias})\n"
    made += f"self.down = nn.Linear(4 * dim, dim{bias})"
    inner = ACTIVATIONS[kind].format("self.up(x)")
    if kind in ("swiglu", "geglu"):
        made += f"\nself.gate = nn.Linear(dim, 4 * dim{bias})"
        inner = f"{ACTIVATIONS[kind].format('self.gate(x)')} * self.up(x)"
    name = "Expert" if kind == "experts" else "MLP"
    text = _class(name, "dim", made, f"return self.down({inner})")
    if kind == "experts":
        made = "super().__init__()\nself.router = nn.Linear(dim, 3, bias=False)\n"
        made += "self.experts = nn.ModuleList(Expert(dim) for _ in range(3))"
        text += "\n\n" + _class("MLP", "dim", made, ROUTED)
    return text


BLOCKS = {  # by the place of the norms, or the residual connection that differs
    "pre": "x = x + self.attn(self.norm_1(x))\nreturn x + self.mlp(self.norm_2(x))",
    "post": "x = self.norm_1(x + self.attn(x))\nreturn self.norm_2(x + self.mlp(x))",
    "output": "x = x + self.norm_1(self.attn(x))\nreturn x + self.norm_2(self.mlp(x))",
    "sandwich": "x = x + self.norm_3(self.attn(self.norm_1(x)))\n"
    "return x + self.norm_4(self.mlp(self.norm_2(x)))",
    "parallel": "return x + self.attn(self.norm_1(x)) + self.mlp(self.norm_2(x))",
    "parallel_shared": "y = self.norm_1(x)\nreturn x + self.attn(y) + self.mlp(y)",
    "norm_1": "x = self.norm_1(x)\nx = x + self.attn(x)\nreturn x + self.mlp(self.norm_2(x))",
    "norm_2": "x = x + self.attn(self.norm_1(x))\nx = self.norm_2(x)\nreturn x + self.mlp(x)",
    "no_attn": "x = self.attn(self.norm_1(x))\nreturn x + self.mlp(self.norm_2(x))",
    "no_mlp": "x = x + self.attn(self.norm_1(x))\nreturn self.mlp(self.norm_2(x))",
}


def _block(features: Features) -> str:
    kind = features["place"] if features["residual"] == "usual" else features["residual"]
    forward = BLOCKS[kind]
    made = ["super().__init__()", "self.attn, self.mlp = Attention(dim, heads), MLP(dim)"]
    norms = [f"norm_{n}" for n in range(1, 5) if f"norm_{n}" in forward]
    made += [f"self.{norm} = Norm(dim)" for norm in norms]
    if features["branch_weight"] == "yes":
        made += [f"self.weight_{n} = nn.Parameter(0.5 * torch.rand(dim))" for n in (1, 2)]
        forward = forward.replace("self.attn(", "self.weight_1 * self.attn(")
        forward = forward.replace("self.mlp(", "self.weight_2 * self.mlp(")
    return _class("Block", "dim, heads", "\n".join(made), forward)


SINUSOIDS = """t = torch.arange(T)[:, None] * 10000 ** (-torch.arange(0, self.dim, 2) / self.dim)
x = x + torch.stack([t.sin(), t.cos()], dim=-1).flatten(1)"""


def _model(features: Features) -> str:
    made = [
        "super().__init__()",
        "self.dim = n_embd",
        "self.tok = nn.Embedding(vocab_size, n_embd)",
    ]
    scale = " * math.sqrt(self.dim)" if features["embedding_scale"] == "yes" else ""
    forward = ["T = x.shape[1]", f"x = self.tok(x){scale}"]
    if features["positions"] == "learned":
        made.append("self.pos = nn.Embedding(block_size, n_embd)")
        forward.append("x = x + self.pos(torch.arange(T))")
    elif features["positions"] == "sinusoidal":
        forward.append(SINUSOIDS)
    if features["embedding_norm"] == "yes":
        made.append("self.tok_norm = Norm(n_embd)")
        forward.append("x = self.tok_norm(x)")
    if features["projection"] != "no":
        made.append("self.projection = nn.Linear(n_embd, n_embd)")
    if features["projection"] == "embedding":
        forward.append("x = self.projection(x)")
    made.append("self.blocks = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))")
    forward.append("for block in self.blocks:\n    x = block(x)")
    if features["final_norm"] == "yes":
        made.append("self.norm = Norm(n_embd)")
        forward.append("x = self.norm(x)")
    if features["projection"] == "head":
        forward.append("x = self.projection(x)")
    bias = "" if features["head"] == "bias" else ", bias=False"
    made.append(f"self.head = nn.Linear(n_embd, vocab_size{bias})")
    made += ["self.head.weight = self.tok.weight"] if features["head"] == "tied" else []
    capped = "30 * torch.tanh(self.head(x) / 30)"
    forward.append(f"return {capped if features['cap'] == 'yes' else 'self.head(x)'}")
    arguments = "vocab_size, block_size, n_embd, n_head, n_layer"
    return _class("GPT", arguments, "\n".join(made), "\n".join(forward))
