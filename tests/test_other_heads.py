"""Checkpoints with a head for another task: the transformer is loaded and the head is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compat import check_parity, load_pretrained
from compat.checkpoint import open_checkpoint
from compat.errors import CheckpointError
from tests.conftest import TINY
from tests.loading_common import both_dialects, ids

HEADS = {
    transformers.GPT2ForSequenceClassification: ("sequence classification", ["score.weight"]),
    transformers.GPT2ForTokenClassification: (
        "token classification",
        ["classifier.weight", "classifier.bias"],
    ),
    transformers.GPT2ForQuestionAnswering: (
        "question answering",
        ["qa_outputs.weight", "qa_outputs.bias"],
    ),
    transformers.GPT2DoubleHeadsModel: (
        "multiple choice",
        ["multiple_choice_head.summary.weight", "multiple_choice_head.summary.bias"],
    ),
}
each_head = pytest.mark.parametrize("cls", HEADS, ids=lambda cls: cls.__name__)
Make = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Make:
    """A function that saves a model of one of the classes with noise on every parameter."""

    def save(cls: Any, **changes: Any) -> Path:
        torch.manual_seed(7)
        config = transformers.GPT2Config(**TINY, initializer_range=0.2, pad_token_id=0, **changes)
        model = cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
        return tmp_path

    return save


@each_head
@both_dialects
def test_the_transformer_is_loaded_and_the_head_is_named(
    save: Make, cls: Any, dialect: str
) -> None:
    folder = save(cls, num_labels=5)
    checkpoint = open_checkpoint(folder)
    task, names = HEADS[cls]
    assert checkpoint.notes == [f"ignored the head for {task}: {', '.join(names)}"]
    reference = transformers.GPT2Model.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden_states = reference(ids()).last_hidden_state
        expected = hidden_states @ reference.wte.weight.t()
        found = load_pretrained(folder, dialect)(ids())
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@each_head
@both_dialects
def test_the_loaded_transformer_has_parity(save: Make, cls: Any, dialect: str) -> None:
    assert check_parity(dialect, save(cls)).passed


@each_head
def test_a_missing_untied_language_model_head_is_reported(save: Make, cls: Any) -> None:
    """With untied embeddings, the embedding cannot replace the head."""
    folder = save(cls, tie_word_embeddings=False)
    if cls is transformers.GPT2DoubleHeadsModel:  # also has a language model head
        assert not open_checkpoint(folder).config.tie_word_embeddings
        return
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        open_checkpoint(folder)


def test_an_unknown_head_is_refused(save: Make, tmp_path: Path) -> None:
    folder = save(transformers.GPT2LMHeadModel)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    torch.save({**model.state_dict(), "value_head.weight": torch.ones(1, 24)}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match=r"1 unexpected: value_head\.weight"):
        open_checkpoint(tmp_path / "a.bin")
