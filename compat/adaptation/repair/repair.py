"""Find edits of a user's source with which their model computes what `transformers` computes.

Edits are searched on a small checkpoint: one that improves the model is kept, and the model is
diagnosed again, until it is compatible. The edited source is then proved on the user's checkpoint,
in a process of its own. Nothing is written.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from compat.adaptation.adapt import Options, adapt_with, no_progress
from compat.adaptation.repair.edits import Edits, edited_texts, with_import_of_torch
from compat.adaptation.repair.fixes import FIXES, UNSAFE, Site
from compat.adaptation.repair.source import Source
from compat.adaptation.result import Adaptation, Finding
from compat.adaptation.stages import MakeReference
from compat.checkpoint import Checkpoint, open_checkpoint
from compat.config import GPT2Config
from compat.dialects.linear import GPTModel
from compat.errors import CompatError, listed
from compat.parity.logits import Extent
from compat.parity.reference import Reference, SharedReference
from compat.saving import save_pretrained
from compat.user_code import SIBLINGS, handle_errors
from compat.user_models import (
    construct,
    edited_sources,
    found_by_trying,
    load_forward,
    load_target,
    on_available_device,
    resized,
)
from compat.user_models.notebook import code_cells, encoding, read_source
from compat.user_models.usage import user_modules

# Importing these modules fills the registry.
AREAS = (
    "activations", "blocks", "dropout", "embeddings", "heads", "kv_cache", "layers", "modules",
    "norms", "parameters", "scores", "signature",
)  # fmt: skip
for area in AREAS:
    import_module(f"compat.adaptation.repair.{area}")
# The proof imports what this process does, although a folder of the user's may be called `torch`.
PROVE = "import sys; sys.path[:] = {}; from compat.adaptation.repair.repair import prove; prove()"
MAX_TRIALS = 120  # models that are built and compared in one search
MAX_SECONDS = 240  # after which a search tries no further edits
# Deviations that hide others, which are found after their repair: a gated MLP may have other biases
# and widths, and another activation.
HIDING = {"gated_mlp": 4}
CACHE = "kv_cache"  # a finding that may be a limit of the proof, and is repaired all the same
SIZES = {"n_embd_mismatch", "n_head_mismatch", "n_layer_mismatch", "vocab_mismatch", "inner_dim"}


@dataclass(frozen=True)
class Target:
    """How a user's model is found and built.

    Args:
        name: `FILE.py:Class`, as for `load_target`.
        kwargs, config_name: see `construct`.
        part: see `adapt`.
        forward: see `load_forward`.
    """

    name: str
    kwargs: Mapping[str, Any] | None = None
    config_name: str | None = None
    part: str | None = None
    forward: str | None = None
    other_ways: bool = True

    def adapt(
        self,
        checkpoint: Checkpoint,
        texts: Mapping[str, str],
        make_reference: MakeReference | None = None,
        extent: Extent = "all",
    ) -> Adaptation:
        """Build the model from these texts and adapt it, with a reference of its own by default.

        With the extent "first", the logits are compared on few inputs, which proves nothing.

        Raises:
            CompatError: it cannot be imported, built or adapted.
        """

        def examined() -> Adaptation:
            forward = None if self.forward is None else load_forward(self.forward)
            cls = load_target(self.name)
            with handle_errors(cls):
                model = construct(
                    cls,
                    checkpoint.config,
                    kwargs=self.kwargs,
                    config_name=self.config_name,
                    other_ways=self.other_ways,
                )
                options = Options(forward, None, no_progress, make_reference or Reference, extent)
                with resized(cls, checkpoint.config):
                    return adapt_with(model, lambda: checkpoint, self.part, options)

        with edited_sources(texts), contextlib.redirect_stdout(sys.stderr):
            return on_available_device(examined)[0]


@dataclass(frozen=True)
class Repair:
    """Edited source that was proved.

    Args:
        texts: the new text of every changed file or cell, by its name.
        old: their present texts.
        fixed: the codes of the deviations, in the order in which they were repaired.
        left: the codes of what is left without breaking parity, such as a wrong KV cache.
    """

    texts: dict[str, str]
    old: dict[str, str]
    fixed: list[str]
    left: list[str] = field(default_factory=list)

    @property
    def diff(self) -> str:
        """The edits as a unified diff, with paths relative to the working directory.

        Lines keep their ends, so `patch -p1` and `git apply` accept the diff of a file. That of a
        notebook shows its cells.
        """
        found: list[str] = []
        for name in self.texts:
            shown = _shown(name)
            found += difflib.unified_diff(*self.lines(name), f"a/{shown}", f"b/{shown}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in found
        )

    def lines(self, name: str) -> tuple[list[str], list[str]]:
        """Return the lines of a file or cell as they are stored, and with the edits.

        Unchanged lines keep their ends, and others get those of the first line.
        """
        old, new = (io.StringIO(texts[name]).readlines() for texts in (self.old, self.texts))
        if "#cell-" in name:
            return old, new
        path = Path(name)
        text = path.read_bytes().decode(encoding(path), "surrogateescape")  # any bytes of comments
        stored = io.StringIO(text, newline="").readlines()
        end = "\r\n" if stored and stored[0].endswith("\r\n") else "\n"
        written: list[str] = []
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for tag, start, stop, first, last in matcher.get_opcodes():
            changed = [line.replace("\n", end) for line in new[first:last]]
            written += stored[start:stop] if tag == "equal" else changed
        return stored, written


@dataclass(frozen=True)
class Unrepaired:
    """A model that no edits made compatible.

    Args:
        fixed: the codes of the deviations that edits repair.
        left: the deviations that they leave; none if the proof of the edited model failed.
        untried: whether edits that change the signature of a constructor were not tried for them.
        stopped: whether the time of the search was over before all edits were tried.
    """

    fixed: list[str]
    left: list[Finding]
    untried: bool = False
    stopped: bool = False

    def __str__(self) -> str:
        codes = dict.fromkeys(finding.code for finding in self.left)
        fixed = listed([code for code in dict.fromkeys(self.fixed) if code not in codes], 20)
        if not self.left:
            return f"edits were found for {fixed}, but the edited model was not proved compatible"
        left = listed(list(codes), 20)
        known = f"edits were found for {fixed}, but none" if fixed else "no edits were found"
        option = "--unsafe-fixes also tries edits that change the signature of a constructor"
        hint = f" ({option})" if self.untried else ""
        limit = f" within {MAX_SECONDS} seconds" if self.stopped else ""
        return f"{known} for {left}{limit}{hint}"


def _shown(name: str) -> str:
    """Return a path from the working directory, or from the file's folder if it is elsewhere."""
    path = Path(name)
    inside = path.is_relative_to(Path.cwd())
    return (path.relative_to(Path.cwd()) if inside else Path(path.name)).as_posix()


def repair(
    target: Target, source: str | Checkpoint, *, unsafe: bool = False
) -> Repair | Unrepaired:
    """Repair a model that adapt found incompatible.

    Args:
        target: the model.
        source: the checkpoint, as for `adapt`.
        unsafe: also try edits that change the signature of a constructor.

    Returns:
        The edits, or what they lack if none were found that make the model compatible.

    Raises:
        CompatError: the model or the checkpoint cannot be loaded, or adapt refuses the model.
    """
    checkpoint = open_checkpoint(source)
    with tempfile.TemporaryDirectory() as folder:
        small = small_checkpoint(checkpoint.config, Path(folder))
        search = Search(target, small, checkpoint.config, unsafe)
        if not search.is_built_in_its_sizes():
            search = Search(target, checkpoint, checkpoint.config, unsafe)
        found = search.run()
        if found is not None and is_proved(target, checkpoint, found):
            return found
        # A size that the code contains may be the small checkpoint's and not the user's.
        if found is not None and search.checkpoint is small:
            search = Search(target, checkpoint, checkpoint.config, unsafe)
            if not search.is_built_in_its_sizes() and (found := search.run()) is not None:
                if is_proved(target, checkpoint, found):
                    return found
    if found is None:
        return Unrepaired(search.fixed, search.left, search.has_untried_edits(), search.is_over())
    return Unrepaired(found.fixed, [])


def small_checkpoint(config: GPT2Config, folder: Path) -> Checkpoint:
    """Return noise in the shapes of a small GPT-2 that is otherwise configured like the user's."""
    heads = min(config.n_head, 4)
    inner = None if config.n_inner is None else 12 * heads * config.n_inner // config.n_embd
    small = replace(
        config,
        n_layer=min(config.n_layer, 2),
        n_head=heads,
        n_embd=12 * heads,
        n_inner=inner,
        n_positions=min(config.n_positions, 32),
        vocab_size=min(config.vocab_size, 97),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = GPTModel(small)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_pretrained(model, folder / "small")
    return open_checkpoint(folder / "small")


@dataclass
class Search:
    """A greedy search: the first edit that improves the model is kept.

    Args:
        target: the model.
        checkpoint: what the edited models are compared with.
        user_config: the config of the checkpoint that the model is repaired for.
        unsafe: also try edits that change the signature of a constructor.
    """

    target: Target
    checkpoint: Checkpoint
    user_config: GPT2Config
    unsafe: bool
    old: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)
    tried: set[tuple[tuple[str, str], ...]] = field(default_factory=set)
    ends: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)
    references: dict[torch.dtype, Reference] = field(default_factory=dict)  # of all trials

    def reference(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Reference:
        """Return the reference of all trials; the final proof has one of its own."""
        if dtype not in self.references:
            self.references[dtype] = SharedReference(checkpoint, dtype)
        return self.references[dtype]

    def is_over(self) -> bool:
        """Return whether the search has taken as long as it may."""
        return time.monotonic() > self.ends

    @cached_property
    def present(self) -> Adaptation:
        """The model as it is.

        An edited one is built with the same arguments: others are not tried for every edit.
        """
        with contextlib.redirect_stdout(sys.stderr):
            cls = load_target(self.target.name)
        for runs in (True, False) if self.target.config_name is None else ():
            config, kwargs = self.checkpoint.config, self.target.kwargs
            kwargs = found_by_trying(cls, config, kwargs, runs=runs)
            if kwargs is not None:
                direct = replace(self.target, kwargs=kwargs, other_ways=False)
                with contextlib.suppress(CompatError):
                    found = direct.adapt(self.checkpoint, {}, self.reference)
                    self.target = direct
                    return found
        return self.target.adapt(self.checkpoint, {}, self.reference)

    @cached_property
    def imported(self) -> list[str]:
        """The files that the user's model is imported from, other than notebooks."""
        with contextlib.redirect_stdout(sys.stderr):
            modules = user_modules(load_target(self.target.name))
        modules += [sys.modules[name] for name in sorted(SIBLINGS)]  # also those with values only
        files = [Path(getattr(module, "__file__", None) or "") for module in modules]
        return [str(file) for file in dict.fromkeys(files) if file.suffix == ".py"]

    def is_built_in_its_sizes(self) -> bool:
        """Return whether the model is built in the checkpoint's sizes, and has none of its own."""
        with contextlib.suppress(CompatError):
            return not any(_is_own_size(finding) for finding in self.present.findings)
        return False

    def run(self) -> Repair | None:
        state = self.present
        while not _is_repaired(state):
            for finding in state.deviations:
                step = self._improved(state, finding, self.texts)
                if step is not None:
                    before, (state, self.texts) = state, step
                    also = _codes(before) - _codes(state) - {finding.code}
                    self.fixed += [finding.code, *sorted(also)]
                    break
            else:
                self.left = [f for f in state.findings if f in state.deviations or f.code == CACHE]
                break
        if not (self.texts and state.compatible):
            return None
        old = {name: self.old[name] for name in self.texts}
        return Repair(self.texts, old, self.fixed, [finding.code for finding in self.left])

    def _improved(
        self, state: Adaptation, finding: Finding, texts: dict[str, str]
    ) -> tuple[Adaptation, dict[str, str]] | None:
        """Return the model after the first edit for a finding with which it is better.

        An edit that brings findings of other kinds, such as a bias of the head, is the last choice.
        It must not leave more tensors unmatched, unless the finding hides others: an edit that
        removes the call of a whole MLP leaves fewer findings than the MLP had.
        """
        second = None
        for edits in self._edits(finding, texts, self.unsafe):
            edited = edited_texts(self.old | texts, edits)
            changed = texts | {
                name: text if "#cell-" in name else with_import_of_torch(text)
                for name, text in edited.items()
            }
            key = tuple(sorted(changed.items()))
            if key in self.tried or len(self.tried) >= MAX_TRIALS or self.is_over():
                continue
            self.tried.add(key)
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # what the user's code prints
                    after = self.target.adapt(self.checkpoint, changed, self.reference, "first")
            except CompatError:
                continue
            if _rank(after) < _rank(state):
                if {f.code for f in after.findings} <= {f.code for f in state.findings}:
                    return after, changed
                hidden = finding.code in HIDING and "no_mlp" not in _codes(after)
                if hidden or len(after.unmatched) <= len(state.unmatched):
                    second = second or (after, changed)
        return second

    def has_untried_edits(self) -> bool:
        """Return whether there are edits for what is left that only `unsafe` allows."""
        return not self.unsafe and any(
            sum(1 for _ in self._edits(finding, self.texts, unsafe=True))
            > sum(1 for _ in self._edits(finding, self.texts, unsafe=False))
            for finding in self.left
        )

    def _edits(self, finding: Finding, texts: dict[str, str], unsafe: bool) -> Iterator[Edits]:
        if finding.file is None:
            return
        names = dict.fromkeys([*_sources(finding.file), *self.imported])
        self.old |= {name: present_text(name) for name in names if name not in self.old}
        sources = {name: Source(name, texts.get(name, self.old[name])) for name in names}
        site = Site(finding, sources, self.checkpoint.config, self.user_config)
        for fix in FIXES.get(finding.code, ()):
            try:
                yield from fix(site) if unsafe or fix not in UNSAFE else ()
            except LookupError:  # the code lacks what the fix changes
                continue
            except Exception as error:  # other fixes may still repair the model
                raised = f"{type(error).__name__}: {error}"
                message = f"A repair of {finding.code} was left out, because it raised {raised}. "
                warnings.warn(f"{message}Report it to the authors of compat.", stacklevel=2)


def _sources(file: str) -> list[str]:
    """Return the file, or all cells of the notebook that a cell is in."""
    path, _, cell = file.partition("#")
    if not cell:
        return [file]
    return [f"{path}#cell-{i}" for i in range(1, len(code_cells(Path(path))) + 1)]


def present_text(name: str) -> str:
    """Return the text of a file or of a cell as it is stored."""
    path, _, cell = name.partition("#cell-")
    return code_cells(Path(path))[int(cell) - 1] if cell else read_source(Path(path))


def _is_own_size(finding: Finding) -> bool:
    """Return whether a model has a size that does not come from the checkpoint."""
    unsplit = finding.code == "n_head_mismatch" and finding.values["found"] == 1
    return finding.code in SIZES and not unsplit


def _codes(state: Adaptation) -> set[str]:
    return {finding.code for finding in state.deviations}


def _is_repaired(state: Adaptation) -> bool:
    """Return whether nothing is left to repair, not even an unexplained fault of the cache."""
    wrong_cache = any(finding.code == CACHE for finding in state.findings)
    return state.compatible and not state.deviations and not wrong_cache


def _rank(state: Adaptation) -> tuple[Any, ...]:
    """Lower is better: compatible, then compared at all, few deviations, taps that agree longer."""
    agreeing = 0
    if state.parity is not None:
        taps = [tap.passed for tap in state.parity.taps]
        agreeing = taps.index(False) if False in taps else len(taps)
    codes = {(finding.code, finding.line) for finding in state.deviations}
    number = sum(HIDING.get(code, 1) for code, _ in codes)
    return not state.compatible, state.parity is None, number, len(state.unmatched), -agreeing


# The proof in a process of its own.


def is_proved(target: Target, checkpoint: Checkpoint, found: Repair) -> bool:
    """Return whether a fresh process finds the edited model compatible with the checkpoint."""
    weights = checkpoint.weights  # the files themselves, whatever revision they are of
    request = {
        "target": asdict(target),
        "source": str(weights.parent if weights.suffix == ".json" else weights),
        "n_head": checkpoint.config.n_head,
        "texts": found.texts,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROVE.format(sys.path)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0 and done.stdout.splitlines()[-1:] == ["compatible"]


def prove() -> None:
    """Build a model from edited source and adapt it: JSON on stdin, the verdict on stdout."""
    request = json.load(sys.stdin)
    checkpoint = open_checkpoint(request["source"], n_head=request["n_head"])
    adaptation = Target(**request["target"]).adapt(checkpoint, request["texts"])
    print("compatible" if adaptation else "not compatible")
