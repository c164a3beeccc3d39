"""Source files with a class GPT whose constructor receives its sizes in one of the usual ways."""

from __future__ import annotations

# The order and the names of the arguments of `Core` give no hint at their meaning.
CORE = """
import typing
from dataclasses import dataclass
from types import SimpleNamespace
import torch
from torch import nn

class Core(nn.Module):
    def __init__(self, a1, a2, a3, a4, a5, a6=None):
        super().__init__()
        self.sizes, self.extra = (a1, a2, a3, a4, a5), a6
"""
DATACLASS = """
@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    flash: str = "auto"
    activation: str = "tanh-gelu"
"""
BASE = """
class Base(Core):
    def __init__(self, n_vocab, n_ctx, dim, depth, heads):
        super().__init__(n_vocab, n_ctx, dim, depth, heads)
"""
READ = "c.vocab_size, c.block_size, c.n_embd, c.n_layer, c.n_head"


def gpt(signature: str, sizes: str, before: str = "") -> str:
    """Return the source of a class GPT with this signature, which passes these sizes to `Core`."""
    return (
        f"\nclass GPT(Core):\n    def __init__(self{signature}):\n"
        f"        {before}\n        super().__init__({sizes})\n"
    )


def _takes(names: str, star: str = "") -> str:
    """Return a class whose constructor's arguments are the sizes."""
    return gpt(f", {star}{names}", ", ".join(n.split("=")[0] for n in names.split(", ")))


STYLES = {
    "arguments": _takes("n_vocab, ctx, width, depth, heads"),
    "defaults": _takes("vocab_size=50257, max_len=64, d_model=8, num_layers=6, nhead=8"),
    "keyword only": _takes("V_O_C_A_B, seqLen, dModel, N_BLOCKS, numHeads", star="*, "),
    "in no table": _takes("size_of_vocab, the_seq_len, token_embed_width, all_layers, head_num=9"),
    "absolute positions": _takes("n_vocab, max_abs_position, width, depth, heads"),
    "network depth": _takes("n_vocab, ctx, width, network_depth, heads"),
    "weights that have a shape": """
class Unit:
    scale = 1

ONE = Unit.scale
""" + gpt(
        ", n_vocab, ctx, width, depth, heads, pretrained_embeddings=None",
        "n_vocab, ctx, width, depth, heads",
        "width = width if pretrained_embeddings is None else pretrained_embeddings.shape[1]",
    ),
    "channels": _takes("n_vocab, max_context, chan_dim, Nx, n_heads"),
    "one letter": _takes("V, T, C, L, H"),
    "numbers": _takes("vocab_size, block_size, embd_number, layer_number, head_number"),
    "embedded": _takes("vocab_size, block_size, embedded_dim, num_layers, num_heads"),
    "kwargs that are kept": """
class GPT(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.cfg = kwargs
        names = self.cfg["vocab_size"], self.cfg["n_ctx"], self.cfg["n_embd"]
        self.sizes = (*names, self.cfg["n_layer"], self.cfg["n_head"])
""",
    "kwargs of a base": BASE + """
class GPT(Base):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
""",
    "inherited": BASE + """
class GPT(Base):
    pass
""",
    "dict": """
class GPT(Core):
    def __init__(self, cfg):
        self.cfg, n = cfg, cfg["n_layers"]
        ctx = self.cfg["context_length"]
        super().__init__(cfg["vocab_size"], ctx, cfg["emb_dim"], n, cfg["n_heads"])
""",
    "dict by get": """
class GPT(Core):
    def __init__(self, cfg: dict):
        vocab, block = cfg.get("vocab_size", 1), cfg.get("block_size")
        super().__init__(vocab, block, cfg["emb_dim"], cfg["n_layers"], cfg.pop("n_heads"))
""",
    "dict unpacked": BASE + """
class GPT(Base):
    def __init__(self, settings):
        super().__init__(**settings)
""",
    "dict with default": """
BASE = {"magic": 7, "n": 1}
class GPT(Core):
    def __init__(self, c=BASE):
        super().__init__(c["vocab"], c["ctx"], c["dim"], c["depth"], c["heads"], c["magic"] / 7)
""",
    "attributes": gpt(", config", READ.replace("c.", "config.")),
    "attributes, renamed": gpt(", hp", READ, "self.hp = hp; c = self.hp"),
    "attributes by getattr": """
class GPT(Core):
    def __init__(self, c):
        ctx, dim = getattr(c, "n_ctx"), getattr(c, "dim", 5)
        super().__init__(c.vocab_size, ctx, dim, c.depth, c.heads)
""",
    "attributes and items": gpt(", c", 'c["vocab_size"], c["n_ctx"], c.dim, c.depth, c["heads"]'),
    "hidden size": gpt(
        ", config",
        "config.vocab_size, config.n_ctx, config.hidden_size, config.n_layer, config.n_head",
    ) + "\n    def width(self):\n        return self.tok.embedding_dim\n",
    "nested": """
class GPT(Core):
    def __init__(self, config):
        m = config.model
        super().__init__(config.data.vocab_size, config.data.n_ctx, m.dim, m.depth, m.heads)
""",
    "nested dict": """
CONFIG = {"model": {"dim": 1, "depth": 1, "heads": 1, "magic": 7}, "data": {"vocab": 2, "ctx": 3}}
class GPT(Core):
    def __init__(self, cfg):
        m, d = cfg["model"], cfg["data"]
        super().__init__(d["vocab"], d["ctx"], m["dim"], m["depth"], m["heads"], m["magic"])
""",
    "sections by get": """
class GPT(Core):
    def __init__(self, cfg):
        m, self.data = cfg["NET_PART"], cfg.get("TEXTS", {})
        vocab = cfg.get("VOCABULARY", {}).get("vocab_size", 1)
        super().__init__(vocab, self.data["n_ctx"], m.get("dim", 3), m["depth"], m["heads"])
""",
    "config classes in one": """
@dataclass
class NetPart:
    dim: int
    depth: int = 2
    heads: int = 3
class Texts:
    def __init__(self, vocab_size=4, n_ctx=5):
        self.vocab_size, self.n_ctx = vocab_size, n_ctx
@dataclass
class Everything:
    net: NetPart
    texts: Texts = None
    def __post_init__(self):
        self.texts = self.texts or Texts()
class GPT(Core):
    def __init__(self, config: Everything):
        c, d = config.net, config.texts
        super().__init__(d.vocab_size, d.n_ctx, c.dim, c.depth, c.heads)
""",
    "kwargs of a part": BASE + """
class Part:
    def __init__(self, rate, **kwargs):
        self.sizes = kwargs["n_vocab"], kwargs.get("n_ctx", 5)
class Parts:
    def __init__(self, dim, depth, heads=3, **kw):
        self.sizes = (*Part(0.5, **kw).sizes, dim, depth, heads)
class GPT(nn.Module):
    def __init__(self, depth, **kwargs):
        super().__init__()
        self.sizes = Parts(depth=depth, **kwargs).sizes
""",
    "annotated dataclass": DATACLASS + gpt(", c: GPTConfig", READ),
    "annotated by string": DATACLASS + gpt(', c: "typing.Optional[GPTConfig]" = None', READ),
    "dataclass by default": DATACLASS + gpt(", x=GPTConfig()", READ, "c = x"),
    "dataclass by name": DATACLASS + """
class TrainConfig:
    n_embd = 3
""" + gpt(", c", f"{READ}, c.flash"),
    "dataclass or default": DATACLASS + gpt(", c=None", READ, "c = c or GPTConfig()"),
    "named tuple": """
class GPTConfig(typing.NamedTuple):
    block_size: int
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
""" + gpt(", c", READ),
    "class of constants": """
class ModelArgs:
    dim = 5
    depth = 6
    heads = 7
    vocab = 8
    def __init__(self):
        self.ctx = 9
class GPT(Core):
    def __init__(self, args: ModelArgs):
        super().__init__(args.vocab, args.ctx, args.dim, args.depth, args.heads)
""",
    "minGPT": gpt(", config", READ, "c = config; assert c.model_type is None"),
    "config of kwargs": """
class GPTConfig:
    def __init__(self, vocab_size, block_size, **kwargs):
        self.vocab_size, self.block_size = vocab_size, block_size
        self.__dict__.update(kwargs)
""" + gpt(", c: GPTConfig", READ),
    "globals": """
vocab_size, block_size, n_embd, n_layer, n_head = 65, 256, 384, 6, 6
""" + gpt("", READ.replace("c.", "")),
    "globals and an argument": """
block_size, n_embd, n_layer, n_head = 256, 384, 6, 6
""" + gpt(", vocab_size", READ.replace("c.", "")),
    "global dict": """
HP = {"vocab_size": 1, "ctx": 2, "dim": 3, "depth": 4, "heads": 5}
""" + gpt("", 'HP["vocab_size"], HP["ctx"], HP["dim"], HP["depth"], HP["heads"]'),
    "global class": """
class Config:
    vocab_size = 1
    block_size = 2
    n_embd = 3
    n_layer = 4
    n_head = 5
""" + gpt("", READ.replace("c.", "Config.")),
    "global sections": """
CFG = {"data": {"vocab_size": 65, "n_ctx": 8}, "net": {"dim": 32, "depth": 3, "heads": 2}}
""" + gpt("", "*CFG['data'].values(), *CFG['net'].values()"),
    "global constants": """
class Hyper:
    vocab, ctx, dim, layers, heads = 65, 8, 32, 2, 2
""" + gpt("", "Hyper.vocab, Hyper.ctx, Hyper.dim, Hyper.layers, Hyper.heads"),
    "a letter beside its name": gpt(
        ", vocab_size, T, d_model, L, n_heads, d=1", "vocab_size, T, d_model, L, n_heads, d"
    ),
    "global dataclass": DATACLASS + "\nc = GPTConfig()\n" + gpt("", READ),
}  # fmt: skip
