"""The hub's cache: concurrent use, killed processes, read-only and linked folders, damage."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from tests.conftest import MakeCheckpoint, noisy_reference
from tests.hub_client import Outcome, check_hub_error, fetch_all, files_of, start
from tests.hub_server import HubServer

NOBODY = 65534
REPO, WEIGHTS = "org/tiny", "model.safetensors"


@pytest.fixture
def hub(tiny: Path) -> Iterator[HubServer]:
    """A hub with one repository."""
    with HubServer() as hub:
        hub.push(REPO, tiny)
        yield hub


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A path for HF_HOME that every user may read, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "home"


def fetch_one(home: Path, hub: HubServer, verify: bool = False, **settings: str) -> Outcome:
    (outcome,) = fetch_all(home, [(REPO, None, verify)], url=hub.url, **settings)
    return outcome


def offline(home: Path, hub: HubServer, verify: bool = False) -> Outcome:
    return fetch_one(home, hub, verify, HF_HUB_OFFLINE="1")


def load_as_nobody(home: Path, hub: HubServer, folder: Path) -> Outcome:
    """Load as a user who may read `home` but not write to it."""
    for path in (home, *home.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    user = NOBODY if os.getuid() == 0 else 0
    hub.push(REPO, folder, "v1")  # a revision that cannot be recorded in the cache
    (outcome,) = fetch_all(home, [(REPO, "v1")], url=hub.url, load=True, user=user)
    for path in (home, *home.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)  # so that the folder can be deleted
    return outcome


def test_two_processes_may_fetch_concurrently(hub: HubServer, tiny: Path, tmp_path: Path) -> None:
    hub.faults[REPO, WEIGHTS] = "slow"
    both = [start(tmp_path, [(REPO, None)], url=hub.url, load=True) for _ in range(2)]
    found = [process.outcomes()[0] for process in both]
    assert [outcome["files"] for outcome in found] == [files_of(tiny)] * 2
    assert found[0]["weights"] == found[1]["weights"]


def test_after_a_kill_the_previous_commit_is_complete_and_the_new_one_can_be_fetched(
    hub: HubServer, tiny: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    assert fetch_one(tmp_path, hub)["files"] == files_of(tiny)
    newer = make_checkpoint(seed=1)
    hub.push(REPO, newer)
    hub.faults[REPO, WEIGHTS] = "stall"
    process = start(tmp_path, [(REPO, None)], url=hub.url)
    assert hub.half_sent.wait(60)
    process.kill()
    del hub.faults[REPO, WEIGHTS]
    assert offline(tmp_path, hub, verify=True)["files"] == files_of(tiny)
    assert fetch_one(tmp_path, hub, verify=True)["files"] == files_of(newer)
    assert offline(tmp_path, hub, verify=True)["files"] == files_of(newer)


def test_a_complete_read_only_cache_is_used(hub: HubServer, tiny: Path, open_home: Path) -> None:
    fetch_one(open_home, hub)
    outcome = load_as_nobody(open_home, hub, tiny)
    assert outcome.get("files") == files_of(tiny), outcome
    assert outcome["weights"]


def test_an_empty_read_only_cache_is_an_error_that_names_its_path(
    hub: HubServer, tiny: Path, open_home: Path
) -> None:
    open_home.mkdir()
    outcome = load_as_nobody(open_home, hub, tiny)
    check_hub_error(
        outcome, f"the cache at {open_home}/hub cannot be written", "Permission", "HF_HOME"
    )


def test_a_cache_behind_a_symbolic_link_is_used(hub: HubServer, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert fetch_one(tmp_path / "link", hub)["files"] == files_of(tiny)
    assert offline(tmp_path / "real", hub)["files"] == files_of(tiny)
    assert offline(tmp_path / "link", hub, verify=True)["files"] == files_of(tiny)


def test_a_cache_without_symbolic_links_is_used_but_cannot_be_verified(
    hub: HubServer, tiny: Path, tmp_path: Path
) -> None:
    outcome = fetch_one(tmp_path, hub, verify=True, HF_HUB_DISABLE_SYMLINKS="1")
    assert outcome["files"] == files_of(tiny)
    assert not any(path.is_symlink() for path in Path(outcome["folder"]).iterdir())
    check_hub_error(
        offline(tmp_path, hub, verify=True), "cannot be verified", WEIGHTS, "without verify"
    )


def test_a_full_disk_is_an_error_and_leaves_no_partial_files(
    hub: HubServer, tiny: Path, tmp_path: Path
) -> None:
    (outcome,) = fetch_all(tmp_path, [(REPO, None)], url=hub.url, largest=50_000)
    where = f"the cache at {tmp_path}/hub cannot be written"
    check_hub_error(outcome, f"{WEIGHTS} of '{REPO}'", where, "File too large", "Free space")
    check_hub_error(offline(tmp_path, hub), "lacks config.json and weights")
    assert fetch_one(tmp_path, hub, verify=True)["files"] == files_of(tiny)


@pytest.mark.parametrize("fault", ["500", "web page", "gated"])
def test_a_complete_cache_is_used_if_the_hub_fails_but_not_if_it_refuses_access(
    hub: HubServer, tiny: Path, tmp_path: Path, fault: str
) -> None:
    fetch_one(tmp_path, hub)
    hub.faults[REPO, ""] = fault
    outcome = fetch_one(tmp_path, hub)
    if fault == "gated":
        check_hub_error(outcome, "403, access is restricted", "HF_TOKEN")
    else:
        assert outcome["files"] == files_of(tiny)
        assert "Using commit" in outcome["stderr"]


def test_a_truncated_file_in_the_cache_is_fetched_again(
    hub: HubServer, tiny: Path, tmp_path: Path
) -> None:
    folder = Path(fetch_one(tmp_path, hub)["folder"])
    os.truncate(folder / WEIGHTS, 1000)
    check_hub_error(offline(tmp_path, hub, verify=True), WEIGHTS, "SHA-256 is", "Delete")
    assert fetch_one(tmp_path, hub, verify=True)["files"] == files_of(tiny)


@pytest.mark.parametrize("missing", ["link", "blob"])
def test_offline_an_incomplete_cache_is_an_error_that_lists_the_missing_files(
    hub: HubServer, tmp_path: Path, missing: str
) -> None:
    noisy_reference(2).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    gaps = {"a": ["config.json"], "b": [], "c": ["config.json"], "d": []}
    shards = sorted(path.name for path in (tmp_path / "sharded").glob("model-*"))
    gaps["b"] += shards[1:3]
    gaps["c"] += shards[:1]
    gaps["d"] += [*shards, "model.safetensors.index.json"]
    requests = [(f"org/{name}", None) for name in gaps]
    for repo, _ in requests:
        hub.push(repo, tmp_path / "sharded")
    home = tmp_path / "home"
    for outcome, gap in zip(fetch_all(home, requests, url=hub.url), gaps.values(), strict=True):
        for name in gap:
            path = Path(outcome["folder"]) / name
            (path if missing == "link" else path.resolve()).unlink()
    found = fetch_all(home, requests, url=hub.url, HF_HUB_OFFLINE="1")
    gaps["d"] = ["weights (model.safetensors or pytorch_model.bin, whole or in shards)"]
    for outcome, gap in zip(found, gaps.values(), strict=True):
        check_hub_error(outcome, "HF_HUB_OFFLINE is set", f"lacks {' and '.join(gap)}.")
    for outcome in fetch_all(home, requests, url=hub.url):
        assert outcome["files"] == files_of(tmp_path / "sharded")


def test_a_cache_that_another_program_filled_is_used(
    hub: HubServer, tiny: Path, tmp_path: Path
) -> None:
    snapshot_download(
        REPO, endpoint=hub.url, cache_dir=tmp_path / "hub", allow_patterns=["*.safetensors", "c*"]
    )
    found = offline(tmp_path, hub, verify=True)
    assert found["files"] == files_of(tiny, WEIGHTS, "config.json")
    before = len(hub.log)
    assert fetch_one(tmp_path, hub)["files"] == files_of(tiny)
    asked = {request.path.split("/")[-1] for request in hub.log[before:]}
    assert asked == {"main", "generation_config.json"}


def test_unknown_files_in_the_cache_are_kept(hub: HubServer, tmp_path: Path) -> None:
    folder = Path(fetch_one(tmp_path, hub)["folder"])
    (folder / "notes.txt").write_text("mine")
    shutil.rmtree(folder.parents[1] / "refs")
    fetch_one(tmp_path, hub)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder.parents[1] / "refs" / "main").read_text() == folder.name
