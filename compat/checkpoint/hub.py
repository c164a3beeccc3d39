"""Checkpoints on the Hugging Face hub: the one file that imports `huggingface_hub`.

This file is imported when something is fetched, because only then may the client read its settings.

The client's `snapshot_download` and `verify_repo_checksums` are not used. The former accepts cached
files of the wrong size, updates a branch's commit before its files are complete, and lists the
repository without a timeout; the latter works only online and also reports files that are not
needed.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from huggingface_hub import HfApi, constants, errors, hf_hub_download
from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from compat.checkpoint.files import read_json
from compat.checkpoint.layout import CONFIG, SMALL_FILES, WEIGHT_FILES
from compat.display import write_text
from compat.errors import HubError, lines, listed

# The hash's name, by its number of hex digits. The hub states SHA-256 for large files and git's
# blob hash for small ones.
HASHES = {64: "SHA-256", 40: "git's SHA-1"}
OFFLINE = "HF_HUB_OFFLINE"


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Run the body in the client's offline mode if the hub's host name has no address.

    Downloads in the body, and in processes that it starts, fail at once then. Otherwise the client
    tries each again for half a minute. Behind a proxy, which resolves names itself, the mode is not
    set.
    """
    if constants.HF_HUB_OFFLINE or getproxies() or _has_address(urlsplit(constants.ENDPOINT)):
        yield
        return
    before = os.environ.get(OFFLINE)
    os.environ[OFFLINE], constants.HF_HUB_OFFLINE = "1", True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False
        os.environ.pop(OFFLINE)
        os.environ.update({} if before is None else {OFFLINE: before})


def _has_address(url: SplitResult) -> bool:
    try:
        return bool(socket.getaddrinfo(url.hostname, url.port))
    except OSError:
        return False


@dataclass(frozen=True)
class RemoteFile:
    """Size in bytes and hash of a file as the hub states them; None where it states none."""

    size: int | None
    hash: str | None

    def has_size_of(self, path: Path) -> bool:
        return path.is_file() and self.size in (None, path.stat().st_size)


@dataclass(frozen=True)
class Repo:
    """A repository at a revision, and its folder in the client's cache.

    In the cache `refs/REVISION` holds a commit, and `snapshots/COMMIT/FILE` links to `blobs/HASH`.
    """

    repo_id: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repo_id!r} at revision {self.revision!r}"

    @property
    def cache(self) -> Path:
        name = "--".join(["models", *self.repo_id.split("/")])
        return Path(constants.HF_HUB_CACHE).expanduser().resolve() / name

    def snapshot(self, commit: str) -> Path:
        return self.cache / "snapshots" / commit

    def cached_commit(self) -> str | None:
        """Return the revision's commit when it was last fetched, or the revision if it is one."""
        commit = self.revision
        with suppress(OSError, ValueError):
            commit = (self.cache / "refs" / self.revision).read_text()
        return commit if _is_commit(commit) else None

    def remember(self, commit: str) -> None:
        """Record the revision's commit in the cache, unless the cache is read-only."""
        if self.cached_commit() == commit:
            return
        ref = self.cache / "refs" / self.revision
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_text(ref, commit)


def fetch(repo_id: str, revision: str | None, verify: bool = False) -> Path:
    """Return the local folder of a hub repository, with the files that a GPT-2 needs.

    All files are of one commit. The hub is asked once for the commit of the revision and for its
    list of files. Files that the cache lacks, or has with another size, are then downloaded by that
    commit. If the hub cannot be reached, the cache is used, provided that it is complete.

    Args:
        repo_id: `gpt2` or `org/name`.
        revision: branch, tag or commit; None for the main branch.
        verify: hash every file and compare it with the hash that the hub states. Offline, the name
            of the file in the cache is its hash.

    Raises:
        HubError: The repository is unknown, forbidden or incomplete; the hub is out of reach and
            the cache incomplete; a download fails; the cache cannot be written; a hash differs, or
            there is no hash to compare with.
        CheckpointError: The index of shards is not JSON.
    """
    repo = Repo(repo_id, revision or "main")
    remote: dict[str, RemoteFile] = {}
    try:
        commit, remote = _list_files(repo)
    except Exception as error:  # the client's errors and its HTTP library's share no base class
        if _is_refusal(error):
            raise _hub_error(repo, error) from error
        paths = _find_in_cache(repo, error)
    else:
        paths = _download_missing(repo, commit, remote)
        # Not before the download is complete, so that offline a branch always has all its files.
        repo.remember(commit)
    if verify:
        stated = {path: remote[path.name].hash if remote else None for path in paths}
        check_hashes(str(repo), {path: stated[path] or _hash_in_name(path) for path in paths})
    return paths[0].parent


def _list_files(repo: Repo) -> tuple[str, dict[str, RemoteFile]]:
    """Return the commit of the revision, and its files."""
    info = HfApi().model_info(
        repo.repo_id,
        revision=repo.revision,
        files_metadata=True,
        timeout=constants.HF_HUB_ETAG_TIMEOUT,  # by default the client waits forever
    )
    if not _is_commit(info.sha):
        raise ValueError(f"no commit, but {info.sha!r}")
    return str(info.sha), {
        file.rfilename: RemoteFile(file.size, file.lfs.sha256 if file.lfs else file.blob_id)
        for file in info.siblings or ()
    }


def _download_missing(repo: Repo, commit: str, remote: Mapping[str, RemoteFile]) -> list[Path]:
    def get(name: str) -> Path:
        path, file = repo.snapshot(commit) / name, remote[name]
        if not file.has_size_of(path):
            _download(repo, commit, name, again=path.is_file())
        if not file.has_size_of(path):
            found = f"{path.stat().st_size:,} bytes" if path.is_file() else "another commit's"
            raise HubError(
                f"{name} of {repo} was downloaded as {found}, but the hub states {file.size:,} "
                f"bytes for commit {commit}.\nDelete {path.resolve()} and fetch again."
            )
        return path

    paths, missing = _needed_files(remote, get)
    if missing:
        raise HubError(
            f"{repo} is not a complete checkpoint. The repository lacks {listed(missing)}, and "
            f"holds {listed(sorted(remote)) or 'no files'}.\nUse another repository or revision."
        )
    return paths


def _download(repo: Repo, commit: str, name: str, again: bool) -> None:
    url = hf_hub_url(repo.repo_id, name, revision=commit)
    try:
        # By default, the client retries a server that does not answer for six minutes.
        for pause in (1, 2, 0):
            try:
                get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
                break
            except Exception as error:
                if _is_refusal(error) or not pause:
                    raise
                time.sleep(pause)
        hf_hub_download(repo.repo_id, name, revision=commit, force_download=again)
    except Exception as error:
        raise _hub_error(repo, error, name) from error


def _find_in_cache(repo: Repo, reason: Exception) -> list[Path]:
    """Return the files in the cache, which is used because of `reason`."""
    commit = repo.cached_commit()
    folder = repo.snapshot(commit) if commit else repo.cache
    cached = [path.name for path in folder.glob("*") if path.is_file()]
    paths, missing = _needed_files(cached, folder.joinpath)
    if missing:
        raise HubError(
            f"{_hub_error(repo, reason)}\n"
            f"The cache is not complete either: {folder} lacks {listed(missing)}."
        )
    if not isinstance(reason, errors.OfflineModeIsEnabled):
        note = "%s was not reached (%s). Using commit %s from the cache"
        logging.getLogger(__name__).warning(note, repo, _explain(reason)[0], commit)
    return paths


def _needed_files(
    available: Collection[str], get: Callable[[str], Path]
) -> tuple[list[Path], list[str]]:
    """Return the paths of the files that a GPT-2 needs, and the names of the missing ones.

    `get` returns the path of an available file, and downloads it if necessary.
    """
    weights = [name for name in WEIGHT_FILES if name in available][:1]
    missing = [CONFIG] if CONFIG not in available else []
    if not weights:
        missing.append("weights (model.safetensors or pytorch_model.bin, whole or in shards)")
    elif weights[0].endswith(".index.json"):
        weight_map = read_json(get(weights[0])).get("weight_map")
        shards = weight_map.values() if isinstance(weight_map, dict) else ()
        weights += sorted({name for name in shards if isinstance(name, str)})
        missing += [name for name in weights if name not in available]
    if missing:
        return [], missing
    return [get(name) for name in (*SMALL_FILES, *weights) if name in available], []


# Hashes.


def check_hashes(what: str, stated: Mapping[Path, str | None]) -> None:
    """Hash every file and compare.

    Args:
        what: names the repository and revision in messages.
        stated: file → SHA-256 or git's blob SHA-1 in hex digits, or None where there is none.

    Raises:
        HubError: A hash differs, is None, or is of another kind.
    """
    if unknown := [path.name for path, hash in stated.items() if len(hash or "") not in HASHES]:
        raise HubError(
            f"{what} cannot be verified. Neither the hub nor the cache states a hash of "
            f"{listed(unknown)}, which must be SHA-256 or git's SHA-1.\n"
            "Load it without verify, or from a hub that states hashes."
        )
    faults = []
    for path, expected in stated.items():
        assert expected is not None
        with path.open("rb") as file:
            large = HASHES[len(expected)] == "SHA-256"
            found = sha_fileobj(file).hex() if large else git_hash(file.read())
        if found != expected:
            faults.append(
                f"{path}: {HASHES[len(expected)]} is {found}, but must be {expected}. "
                f"Delete {path.resolve()}"
            )
    if faults:
        headline = f"{what}: {len(faults)} of {len(stated)} files differ from what the hub states:"
        raise HubError(lines(headline, faults) + "\nDelete these files and fetch again.")


def _hash_in_name(path: Path) -> str | None:
    """Return the hash that is the name of the blob that a cached file links to."""
    name = Path(os.readlink(path)).name if path.is_symlink() else ""
    return name if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) else None


def _is_commit(text: str | None) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", text or "") is not None


# Errors.


def _is_refusal(error: Exception) -> bool:
    """Return whether the hub refused the request. Any other error means that it did not answer."""
    if isinstance(error, errors.HfHubHTTPError):
        return 400 <= error.response.status_code < 500 and error.response.status_code != 429
    return isinstance(error, errors.HFValidationError)


def _hub_error(repo: Repo, error: Exception, name: str | None = None) -> HubError:
    what = f"{name} of {repo}" if name else str(repo)
    found, next_step = _explain(error)
    return HubError(f"{what} could not be fetched from {constants.ENDPOINT}: {found}.\n{next_step}")


def _explain(error: Exception) -> tuple[str, str]:
    """Return what happened, and the next step."""
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return _explain(error.__cause__)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set", "Unset it to download, or use a local folder."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{status}, no such revision", "Use one of its branches, tags or commits."
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return (
            f"{status}, access is restricted",
            "Ask for access on the repository's page, and set HF_TOKEN to a token that has it.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{status}, no such repository, or a private one",
            "Check the name. For a private one set HF_TOKEN to a token that may read it.",
        )
    if status == 401:
        return "401, the token is not valid", "Set HF_TOKEN to a valid token, or unset it."
    if isinstance(error, OSError) and error.errno is not None:
        return (
            f"the cache at {constants.HF_HUB_CACHE} cannot be written: {error}",
            "Free space there, or set HF_HOME to a writable folder.",
        )
    if isinstance(error, ValueError) and not isinstance(error, errors.HFValidationError):
        return (
            f"the answer is not that of a hub ({reason})",
            "Check HF_ENDPOINT and the connection, or use a local folder.",
        )
    if isinstance(error, errors.EntryNotFoundError) and status:
        reason = f"{status}, no such file, although the hub lists it"
    return reason, "Check the name and the connection and try again, or use a local folder."
