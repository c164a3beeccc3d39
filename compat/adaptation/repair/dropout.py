"""Fixes of dropout that is active in eval mode."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.source import code_of, enclosing, find, indent_of, operand_code, span
from compat.adaptation.repair.syntax import (
    argument,
    assigned,
    assignments,
    called,
    constant,
    is_self,
    variables,
)
from compat.adaptation.repair.values import attempts, calls_of


@fixes("dropout_always_on")
def dropout_in_training(site: Site) -> Iterator[Edits]:
    """Apply dropout in training only."""
    edits = [_in_training(call) for call in site.every(ast.Call)]
    yield from attempts(site, [edit for edit in edits if edit is not None])


def _in_training(call: ast.Call) -> Edit | None:
    name = called(call)
    if enclosing(call, ast.ClassDef) is None:
        return None
    if name == "scaled_dot_product_attention":
        p = argument(call, 4, "dropout_p")
        function = enclosing(call, ast.FunctionDef)
        if isinstance(p, ast.Name) and function is not None:
            p = next(assignments(function, p.id), p)
        if p is None or constant(p) == 0 or _mentions_training(p):
            return None
        return Edit.replace(p, f"{operand_code(p)} if self.training else 0.0")
    key = "train" if code_of(call.func) == "torch.dropout" else "training"
    is_dropout = re.fullmatch(r"(alpha_|feature_|feature_alpha_)?dropout[123]?d?_?", name)
    if not is_dropout or is_self(call.func) or _mentions_training(argument(call, 2, key)):
        return None
    return Edit.set_argument(call, 2, key, "self.training")


def _mentions_training(node: ast.AST | None) -> bool:
    inside = ast.walk(node) if node is not None else ()
    return any(getattr(each, "attr", "") == "training" for each in inside)


@fixes("dropout_always_on")
def dropout_module_in_forward(site: Site) -> Iterator[Edits]:
    """Replace a module that forward creates, which is in training mode, by the function."""
    edits: Edits = []
    for call in site.every(ast.Call):
        match built := call.func:
            case ast.Call(ast.Attribute(module, "train")) if is_self(module):
                edits.append(Edit.replace(built, code_of(module)))
                continue
            case ast.Call(ast.Attribute(module, "train")):
                built = module
        edits += _function_instead(site, call, built)
        function = enclosing(call, ast.FunctionDef)
        if isinstance(built, ast.Name) and function is not None:
            for statement in find(ast.Assign, function):
                for value in assignments(statement, built.id, deep=False):
                    if replaced := _function_instead(site, call, value):
                        yield [*replaced, Edit.remove(statement)]
    yield from attempts(site, edits)


def _function_instead(site: Site, call: ast.Call, built: ast.expr) -> Edits:
    """Call the function for dropout where a module is called, if the module is nn.Dropout."""
    if not isinstance(built, ast.Call) or called(built) != "Dropout" or not call.args:
        return []
    p = argument(built, 0, "p")
    arguments = [code_of(call.args[0]), "0.5" if p is None else code_of(p)]
    dropout = site.torch("torch.nn.functional.dropout")
    return [Edit.replace(call, f"{dropout}({', '.join(arguments)}, training=self.training)")]


@fixes("dropout_always_on")
def training_mode_forced(site: Site) -> Iterator[Edits]:
    """Remove from the methods what turns on training mode."""
    edits = [
        Edit.remove(statement)
        for statement in site.every(ast.stmt)
        if enclosing(statement, ast.ClassDef) is not None and _turns_on_training(statement)
    ]  # fmt: skip
    yield from attempts(site, edits)


def _turns_on_training(statement: ast.stmt) -> bool:
    """Return whether a statement is `module.train()` or `module.training = True`."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return called(statement.value) == "train"
    return any(
        isinstance(target, ast.Attribute) and target.attr == "training" and constant(value) is True
        for target, value in assigned(statement)
    )


@fixes("dropout_always_on")
def written_dropout_in_training(site: Site) -> Iterator[Edits]:
    """Skip a hand-written dropout in eval mode."""
    source, function = site.source, site.function
    if site.cls_or_none is None or site.statement not in function.body:
        return
    first, indent = function.body.index(site.statement), indent_of(site.statement)
    for following in function.body[first : first + 4]:
        if isinstance(following, ast.Return):
            break
        if variables(site.statement) & variables(following):
            start, end = source.offset(site.statement.lineno, 0), span(following)[1]
            inner = source.text[start:end].replace(f"\n{indent}", f"\n{indent}    ")
            text = f"{indent}if self.training:\n    {inner}"
            yield [Edit.at(site.statement, start, end, text)]
    inputs = [each.arg for each in function.args.args[1:]]
    if inputs:
        early = ("if not self.training:", f"    return {inputs[0]}")
        yield [Edit.insert_before(site.statement, *early)]
        yield [Edit.insert_before(function.body[0], *early)]


@fixes("dropout_always_on")
def dropout_in_function(site: Site) -> Iterator[Edits]:
    """Pass the mode to a function that applies dropout, or remove the dropout."""
    function = site.function_or_none
    for call in site.calls:
        if "dropout" not in called(call).lower():
            continue
        if function is not None and enclosing(function, ast.ClassDef) is None and not (
            function.args.kwonlyargs or function.args.vararg or function.args.kwarg
        ) and function.args.args:  # fmt: skip
            last = max([*function.args.args, *function.args.defaults], key=span)
            callers = [c for c in calls_of(site, function.name) if enclosing(c, ast.ClassDef)]
            yield [
                Edit.suffix(last, ", training=False"),
                Edit.set_argument(call, 2, "training", "training"),
                *(Edit.set_keyword(each, "training", "self.training") for each in callers),
            ]
        if call.args:
            yield [Edit.replace(call, code_of(call.args[0]))]


@fixes("dropout_always_on")
def called_in_training(site: Site) -> Iterator[Edits]:
    """Call a function that drops at random only in training: `f(x, p) if self.training else x`."""
    edits: Edits = []
    for each in site.everywhere:
        arguments = each.function.args.args[:1] if each.function_or_none else []
        for call in each.calls if [a.arg for a in arguments] == ["self"] else ():
            if isinstance(call.func, ast.Name) and call.args and "drop" in call.func.id.lower():
                own, operand = code_of(call), code_of(call.args[0])
                edits.append(Edit.replace(call, f"({own} if self.training else {operand})"))
    yield edits
