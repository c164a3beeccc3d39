"""The registry of fixes: for a finding, edits of the source to try, the likeliest first.

To add a fix, write a generator that yields lists of edits for a `Site`, decorate it with
`@fixes(CODE, …)`, and put it into the module of its part of GPT-2. A fix may yield edits that turn
out wrong: `repair` keeps only what improves the model. Empty lists are left out. A fix that looks
something up that the code or the finding does not have ends with a LookupError, such as that of
`site.function`.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

from compat.adaptation.repair.edits import Edit, Edits, edited_texts
from compat.adaptation.repair.source import Node, Source, enclosing, find, needed, source_of
from compat.adaptation.repair.syntax import constructor, variables
from compat.adaptation.result import Finding
from compat.config import GPT2Config

Fix = Callable[["Site"], Iterator[Edits]]

FIXES: dict[str, list[Fix]] = {}
UNSAFE: set[Fix] = set()


def fixes(*codes: str, unsafe: bool = False) -> Callable[[Fix], Fix]:
    """Add a fix for findings of these codes.

    Args:
        codes: codes in the registry of deviations.
        unsafe: the fix changes the signature of a constructor.
    """

    def register(fix: Fix) -> Fix:
        @wraps(fix)
        def changing(site: Site) -> Iterator[Edits]:
            return filter(None, fix(site))

        for code in codes:
            FIXES.setdefault(code, []).append(changing)
        if unsafe:
            UNSAFE.add(changing)
        return changing

    return register


@dataclass(frozen=True)
class Site:
    """A finding and the code around its line.

    Args:
        finding: the finding, which has a file and a line.
        sources: the files of the user's model, by the names that findings use.
        config: the config of the checkpoint on which edits are tried, which may be small.
        user_config: the config of the user's checkpoint.
    """

    finding: Finding
    sources: Mapping[str, Source]
    config: GPT2Config
    user_config: GPT2Config

    @property
    def source(self) -> Source:
        assert self.finding.file is not None
        return self.sources[self.finding.file]

    @property
    def tree(self) -> ast.Module:
        """The syntax of the finding's file."""
        return self.source.tree

    @property
    def texts(self) -> dict[str, str]:
        """The texts of the files."""
        return {file: source.text for file, source in self.sources.items()}

    @cached_property
    def ordered(self) -> list[Source]:
        """The files, the finding's first."""
        return sorted(self.sources.values(), key=lambda source: source is not self.source)

    @property
    def line(self) -> int:
        assert self.finding.line is not None
        return self.finding.line

    @cached_property
    def statement(self) -> ast.stmt:
        """The innermost statement of the finding's line."""
        return self.source.statements_at(self.line)[0]

    @property
    def values(self) -> dict[str, Any]:
        """The values of the finding."""
        return self.finding.values

    @cached_property
    def function_or_none(self) -> ast.FunctionDef | None:
        """The function or method around the line."""
        if isinstance(self.statement, ast.FunctionDef):
            return self.statement
        return enclosing(self.statement, ast.FunctionDef)

    @property
    def function(self) -> ast.FunctionDef:
        """The function or method around the line, without which the fix does not apply."""
        return needed(self.function_or_none)

    @property
    def region(self) -> ast.AST:
        """The function or method around the line, or else the whole file."""
        return self.function_or_none or self.tree

    @property
    def within(self) -> ast.stmt:
        """The function or method around the line, or else the statement."""
        return self.function_or_none or self.statement

    @cached_property
    def cls_or_none(self) -> ast.ClassDef | None:
        """The class around the line."""
        return enclosing(self.statement, ast.ClassDef)

    @property
    def cls(self) -> ast.ClassDef:
        """The class around the line, without which the fix does not apply."""
        return needed(self.cls_or_none)

    @property
    def init_or_none(self) -> ast.FunctionDef | None:
        """The constructor of the class around the line."""
        return None if self.cls_or_none is None else constructor(self.cls_or_none)

    @property
    def init(self) -> ast.FunctionDef:
        """The constructor of the class around the line, without which the fix does not apply."""
        return needed(self.init_or_none)

    @cached_property
    def scopes(self) -> list[ast.AST]:
        """The statement, and the function and class around it."""
        around = [self.statement, self.function_or_none, self.cls_or_none]
        return [scope for scope in around if scope is not None]

    @cached_property
    def calls(self) -> list[ast.Call]:
        """The calls that begin on the finding's line, then the others of its statement."""
        found = find(ast.Call, self.statement)
        return sorted(
            found, key=lambda call: not call.lineno <= self.line <= (call.end_lineno or 0)
        )

    @cached_property
    def everywhere(self) -> list[Site]:
        """This place and the further lines with the same deviation."""
        found = [self]
        for place in self.finding.also:
            file, _, line = place.rpartition(":")
            if file in self.sources:
                found.append(self.at(file, int(line)))
        return found

    def at(self, file: str, line: int) -> Site:
        """Return the finding as if it were at another line."""
        finding = dataclasses.replace(self.finding, file=file, line=line)
        return dataclasses.replace(self, finding=finding)

    def around(self, node: ast.expr | ast.stmt) -> Site:
        """Return the finding as if it were at a node."""
        return self.at(source_of(node).file, node.lineno)

    def every(self, kind: type[Node]) -> Iterator[Node]:
        """Yield the nodes of a kind in all files."""
        return (node for source in self.sources.values() for node in find(kind, source.tree))

    def lineage(self, cls: ast.ClassDef) -> list[ast.ClassDef]:
        """Return a class and those of the user's files that it inherits from, itself first."""
        found = [cls]
        for each in found:  # which grows
            names = {base.id for base in each.bases if isinstance(base, ast.Name)}
            above = (other for other in self.every(ast.ClassDef) if other.name in names)
            found += [other for other in above if other not in found]
        return found

    def new_name(self, *names: str) -> str:
        """Return the first of the names that the function does not use."""
        within = self.region
        known = variables(within)
        known |= {node.arg for node in ast.walk(within) if isinstance(node, ast.arg)}
        numbered = (f"{names[0]}_{i}" for i in itertools.count(2))
        return next(name for name in itertools.chain(names, numbered) if name not in known)

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """The imports of the finding's file, or of all cells of its notebook."""
        name = self.source.file.partition("#")[0]
        own = [s for file, s in self.sources.items() if file.partition("#")[0] == name]
        nodes = (node for source in own for node in find(ast.stmt, source.tree))
        return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]

    @cached_property
    def imported(self) -> frozenset[str]:
        """The names that imports bind."""
        return frozenset(
            alias.asname or alias.name.partition(".")[0]
            for node in self.imports
            for alias in node.names
        )

    def torch(self, name: str) -> str:
        """Return how the file can write, for example, `torch.nn.functional.gelu`."""
        known: dict[str, str] = {}  # the alias of every imported module
        for node in self.imports:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    known[alias.name] = alias.asname or alias.name
                    if alias.asname is None:
                        known[alias.name.partition(".")[0]] = alias.name.partition(".")[0]
            elif node.module and not node.level:
                for alias in node.names:
                    known[f"{node.module}.{alias.name}"] = alias.asname or alias.name
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if own := known.get(".".join(parts[:end])):
                return ".".join([own, *parts[end:]])
        return name


# Fixes of code that was already edited.


def _edited(site: Site, edits: Edits) -> Site:
    """Return the finding in the edited code."""
    texts = edited_texts(site.texts, edits)
    sources = {**site.sources, **{file: Source(file, text) for file, text in texts.items()}}

    def moved(file: str, line: int) -> int:
        source = site.sources[file]
        start = source.offset(line, 0)
        before = [e for e in edits if e.file == file and e.start <= start]
        return line + sum(
            e.text.count("\n") - source.text[e.start : e.end].count("\n") for e in before
        )

    also = []
    for place in site.finding.also:
        file, _, line = place.rpartition(":")
        also.append(f"{file}:{moved(file, int(line))}" if file in sources else place)
    finding = dataclasses.replace(site.finding, line=moved(site.source.file, site.line), also=also)
    return dataclasses.replace(site, finding=finding, sources=sources)


def followed(site: Site, edits: Edits, fix: Fix) -> Iterator[Edits]:
    """Yield edits together with those that a fix makes of the edited code, as whole texts."""
    changed = _edited(site, edits)
    for further in fix(changed):
        texts = changed.texts | edited_texts(changed.texts, further)
        pairs = [(file, old, texts[file]) for file, old in site.texts.items()]
        yield [Edit(file, 0, len(old), new) for file, old, new in pairs if new != old]
