"""The homes of what lies around the layers: norms, embeddings, head."""

from __future__ import annotations

import torch
from torch.fx import Node

from compat.adaptation.anatomy.norms import Norm
from compat.adaptation.anatomy.parts import Anatomy
from compat.adaptation.mapping.arrange import single_op
from compat.adaptation.mapping.assignments import Assignments, Home
from compat.adaptation.mapping.embedding import embedding_of
from compat.adaptation.tracing.graph import Graph, kind, size
from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.ops import Op, Rearrange, Rows, Same, Transpose


def norm_homes(graph: Graph, hf: str, norm: Norm) -> dict[str, Home]:
    homes: dict[str, Home] = {}
    for name, node in (("weight", norm.scale), ("bias", norm.shift)):
        if node is not None:
            content = torch.arange(graph.values[node].numel()).view(graph.values[node].shape)
            op = single_op(content, (content.numel(),), 1)
            if op is not None:
                homes[f"{hf}.{name}"] = (node,), op
    return homes


def end_homes(anatomy: Anatomy, mapping: Assignments) -> None:
    """The embeddings and the head, by the shapes of their parameters."""
    graph, C = anatomy.graph, anatomy.width
    tables = graph.parameters_between([anatomy.token_embedding], [])
    if len(tables) != 1:
        raise AdaptError("the token embedding is made of more than one parameter")
    table = tables[0]
    mapping.by_tensor["wte.weight"] = (table,), _table_op(graph, table, C)
    for node in graph.parameters_between([anatomy.embed], []):
        shape = graph.values[node].shape
        long = C in shape and shape.numel() > C
        if node is not table and long and "wpe.weight" not in mapping.by_tensor:
            mapping.by_tensor["wpe.weight"] = (node,), _table_op(graph, node, C)
    for node in graph.parameters_between([anatomy.logits], [anatomy.xf]):
        shape = graph.values[node].shape
        if C in shape and shape.numel() > C and node is not table:
            mapping.by_tensor["lm_head.weight"] = (node,), _table_op(graph, node, C)
        elif node is not table and shape.numel() > 1:
            mapping.zeroed.append(node)  # a bias; one number is a factor
    mapping.head_scale = _head_scale(anatomy)


def _head_scale(anatomy: Anatomy) -> float:
    """What the logits are multiplied by after the head."""
    graph = anatomy.graph
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size(anatomy.xf), generator=generator, dtype=torch.float64)
    between = graph.between([graph.output], [anatomy.head])
    if not any(kind(node) in ("mul", "div") for node in between):
        return 1.0
    head, logits = graph.run([anatomy.head, graph.output], {anatomy.xf: x})
    other = graph.run([graph.output], {anatomy.xf: 0 * x})[0]
    base = graph.run([anatomy.head], {anatomy.xf: 0 * x})[0]
    scale = float((logits - other).norm() / (head - base).norm())
    same = torch.allclose(logits - other, scale * (head - base), rtol=1e-6, atol=1e-9)
    return scale if same else 1.0


def _table_op(graph: Graph, node: Node, C: int) -> Op:
    """How `[rows, C]` becomes the parameter, by its shape."""
    shape = graph.values[node].shape
    rows = shape.numel() // C
    patterns = ("r c -> 1 r c", "r c -> r 1 c", "r c -> r c 1")
    ops: list[Op] = [Same(), Transpose(), *map(Rearrange, patterns)]
    for op in ops:
        if op.load(torch.empty(rows, C, device="meta"))[0].shape == shape and not (
            rows == C and isinstance(op, Transpose)
        ):
            return op
    raise AdaptError(f"{graph.names[node]} has shape {list(shape)}, expected [rows, {C}]")


def fit_sizes(anatomy: Anatomy, mapping: Assignments, config: GPT2Config) -> None:
    """Tables of another length than the checkpoint's take the rows that both have."""
    graph = anatomy.graph
    for hf, rows in (
        ("wte.weight", config.vocab_size),
        ("lm_head.weight", config.vocab_size),
        ("wpe.weight", config.n_positions),
    ):
        if hf not in mapping.by_tensor:
            continue
        (node,), op = mapping.by_tensor[hf]
        wanted = graph.values[node].numel() // config.n_embd
        if wanted != rows:
            pattern = {"same": "r c -> r c", "transpose": "r c -> c r"}.get(str(op), str(op))
            start = _first_row(anatomy, mapping, wanted - rows) if hf == "wpe.weight" else 0
            mapping.by_tensor[hf] = (node,), Rows(rows, wanted, pattern, start)


def _first_row(anatomy: Anatomy, mapping: Assignments, spare: int) -> int:
    """Which row of a position table with spare rows the first token gets, as 2 in OPT."""
    if spare <= 0 or "wte.weight" not in mapping.by_tensor:
        return 0
    (table,), _ = mapping.by_tensor["wte.weight"]
    (positions,), _ = mapping.by_tensor["wpe.weight"]
    found = embedding_of(anatomy.graph, anatomy.embed, table, positions)
    first = found.offset if found is not None else None
    return first if first is not None and 0 <= first <= spare else 0
