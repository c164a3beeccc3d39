"""ctranslate2 generates the same ids from a converted export as compat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from compat import generate, load_pretrained, load_tokenizer, save_pretrained
from tests.loading_common import both_dialects

ctranslate2 = pytest.importorskip("ctranslate2")
pytestmark = pytest.mark.interop


@both_dialects
@pytest.mark.parametrize("limit", ["5GB", "1MB"])
def test_ctranslate2_generates_the_same_ids(tmp_path: Path, dialect: str, limit: str) -> None:
    model, tokenizer = load_pretrained("demo", dialect), load_tokenizer("demo")
    export, converted = tmp_path / "export", tmp_path / "converted"
    save_pretrained(model, export, tokenizer="demo", max_shard_size=limit)
    ctranslate2.converters.TransformersConverter(str(export)).convert(str(converted))
    names = {i: name for name, i in json.loads((export / "vocab.json").read_text()).items()}
    generator = ctranslate2.Generator(str(converted), device="cpu", compute_type="float32")
    for text in ("ROMEO:\nI ", "First Citizen:", "the"):
        prompt = tokenizer.encode(text)
        ours = generate(
            model, torch.tensor([prompt]), max_new_tokens=60, temperature=0, stop_ids=()
        )
        theirs = generator.generate_batch(
            [[names[i] for i in prompt]],
            max_length=60,
            min_length=60,
            beam_size=1,
            end_token=[],
            include_prompt_in_result=False,
        )
        assert theirs[0].sequences_ids[0] == ours[0, len(prompt) :].tolist()
