"""Processes that fetch from a hub, because `huggingface_hub` reads its settings on import.

They are forked from a process that has imported compat and torch, because these imports take longer
than most fetches. `compat` does not import `huggingface_hub` until it fetches.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.forked import Forked

FetchRequest = tuple[str, str | None] | tuple[str, str | None, bool]  # repo id, revision, verify
Outcome = dict[str, Any]

UNREACHABLE = "http://127.0.0.1:9"  # no server listens on this port


@dataclass
class RunningFetch:
    """A running process, and the file to which it writes its outcomes."""

    forked: Forked
    out: Path

    def outcomes(self) -> list[Outcome]:
        """Wait for the process, which may only print to stderr, and return its outcomes."""
        ended = self.forked.wait()
        assert ended.code == 0, ended.err
        assert not ended.out, ended.out
        found = json.loads(self.out.read_text())
        self.out.unlink()
        return [{**outcome, "stderr": ended.err} for outcome in found]

    def kill(self) -> None:
        self.forked.kill()
        self.out.unlink(missing_ok=True)


def start(
    home: Path,
    requests: Sequence[FetchRequest],
    *,
    url: str = UNREACHABLE,
    load: bool = False,
    user: int = 0,
    largest: int = 0,
    **env: str,
) -> RunningFetch:
    """Start a separate process that fetches concurrently, with `home` as HF_HOME.

    Args:
        load: also load the weights, and report their hash.
        user: the user id to which the process switches first.
        largest: maximum size of a file in bytes, to simulate a full disk.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        kept.pop(name, None), kept.pop(name.upper(), None)
    settings = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    descriptor, out = tempfile.mkstemp()
    os.close(descriptor)
    variables = {**kept, **settings, **env}
    return RunningFetch(
        Forked(_run, Path(out), requests, load, user, largest, env=variables), Path(out)
    )


def fetch_all(home: Path, requests: Sequence[FetchRequest], **settings: Any) -> list[Outcome]:
    """Run `start`, and return the outcomes."""
    return start(home, requests, **settings).outcomes()


def files_of(folder: Path, *names: str) -> dict[str, str]:
    """Return the hashes of all or the named files of a folder, in the format of an outcome."""
    paths = [folder / name for name in names] or [p for p in folder.iterdir() if p.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def hash_of(state: dict[str, Tensor]) -> str:
    """Return one hash of all names and tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def check_hub_error(outcome: Outcome, *fragments: str) -> None:
    """Check that the outcome is a HubError whose message contains all of the fragments."""
    __tracebackhide__ = True
    if outcome.get("error") != "HubError":
        pytest.fail(f"expected a HubError, but the outcome is: {outcome}")
    if missing := [fragment for fragment in fragments if fragment not in outcome["message"]]:
        pytest.fail(f"the message lacks {missing}: {outcome['message']}")


def _run(out: Path, requests: Sequence[FetchRequest], load: bool, user: int, largest: int) -> None:
    with out.open("w") as file:
        if user:
            _import_all()
            os.setuid(user)
        if largest:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        with ThreadPoolExecutor(len(requests)) as threads:
            json.dump(list(threads.map(lambda request: _outcome(request, load), requests)), file)


def _import_all() -> None:
    """Import lazily loaded modules now, because the other user may not read their files."""
    import huggingface_hub.file_download  # noqa: F401

    from compat import load_pretrained

    load_pretrained("demo")
    _outcome(("org/nowhere", None), load=False)


def _outcome(request: FetchRequest, load: bool) -> Outcome:
    from compat import load_pretrained, to_hf_state_dict
    from compat.checkpoint.hub import fetch

    start = time.monotonic()
    try:
        folder = fetch(*request)
        found: Outcome = {"folder": str(folder), "files": files_of(folder)}
        if load:
            state = to_hf_state_dict(load_pretrained(request[0], revision=request[1]))
            found["weights"] = hash_of(state)
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    return {**found, "seconds": time.monotonic() - start}
