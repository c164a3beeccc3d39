"""Processes that fetch from a hub: `huggingface_hub` reads its settings when it is imported.

They are forked from one that has imported compat and torch, which takes longer than most fetches;
`compat` does not import `huggingface_hub` until it fetches.
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

Ask = tuple[str, str | None] | tuple[str, str | None, bool]  # repository, revision, verify
Outcome = dict[str, Any]

NOWHERE = "http://127.0.0.1:9"  # nobody listens there


@dataclass
class Fetching:
    """A running process, and the file of its outcomes."""

    forked: Forked
    out: Path

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes. The process may only print to stderr."""
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
    asks: Sequence[Ask],
    *,
    url: str = NOWHERE,
    load: bool = False,
    user: int = 0,
    largest: int = 0,
    **env: str,
) -> Fetching:
    """Fetch concurrently in a separate process, with `home` as HF_HOME.

    Args:
        load: load the weights as well, and tell their hash.
        user: become this one first.
        largest: bytes that a file may have, as on a full disk.
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
    return Fetching(Forked(_run, Path(out), asks, load, user, largest, env=variables), Path(out))


def fetch_all(home: Path, asks: Sequence[Ask], **settings: Any) -> list[Outcome]:
    """Run `start` and return the outcomes."""
    return start(home, asks, **settings).outcomes()


def files_of(folder: Path, *names: str) -> dict[str, str]:
    """The hashes of a folder's files, or of those named, as in an outcome."""
    paths = [folder / name for name in names] or [p for p in folder.iterdir() if p.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def hash_of(state: dict[str, Tensor]) -> str:
    """One hash for all names and tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def is_error(outcome: Outcome, *fragments: str) -> None:
    """A HubError whose message has all of the fragments."""
    __tracebackhide__ = True
    if outcome.get("error") != "HubError":
        pytest.fail(f"expected a HubError, but: {outcome}")
    if missing := [fragment for fragment in fragments if fragment not in outcome["message"]]:
        pytest.fail(f"{missing} not in: {outcome['message']}")


def _run(out: Path, asks: Sequence[Ask], load: bool, user: int, largest: int) -> None:
    with out.open("w") as file:
        if user:
            _import_all()
            os.setuid(user)
        if largest:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        with ThreadPoolExecutor(len(asks)) as threads:
            json.dump(list(threads.map(lambda ask: _outcome(ask, load), asks)), file)


def _import_all() -> None:
    """Import lazy modules now, since the other user may not read them."""
    import huggingface_hub.file_download  # noqa: F401

    from compat import load_pretrained

    load_pretrained("demo")
    _outcome(("org/nowhere", None), load=False)


def _outcome(ask: Ask, load: bool) -> Outcome:
    from compat import load_pretrained, to_hf_state_dict
    from compat.checkpoint.hub import fetch

    start = time.monotonic()
    try:
        folder = fetch(*ask)
        found: Outcome = {"folder": str(folder), "files": files_of(folder)}
        if load:
            state = to_hf_state_dict(load_pretrained(ask[0], revision=ask[1]))
            found["weights"] = hash_of(state)
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    return {**found, "seconds": time.monotonic() - start}
