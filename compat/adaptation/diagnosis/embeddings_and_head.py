"""Deviations of the embeddings, the head and the logits."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from compat.adaptation.anatomy.dissect import is_table_of_positions
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.modified_reference import Changes
from compat.adaptation.diagnosis.registry import Deviation, detects, deviation, operations
from compat.adaptation.diagnosis.shifts import shifted_ids
from compat.adaptation.mapping.embeddings import EmbeddingFormula
from compat.adaptation.tracing.contractions import contraction
from compat.adaptation.tracing.graph import (
    DRAWS,
    MOVES,
    NAN_GUARDS,
    SHIFTS,
    Place,
    kind,
    live_inputs,
    size,
    tensor_inputs,
)
from compat.adaptation.tracing.rewrites import CUTS, POOLS
from compat.ops import Rows

# Operations that make positions.
POSITION_OPS = {"arange", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "cumsum"}
SUM = "x = wte(ids) + wpe(torch.arange(T))"


def _path(context: DiagnosisContext) -> list[Node]:
    """Return the nodes from the ids to the embedding."""
    return context.graph.between([context.anatomy.embed], [context.graph.input])


def _sum_line(context: DiagnosisContext) -> Place | None:
    """Return the line that adds the embeddings; if unknown, the one that looks up the tokens."""
    graph = context.graph
    sums = [n for n in _path(context) if kind(n) in ("add", "sub") and n in graph.live]
    return source.running(graph, sums or [context.anatomy.token_embedding])


def position_line(context: DiagnosisContext) -> Place | None:
    """Return the line that computes the positions; if unknown, the one that adds the embeddings."""
    constant = [node for node in _path(context) if node not in context.graph.live]
    line = source.running(context.graph, constant, "arange", "slice", "add", "embedding")
    return line or _sum_line(context)


@deviation("the {what} embedding is multiplied by {found:.6g}, but GPT-2 does not scale it", SUM)
def scaled_embedding(context: DiagnosisContext) -> Iterator[Deviation]:
    if (found := context.embedding) is None:
        return
    graph, path = context.graph, _path(context)
    factors = [n for n in path if kind(n) in ("mul", "div")]
    doubled = [n for n in path if kind(n) == "add" and {*tensor_inputs(n)} <= graph.live]
    for what, scale, changes in (
        ("token", found.token_scale, Changes(token_scale=found.token_scale)),
        ("position", found.position_scale, Changes(position_scale=found.position_scale)),
    ):
        if abs(scale - 1) > 1e-9:
            own = [n for n in factors if (n in graph.live) is (what == "token")]
            values = {"what": what, "found": scale}
            line = source.running(graph, own or doubled or factors) or _sum_line(context)
            yield Deviation("embed", [line], values, changes)


@deviation(
    "the position embedding is a fixed formula, but GPT-2 learns it, so wpe.weight cannot be "
    "loaded",
    "nn.Embedding({n_positions}, {n_embd})",
)
def sinusoidal_pos(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.embedding is None or context.embedding.added is None:
        return
    changes = Changes(added=context.embedding.added)
    if "wpe.weight" not in context.mapping.by_tensor:
        changes.weights["wpe.weight"] = None
    values = {"n_positions": context.config.n_positions, "n_embd": context.config.n_embd}
    graph = context.graph
    fixed = [
        node for node in _path(context) if node in graph.live and kind(node) == "add"
        and any(a not in graph.live and not graph.parameters_of[a] for a in node.all_input_nodes)
    ]  # fmt: skip
    line = source.running(graph, fixed) or _sum_line(context)
    computing = source.mentions(context.model, r"\b(sin|cos)\(")  # also where the buffer is filled
    lines = [line, *(computing if len(computing) <= 4 else [])]
    yield Deviation("embed", lines, values, changes)


@deviation(
    "there is no position embedding, but GPT-2 adds wpe.weight, so wpe.weight cannot be loaded",
    SUM,
)
def no_pos(context: DiagnosisContext) -> Iterator[Deviation]:
    found = context.embedding
    if found is None or found.added is not None or found.offset is not None or found.rows:
        return
    if found.by_batch:
        return
    if context.anatomy.leading and _position_vectors(context):
        return  # they may be added after these projections
    if later_tables(context) or joined_positions(context):  # unknown_embedding
        return
    if found.from_tokens:
        tables = context.nodes_of("wte.weight")
        after = [n for n in _path(context) if n not in context.graph.live and n not in tables]
        lookups = [n for n in after if context.graph.parameters_of[n]]
        added = context.weights["wte.weight"][: context.config.n_positions]
        message = (
            "the positions are looked up in the token embedding, but GPT-2 has a separate table "
            "for them, so wpe.weight cannot be loaded"
        )
        changes = Changes(weights={"wpe.weight": None}, added=added)
        line = source.running(context.graph, lookups)
        yield Deviation("embed", [line or position_line(context)], {}, changes, message=message)
    else:
        node, graph, model = context.anatomy.token_embedding, context.graph, context.model
        line = source.projecting(graph, model, node)  # of a class with a table alone, the call
        call = source.embedding_call(graph, model, node)
        lines = [line, call, context.owner_of("wte.weight")]
        yield Deviation("embed", lines, {}, Changes(weights={"wpe.weight": None}))


def later_tables(context: DiagnosisContext) -> set[Node]:
    """Return the parameters of tables of positions that are read between embeddings and blocks.

    Norms over several axes have parameters for each position, too, which are none of them.
    """
    graph, layers = context.graph, context.anatomy.layers
    end = layers[0].x1 if layers else context.anatomy.xf
    before = graph.between([end], [context.anatomy.embed])
    tables = [graph.parameters_of[n] for n in before if is_table_of_positions(graph, n)]
    norms = [*context.places.named.values(), *context.places.extra.values()]
    own = {parameter for norm in norms for parameter in (norm.scale, norm.shift)}
    return set().union(*tables) - own


def _position_vectors(context: DiagnosisContext) -> bool:
    """Return whether the graph has a vector for each position, (T, C), that no id changes."""
    graph = context.graph
    shape = graph.shape[1], context.anatomy.width
    return any(node not in graph.live and size(node)[-2:] == shape for node in graph.nodes)


@deviation(
    "the first token has position {found}, but in GPT-2 it has position 0", "torch.arange(T)"
)
def pos_offset(context: DiagnosisContext) -> Iterator[Deviation]:
    found = context.embedding
    if found is None or found.added is not None or found.offset is None:
        return
    _, op = context.mapping.by_tensor.get("wpe.weight", ((), None))
    if offset := found.offset - (op.start if isinstance(op, Rows) else 0):
        changes = Changes(position_offset=offset)
        yield Deviation("embed", [position_line(context)], {"found": offset}, changes)


@deviation(
    "the tokens have the positions {found}, but GPT-2 uses {expected}",
    "positions = torch.arange(T)  # with a cache: torch.arange(past, past + T)",
)
def position_ids(context: DiagnosisContext) -> Iterator[Deviation]:
    if (found := context.embedding) is None:
        return
    if found.by_batch:
        yield _by_batch(context, found)
    if found.rows is None:
        return
    first = next((i for i, row in enumerate(found.rows) if row != i), 0)
    start = max(first - 1, 0)
    shown = {"found": found.rows[start : start + 4], "expected": range(start, start + 4)}
    values = {
        key: "…, " * (start > 0) + ", ".join(map(str, rows)) + ", …" for key, rows in shown.items()
    }
    added = context.weights["wpe.weight"][list(found.rows)] * found.position_scale
    changes = Changes(weights={"wpe.weight": None}, added=added)
    made = [node for node in _path(context) if kind(node) in POSITION_OPS]
    line = source.running(context.graph, made) or position_line(context)
    yield Deviation("embed", [line], values, changes)


def _by_batch(context: DiagnosisContext, found: EmbeddingFormula) -> Deviation:
    """Return positions that are added along the axis of the batch, as by code for ids (T, B)."""
    B, T = context.graph.shape
    changes = Changes(added=found.added)
    if "wpe.weight" in context.mapping.by_tensor:
        rows = context.weights["wpe.weight"][:B, None] * found.position_scale
        changes = Changes(weights={"wpe.weight": None}, added=rows.expand(-1, T, -1))
    message = (
        "the positions are added along the axis of the batch, so all tokens of a sequence have the "
        "same one, but GPT-2 adds them along the axis of the tokens"
    )
    return Deviation("embed", [_sum_line(context)], {}, changes, message=message)


@deviation(
    "the token embedding and the position embedding are {found}, but GPT-2 adds them",
    "x = wte(ids) + wpe(torch.arange(T))",
)
def other_embedding(context: DiagnosisContext) -> Iterator[Deviation]:
    graph = context.graph
    if joined := joined_positions(context):
        how = {"cat": "concatenated", "mul": "multiplied"}[kind(joined[0])]
        yield Deviation("embed", [source.running(graph, joined)], {"found": how})
    # A token table of another width is reported as such.
    elif not _added_operations(context) and not _on_ids(context) and _is_no_sum(context):
        drawn = any(kind(node) in DRAWS for node in _path(context))
        if drawn or shifted_ids(graph, context.anatomy.embed):
            return  # these have codes of their own
        if "wte.weight" in context.mapping.by_tensor:
            values = {"found": "combined by a formula that is unknown to compat"}
            yield Deviation("embed", [_sum_line(context)], values)


@detects("extra_operation")
def changed_tokens(context: DiagnosisContext) -> Iterator[Deviation]:
    if (nodes := _added_operations(context)) and not joined_positions(context):
        place = source.running(context.graph, nodes)
        values = operations(nodes, "the token embedding", "its sum with the positions")
        yield Deviation("embed", [place], values)
    elif (nodes := _on_ids(context)) and _is_no_sum(context):
        values = operations(nodes, "the ids", "the token embedding")
        yield Deviation("embed", [source.running(context.graph, nodes)], values)


def _added_operations(context: DiagnosisContext) -> list[Node]:
    """Return the operations on the tokens alone that no other code names."""
    inner = context.on_tokens_alone
    known = "wte" in context.places.extra or any(contraction(n) is not None for n in inner)
    return [] if known else inner  # extra_ln, or extra_projection


def _on_ids(context: DiagnosisContext) -> list[Node]:
    """Return the operations on the ids before the lookup that do not only move them."""
    graph, lookup = context.graph, context.anatomy.token_embedding
    path = graph.on_paths([graph.input], [lookup])
    usual = MOVES | SHIFTS | {"getitem"}
    return [node for node in path if node is not lookup and kind(node) not in usual]


def _is_no_sum(context: DiagnosisContext) -> bool:
    """Return whether no formula fits, or positions are read that the one that fits has not."""
    found = context.embedding
    if found is None:
        return True
    absent = found.offset is None and found.added is None and not found.rows
    return absent and not found.by_batch and not found.from_tokens and bool(later_tables(context))


def joined_positions(context: DiagnosisContext) -> list[Node]:
    """Return the nodes that concatenate or multiply the tokens with a table of positions."""
    graph = context.graph
    joining = [n for n in _path(context) if n in graph.live and kind(n) in ("cat", "mul")]
    return [
        n for n in joining
        if any(is_table_of_positions(graph, a) for a in tensor_inputs(n))
        and (kind(n) == "mul" or size(n)[-1] > size(tensor_inputs(n)[0])[-1])  # not along time
    ]  # fmt: skip


@deviation(
    "the head has separate weights, but GPT-2 ties the head to the token embedding, so compat "
    "copied the token embedding into the head",
    "head.weight = wte.weight  # saves {found:,} parameters",
    severity="info",
)
def untied_head(context: DiagnosisContext) -> Iterator[Deviation]:
    assigned, graph = context.mapping.by_tensor, context.graph
    if "lm_head.weight" in assigned and context.config.tie_word_embeddings:
        (node,), _ = assigned["lm_head.weight"]
        place = source.built(context.model, graph.names[node])
        yield Deviation(None, [place], {"found": graph.values[node].numel()})


@deviation(
    "the head has a bias, but GPT-2's head has none, so compat set it to zero",
    "bias=False",
    severity="info",
)
def head_bias(context: DiagnosisContext) -> Iterator[Deviation]:
    for node in context.mapping.zeroed:
        yield Deviation(None, [source.built(context.model, context.graph.names[node])])


@deviation(
    "the logits are multiplied by {found:.6g}, but GPT-2 does not scale them", "return logits"
)
def scaled_logits(context: DiagnosisContext) -> Iterator[Deviation]:
    scale = context.mapping.head_scale
    if abs(scale - 1) > 1e-9:
        after = context.graph.between([context.graph.output], [context.anatomy.head])
        place = source.running(context.graph, after, "mul", "div")
        yield Deviation("logits", [place], {"found": scale}, Changes(head_scale=scale))


@deviation(
    "the model returns {found} of the logits, but GPT-2 returns the logits",
    "return logits",
)
def softmax_output(context: DiagnosisContext) -> Iterator[Deviation]:
    if (node := context.mapping.output_softmax) is not None:
        built = source.torch_built(context.model, [node])
        found = "the logarithm of the softmax" if "log" in kind(node) else "the softmax"
        lines = [built, context.graph.place(node)]
        yield Deviation("logits", lines, {"found": found}, Changes())


@deviation("{found} is applied to the logits, but GPT-2 returns them unchanged", "return logits")
def changed_logits(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect operations on the logits other than a bias or a factor, such as a clamp."""
    graph, usual = context.graph, MOVES | CUTS | {"add", "mul", "div", "getitem"}
    after_head = graph.on_paths([context.anatomy.head], [graph.output])
    if (softmax := context.mapping.output_softmax) is not None:
        after_head += [node for node, above in graph.ancestors.items() if softmax in above]
    unusual = [node for node in after_head if kind(node) not in usual]
    unusual += [node for node in after_head if kind(node) in usual and _joins_others(context, node)]
    guards = [node for node in unusual if kind(node) in NAN_GUARDS]
    others = [node for node in unusual if node not in guards]
    only_guards = guards and all(kind(node) in ("where", "masked_fill") for node in others)
    for node in (guards if only_guards else others)[:1]:
        evidence = "found in the graph, but not tested for its effect on the logits"
        place = graph.place(node)
        yield Deviation("logits", [place], {"found": kind(node)}, evidence=evidence)


def _joins_others(context: DiagnosisContext, node: Node) -> bool:
    """Return whether an operation combines the logits with a tensor that is not the head's."""
    graph, head = context.graph, context.anatomy.head
    inputs = live_inputs(graph, node)
    return any(head not in graph.ancestors[a] | {a} for a in inputs) and len(inputs) > 1


@deviation(
    "the model returns the logits of the last position only, so compat computed the others for the "
    "comparison",
    "Remove the slice if you need the logits of every position.",
    severity="info",
)
def last_position_only(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.last_only is not None and not context.is_pooled:
        yield Deviation(None, [context.graph.place(context.last_only)])
    elif context.with_targets and not context.of_loss:
        yield Deviation(None, [source.matching(context.model, r"\[:, *\[? *-1|\[:, *-1 *:")])


@deviation(
    "the model returns the loss instead of the logits, so compat compared the logits that the loss "
    "is computed from",
    "return logits, loss",
    severity="info",
)
def loss_only(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.of_loss:
        pattern = r"cross_entropy\(|CrossEntropyLoss\("
        yield Deviation(None, [source.matching(context.model, pattern)])


@deviation(
    "the logits are computed from the {found} over all positions, as in a classifier, but GPT-2 "
    "computes logits for each position from its own hidden state",
    "return head(ln_f(x))",
)
def pooled_positions(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.last_only is not None and context.is_pooled:
        place = context.graph.place(context.last_only)
        yield Deviation("ln_f", [place], {"found": POOLS[kind(context.last_only)]})


@deviation(
    "the model takes ids of shape {found}, but GPT-2 takes (B, T), so compat {how}",
    "{call}",
    severity="info",
)
def input_shape(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.input_shape:
        how, call = {
            "(T, B)": ("transposed the ids and the logits", "model(ids.T).transpose(0, 1)"),
            "(T,)": ("called it for each sequence", "torch.stack([model(row) for row in ids])"),
        }[context.input_shape]
        values = {"found": context.input_shape, "how": how, "call": call}
        yield Deviation(None, [source.matching(context.model, r"def forward\(")], values)


@deviation(
    "the model fails before {found} is called, so compat calls it before each call, without the KV "
    "caches that it makes",
    "Make the masks in the constructor, and register them as buffers.",
    severity="info",
)
def setup_first(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.setup:
        place = source.matching(context.model, rf"def {context.setup}\(")
        yield Deviation(None, [place], {"found": f"self.{context.setup}(…)"})


# The lines that give the logits another shape, and how to undo it.
RESHAPES = {
    "(B·T, V)": (
        r"(view|reshape)\(-1, |flatten\(0, 1\)|(view|reshape)\(\w+ ?\* ?\w+, ",
        "view(B, T, V)",
    ),
    "(B, V, T)": (
        r"(return|logits|out\w*)\b.*(transpose\(|permute\(|\.mT\b)",
        "transpose(1, 2)",
    ),
    "(T, B, V)": (
        r"\b(ids|idx|in_?put\w*|src|tok\w*|x)\.(transpose\(0, 1\)|permute\(1, 0|m?T\b|t\(\))",
        "transpose(0, 1)",
    ),
}


@deviation(
    "the model returns logits of shape {found}, but GPT-2 returns (B, T, V), so compat reshaped "
    "them",
    "logits.{how}",
    severity="info",
)
def output_shape(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.output_shape and not (context.with_targets or context.of_loss):
        pattern, how = RESHAPES[context.output_shape]
        place = context.graph.place(context.anatomy.head)
        place = source.matching(context.model, pattern) or place
        yield Deviation(None, [place], {"found": context.output_shape, "how": how})


@deviation(
    "the model leaves out the last id, so it returns logits (B, T − 1, V) for ids (B, T), but "
    "GPT-2 returns (B, T, V); compat passed one more id",
    "Pass all ids to the embedding, and shift the ids and the logits in the loss.",
    severity="info",
)
def last_id_left_out(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.leaves_out_last:
        yield Deviation(None, [source.matching(context.model, r"\[:, *:-1\]")])
