"""Cached files are compared with the hashes that the hub states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compat import HubError
from compat.checkpoint.hub import check_hashes
from tests.conftest import noisy_reference
from tests.hub_client import FetchRequest, Outcome, check_hub_error, fetch_all, files_of
from tests.hub_server import HubServer

WEIGHTS = "model.safetensors"
# Hashes of an empty file, as `git hash-object` and `sha256sum` print them.
EMPTY_SHA1 = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("stated", [EMPTY_SHA1, EMPTY_SHA256])
def test_hashes_equal_those_of_git_and_sha256sum(tmp_path: Path, stated: str) -> None:
    (tmp_path / "empty").touch()
    check_hashes("it", {tmp_path / "empty": stated})
    (tmp_path / "empty").write_text("x")
    with pytest.raises(HubError, match=f"1 of 1 files .*\n.*must be {stated}"):
        check_hashes("it", {tmp_path / "empty": stated})


def test_all_differing_files_are_listed(tmp_path: Path) -> None:
    stated: dict[Path, str | None] = {}
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
        stated[tmp_path / name] = hashlib.sha256(b"b").hexdigest()
    with pytest.raises(HubError, match=r"2 of 3 files (.|\n)*/a: (.|\n)*/c: "):
        check_hashes("it", stated)


@pytest.mark.parametrize("stated", [None, "", '"W/weak"'])
def test_a_missing_hash_is_an_error(tmp_path: Path, stated: str | None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        HubError, match=r"it cannot be verified\. .* a hash of file, which must be SHA"
    ):
        check_hashes("it", {tmp_path / "file": stated})


@dataclass
class Session:
    """Outcomes for repositories in which the server flips a bit, before and after the repair."""

    folder: Path
    plain: dict[str, Outcome]
    online: dict[str, Outcome]
    offline: dict[str, Outcome]
    repaired: dict[str, Outcome]


FLIPPED = {"org/weights": WEIGHTS, "org/config": "config.json", "org/shard": "model-00002-of-00006"}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    root, home = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("home")
    noisy_reference().save_pretrained(root / "whole")
    noisy_reference().save_pretrained(root / "shards", max_shard_size="20KB")
    with HubServer() as hub:
        for repo in (*FLIPPED, "org/right", "org/unstated"):
            hub.push(repo, root / ("shards" if repo == "org/shard" else "whole"))
        for repo, name in FLIPPED.items():
            hub.faults[repo, name + ".safetensors" if repo == "org/shard" else name] = "flip"
        hub.faults["org/unstated", WEIGHTS] = "listed without hash"

        def fetch_repos(verify: bool, **settings: str) -> dict[str, Outcome]:
            requests: list[FetchRequest] = [(repo, None, verify) for repo in hub.repos]
            return dict(
                zip(hub.repos, fetch_all(home, requests, url=hub.url, **settings), strict=True)
            )

        plain, online = fetch_repos(False), fetch_repos(True)
        offline = fetch_repos(True, HF_HUB_OFFLINE="1")
        hub.faults.clear()
        for outcome in online.values():  # follow the advice of the message
            for line in outcome.get("message", "").splitlines():
                if ". Delete " in line:
                    Path(line.split(". Delete ")[1]).unlink()
        yield Session(root, plain, online, offline, fetch_repos(True))


@pytest.mark.parametrize("repo", FLIPPED)
def test_a_flipped_bit_is_found_online_and_offline_and_can_be_repaired(
    session: Session, repo: str
) -> None:
    assert "files" in session.plain[repo]  # nothing was verified
    kind = "git's SHA-1 is" if repo == "org/config" else "SHA-256 is"
    for outcome in (session.online[repo], session.offline[repo]):
        check_hub_error(outcome, repr(repo), "1 of", FLIPPED[repo], kind, "must be", "fetch again")
    folder = session.folder / ("shards" if repo == "org/shard" else "whole")
    assert session.repaired[repo]["files"] == files_of(folder)


def test_unchanged_files_are_accepted_online_and_offline(session: Session) -> None:
    for found in (session.plain, session.online, session.offline, session.repaired):
        assert found["org/right"]["files"] == files_of(session.folder / "whole")


def test_the_file_name_in_the_cache_replaces_a_hash_that_the_hub_lacks(session: Session) -> None:
    for found in (session.online, session.offline):
        assert found["org/unstated"]["files"] == files_of(session.folder / "whole")
