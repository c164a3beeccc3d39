"""Mutations, which depend only on their seed, index and kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.faults.builder import build, tokenizer_json, write_json
from tests.fuzz.by_bytes import mutate_bytes
from tests.fuzz.by_json import mutate_header, mutate_json
from tests.fuzz.by_pickle import mutate_old_style, mutate_zip, mutate_zipped_pickle

Files = dict[str, bytes]
Mutator = Callable[[bytes, Random], bytes]


# Kind → the layout of its checkpoint, and the mutators of each of its files. The bytes of all of
# these files may be changed, too.
KINDS: dict[str, tuple[str, dict[str, list[Mutator]]]] = {
    "safetensors": ("safetensors", {"model.safetensors": [mutate_header]}),
    "prefixed": ("prefixed", {"model.safetensors": [mutate_header]}),
    "shards": (
        "shards",
        {
            "model.safetensors.index.json": [mutate_json],
            "model-00001-of-00002.safetensors": [mutate_header],
        },
    ),
    "bin": ("bin", {"pytorch_model.bin": [mutate_zip, mutate_zipped_pickle]}),
    "legacy": ("legacy", {"pytorch_model.bin": [mutate_old_style]}),
    "nanogpt": ("nanogpt", {"ckpt.pt": [mutate_zip, mutate_zipped_pickle]}),
    "mingpt": (
        "mingpt",
        {"config.json": [mutate_json, mutate_json], "model.pt": [mutate_zipped_pickle]},
    ),
    "config": ("safetensors", {"config.json": [mutate_json, mutate_json]}),
    "vocab": ("safetensors", {"vocab.json": [mutate_json], "merges.txt": []}),
    "tokenizer": ("safetensors", {"tokenizer.json": [mutate_json, mutate_json]}),
}


@cache
def seed_files(kind: str) -> Files:
    """Return the files of a valid checkpoint."""
    with TemporaryDirectory() as name:
        folder = build(Path(name), KINDS[kind][0])
        if kind == "tokenizer":
            write_json(folder / "tokenizer.json", tokenizer_json())
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def mutation(seed: int, index: int, kinds: list[str]) -> tuple[str, Files]:
    """Return the kind and the files of mutation `index`."""
    kind = kinds[index % len(kinds)]
    rng, files = Random(f"{seed} {index} {kind}"), dict(seed_files(kind))
    name = rng.choice(list(KINDS[kind][1]))
    others = [data for other, data in files.items() if other != name]

    def of_bytes(data: bytes, rng: Random) -> bytes:
        return mutate_bytes(data, rng, rng.choice(others))

    files[name] = rng.choice([of_bytes, *KINDS[kind][1][name]])(files[name], rng)
    return kind, files
