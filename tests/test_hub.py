"""Hub ids, fetched over HTTP from a small hub of our own on the loopback interface."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compat import HubError, load_pretrained
from tests.conftest import noisy_reference

# What a process prints of each [source, revision]: the weights' hash, or the error.
LOAD = """
import hashlib, json, sys
from compat import load_pretrained, to_hf_state_dict
for source, revision in json.loads(sys.argv[1]):
    try:
        state = to_hf_state_dict(load_pretrained(source, revision=revision))
    except Exception as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
    else:
        digest = hashlib.sha256()
        for name, tensor in sorted(state.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        outcome = {"weights": digest.hexdigest()}
    print("OUTCOME", json.dumps(outcome))
"""

Outcome = dict[str, str]


def load(home: Path, sources: list[tuple[str, str | None]], **env: str) -> list[Outcome]:
    """Load in a process of its own: `huggingface_hub` reads its settings when it is imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        kept.pop(name, None), kept.pop(name.upper(), None)
    settings = {
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(sources)],
        env={**kept, **settings, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return [json.loads(rest) for mark, rest in lines if mark == "OUTCOME"]


def weights_of(seed: int) -> Outcome:
    state = noisy_reference(seed).state_dict()
    del state["lm_head.weight"]
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return {"weights": digest.hexdigest()}


def make_repos(root: Path) -> None:
    """`gpt2` has other formats beside its safetensors; the rest are as they are named."""
    for seed, name in enumerate(("gpt2", "org/only-bin", "org/sharded", "org/pinned")):
        folder = root / name
        shards = {"max_shard_size": "20KB"} if name == "org/sharded" else {}
        noisy_reference(seed).save_pretrained(folder, **shards)
    state = load_file(root / "org/only-bin" / "model.safetensors")
    torch.save(state, root / "org/only-bin" / "pytorch_model.bin")
    (root / "org/only-bin" / "model.safetensors").unlink()
    shutil.copy(root / "org/only-bin" / "pytorch_model.bin", root / "gpt2")
    (root / "gpt2" / "tf_model.h5").write_bytes(b"not for us")


@dataclass
class Session:
    """One process that loaded several sources while the hub was up, and what the hub was asked."""

    home: Path
    url: str
    commit: str
    outcomes: dict[tuple[str, str | None], Outcome] = field(default_factory=dict)
    log: list[tuple[str, str, int]] = field(default_factory=list)

    def asked(self, repo: str) -> set[str]:
        """The files of a repository that were requested."""
        mark = f"/{repo}/resolve/"
        return {path.split("/")[-1] for _, path, _ in self.log if path.startswith(mark)}


@pytest.fixture(scope="module")
def session(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    spec = importlib.util.spec_from_file_location("local_hub", shared / "tools" / "local_hub.py")
    assert spec is not None and spec.loader is not None
    local_hub: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(local_hub)
    root = tmp_path_factory.mktemp("hub")
    make_repos(root)
    with local_hub.LocalHub(root) as hub:
        online = Session(tmp_path_factory.mktemp("home"), hub.url, hub.repo("org/pinned").commit)
        sources: list[tuple[str, str | None]] = [
            ("gpt2", None),
            ("org/only-bin", None),
            ("org/sharded", None),
            ("org/pinned", online.commit),
            ("org/nowhere", None),
            ("gpt2", "no-such-branch"),
        ]
        outcomes = load(online.home, sources, HF_ENDPOINT=hub.url)
        online.outcomes = dict(zip(sources, outcomes, strict=True))
        online.log = list(hub.log)
    yield online


def test_safetensors_are_loaded_and_nothing_else_is_requested(session: Session) -> None:
    assert session.outcomes["gpt2", None] == weights_of(0)
    assert {"config.json", "model.safetensors"} <= session.asked("gpt2")
    assert not {"pytorch_model.bin", "tf_model.h5"} & session.asked("gpt2")


def test_a_repository_with_only_a_pickle_is_loaded(session: Session) -> None:
    assert session.outcomes["org/only-bin", None] == weights_of(1)
    assert "pytorch_model.bin" in session.asked("org/only-bin")


def test_a_repository_in_shards_is_loaded(session: Session) -> None:
    assert session.outcomes["org/sharded", None] == weights_of(2)
    assert sum(name.startswith("model-") for name in session.asked("org/sharded")) > 2


def test_a_commit_is_loaded(session: Session) -> None:
    assert session.outcomes["org/pinned", session.commit] == weights_of(3)
    asked = [path for _, path, _ in session.log if "/org/pinned/" in path]
    assert any(f"/{session.commit}/" in path for path in asked)
    assert not any("/main" in path for path in asked)


@pytest.mark.parametrize(
    ("source", "fragments"),
    [
        (("org/nowhere", None), ("'org/nowhere'", "Check the name")),
        (("gpt2", "no-such-branch"), ("'gpt2'", "revision 'no-such-branch'")),
    ],
)
def test_what_the_hub_does_not_have_is_named(
    session: Session, source: tuple[str, str | None], fragments: tuple[str, ...]
) -> None:
    outcome = session.outcomes[source]
    assert outcome["error"] == "HubError"
    for fragment in fragments:
        assert fragment in outcome["message"]
    assert "404" in outcome["message"]


def test_offline_with_an_empty_cache_is_a_hub_error(tmp_path: Path) -> None:
    (outcome,) = load(tmp_path, [("gpt2", None)], HF_HUB_OFFLINE="1")
    assert outcome["error"] == "HubError"
    assert "'gpt2' could not be fetched" in outcome["message"]


def test_offline_after_a_first_load_works(session: Session) -> None:
    sources = [("gpt2", None), ("org/pinned", session.commit), ("org/only-bin", None)]
    outcomes = load(session.home, sources, HF_HUB_OFFLINE="1", HF_ENDPOINT=session.url)
    assert outcomes == [weights_of(0), weights_of(3), weights_of(1)]


def test_an_error_without_a_message_is_a_hub_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP libraries raise time-outs whose text is empty."""

    def snapshot_download(*args: object, **kwargs: object) -> str:
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(HubError, match="'org/name' could not be fetched"):
        load_pretrained("org/name")
