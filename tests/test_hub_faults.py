"""Each fault of the hub raises one HubError in bounded time and leaves no partial files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import noisy_reference
from tests.hub_client import Outcome, check_hub_error, fetch_all, files_of
from tests.hub_server import HubServer

WEIGHTS = "model.safetensors"
NEXT = "Check the name and the connection and try again"

# The faulty file ("" is the listing), its fault, and fragments of the error message.
FAULTS: list[tuple[str, str, tuple[str, ...]]] = [
    ("", "500", ("500 Internal Server Error", NEXT, "The cache is not complete either")),
    ("", "hang", ("timed out", NEXT, "The cache is not complete either")),
    ("", "gated", ("403, access is restricted", "HF_TOKEN")),
    ("", "bad token", ("401, the token is not valid", "HF_TOKEN")),
    ("", "web page", ("not that of a hub (Expecting value", "HF_ENDPOINT")),
    ("", "no commit", ("not that of a hub (no commit, but None)", "HF_ENDPOINT")),
    ("config.json", "500", ("500 Internal Server Error", NEXT)),
    (WEIGHTS, "500", ("500 Internal Server Error", NEXT)),
    (WEIGHTS, "hang", ("timed out", NEXT)),
    (WEIGHTS, "silent", ("timed out", NEXT)),
    (WEIGHTS, "stall", ("timed out", NEXT)),
    (WEIGHTS, "cut", ("peer closed connection", NEXT)),
    (WEIGHTS, "wrong size", ("Consistency check failed: file should be of size", NEXT)),
    (WEIGHTS, "gone", ("404, no such file, although the hub lists it", NEXT)),
    (WEIGHTS, "no etag", ("does not have an ETag", NEXT)),
    (
        WEIGHTS,
        "listed larger",
        ("was downloaded as", "but the hub states", "for commit", "fetch again"),
    ),
]
TOLERATED = ["cut once", "slow"]
IDS = [f"{file or 'listing'}-{fault}" for file, fault, _ in FAULTS]


def repo_of(file: str, fault: str) -> str:
    return f"org/{file or 'listing'}-{fault}".replace(" ", "-")


@dataclass
class Session:
    """The outcomes during every fault, and of fetches with verify after the faults were removed."""

    folder: Path
    url: str
    faulty: dict[str, Outcome]
    after: dict[str, Outcome]


@pytest.fixture(scope="module")
def session(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    home = tmp_path_factory.mktemp("home")
    faults = [(file, fault) for file, fault, _ in FAULTS] + [(WEIGHTS, f) for f in TOLERATED]
    with HubServer() as hub:
        for file, fault in faults:
            hub.push(repo_of(file, fault), tiny)
            hub.faults[repo_of(file, fault), file] = fault
        repos = [repo_of(*fault) for fault in faults]
        limits = {"HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        faulty = fetch_all(home, [(repo, None) for repo in repos], url=hub.url, **limits)
        hub.faults.clear()
        after = fetch_all(home, [(repo, None, True) for repo in repos], url=hub.url)
        yield Session(
            tiny,
            hub.url,
            dict(zip(repos, faulty, strict=True)),
            dict(zip(repos, after, strict=True)),
        )


@pytest.mark.parametrize(("file", "fault", "fragments"), FAULTS, ids=IDS)
def test_a_fault_raises_one_complete_error_in_bounded_time(
    session: Session, file: str, fault: str, fragments: tuple[str, ...]
) -> None:
    repo = repo_of(file, fault)
    outcome = session.faulty[repo]
    what = f"{file} of {repo!r}" if file else repr(repo)
    check_hub_error(outcome, f"{what} at revision 'main'", *fragments)
    assert session.url in outcome["message"] or fault == "listed larger"
    assert outcome["seconds"] < 40


@pytest.mark.parametrize("fault", TOLERATED)
def test_an_interrupted_or_slow_download_is_completed(session: Session, fault: str) -> None:
    assert session.faulty[repo_of(WEIGHTS, fault)]["files"] == files_of(session.folder)


def test_the_next_fetch_after_a_fault_has_the_correct_bytes(session: Session) -> None:
    assert len(session.after) == len(FAULTS) + len(TOLERATED)
    for repo, outcome in session.after.items():
        assert outcome.get("files") == files_of(session.folder), (repo, outcome)


# The files that are removed from a sharded repository, and a fragment of the error message.
GAPS = {
    "no-config": (["config.json"], "lacks config.json, and holds generation_config.json, model-"),
    "no-weights": (["model*"], "lacks weights (model.safetensors or pytorch_model.bin, whole"),
    "no-index": (["*index*"], "lacks weights (model.safetensors or pytorch_model.bin, whole"),
    "no-shard": (
        ["model-00002*", "model-00004*", "config.json"],
        "lacks config.json, model-00002-of-00006.safetensors and model-00004-of-00006.safetensors, "
        "and",
    ),
    "nothing": (
        ["*"],
        "lacks config.json and weights (model.safetensors or pytorch_model.bin, whole",
    ),
}


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcomes of repositories that lack files or have an invalid index."""
    root = tmp_path_factory.mktemp("gaps")
    with HubServer() as hub:
        for name in (*GAPS, "outside", "no-map", "no-json"):
            noisy_reference().save_pretrained(root / name, max_shard_size="20KB")
            for pattern in GAPS.get(name, ([], ""))[0]:
                for path in (root / name).glob(pattern):
                    path.unlink()
        index = "model.safetensors.index.json"
        (root / "outside" / index).write_text('{"weight_map": {"wte": "../../refs/main"}}')
        (root / "no-map" / index).write_text('{"weight_map": [1]}')
        (root / "no-json" / index).write_text("<html>")
        for path in root.iterdir():
            hub.push(f"org/{path.name}", path)
        requests = [(repo, None) for repo in hub.repos]
        found = fetch_all(tmp_path_factory.mktemp("home"), requests, url=hub.url, load=True)
        return dict(zip(hub.repos, found, strict=True))


@pytest.mark.parametrize("name", GAPS)
def test_missing_files_of_a_repository_are_listed(gaps: dict[str, Outcome], name: str) -> None:
    next_step = "Use another repository or revision."
    check_hub_error(
        gaps[f"org/{name}"], f"'org/{name}' at revision 'main'", GAPS[name][1], next_step
    )


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("outside", "The repository lacks ../../refs/main"),
        ("no-map", "has no 'weight_map'"),
        ("no-json", "cannot be read as JSON"),
    ],
)
def test_an_invalid_index_is_an_error(gaps: dict[str, Outcome], name: str, fragment: str) -> None:
    assert gaps[f"org/{name}"]["error"] in ("HubError", "CheckpointError")
    assert fragment in gaps[f"org/{name}"]["message"]
