"""The tensors in a weights file or in its shards, by Hugging Face's names."""

from __future__ import annotations

from pathlib import Path

from compat.checkpoint.files import Stored, TensorFile, read_index
from compat.checkpoint.formats import recognized
from compat.checkpoint.layout import plain_name
from compat.checkpoint.pickle_file import PickleFile
from compat.checkpoint.safetensors_file import SafetensorsFile
from compat.errors import CheckpointError, collapse_layers, lines, listed

PICKLES = (".bin", ".pt", ".pth")


def open_files(weights: Path, most: int) -> dict[Path, TensorFile]:
    """The file, or all the shards of an index.

    Args:
        weights: the file or index.
        most: bytes that a pickle may unpack to, if that is more than it takes on disk.

    Raises:
        CheckpointError: a file that cannot be read, or an index that does not tell what its shards
            hold.
    """
    if not weights.name.endswith(".index.json"):
        return {weights: open_file(weights, most)}
    index = read_index(weights)
    paths = [weights.parent / name for name in sorted(set(index.values()))]
    files = {path: open_file(path, most) for path in paths}
    _check_index(weights, index, {path.name: file for path, file in files.items()})
    return files


def open_file(path: Path, most: int) -> TensorFile:
    """Open one file of tensors by its ending.

    Raises:
        CheckpointError: it cannot be read, or is of another kind.
    """
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in PICKLES:
        return PickleFile(path, most)
    what = f": {found.sentence}" if (found := recognized(path)) else ""
    raise CheckpointError(
        f"{path} is no tensor file that compat knows{what}; "
        f"expected .safetensors or {', '.join(PICKLES)}"
    )


def by_name(files: dict[Path, TensorFile]) -> dict[str, Stored]:
    """Every tensor, without what a wrapper or `transformers` puts before its name.

    Raises:
        CheckpointError: a tensor that is there twice.
    """
    found: dict[str, Stored] = {}
    for path, file in files.items():
        for name in file.infos:
            short = plain_name(name)
            if short in found:
                raise CheckpointError(
                    f"{path} holds {short} a second time (as {name}); each belongs once"
                )
            found[short] = Stored(file, name)
    return found


def model_args_of(files: dict[Path, TensorFile]) -> object:
    """What nanoGPT saves beside its tensors, or None."""
    args = [file.model_args for file in files.values() if isinstance(file, PickleFile)]
    return args[0] if len(args) == 1 else None


def _check_index(index: Path, weight_map: dict[str, str], shards: dict[str, TensorFile]) -> None:
    """What the index says of every tensor is what the shards hold."""
    wrong = [name for name, shard in weight_map.items() if name not in shards[shard].infos]
    held = [name for shard in shards.values() for name in shard.infos]
    untold = [name for name in held if name not in weight_map]
    faults = []
    if wrong:
        faults.append(f"{len(wrong)} not in the shard it names: {listed(collapse_layers(wrong))}")
    if untold:
        faults.append(
            f"{len(untold)} in a shard but not in the index: {listed(collapse_layers(untold))}"
        )
    if faults:
        headline = f"{index} does not say what its shards hold:"
        raise CheckpointError(lines(headline, faults) + "\nFetch or export all of it again.")
