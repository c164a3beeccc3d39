"""Arguments that only the user's calls reveal, for example `model = GPT("tiny", (V, T))`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compat import AdaptError, GPT2Config
from compat.user_models import construct_with_call, load_target

CONFIG = GPT2Config(vocab_size=97, n_positions=48, n_embd=24, n_layer=3, n_head=4)
MODEL = """
import argparse
from types import SimpleNamespace

import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, heads, kind):
        super().__init__()
        assert width % heads == 0 and kind in {"global": 1, "local": 2}
        self.heads, self.kind = heads, kind
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x)

class Embedding(nn.Module):
    def __init__(self, words, n, d):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, d), nn.Embedding(n, d)

    def forward(self, ids):
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))

class GPT(nn.Module):
    def __init__(self, parts, blocks, after):
        super().__init__()
        self.parts = parts
        if not isinstance(parts, nn.Module):
            (words, n, width), heads, kinds = parts
            self.parts = Embedding(words, n, width)
            blocks = nn.ModuleList(Block(width, h, k) for h, k in zip(heads, kinds))
            after = nn.Sequential(after(width), nn.Linear(width, words))
        self.blocks, self.after = blocks, after

    def forward(self, ids):
        x = self.parts(ids)
        for block in self.blocks:
            x = block(x)
        return self.after(x)
"""
CALLS = {
    "names of sizes": '''
def train(path):
    text = open(path).read()
    vocab_size, block_size, n_embd = len(set(text)), 64, 256
    n_layer = 6
    n_head = 8
    heads = [n_head] * n_layer
    kinds = ["global"] * n_layer
    model = GPT(((vocab_size, block_size, n_embd), heads, kinds), None, nn.LayerNorm).cuda()
''',
    "options of the command line": '''
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--d-model", default=256)
    parser.add_argument("--ctx", "-c", default=64)
    parser.add_argument("--layers", default=6)
    parser.add_argument("--heads", default=8)
    args = parser.parse_args()
    sizes = (50257, args.ctx, args.d_model)
    model = GPT((sizes, [args.heads] * args.layers, args.layers * ["global"]), None, nn.LayerNorm)
''',
    "entries of a config": '''
CONFIG = dict(width=256, n_ctx=64, n_layer=6, n_head=8, kind="global")

def main():
    cfg = SimpleNamespace(**CONFIG)
    kinds = [cfg.kind for _ in range(cfg.n_layer)]
    data = load_data()
    model = GPT(((data.vocab_size, cfg.n_ctx, cfg.width), [cfg.n_head] * cfg.n_layer, kinds), None,
                after=nn.LayerNorm)
''',
    "modules": '''
def main():
    V, N, D, L, H = 65, 64, 256, 6, 8
    blocks = nn.ModuleList([Block(D, H, "global") for _ in range(L)])
    model = GPT(Embedding(V, N, D), blocks, nn.Sequential(nn.LayerNorm(D), nn.Linear(D, V)))
''',
    "a dictionary that is passed on": '''
def main():
    n_ctx, width, n_layer, n_head = 64, 256, 6, 8
    sizes = ((load_data().vocab_size, n_ctx, width), [n_head] * n_layer, ["global"] * n_layer)
    trainer = Trainer(GPT, {"parts": sizes, "blocks": None, "after": nn.LayerNorm})
''',
}  # fmt: skip


def built(tmp_path: Path, files: dict[str, str]) -> tuple[Any, str]:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return construct_with_call(load_target(f"{tmp_path / 'own.py'}:GPT"), CONFIG)


@pytest.mark.parametrize("place", ["own.py", "train.py"])
@pytest.mark.parametrize("style", CALLS)
def test_the_users_call_is_repeated_with_the_sizes_of_the_checkpoint(
    tmp_path: Path, style: str, place: str
) -> None:
    files = {"own.py": MODEL, "pyproject.toml": ""}
    imports = "import argparse\nfrom types import SimpleNamespace\nfrom own import *\n"
    files[place] = files.get(place, imports) + CALLS[style]
    model, _ = built(tmp_path, files)
    assert model.parts.tokens.weight.shape == (97, 24)
    assert model.parts.positions.weight.shape == (48, 24)
    assert [block.heads for block in model.blocks] == [4, 4, 4]
    assert {block.kind for block in model.blocks} == {"global"}
    assert model.after[1].weight.shape == (97, 24)


@pytest.mark.parametrize("passed", ["Attention", "lambda d: Attention(d)"])
def test_a_class_that_only_the_call_names_is_imported(tmp_path: Path, passed: str) -> None:
    model = "import torch\nfrom torch import nn\n\nclass GPT(nn.Module):\n"
    model += "    def __init__(self, vocab_size, n_embd, make):\n        super().__init__()\n"
    model += (
        "        self.table = nn.Embedding(vocab_size, n_embd)\n        self.made = make(n_embd)\n"
    )
    model += "\n    def forward(self, ids):\n"
    model += "        return self.made(self.table(ids)) @ self.table.weight.T\n"
    part = "from torch import nn\n\nclass Attention(nn.Linear):\n"
    part += "    def __init__(self, n_embd):\n        super().__init__(n_embd, n_embd)\n"
    call = "from own import GPT\nfrom part import Attention\n\n"
    call += f"model = GPT(vocab_size=65, n_embd=64, make={passed})\nraise OSError\n"
    files = {"own.py": model, "part.py": part, "train.py": call, "pyproject.toml": ""}
    built_model, call = built(tmp_path, files)
    assert type(built_model.made).__name__ == "Attention"
    assert f"make={'<lambda>' if 'lambda' in passed else 'Attention'}" in call
    assert built_model.table.weight.shape == (97, 24)


def test_a_call_of_another_class_with_the_same_name_is_ignored(tmp_path: Path) -> None:
    files = {"own.py": MODEL, "pyproject.toml": "", "other.py": MODEL + CALLS["modules"]}
    with pytest.raises(AdaptError, match="GPT needs the arguments"):
        built(tmp_path, files)


def test_no_other_code_of_the_call_is_executed(tmp_path: Path) -> None:
    """A call of another function has no value, so its argument stays unknown."""
    call = '\ndef main():\n    GPT(open("written", "w"), None, nn.LayerNorm)\n'
    with pytest.raises(AdaptError, match="GPT needs the arguments"):
        built(tmp_path, {"own.py": MODEL + call, "pyproject.toml": ""})
    assert not (tmp_path / "written").exists()


def test_sections_of_a_config_class_that_only_a_script_imports_have_the_checkpoints_sizes(
    tmp_path: Path,
) -> None:
    model = "import torch\nfrom torch import nn\n\nclass GPT(nn.Module):\n"
    model += "    def __init__(self, config):\n        super().__init__()\n"
    model += "        self.table = nn.Embedding(config.vocab_size, config.n_embd)\n"
    model += "        part = config.Mixer\n        assert part.kinds == ('a', 'b')\n"
    model += "        self.mix = nn.Linear(part.n_embd, part.n_embd)\n"
    model += "\n    def forward(self, ids):\n"
    model += "        return self.mix(self.table(ids)) @ self.table.weight.T\n"
    config = "class Mixer:\n    n_embd = 64\n    kinds = ('a', 'b')\n\nclass ModelConfig:\n"
    config += "    vocab_size = 65\n    n_embd = 64\n    Mixer = Mixer\n"
    config += "\n    @property\n    def head_dim(self):\n        raise ValueError('no heads')\n"
    call = "from own import GPT\nfrom sizes import ModelConfig\n\n"
    call += "config = ModelConfig()\nmodel = GPT(config)\nraise OSError\n"
    files = {"own.py": model, "sizes.py": config, "train.py": call, "pyproject.toml": ""}
    found, _ = built(tmp_path, files)
    assert (found.table.weight.shape, found.mix.weight.shape) == ((97, 24), (24, 24))
