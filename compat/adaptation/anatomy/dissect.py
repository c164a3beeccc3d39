"""GPT-2's anatomy found in a graph by data flow.

Names carry no information here. Attention is where two things that depend on the ids are
multiplied; everything else is found from there.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch.fx import Node

from compat.adaptation.anatomy.attention_ops import fused_core, split_core
from compat.adaptation.anatomy.graph_index import GraphIndex
from compat.adaptation.anatomy.parts import Anatomy, Core, Layer, Sum
from compat.adaptation.tracing.contractions import SDPA, Contraction
from compat.adaptation.tracing.graph import MOVES, Graph, kind, size, tensor_inputs
from compat.errors import AdaptError


def dissect(graph: Graph) -> Anatomy:
    """Find everything, or say what is missing.

    Raises:
        AdaptError: this is no GPT-2, or one whose parts cannot be told apart; says which.
    """
    return _Dissection(graph).run()


class _Dissection:
    """The search, which keeps what it found so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.marks = GraphIndex(graph)

    def run(self) -> Anatomy:
        graph = self.graph
        cores = self._cores()
        if not cores:
            raise AdaptError(
                "no attention: nowhere is softmax(q·kᵀ) multiplied with v; "
                f"{len(self.marks.projections)} projections found. This is not a GPT-2"
            )
        levels = self._levels(cores)
        tokens, embed = self._embedding()
        self.width = size(tokens)[-1]
        head, xf = self._head()
        layers: list[Layer] = []
        for place, level in enumerate(levels):
            until = [c.product for c in levels[place + 1]] if place + 1 < len(levels) else [head]
            layers.append(self._layer(place, level, until, head, layers))
        rows = prod(size(self._table(tokens))) // self.width
        return Anatomy(graph, tokens, embed, layers, xf, head, graph.output, self.width, rows)

    def _cores(self) -> list[Core]:
        cores = []
        for node in self.marks.live:
            if node not in self.marks.mixers:
                continue
            if kind(node) in SDPA:
                cores.append(fused_core(node))
            elif (core := self._core(self.marks.products[node])) is not None:
                cores.append(core)
        return [self._with_own_value(core) for core in cores]

    def _with_own_value(self, core: Core) -> Core:
        """Where one node is key and value, a copy of it for the value, so that each can be set."""
        if core.v.node is not core.k.node or core.scores is not None:
            return core
        copy = self.graph.copy(core.k.node, core.product)
        q, k, _, *rest = core.product.args
        core.product.args = (q, k, copy, *rest)
        self.marks.refresh()
        return replace(core, v=replace(core.v, node=copy))

    def _core(self, product: Contraction) -> Core | None:
        """The core whose second product this is: probabilities, from a first product, times v."""
        for probs, v in ((product.a, product.b), (product.b, product.a)):
            firsts = self.marks.frontier(probs) & self.marks.mixers
            if len(firsts) != 1 or self.marks.frontier(v) & self.marks.mixers - firsts:
                continue
            first = self.marks.products.get(next(iter(firsts)))
            if first is None or self.marks.frontier(v) & firsts:
                continue
            return split_core(first, product, probs, v)
        return None

    def _levels(self, cores: list[Core]) -> list[list[Core]]:
        """Cores by layer: heads of one layer do not depend on each other."""
        above = self.graph.ancestors
        level: dict[Node, int] = {}
        for core in cores:
            before = [level[c.product] for c in cores if c.product in above[core.product]]
            level[core.product] = max(before, default=-1) + 1
        levels: list[list[Core]] = [[] for _ in range(max(level.values()) + 1)]
        for core in cores:
            levels[level[core.product]].append(core)
        return levels

    def _embedding(self) -> tuple[Node, Node]:
        """The token embedding, and the embedded text: positions added, scaled, no norm yet."""
        tables = self._lookups()
        if not tables:
            raise AdaptError("no token embedding: no table of parameters is looked up by the ids")
        node = tables[0]
        while True:
            users = [user for user in node.users if user in self.graph.live]
            if len(users) != 1 or not self._continues_embedding(users[0], set(tables)):
                return tables[0], node
            node = users[0]

    def _lookups(self) -> list[Node]:
        """Where a table is looked up by the ids, or multiplied with one-hot vectors of them."""
        marks = self.marks
        return [
            node for node in marks.live
            if marks.embeds(node) or (node in marks.projections and not marks.sources(node))
        ]  # fmt: skip

    def _table(self, node: Node) -> Node:
        """The table of an embedding, or of a product with one-hot vectors."""
        found = self.marks.products.get(node)
        if found is None:
            return tensor_inputs(node)[0]
        return found.b if found.a in self.graph.live else found.a

    def _continues_embedding(self, user: Node, tables: set[Node]) -> bool:
        if kind(user) in MOVES or kind(user) == "getitem":
            return True
        if kind(user) not in ("add", "mul", "div", "sub", "rsub"):
            return False
        return all(
            self.marks.frontier(a) <= tables for a in user.all_input_nodes if a in self.graph.live
        )

    def _head(self) -> tuple[Node, Node]:
        found = self.marks.frontier(self.graph.output)
        if len(found) != 1 or not found <= self.marks.projections:
            names = ", ".join(sorted(str(node) for node in found)) or "nothing"
            raise AdaptError(
                f"no language-model head: the output comes from {names}, not from one projection "
                "to the vocabulary"
            )
        head = found.pop()
        return head, self.marks.up(self.marks.data(head)[0])

    def _layer(
        self, place: int, cores: list[Core], until: list[Node], head: Node, done: list[Layer]
    ) -> Layer:
        graph, above = self.graph, self.graph.ancestors
        marks, outs = self.marks, {core.product for core in cores}
        qkv, x1 = self._inputs(place, cores)
        out_projs = [
            n for n in marks.live if n in marks.projections and marks.sources(n) <= outs
        ]  # fmt: skip
        reached = set().union(*(above[n] for n in until)) - above[qkv[0]]
        following = {n for n in reached if n in self.marks.projections}
        mlp = following - {*qkv, *out_projs, head, *(q for q in self._next_qkv(until, head))}
        fc, mlp_proj = self._mlp(place, sorted(mlp, key=graph.order.__getitem__))
        attn = self._end(self._joined(out_projs)) if out_projs else self._last(cores)
        end = self._end(mlp_proj)
        attn_sum, mlp_sum = self._sum(attn, outs), self._sum(end, {mlp_proj})
        if attn_sum.node is mlp_sum.node:  # both are summed before they join the stream
            attn_sum = mlp_sum = self._sum(mlp_sum.node, {*outs, mlp_proj})
        return Layer(
            cores=cores,
            qkv=qkv,
            x1=x1,
            out_proj=out_projs[-1] if out_projs else None,
            heads=self.marks.data(out_projs[-1])[0] if out_projs else attn,
            attn=attn,
            attn_sum=attn_sum,
            fc=fc,
            x2=self.marks.up(self.marks.data(fc)[0]),
            act=self.marks.up(self.marks.data(mlp_proj)[0]),
            fc_end=self._end(fc),
            mlp_proj=mlp_proj,
            mlp=end,
            mlp_sum=mlp_sum,
            parallel=not outs & above[fc],
        )

    def _inputs(self, place: int, cores: list[Core]) -> tuple[list[Node], Node]:
        """The projections that make q, k and v, and the one tensor that they read."""
        qkv = set().union(*(self.marks.frontier(o.node) for c in cores for o in (c.q, c.k, c.v)))
        if strange := [n for n in qkv if n not in self.marks.projections]:
            raise AdaptError(
                f"layer {place}: q, k or v come from {strange[0]}, which is no projection"
            )
        inputs = {self.marks.up(self.marks.data(n)[0]) for n in qkv}
        if len(inputs) != 1:
            raise AdaptError(
                f"layer {place}: q, k and v are projected from {len(inputs)} different tensors, "
                "as in cross-attention; expected one"
            )
        return sorted(qkv, key=self.graph.order.__getitem__), inputs.pop()

    def _next_qkv(self, until: list[Node], head: Node) -> set[Node]:
        """The projections of the layer above."""
        marks = self.marks
        mixers = [n for n in until if n is not head]
        firsts = set().union(*(marks.sources(n) & marks.mixers for n in mixers))
        return set().union(*(marks.sources(n) for n in [*mixers, *firsts])) & marks.projections

    def _mlp(self, place: int, found: list[Node]) -> tuple[Node, Node]:
        if len(found) != 2:
            raise AdaptError(self._no_mlp(f"layer {place}", found))
        fc, mlp_proj = found
        if not self.marks.sources(mlp_proj) <= {fc}:
            raise AdaptError(
                f"layer {place}: {mlp_proj} reads more than {fc}; "
                "expected an MLP of two projections"
            )
        return fc, mlp_proj

    def _last(self, cores: list[Core]) -> Node:
        """Attention's result where no projection follows: the heads side by side."""
        node = max((core.out.node for core in cores), key=self.graph.order.__getitem__)
        while True:
            users = [user for user in node.users if user in self.graph.live]
            if len(users) != 1 or kind(users[0]) not in MOVES | {"cat", "getitem", "stack"}:
                return node
            node = users[0]

    def _joined(self, out_projs: list[Node]) -> Node:
        """The projection, or where those of single heads are summed or concatenated."""
        above, wanted = self.graph.ancestors, set(out_projs)
        return next(n for n in self.marks.live if wanted <= above[n] | {n})

    def _no_mlp(self, where: str, found: list[Node]) -> str:
        places = dict.fromkeys(self.graph.place(node) for node in found)
        lines = ", ".join(f"{p.file}:{p.line}" for p in places if p)
        why = "" if found else "; no MLP is run between attention and what follows"
        if len(found) == 3 and self.marks.sources(found[2]) == set(found[:2]):
            why = "; this is a gated MLP, as in LLaMA"
        elif len(found) > 2:
            why = "; there is more than an MLP between two attentions or before the head"
        return (
            f"{where}: {len(found)} projections after attention"
            f"{' at ' if lines else ''}{lines}; expected two, those of the MLP{why}"
        )

    def _end(self, node: Node) -> Node:
        """The projection's result with a bias that is added apart."""
        end = node
        while True:
            users = [user for user in node.users if user in self.graph.live]
            if len(users) != 1:
                return end
            user = users[0]
            if kind(user) == "add" and self._adds_parameter(user):
                node = end = user
            elif kind(user) in MOVES or kind(user) == "getitem":
                node = user
            else:
                return end

    def _adds_parameter(self, node: Node) -> bool:
        dead = [a for a in node.all_input_nodes if a not in self.graph.live]
        return len(dead) == 1 and bool(self.graph.parameters_of[dead[0]])

    def _sum(self, branch: Node, roots: set[Node]) -> Sum:
        """The first sum of a branch with a tensor that is not made of the branch's roots."""
        above = self.graph.ancestors
        for node in self.marks.live:
            if self.graph.order[node] <= self.graph.order[branch] or not self._adds_streams(node):
                continue
            one, other = (a for a in tensor_inputs(node)[:2])
            for inner, outer in ((one, other), (other, one)):
                from_branch = branch in above[inner] or inner is branch
                if from_branch and not roots & (above[outer] | {outer}):
                    return Sum(node, inner, self.marks.up(outer))
        return Sum(branch, branch, None)

    def _adds_streams(self, node: Node) -> bool:
        """The sum of two live tensors (B, T, C)."""
        if kind(node) != "add":
            return False
        inputs = tensor_inputs(node)[:2]
        B, T = self.graph.shape
        whole = B * T * self.width
        return len(inputs) == 2 and all(
            a in self.graph.live and prod(size(a)) == whole for a in inputs
        )
