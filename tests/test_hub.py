"""Fetching hub ids over HTTP from a local server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compat import HubError, load_pretrained
from compat.checkpoint.hub import fetch
from tests.conftest import noisy_reference
from tests.hub_client import (
    FetchRequest,
    Outcome,
    check_hub_error,
    fetch_all,
    files_of,
    hash_of,
    start,
)
from tests.hub_server import HubServer

NAMES = (
    "gpt2",
    "org/only-bin",
    "org/sharded",
    "org/both",
    "org/pinned",
    "org/pushed",
    "org/secret",
)
GPT2 = "openai-community/gpt2"  # the name to which the hub redirects `gpt2`


def weights_of(seed: int) -> str:
    state = noisy_reference(seed).state_dict()
    del state["lm_head.weight"]
    return hash_of(state)


def make_folders(root: Path) -> None:
    """Make one folder for each name; some contain additional files that are not needed."""
    for seed, name in enumerate(NAMES):
        shards = {"max_shard_size": "20KB"} if name == "org/sharded" else {}
        noisy_reference(seed).save_pretrained(root / name, **shards)
    state = load_file(root / "org/only-bin" / "model.safetensors")
    torch.save(state, root / "org/only-bin" / "pytorch_model.bin")
    (root / "org/only-bin" / "model.safetensors").unlink()
    for path in (root / "org/sharded").glob("model*"):
        shutil.copy(path, root / "org/both")
    for other in ("pytorch_model.bin", "tf_model.h5", "README.md", "onnx/model.safetensors"):
        (root / "gpt2" / other).parent.mkdir(exist_ok=True)
        (root / "gpt2" / other).write_bytes(b"not for us")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        (root / "gpt2" / name).write_text(json.dumps({"file": name}))


@dataclass
class Session:
    """The outcomes of one process that loaded several sources while the hub was running."""

    home: Path
    root: Path
    hub: HubServer
    pinned: str
    outcomes: dict[FetchRequest, Outcome]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    root, home = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("home")
    make_folders(root)
    with HubServer() as hub:
        for name in NAMES:
            hub.push(GPT2 if name == "gpt2" else name, root / name)
        hub.moved["gpt2"] = GPT2
        hub.tokens["org/secret"] = "hf_letmein"
        hub.repos["org/pushed"].to_push = root / "org/pinned"
        hub.faults["org/pushed", ""] = "push"
        pinned = hub.push("org/pinned", root / "org/pinned", "v1")
        hub.push("org/pinned", root / "gpt2")  # the newest commit of main
        requests: list[FetchRequest] = [(name, None) for name in NAMES if name != "org/pinned"]
        requests += [("org/pinned", "v1"), ("org/nowhere", None), ("org/both", "no-such-branch")]
        found = fetch_all(home, requests, url=hub.url, load=True, HF_TOKEN="hf_letmein")
        yield Session(home, root, hub, pinned, dict(zip(requests, found, strict=True)))


def test_safetensors_are_loaded_and_only_needed_files_are_requested(session: Session) -> None:
    outcome = session.outcomes["gpt2", None]
    needed = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    needed += ("tokenizer_config.json", "vocab.json", "merges.txt")
    assert outcome["weights"] == weights_of(0)
    assert outcome["files"] == files_of(session.root / "gpt2", *needed)
    assert session.hub.downloaded_files(GPT2) == set(needed)


def test_a_repository_with_only_a_pickle_is_loaded(session: Session) -> None:
    assert session.outcomes["org/only-bin", None]["weights"] == weights_of(1)
    assert "pytorch_model.bin" in session.hub.downloaded_files("org/only-bin")


def test_a_sharded_repository_is_loaded(session: Session) -> None:
    assert session.outcomes["org/sharded", None]["weights"] == weights_of(2)
    assert (
        sum(name.startswith("model-") for name in session.hub.downloaded_files("org/sharded")) > 2
    )


def test_a_single_file_is_preferred_to_shards(session: Session) -> None:
    assert session.outcomes["org/both", None]["weights"] == weights_of(3)
    weights = {
        name for name in session.hub.downloaded_files("org/both") if name.startswith("model")
    }
    assert weights == {"model.safetensors"}


def test_all_files_of_a_tag_are_requested_by_its_commit(session: Session) -> None:
    outcome = session.outcomes["org/pinned", "v1"]
    assert outcome["weights"] == weights_of(4)
    assert Path(outcome["folder"]).name == session.pinned
    requested = [request.path for request in session.hub.log if "/org/pinned/" in request.path]
    files = [path for path in requested if "/resolve/" in path]
    assert files and all(f"/resolve/{session.pinned}/" in path for path in files)
    assert {path for path in requested if path not in files} == {
        "/api/models/org/pinned/revision/v1"
    }


def test_a_push_while_files_are_fetched_does_not_mix_two_commits(session: Session) -> None:
    folder = session.root / "org/pushed"
    outcome = session.outcomes["org/pushed", None]
    assert outcome["files"] == files_of(folder)
    assert outcome["weights"] == weights_of(4)  # loaded after the push, so all of the new commit


def test_the_token_of_the_environment_is_sent_with_every_request(session: Session) -> None:
    assert session.outcomes["org/secret", None]["weights"] == weights_of(6)
    requested = [request for request in session.hub.log if "org/secret" in request.path]
    assert requested and all(request.token == "Bearer hf_letmein" for request in requested)


@pytest.mark.parametrize(
    ("unknown", "fragments"),
    [
        (("org/nowhere", None), ("'org/nowhere'", "'main'", "401, no such", "Check the name")),
        (("org/both", "no-such-branch"), ("'org/both'", "'no-such-branch'", "404, no such rev")),
    ],
)
def test_an_unknown_repository_or_revision_is_named(
    session: Session, unknown: FetchRequest, fragments: tuple[str, ...]
) -> None:
    check_hub_error(session.outcomes[unknown], *fragments, session.hub.url)


def test_a_second_fetch_makes_one_request_and_downloads_nothing(
    session: Session, tmp_path: Path
) -> None:
    shutil.copytree(session.home, tmp_path / "home", symlinks=True)
    before = len(session.hub.log)
    (outcome,) = fetch_all(tmp_path / "home", [("org/sharded", None)], url=session.hub.url)
    assert outcome["files"] == files_of(session.root / "org/sharded")
    (request,) = session.hub.log[before:]
    assert request.path == "/api/models/org/sharded/revision/main"


def test_offline_and_without_a_connection_the_cached_revision_is_used(session: Session) -> None:
    requests: list[FetchRequest] = [
        ("gpt2", None),
        ("org/pinned", "v1"),
        ("org/pinned", session.pinned),
    ]
    requests += [("org/only-bin", None), ("org/sharded", None)]
    offline = start(session.home, requests, url=session.hub.url, load=True, HF_HUB_OFFLINE="1")
    unreachable = start(session.home, requests, load=True)
    for process, found in [(offline, offline.outcomes()), (unreachable, unreachable.outcomes())]:
        assert [o["weights"] for o in found] == [weights_of(i) for i in (0, 4, 4, 1, 2)]
        reported = "Using commit" in found[0]["stderr"]
        assert reported is (process is unreachable)  # not reported to users who requested the cache


def test_offline_a_revision_that_is_not_cached_is_an_error(session: Session) -> None:
    """`main` of org/pinned was never fetched, although another revision was."""
    requests: list[FetchRequest] = [("org/pinned", None), ("org/never", "v1"), ("gpt2", "../../x")]
    offline = start(session.home, requests, HF_HUB_OFFLINE="1")
    unreachable = start(session.home, requests)
    found = [process.outcomes() for process in (offline, unreachable)]
    for outcome in found[0]:
        check_hub_error(outcome, "HF_HUB_OFFLINE is set", "lacks config.json and weights")
    for outcome in found[1]:
        check_hub_error(
            outcome, "refused", "lacks config.json and weights", "Check the name and the conn"
        )


def test_progress_is_printed_to_stderr_and_can_be_disabled(
    session: Session, tmp_path: Path
) -> None:
    request: list[FetchRequest] = [("org/both", None)]
    # If stderr is not a terminal, the client shows progress only with this variable.
    settings = {"url": session.hub.url, "TQDM_POSITION": "-1"}
    shown = start(tmp_path / "a", request, **settings)
    hidden = start(tmp_path / "b", request, **settings, HF_HUB_DISABLE_PROGRESS_BARS="1")
    printed = [process.outcomes()[0]["stderr"] for process in (shown, hidden)]
    assert "model.safetensors: 100%" in printed[0]  # stdout must stay empty
    assert printed[1] == ""


def test_the_cache_folder_can_be_configured(session: Session, tmp_path: Path) -> None:
    cache = tmp_path / "elsewhere"
    settings = {"url": session.hub.url, "HF_HUB_CACHE": str(cache)}
    (outcome,) = fetch_all(tmp_path / "home", [("org/both", None)], **settings)
    assert Path(outcome["folder"]).is_relative_to(cache)


def test_an_error_without_a_message_is_a_hub_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP libraries raise timeouts without a message."""

    def model_info(*args: object, **kwargs: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(
        HubError, match=r"'org/name' at .* could not be fetched .*: TimeoutError\.\n"
    ):
        load_pretrained("org/name")


def test_an_impossible_repository_name_is_a_hub_error() -> None:
    with pytest.raises(HubError, match=r"'org/a--b'.*\nCheck the name"):
        fetch("org/a--b", None)
