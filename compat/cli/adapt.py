"""`adapt`: map, load and prove a user's own GPT-2, or report what differs and on which line."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import compat
from compat.cli import options
from compat.cli.output import (
    console,
    note,
    print_json,
    print_notes,
    print_wrapped,
    verdict,
    write_page,
)
from compat.display import page
from compat.errors import collapse_layers, listed
from compat.summary import SEVERITY, further_places
from compat.user_code import place

if TYPE_CHECKING:
    from rich.status import Status
    from torch import nn

    from compat.adaptation.repair.repair import Target

MOST_SECONDS = 60  # of processor time, to find another way to build a model
COLOURS = {"breaks": "red", "drifts": "yellow", "limit": "magenta", "info": "cyan"}
STAGES = {
    "trace": "recording the operations of the model",
    "map": "recognising its parts",
    "load": "loading the weights",
    "reference": "loading the reference",
    "logits": "comparing logits",
    "parity": "comparing hidden states",
    "diagnose": "locating the differences",
    "gradients": "comparing gradients",
    "decode": "decoding with the KV cache",
}
# Options of this panel of the help.
construction = partial(typer.Option, rich_help_panel="Construction of the model")
repairing = partial(typer.Option, rich_help_panel="Repair")


def adapt_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:Class",
            help="The file and the class of your model, or FILE.py:make_model, a function that "
            "returns the model. FILE.ipynb and package.module work too. If there is only one "
            "model, :Class can be left out.",
        ),
    ],
    source: options.Source = None,
    others: Annotated[list[str] | None, typer.Argument(metavar="[FILES]", hidden=True)] = None,
    model: options.Model = None,
    revision: options.Revision = None,
    n_head: options.NHead = None,
    kwargs: Annotated[
        str | None,
        construction(
            metavar="JSON",
            help="""Arguments of the constructor, such as '{"dropout": 0.0}'. They replace those """
            "inferred from the checkpoint.",
        ),
    ] = None,
    part: Annotated[
        str | None,
        construction(
            metavar="PART",
            help="Which part the class is, if it is not a whole model: h.0, h.0.attn, h.0.mlp, "
            "h.0.ln_1 or ln_f.",
        ),
    ] = None,
    config_name: Annotated[
        str | None,
        construction(
            metavar="NAME", help="A config object of the file, passed to the constructor unchanged."
        ),
    ] = None,
    forward: Annotated[
        str | None,
        construction(
            metavar="CALL",
            help='How the model is called, such as "model(ids)[0]", or FILE.py:function for a '
            "function of the model and the ids (B, T). It returns the logits (B, T, V).",
        ),
    ] = None,
    diff: Annotated[
        bool, repairing("--diff", help="Print the edits that make the model compatible as a diff.")
    ] = False,
    fix: Annotated[
        bool,
        repairing("--fix", help="Write these edits, after the edited model was proved."),
    ] = False,
    unsafe_fixes: Annotated[
        bool,
        repairing(
            "--unsafe-fixes", help="Also try edits that change the signature of a constructor."
        ),
    ] = False,
    emit_map: Annotated[
        bool, options.output("--emit-map", help="Print the name map as Python code.")
    ] = False,
    summary: Annotated[
        bool,
        options.output(
            "--summary",
            help="Examine several files (adapt FILES --summary --model SOURCE) and print a CSV "
            "table with one row for each. With --html, write it as a page too.",
        ),
    ] = False,
    time_limit: Annotated[
        float,
        options.output(metavar="SECONDS", min=1, help="With --summary: limit for one file."),
    ] = 300,
    html: options.Html = None,
    as_json: options.Json = False,
) -> None:
    """Load a checkpoint into your own GPT-2, and prove parity or show what differs.

    The class is built in the checkpoint's sizes. Its parameters are recognised by how its code uses
    them, and its hidden states are compared with those of transformers. Every deviation is shown
    with its line and a fix.

    The model's code is imported and run, as if you ran it yourself; no code from the checkpoint is
    run.

    Exit code 0: it computes what transformers computes. 1: it does not, or only parts of it can be
    built and run. 2: wrong usage. 3: it cannot be imported, built, run or recognised as a GPT-2, or
    the checkpoint is bad. 4: no network. 70: a bug in compat.
    """
    if unsafe_fixes and not (diff or fix):
        raise typer.BadParameter("pass it with --diff or --fix.", param_hint="--unsafe-fixes")
    if summary:
        changing = {"--diff": diff, "--fix": fix, "--emit-map": emit_map, "--json": as_json}
        options.exclude({"--summary": True}, changing)
        passed_on = {
            "--kwargs": kwargs,
            "--part": part,
            "--config-name": config_name,
            "--forward": forward,
            "--revision": revision,
            "--n-head": n_head,
        }
        targets = [target, *([] if source is None else [source]), *(others or [])]
        raise typer.Exit(_summarize(targets, model or "demo", passed_on, time_limit, html))
    if others:
        raise typer.BadParameter(
            f"{len(others) + 2} arguments were passed. Pass one FILE.py:Class and one SOURCE, or "
            "several files with --summary and --model."
        )
    source = options.choose_source(source, model)
    arguments = _constructor_arguments(kwargs)
    options.exclude({"--kwargs": kwargs, "--config-name": config_name})
    options.exclude({"--part": part, "--forward": forward})
    options.exclude({"--json": as_json, "--emit-map": emit_map, "--diff": diff, "--fix": fix})
    # A breakpoint() that is left in the code would stop every call of the model, in the processes
    # in which edits are proved too.
    os.environ.setdefault("PYTHONBREAKPOINT", "0")
    checkpoint = compat.open_checkpoint(source, revision=revision, n_head=n_head)
    examination = _Examination(checkpoint, arguments, config_name, part, forward)
    target, adaptation = examination.run(target)
    print_notes([*checkpoint.notes, *examination.notes])
    if html is not None:
        write_page(html, page(adaptation))
    if (diff or fix) and adaptation.deviations:
        from compat.adaptation.repair.repair import Target

        examined = Target(target, arguments, config_name, part, forward)
        raise typer.Exit(_repair(examined, checkpoint, adaptation, unsafe_fixes, fix))
    if as_json:
        print_json(adaptation.to_json(full=True))
    elif emit_map:
        from compat.adaptation.emit import to_python

        print(to_python(adaptation.name_map), end="")
        note("  ".join(part.plain for part in _headline(adaptation)))
    else:
        show(adaptation, console())
        if adaptation:
            _show_next_step(adaptation, part, console())
    raise typer.Exit(0 if adaptation.compatible else 1)


@dataclass
class _Examination:
    """Builds a model and adapts it.

    Args:
        checkpoint: The checkpoint.
        kwargs, config_name: See `construct`.
        part: See `compat.adapt`.
        forward: See `load_forward`.

    Attributes:
        notes: What the user should know about the choice of the model and its construction.
        loaded: The class that was loaded last, its model, or None if it could not be built, and the
            call that built it.
    """

    checkpoint: compat.Checkpoint
    kwargs: dict[str, Any] | None
    config_name: str | None
    part: str | None
    forward: str | None
    notes: list[str] = field(default_factory=list)
    loaded: tuple[Callable[..., nn.Module], nn.Module | None, str] | None = None

    def run(self, target: str) -> tuple[str, compat.Adaptation]:
        """Return the model that was examined, and the result.

        If the target names no class, and the one that was chosen is refused, it is the first of the
        other models in the file that is not refused.
        """
        from compat.user_models import on_available_device

        # For the output and the downloads of the user's code.
        with contextlib.redirect_stdout(sys.stderr), _hub(target):
            try:
                (call, adaptation), on_cpu = on_available_device(partial(self._adapt, target))
            except compat.AdaptError as error:
                target, call, adaptation, on_cpu = self._adapt_other(target, error)
        if on_cpu:
            self.notes.append(
                "your code uses a device that this machine lacks, so compat ran it on the CPU"
            )
        self.notes.append(f"compat built {call}")
        return target, adaptation

    def _adapt_other(
        self, target: str, error: compat.AdaptError
    ) -> tuple[str, str, compat.Adaptation, bool]:
        """Adapt another model of the file, or else parts of the one that was refused.

        Returns:
            The target, the calls that built what was examined, the result, and whether that needed
            the CPU.

        Raises:
            AdaptError: none of this is possible; the error is the one that was raised before.
        """
        from compat.user_models import (
            imported_siblings,
            on_available_device,
            other_targets,
            restore_siblings,
        )

        if self.loaded is None:
            raise error
        refused, model, built = self.loaded
        siblings, notes = imported_siblings(), [*self.notes]
        for other in other_targets(target, refused.__name__):
            with contextlib.suppress(compat.AdaptError):
                (call, adaptation), on_cpu = on_available_device(partial(self._adapt, other))
                headline = str(error).partition("\n")[0]
                why = f"because {refused.__name__} was refused: {headline}"
                self.notes.append(f"{other} was examined, {why}")
                return other, call, adaptation, on_cpu
        restore_siblings(siblings)
        self.notes[:] = notes
        parts = partial(self._adapt_partly, refused, model, built, error)
        (call, adaptation), on_cpu = on_available_device(parts)
        return target, call, adaptation, on_cpu

    def _adapt(self, target: str) -> tuple[str, compat.Adaptation]:
        """Build and adapt a model, and return the call that built it and the result.

        If the model returns no logits, it is built in another way in which it does.
        """
        from compat.adaptation.tracing.calling import NoLogitsError
        from compat.user_code import handle_errors
        from compat.user_models import construct_with_call, load_forward, load_target, resized
        from compat.user_models.accelerators import needs_a_device

        self.notes.clear()  # those on a model that was refused
        forward = None if self.forward is None else load_forward(self.forward)
        cls, config = load_target(target, self.notes), self.checkpoint.config
        self.loaded = cls, None, ""
        status = _status("building the model …")
        build = partial(
            construct_with_call, cls, config, kwargs=self.kwargs, config_name=self.config_name
        )

        def adapted(built: nn.Module) -> compat.Adaptation:
            with resized(cls, config):  # forward may read the sizes too
                return compat.adapt(
                    built,
                    self.checkpoint,
                    part=self.part,
                    forward=forward,
                    progress=partial(_show_stage, status),
                )

        with status, handle_errors(cls):
            built, call = build()
            self.loaded = cls, built, call
            try:
                return call, adapted(built)
            except NoLogitsError as error:
                if needs_a_device(error):
                    raise
                try:
                    built, other = build(runs=self._can_be_called())
                    if other != call:
                        return other, adapted(built)
                except compat.AdaptError as failure:
                    if needs_a_device(failure):
                        raise
                raise

    def _adapt_partly(
        self,
        target: Callable[..., nn.Module],
        model: nn.Module | None,
        call: str,
        error: compat.AdaptError,
    ) -> tuple[str, compat.Adaptation]:
        """Examine the parts of a model that the user's own code failed to build or to run.

        Args:
            target: the class of the model.
            model, call: the model, if it could be built, and the call that built it.
            error: why it was refused.

        Returns:
            The calls that built the model or its parts, and the result.

        Raises:
            AdaptError: the error, if it is of another kind, or no part can be examined.
        """
        from compat.adaptation.part import takes_hidden_states
        from compat.adaptation.partly import adapt_partly
        from compat.adaptation.tracing.calling import NoLogitsError
        from compat.user_models import construct_with_call, part_classes, resized
        from compat.user_models.arguments import UnknownArguments

        cause, calls = error.__cause__, [call] if call else []
        of_users_code = isinstance(cause, Exception) and not isinstance(cause, compat.CompatError)
        if not (of_users_code or isinstance(error, (NoLogitsError, UnknownArguments))):
            raise error
        # With one of these options, the error may be in the option and not in the user's code.
        options_passed = [self.kwargs, self.config_name, self.part, self.forward]
        if any(option is not None for option in options_passed) or not isinstance(target, type):
            raise error

        def parts() -> Iterator[nn.Module]:
            end = time.process_time() + MOST_SECONDS
            for cls in part_classes(target):
                if time.process_time() < end:
                    with contextlib.suppress(compat.AdaptError):
                        part, how = construct_with_call(
                            cls, self.checkpoint.config, runs=takes_hidden_states
                        )
                        calls.append(how)
                        yield part

        status = _status("building the model …")
        progress = partial(_show_stage, status)
        with status, resized(target, self.checkpoint.config):
            adaptation = adapt_partly(target, model, parts(), self.checkpoint, error, progress)
        if adaptation is None:
            raise error
        return ", and ".join(calls), adaptation

    def _can_be_called(self) -> Callable[[nn.Module, compat.GPT2Config], bool]:
        """Return a function that makes the likeliest calls of models, for a limited time in all."""
        from compat.adaptation.inputs import can_be_called

        end = time.process_time() + MOST_SECONDS

        def runs(model: nn.Module, sizes: compat.GPT2Config) -> bool:
            in_sizes = replace(self.checkpoint, config=sizes)
            return time.process_time() < end and can_be_called(model, in_sizes)

        return runs


def _status(text: str) -> Status:
    """Return a spinner with a text, which is shown on terminals only."""
    return Console(stderr=True).status(text, spinner="line")  # of ASCII characters


def _show_stage(status: Status, stage: str) -> None:
    status.update(f"{STAGES.get(stage, stage)} …")


def _summarize(
    targets: Sequence[str],
    source: str,
    passed_on: Mapping[str, object],
    time_limit: float,
    html: Path | None,
) -> int:
    """Print a row for each file, and return the exit code: 0 if all are compatible."""
    from compat.cli.adapt_summary import COLUMNS, WORDS, print_csv, summarize

    arguments = ["--model", source]
    for name, value in passed_on.items():
        arguments += [name, str(value)] if value else []
    rows = print_csv(summarize(targets, arguments, time_limit))
    if html is not None:
        from compat.html_report import table_page

        write_page(html, table_page(f"{len(rows)} models on {source}", COLUMNS, rows))
    return 0 if all(row[1] == WORDS[0] for row in rows) else 1


def _hub(target: str) -> contextlib.AbstractContextManager[None]:
    """Enter offline mode for code that downloads from a hub that cannot be reached."""
    from compat.user_models import downloads

    if not downloads(target):
        return contextlib.nullcontext()
    from compat.checkpoint.hub import offline_if_unreachable

    return offline_if_unreachable()


def _repair(
    target: Target,
    checkpoint: compat.Checkpoint,
    adaptation: compat.Adaptation,
    unsafe: bool,
    fix: bool,
) -> int:
    """Print or write the edits that make the model compatible, and return the exit code."""
    from compat.adaptation.repair.repair import Unrepaired, repair
    from compat.adaptation.repair.write import write

    if any(finding.code == "partly_examined" for finding in adaptation.findings):
        show(adaptation, console())
        note("only parts of the model were examined, so no edits were tried. Nothing was written")
        return 1
    with _status("searching for edits …"), _hub(target.name):
        found = repair(target, checkpoint, unsafe=unsafe)
    if isinstance(found, Unrepaired):
        show(adaptation, console())
        note(f"{found}. Nothing was written")
        return 1
    codes = listed(list(dict.fromkeys(found.fixed)), len(found.fixed))
    left = f". {listed(found.left)} is left" if found.left else ""
    if not fix:
        print(found.diff, end="")
        note(
            f"these edits repair {codes} and were proved in a separate process{left}. Write them "
            "with --fix"
        )
        return 1
    files = listed([os.path.relpath(path) for path in write(found)])
    note(f"repaired {codes} in {files}, so the model now computes what transformers computes{left}")
    return 0


def _constructor_arguments(kwargs: str | None) -> dict[str, Any] | None:
    """Return the JSON object of --kwargs."""
    if kwargs is None:
        return None
    try:
        found = json.loads(kwargs)
        fault = None if isinstance(found, dict) else "it is not an object"
    except ValueError as error:
        fault = str(error)
    if fault is not None:
        raise typer.BadParameter(
            f"{kwargs!r} is not a JSON object ({fault}). Pass one such as "
            """'{"dropout": 0.0}'.""",
            param_hint="--kwargs",
        )
    return dict(found)


def show(adaptation: compat.Adaptation, out: Console) -> None:
    """Print the two verdicts, the unmatched tensors, then every finding with its line and fix."""
    headline = _headline(adaptation)
    joined = Text("   ").join(headline)
    if joined.cell_len <= out.width:
        out.print(joined, soft_wrap=True)
    else:
        for part in headline:
            print_wrapped(out, part, others="  ")
    if 0 < len(adaptation.unmatched) < adaptation.tensors:
        names = listed(collapse_layers(adaptation.unmatched), len(adaptation.unmatched))
        print_wrapped(out, Text(f"no parameter for {names}"), "  ", "    ")
    important = [finding for finding in adaptation.findings if finding.severity != "info"]
    for _, on_a_line in groupby(important, key=_place):
        found = list(on_a_line)
        out.print()
        _show_line(found[0], out)
        for finding in found:
            show_finding(finding, out)
    minor = [finding for finding in adaptation.findings if finding.severity == "info"]
    if minor:
        out.print()
    for finding in minor:
        where = f" at {_place(finding)}" if finding.file else ""
        title = Text.assemble(
            (f"{SEVERITY['info'][0]} {finding.code}", COLOURS["info"]),
            f"{where}: {finding.message} → {finding.fix}",
        )
        print_wrapped(out, title, others="  ")


def _show_next_step(adaptation: compat.Adaptation, part: str | None, out: Console) -> None:
    """Print the code with which users load the weights in their own program."""
    argument = "" if part is None else f", part={json.dumps(part)}"
    out.print()
    out.print(Text("To load the weights in your own code:"))
    for line in (
        "from compat import adapt",
        f"model = {adaptation.model}(...)  # as you build it",
        f"adapt(model, {json.dumps(adaptation.source)}{argument}).raise_if_failed()",
    ):
        out.print(Text(f"    {line}", "bold"), soft_wrap=True)


def _headline(adaptation: compat.Adaptation) -> list[Text]:
    """State whether all tensors were mapped, and whether the model has parity."""
    total = adaptation.tensors
    mapped = total - len(adaptation.unmatched)
    return [
        verdict(mapped == total, f"mapped {mapped:,} of {total:,} tensors"),
        verdict(adaptation.compatible, _parity(adaptation)),
    ]


def _parity(adaptation: compat.Adaptation) -> str:
    report = adaptation.parity
    if report is None:
        return f"parity could not be checked: {adaptation.why_unchecked}"
    report = report.float32 or report  # the copy of a model in half precision
    taps = f"{len(report.taps):,} of {len(report.taps):,} taps"
    if adaptation.compatible:
        number = len(report.logits.inputs)
        inputs = "logits on 1 input" if number == 1 else f"logits on {number} inputs"
        return f"parity at {taps}, and {inputs}; max|Δlogits| = {report.max_abs_diff:.1g}"
    if all(tap.passed for tap in report.taps):
        return f"no parity, although {taps} agree"
    return f"parity fails from {report.first_divergence} on"


def show_finding(finding: compat.Finding, out: Console) -> None:
    """Print the message, the fix and the evidence of a finding."""
    (mark, effect), colour = SEVERITY[finding.severity], COLOURS[finding.severity]
    at = f" at {finding.tap}" if finding.tap else ""
    title = Text.assemble(
        (f"{mark} ", colour),
        (finding.code, f"bold {colour}"),
        " · ",
        (f"{effect}{at}", colour),
        f": {finding.message}",
    )
    print_wrapped(out, title, "  ", "    ")
    fix = finding.fix.replace("\n", "\n    ")
    out.print(Text.assemble("  ", ("→ ", "bold green"), (fix, "bold")), soft_wrap=True)
    if finding.also:
        also = listed(further_places(finding.also), len(finding.also))
        print_wrapped(out, Text(f"also at {also}"), "    ", "    ")
    if finding.evidence:
        print_wrapped(out, Text(finding.evidence, style="dim"), "    ", "    ")


def _show_line(finding: compat.Finding, out: Console) -> None:
    """Print `file:line  source`, on two lines if long. It is not truncated, so it can be copied."""
    if finding.file is None:
        return
    where = Text(_place(finding), style="cyan")
    source = Text((finding.source_line or "").strip(), style="bold")
    fits = where.cell_len + 2 + source.cell_len <= out.width or not out.is_terminal
    out.print(Text("  " if fits else "\n  ").join([where, source]), soft_wrap=True)


def _place(finding: compat.Finding) -> str:
    return place(finding.file or "", finding.line)
