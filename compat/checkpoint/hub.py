"""Checkpoints on the Hugging Face hub: the one file that imports `huggingface_hub`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from compat.checkpoint.hub_cache import RepoCache, is_commit
from compat.checkpoint.names import gather
from compat.checkpoint.verify import Stated, check_hashes, hash_in_name
from compat.errors import HubError, listed


@dataclass(frozen=True)
class Wanted:
    """What a user asks of the hub."""

    repo_id: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repo_id!r} at revision {self.revision!r}"

    @property
    def cache(self) -> RepoCache:
        """Where the client keeps the repository."""
        from huggingface_hub import constants

        name = "--".join(["models", *self.repo_id.split("/")])
        return RepoCache(Path(constants.HF_HUB_CACHE).expanduser().resolve() / name)


def fetch(repo_id: str, revision: str | None, verify: bool = False) -> Path:
    """The local folder of a hub repository, all of it from one commit, with what a GPT-2 needs.

    The hub is asked once for the commit that the revision means and for what it holds. Files that
    the cache lacks, or has in another size, are then downloaded by that commit. If the hub cannot
    be reached, the cache is used, where it has everything at that revision.

    Args:
        repo_id: `gpt2` or `org/name`.
        revision: branch, tag or commit; None for the main branch.
        verify: compare the bytes of every file with the hash that the hub states for it or, out of
            its reach, with the one that names the file in the cache; without any it is an error.

    Raises:
        HubError: unknown, forbidden or incomplete; out of reach with an incomplete cache; a
            download that fails, a cache that cannot be written, or bytes that are not those stated.
        CheckpointError: an index of shards that is no JSON.
    """
    wanted = Wanted(repo_id, revision or "main")
    stated: dict[str, Stated] = {}
    try:
        commit, stated = _ask(wanted)
    except Exception as error:  # the client's errors and its HTTP library's share no narrower class
        if _is_answer(error):
            raise _failed(wanted, error) from error
        files = _from_cache(wanted, error)
    else:
        files = _from_hub(wanted, commit, stated)
        # Only now: a revision that the cache knows has all its files, even after a kill.
        wanted.cache.remember(wanted.revision, commit)
    if verify:
        hashes = {path: stated[path.name].hash if stated else None for path in files}
        check_hashes(str(wanted), {path: hashes[path] or hash_in_name(path) for path in files})
    return files[0].parent


def _ask(wanted: Wanted) -> tuple[str, dict[str, Stated]]:
    """The commit that the revision means, and what it holds."""
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(
        wanted.repo_id,
        revision=wanted.revision,
        files_metadata=True,
        timeout=constants.HF_HUB_ETAG_TIMEOUT,  # the client's own default is to wait for ever
    )
    if not is_commit(info.sha):
        raise ValueError(f"no commit, but {info.sha!r}")
    return str(info.sha), {
        file.rfilename: Stated(file.size, file.lfs.sha256 if file.lfs else file.blob_id)
        for file in info.siblings or ()
    }


def _from_hub(wanted: Wanted, commit: str, stated: dict[str, Stated]) -> list[Path]:
    """The files of a commit; those that the cache lacks are downloaded."""
    folder = wanted.cache.snapshot(commit)

    def get(name: str) -> Path:
        path = folder / name
        if not stated[name].fits(path):
            _download(wanted, commit, name, again=path.is_file())
        if not stated[name].fits(path):
            found = f"{path.stat().st_size:,} bytes" if path.is_file() else "another commit's"
            raise HubError(
                f"{name} of {wanted} came as {found}, expected {stated[name].size:,} bytes of "
                f"commit {commit}, as the hub states\nDelete {path.resolve()}, and fetch again."
            )
        return path

    def lacking(missing: list[str]) -> HubError:
        return HubError(
            f"{wanted} is no whole checkpoint: the repository lacks {listed(missing)}; it holds "
            f"{listed(sorted(stated)) or 'no files'}\nGive another repository or revision."
        )

    return gather(stated, get, lacking)


def _download(wanted: Wanted, commit: str, name: str, again: bool) -> None:
    """Bring one file into the cache."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    url = hf_hub_url(wanted.repo_id, name, revision=commit)
    try:
        # A server that is silent here would keep the client trying for minutes: we ask before it.
        for pause in (1, 2, 0):
            try:
                get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
                break
            except Exception as error:
                if _is_answer(error) or not pause:
                    raise
                time.sleep(pause)
        hf_hub_download(wanted.repo_id, name, revision=commit, force_download=again)
    except Exception as error:
        raise _failed(wanted, error, name) from error


def _from_cache(wanted: Wanted, reason: Exception) -> list[Path]:
    """What the cache has at the revision; the hub could not be asked, for a reason."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    commit = wanted.cache.commit_of(wanted.revision)
    folder = wanted.cache.snapshot(commit) if commit else wanted.cache.folder
    there = [path.name for path in folder.glob("*") if path.is_file()]

    def lacking(missing: list[str]) -> HubError:
        return HubError(
            f"{_failed(wanted, reason)}\n"
            f"The cache does not have all of it either: {folder} lacks {listed(missing)}."
        )

    files = gather(there, folder.joinpath, lacking)
    if not isinstance(reason, OfflineModeIsEnabled):
        note = "%s: %s; using commit %s from the cache"
        logging.getLogger(__name__).warning(note, wanted, _explained(reason)[0], commit)
    return files


def _is_answer(error: Exception) -> bool:
    """The hub said no, where other errors mean that it did not say anything."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, HfHubHTTPError):
        return 400 <= error.response.status_code < 500 and error.response.status_code != 429
    return isinstance(error, HFValidationError)


def _failed(wanted: Wanted, error: Exception, name: str | None = None) -> HubError:
    from huggingface_hub import constants

    what = f"{name} of {wanted}" if name else str(wanted)
    found, next_step = _explained(error)
    return HubError(f"{what} could not be fetched from {constants.ENDPOINT}: {found}\n{next_step}")


def _explained(error: Exception) -> tuple[str, str]:
    """What happened, and what to do about it."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return _explained(error.__cause__)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    what, then = reason, "Check the name and the connection and try again, or give a local folder."
    if isinstance(error, errors.OfflineModeIsEnabled):
        what, then = "HF_HUB_OFFLINE is set", "Unset it to download, or give a local folder."
    elif isinstance(error, errors.RevisionNotFoundError):
        what, then = f"{status}, no such revision", "Give one of its branches, tags or commits."
    elif isinstance(error, errors.GatedRepoError) or status == 403:
        what = f"{status}, access is restricted"
        then = "Ask for access on the repository's page; set HF_TOKEN to a token that has it."
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = f"{status}, no such repository, or a private one"
        then = "Check the name; for a private one set HF_TOKEN to a token that may read it."
    elif status == 401:
        what, then = "401, the token is not valid", "Set HF_TOKEN to a valid token, or unset it."
    elif isinstance(error, errors.EntryNotFoundError) and status:
        what = f"{status}, no such file, although the hub lists it"
    elif isinstance(error, OSError) and error.errno is not None:
        what = f"the cache at {constants.HF_HUB_CACHE} cannot be written: {error}"
        then = "Free space there, or set HF_HOME to a folder that may be written."
    elif isinstance(error, ValueError) and not isinstance(error, errors.HFValidationError):
        what = f"the answer is not a hub's ({reason})"
        then = "Check HF_ENDPOINT and the connection, or give a local folder."
    return what, then
