"""Deviations of how a model runs and of what could be traced and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.registry import CODES, Code, Deviation, deviation
from compat.adaptation.tracing.graph import DRAWS, MOVES, Graph, Place, kind, tensor_inputs
from compat.config import HALF, dtype_name
from compat.errors import listed
from compat.parity.conditions import COMPARISONS
from compat.user_code import exception_summary, users_frames


@deviation(
    "dropout is applied in eval mode too, but GPT-2 applies it only in training mode",
    "F.dropout(x, p, training=self.training)  # or dropout_p=p if self.training else 0.0",
)
def dropout_always_on(context: DiagnosisContext) -> Iterator[Deviation]:
    if dropouts := context.graph.dropouts:
        first = next((node for node in dropouts if node in context.graph.order), None)
        tap = "embed" if first is None else context.tap_after(first)
        lines = [context.graph.place(node) for node in dropouts]
        place = next((line for line in lines if line), None)
        if place is not None and not place.in_forward:  # a function of the user's own
            lines += source.callers(context.graph, place)
        yield Deviation(tap, lines, evidence=context.noise)


@deviation(
    "the forward pass draws random numbers ({found}) in eval mode, for noise or to initialise a "
    "module that it creates, so no two runs agree",
    "Draw random numbers only if self.training is True, and create modules in __init__.",
)
def random_in_forward(context: DiagnosisContext) -> Iterator[Deviation]:
    graph = context.graph
    drawn = [
        n for n in graph.between([graph.output], [graph.input])
        if kind(n) in DRAWS and n not in graph.dropouts
    ]  # fmt: skip
    if drawn:
        later = graph.nodes[graph.order[drawn[0]] + 1 :]
        user = next((n for n in later if n in graph.live), None)
        tap = "logits" if user is None else context.tap_after(user)
        lines = [graph.place(node) for node in drawn]
        yield Deviation(tap, lines, {"found": kind(drawn[0])})


@deviation(
    "the forward pass writes to {found}, so every call runs with different weights",
    "Remove the assignment, or move it out of forward.",
)
def weights_changed(context: DiagnosisContext) -> Iterator[Deviation]:
    if written := context.graph.written:
        places = list(written.values())
        yield Deviation("embed", places, {"found": listed(list(written), 4)})


@deviation(
    "the model was called with {found}, because tokens attend to later ones without this argument",
    "Pass the mask in every call, or apply a causal mask in forward.",
    severity="limit",
)
def mask_argument(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.mask:
        name = context.mask.partition("=")[0]
        place = source.argument(context.model, name)
        evidence = "observed: without it, the last token changes the logits of earlier tokens"
        yield Deviation(None, [place], {"found": context.mask}, evidence=evidence)


@deviation(
    "the model accepts only sequences of {found} ids, but GPT-2 accepts any number of ids up to "
    "n_positions",
    "Cut the mask and the positions to the length of the input: mask[:T, :T].",
    severity="limit",
)
def fixed_length(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.fixed_length and context.length_error:
        frames = users_frames(context.length_error)
        places = [Place(frame.filename, frame.lineno or 0) for frame in frames]
        lines = [*places[-1:], *places]  # the innermost first
        values = {"found": f"{context.fixed_length:,}"}
        raised = exception_summary(context.length_error)
        evidence = f"observed: for {context.fixed_length - 1:,} ids, {raised}"
        yield Deviation(None, lines, values, evidence=evidence)


@deviation(
    "a low-rank term (LoRA) is added to the result of a projection, but GPT-2 has no such term",
    "Merge the term with `weight += scale * B @ A`, or remove it.",
)
def low_rank_term(context: DiagnosisContext) -> Iterator[Deviation]:
    if terms := context.graph.low_rank:
        lines = [context.graph.place(node) for node in terms]
        yield Deviation(None, lines)


NO_ID = (
    "the code treats the id {found} differently, which compat passed because no token has it, but "
    "GPT-2 treats all ids alike"
)


@deviation(
    "the code depends on the value of an id here, and {found}, but GPT-2 treats all ids alike",
    "Remove the condition. If it hides padding, pass an attention mask as an argument.",
)
def id_condition(context: DiagnosisContext) -> Iterator[Deviation]:
    graph = context.graph
    compared = [
        node for node in graph.nodes
        if node in graph.live and kind(node) in COMPARISONS
        and not graph.parameters_between([node], [])
    ]  # fmt: skip
    lines = _lines(graph, compared) or graph.exits
    if lines and context.failed_input and not context.is_pooled:
        values = {"found": f"the logits differ from the reference's on {context.failed_input}"}
        evidence = "confirmed: all taps agree on random ids"
        yield Deviation("logits", lines, values, evidence=evidence)
        return
    numbers = {node: node.args[1] for node in compared if len(node.args) > 1}
    mattering = [
        (node, number) for node, number in numbers.items()
        if isinstance(number, int) and _matters(context, node, number)
    ]  # fmt: skip
    evidence = "confirmed: the logits change with the result of this comparison"
    vocab_size = context.config.vocab_size
    if own := [(node, number) for node, number in mattering if 0 <= number < vocab_size]:
        named = list(dict.fromkeys(str(number) for _, number in own))
        found = f"the id {named[0]} changes the logits in a way that other ids do not"
        if len(named) > 1:
            found = f"the ids {listed(named)} change the logits in a way that other ids do not"
        lines = _lines(graph, [node for node, _ in own])
        yield Deviation("logits", lines, {"found": found}, evidence=evidence)
    elif mattering:
        number = mattering[0][1]
        lines = _lines(graph, [node for node, other in mattering if other == number])
        values = {"found": str(number)}
        yield Deviation("logits", lines, values, evidence=evidence, severity="info", message=NO_ID)


def _lines(graph: Graph, nodes: Sequence[Node]) -> list[Place | None]:
    """Return the lines of nodes, also those that compute the same once more."""
    return [line for node in nodes for line in (graph.place(node), graph.repeated(node))]


def _matters(context: DiagnosisContext, node: Node, number: int) -> bool:
    """Return whether the logits change with the result of comparing one of the ids."""
    graph, ids = context.graph, tensor_inputs(node)[0]
    while ids is not graph.input and kind(ids) in MOVES:
        ids = tensor_inputs(ids)[0]
    if ids is not graph.input:
        return False
    T = graph.shape[1]
    for place in (T // 2, slice(T // 4, None, 2)):  # one token; several, which an id may separate
        example, tokens = graph.example.clone(), (slice(None), place)
        [other] = graph.run([node], {graph.input: example})
        if 0 <= number < context.config.vocab_size:
            example[tokens] = number
        else:  # no id equals it, so the result is changed as if one did
            other = other.clone(memory_format=torch.contiguous_format)
            by_token = other.view(graph.shape)
            by_token[tokens] = ~by_token[tokens]
        [own] = graph.run([graph.output], {graph.input: example}, finite=True)
        [forced] = graph.run([graph.output], {graph.input: example, node: other}, finite=True)
        if not torch.allclose(own, forced, rtol=1e-6, atol=1e-9):
            return True
    return False


@deviation(
    "this operation is computed in {found}, but the model's parameters are in {expected}",
    "Remove the cast, or convert the whole model with model.to(torch.{found}).",
)
def low_precision(context: DiagnosisContext) -> Iterator[Deviation]:
    graph = context.graph
    casts = [
        node for node in graph.nodes
        if node in graph.live and any(argument in HALF for argument in node.args)
    ]  # fmt: skip
    if casts:
        named = next(a for a in HALF if a in casts[0].args)
        dtypes = {parameter.dtype for parameter in context.model.parameters()}
        widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
        values = {"found": dtype_name(named), "expected": dtype_name(widest)}
        lines = [graph.place(node) for node in casts]
        yield Deviation(context.tap_after(casts[0]), lines, values)


# Entries without a detector, which `findings` reports after the model has run.
CODES.update(
    plain_list=Code(
        "breaks",
        "{found} is a Python {kind} of modules, so model.parameters() and state_dict() leave "
        "them out, and they are neither trained nor saved",
        "self.{name} = nn.ModuleList(self.{name})",
    ),
    batch_first=Code(
        "breaks",
        "attention runs over the sequences of the batch instead of the tokens, which "
        "nn.MultiheadAttention does for tensors (B, T, C) unless batch_first=True",
        "nn.MultiheadAttention(..., batch_first=True)",
    ),
    extra_tokens=Code(
        "breaks",
        "other vectors are joined with the embeddings of the ids, so attention reads {found} "
        "vectors for {expected} ids, but GPT-2 reads nothing but the embeddings of the ids",
        "x = wte(ids) + wpe(torch.arange(T))",
    ),
    mixed_types=Code(
        "limit",
        "the parameters have several data types, {found}, so compat converted all of them to the "
        "widest type for the comparison",
        "model.float()",
    ),
    continued=Code(
        "limit",
        "a call of the model changes {found}, and the next call continues from there, so the same "
        "ids get other logits; compat restored the values before each call",
        "Restore self.{name} before each new sequence.",
    ),
    one_token=Code(
        "breaks",
        "the model takes one token per call, so its attention needs no mask, but GPT-2 takes whole "
        "sequences; compat called it with sequences, without this assertion",
        'scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))',
    ),
    train_mode=Code(
        "info",
        "the constructor leaves the model in training mode, in which dropout is applied",
        "model.eval()",
    ),
    fast_path=Code(
        "breaks",
        "in eval mode without gradients, nn.TransformerEncoderLayer runs a fused kernel that "
        "computes something else than the layer's own code, for example the exact GELU, or "
        "attention with a boolean mask in place of numbers that are added to the scores",
        "torch.backends.mha.set_fastpath_enabled(False)",
    ),
    no_head=Code(
        "breaks",
        "the model has no head and returns hidden states, but GPT-2 returns logits, which are the "
        "product of the hidden states with the token embedding",
        "return x @ self.{table}.T",
    ),
    no_forward=Code(
        "info",
        "the class has no forward, so compat called {found}",
        "def forward(self, ids): return {found}",
    ),
    logits_method=Code(
        "info",
        "forward returns hidden states, and {found} returns the logits, so compat called it",
        "logits = {found}",
    ),
    no_attention=Code(
        "breaks",
        "the model multiplies no softmax(q·kᵀ) with v, so it has no attention and is not a GPT-2",
        "x = x + attn(ln_1(x))",
    ),
    unused_attention=Code(
        "breaks",
        "attention is computed here, but its result does not reach the logits",
        "out = self.proj(out)  # of the heads, not of their input",
    ),
    untraced=Code(
        "info",
        "{found}, so compat mapped the model by the order of its module calls and compared only "
        "its logits",
        "Use only torch operations between the ids and the logits.",
    ),
    partly_examined=Code(
        "breaks",
        "{found}, so compat examined only {parts}, in a GPT-2 of its own",
        "{fix}",
    ),
    unexamined=Code(
        "info",
        "compat failed to check the model for {codes} ({found}), but the comparison of taps and "
        "logits is complete",
        "Report this to the authors of compat, and attach the model.",
    ),
    not_compared=Code(
        "limit",
        "{found}, so the proof does not cover every case",
        "check_parity(model, source, input_ids=…)  # ids that cover the case",
    ),
    kv_cache=Code(
        "breaks",
        "the decode step {step} with the KV cache does not compute the logits of the whole "
        "sequence, because {found}",
        "Use the positions torch.arange(past, past + T) for the new ids, and let these ids "
        "attend to all cached keys and causally to each other.",
    ),
    kv_cache_chunk=Code(
        "limit",
        "with the KV cache, {step} computes the logits of the whole sequence for one new id at a "
        "time, but not for {number} at once, where they differ by {found} of their norm",
        "Let several new ids attend to all cached keys and causally to each other, for example "
        "with the mask torch.ones(T, past + T, dtype=torch.bool).tril(past).",
    ),
    wrong_gradient=Code(
        "limit",
        "the logits are GPT-2's, but the gradients are not ({found})",
        "Remove .detach(), .data or torch.no_grad() there, or correct the backward of a "
        "torch.autograd.Function.",
    ),
    changed_in_place=Code(
        "limit",
        "the logits are GPT-2's, but no gradients can be computed, because a tensor that the "
        "backward pass needs is changed in place",
        "Write x = x + y instead of x += y.",
    ),
    refused_input=Code(
        "breaks",
        "{found}, on {input}, which GPT-2 accepts",
        "Accept any number of sequences of up to {n_positions} ids.",
    ),
    unexplained=Code("breaks", "{found}", "Compare the code before this tap with GPT-2's."),
)
