"""ctranslate2, by its own converter; the model's file can have float32 or int8 weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import ctranslate2

from benchmarks.peers import Generate

END = "<|endoftext|>"


def convert(source: Path, kind: str, folder: Path) -> None:
    """Convert with a made-up tokenizer, which the converter requires; only ids are measured."""
    with TemporaryDirectory() as beside:
        config = json.loads((source / "config.json").read_text())
        for path in [source / "config.json", *source.glob("model*")]:
            Path(beside, path.name).symlink_to(path.resolve())
        vocabulary = {token_of(i): i for i in range(config["vocab_size"] - 1)}
        vocabulary[END] = config["vocab_size"] - 1
        Path(beside, "vocab.json").write_text(json.dumps(vocabulary))
        Path(beside, "merges.txt").write_text("#version: 0.2\n")
        converter = ctranslate2.converters.TransformersConverter(beside)
        converter.convert(str(folder), quantization=kind, force=True)


def token_of(i: int) -> str:
    return f"id{i}"


def load(folder: Path, kind: str, batch: int, threads: int) -> Generate:
    generator = ctranslate2.Generator(
        str(folder), device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads
    )

    def generate(prompts: list[list[int]], new: int, tick: Callable[[], None]) -> list[list[int]]:
        def seen(step: ctranslate2.GenerationStepResult) -> bool:
            if step.batch_id == 0:  # once for the whole batch
                tick()
            return False

        results = generator.generate_batch(
            [[token_of(i) for i in prompt] for prompt in prompts],
            max_length=new,
            beam_size=1,
            end_token=[],
            include_prompt_in_result=False,
            callback=seen,
        )
        return [result.sequences_ids[0] for result in results]

    return generate
