"""Checkpoints on the Hugging Face hub: the one file that imports `huggingface_hub`."""

from __future__ import annotations

from pathlib import Path

from compat.errors import HubError

_SMALL = ["config.json", "tokenizer.json", "vocab.json", "merges.txt"]
_SAFETENSORS = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
_PICKLES = ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"]


def fetch(repo_id: str, revision: str | None) -> Path:
    """The local folder of a hub repository; only what a GPT-2 needs is downloaded, once.

    `.bin` files are fetched only where there are no safetensors. Everything comes from one commit.

    Raises:
        HubError: unknown repository or revision, no network, or offline with nothing cached.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=_SMALL + _SAFETENSORS)
        )
        if not any(folder.glob("*.safetensors")):
            # A snapshot's folder is named by its commit: the same one, even if main has moved on.
            snapshot_download(repo_id, revision=folder.name, allow_patterns=_PICKLES)
    except Exception as error:
        # The client's errors, and its HTTP library's, share no narrower class.
        at = f" at revision {revision!r}" if revision else ""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HubError(
            f"{repo_id!r}{at} could not be fetched from the Hugging Face hub: {reason}\n"
            "Check the name and the connection, or give a local folder."
        ) from error
    return folder
