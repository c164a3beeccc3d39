"""Tokenizer files are copied with saved weights, or written from a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import compat
from compat import Tokenizer, TokenizerError, load_pretrained, load_tokenizer, save_pretrained
from compat.checkpoint import open_checkpoint
from compat.checkpoint.find import DEMO
from compat.vocabulary import build_vocabulary, vocabulary_tables
from tests.conftest import MakeCheckpoint
from tests.saving_common import no_warnings
from tests.vocabularies import BYTES, END, SMALL, build_tokenizer, small_vocab

FILES = [
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
]
TEXTS = ["ROMEO:\nWhat light?", " two  spaces\t", "naïve 日本 🙂", "", "it's we'll 123,456"]


@pytest.mark.parametrize("kind", ["folder", "path", "checkpoint", "file"])
def test_the_files_of_a_source_are_copied_byte_for_byte(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, kind: str
) -> None:
    source = make_checkpoint(**SMALL)
    for name in FILES:
        (source / name).write_bytes(b"not read: \r\n\xff" + name.encode())
    sources = {
        "folder": str(source),
        "path": source,
        "checkpoint": open_checkpoint(source),
        "file": source / "model.safetensors",
    }[kind]
    files = save_pretrained(load_pretrained(source), tmp_path, tokenizer=sources)
    assert set(FILES) <= {path.name for path in files}
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()


def test_the_files_of_the_embedded_checkpoint_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source "demo" stands for the embedded checkpoint even if a folder has that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    tmp_path = tmp_path / "out"
    save_pretrained(load_pretrained("demo"), tmp_path, tokenizer="demo")
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes()


def test_the_files_are_complete_if_the_source_is_the_destination(tmp_path: Path) -> None:
    """Links in the source, such as those of the hub's cache, are replaced with files."""
    for name in ("vocab.json", "merges.txt", "config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO / name)
    save_pretrained(load_pretrained(tmp_path), tmp_path, tokenizer=tmp_path)
    assert not any(path.is_symlink() for path in tmp_path.iterdir())
    assert (tmp_path / "merges.txt").read_bytes() == (DEMO / "merges.txt").read_bytes()


def test_a_new_tokenizer_replaces_all_files_of_the_old_one(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text("old")
    model = load_pretrained("demo")
    save_pretrained(model, tmp_path)
    assert all((tmp_path / name).read_text() == "old" for name in FILES)
    save_pretrained(model, tmp_path, tokenizer="demo")
    new = {"vocab.json", "merges.txt", "tokenizer_config.json"}
    assert {path.name for path in tmp_path.iterdir()} & set(FILES) == new
    assert all((tmp_path / name).read_text() != "old" for name in new)


def test_transformers_reads_the_same_tokenizer(tmp_path: Path) -> None:
    ours = load_tokenizer("demo")
    save_pretrained(load_pretrained("demo"), tmp_path, tokenizer=ours)
    assert json.loads((tmp_path / "vocab.json").read_text()) == json.loads(
        (DEMO / "vocab.json").read_text()
    )
    with no_warnings():
        theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (type(theirs).__name__, theirs.model_max_length) == ("GPT2Tokenizer", 256)
    reloaded = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == reloaded.encode(text) == theirs(text)["input_ids"]
    assert reloaded.vocabulary == ours.vocabulary


def test_the_vocabulary_of_gpt2_is_restored(tmp_path: Path, shared: Path) -> None:
    """It is read from its files, and from tiktoken's ranks alone."""
    folder = shared / "data" / "gpt2-tokenizer"
    vocab = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().splitlines()[1:]
    vocabulary = build_vocabulary(vocab, merges, {})
    assert vocabulary_tables(vocabulary) == (vocab, merges, {})
    assert vocabulary_tables(compat.tokenizer._gpt2_of_tiktoken()) == (vocab, merges, {})


@pytest.mark.parametrize("files", [[], ["vocab.json"], ["merges.txt", "tokenizer_config.json"]])
def test_a_source_without_a_tokenizer_is_refused(
    tmp_path: Path, tiny: Path, files: list[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in files:
        (source / name).write_text("")
    with pytest.raises(TokenizerError, match=r"source has no tokenizer\.json, nor vocab\.json"):
        save_pretrained(load_pretrained(tiny), tmp_path / "new", tokenizer=source)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("tokenizer", "match"),
    [
        (build_tokenizer(small_vocab(), ["a b"], {"<s>": 258}), r"special tokens <s>\. Pass"),
        (
            build_tokenizer(small_vocab(ab=300), ["a b"], {}),
            "id 300, but the config has vocab_size",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_written_is_refused(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, tokenizer: Tokenizer, match: str
) -> None:
    model = load_pretrained(make_checkpoint(vocab_size=300, **SMALL))
    with pytest.raises(TokenizerError, match=match):
        save_pretrained(model, tmp_path / "new", tokenizer=tokenizer)
    assert not (tmp_path / "new").exists()


def test_a_padded_vocabulary_keeps_its_padding_rows(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    model = load_pretrained(make_checkpoint(vocab_size=320, **SMALL))
    save_pretrained(model, tmp_path, tokenizer=build_tokenizer(small_vocab(), ["a b"], {}))
    reloaded = load_pretrained(tmp_path)
    assert torch.equal(reloaded.tok_emb.weight, model.tok_emb.weight)
    assert load_tokenizer(tmp_path).ids_without_text(320) == list(range(258, 320))


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, int], list[str], dict[str, int]]:
    """Draw consistent merges, tokens without merges, added tokens, and ids in any order."""
    tokens, merges = list(BYTES), []
    few = st.sampled_from([*BYTES[60:70], "Ġ"])
    for _ in range(draw(st.integers(0, 12))):
        left, right = (draw(st.one_of(few, st.sampled_from(tokens[-3:]))) for _ in "lr")
        if left + right not in tokens:
            try:
                numbered = {token: i for i, token in enumerate([*tokens, left + right])}
                build_vocabulary(numbered, [*merges, f"{left} {right}"], {})
            except TokenizerError:  # a merge that tiktoken would apply differently
                continue
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    others = draw(
        st.lists(st.text(st.sampled_from("aé日🙂 Ġ"), min_size=2, max_size=3), unique=True)
    )
    tokens += [token for token in others if token not in tokens]
    tokens += draw(st.sampled_from([[], [END]]))
    added = draw(st.lists(st.sampled_from(["<s>", "日本", "a b", END]), unique=True))
    added = [token for token in added if token not in tokens]
    ids = draw(st.permutations(range(2 * (len(tokens) + len(added)))))
    vocab = dict(zip(tokens, ids, strict=False))
    return vocab, merges, dict(zip(added, ids[len(tokens) :], strict=False))


@given(tables())
def test_vocabulary_tables_inverts_build_vocabulary(
    drawn_tables: tuple[dict[str, int], list[str], dict[str, int]],
) -> None:
    vocabulary = build_vocabulary(*drawn_tables)
    vocab, merges, added = vocabulary_tables(vocabulary)
    assert merges == drawn_tables[1]
    assert build_vocabulary(vocab, merges, added) == vocabulary
