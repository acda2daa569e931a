"""Small changes of meaning to Python sources, one at a time: each is a question that the tests should answer."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.FloorDiv: ast.Mult,
}
CLAMPS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
SAID = {"log", "logger", "logging", "warnings"}  # calls on these only log
UNSEEN = {"__repr__", "__str__", "__init_subclass__"}


@dataclass(frozen=True)
class Mutant:
    """A change to a file: `old` at [start, end) becomes `new`."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    key: str  # made of file, function, text and change, without the line

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        lines = source.decode().splitlines(), self.apply(source).decode().splitlines()
        return "\n".join(list(difflib.unified_diff(*lines, self.file, self.file, lineterm="", n=1))[2:])


def mutants_of(path: Path, name: str) -> list[Mutant]:
    """Returns every mutant of a source that still compiles."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, seen, tree = [], dict[str, int](), ast.parse(source)
    outer = _outer_functions(tree)
    for scope, node, new in Changes().of(tree):
        start, end = (starts[line - 1] + col for line, col in _span(node))
        old = source[start:end].decode()
        what = "\0".join((name, scope, old, new))
        seen[what] = seen.get(what, -1) + 1
        key = hashlib.sha256(f"{what}\0{seen[what]}".encode()).hexdigest()[:12]
        mutant = Mutant(name, node.lineno, start, end, old, new, key)
        function = next(one for one in reversed(outer) if one.lineno <= node.lineno)
        before = source[starts[function.lineno - 1] : start]
        after = source[end : starts[function.end_lineno or 0]]
        meaning = _meaning(before + new.encode() + after)
        if meaning and meaning != _meaning(before + source[start:end] + after):
            found.append(mutant)
    return found


def _outer_functions(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns the functions that are in no other function, in order."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(child)
        else:
            found += _outer_functions(child)
    return found


def _meaning(function: bytes) -> str:
    """Returns the syntax tree of a function's lines as a text, "" if they do not compile."""
    try:
        return ast.dump(ast.parse(b"if 1:\n" + function if function[:1].isspace() else function))
    except SyntaxError:
        return ""


Change = tuple[str, ast.stmt | ast.expr, str]  # function, replaced node, replacement


class Changes:
    """Walks functions only: code outside of them is declarations, and tests use the names of constants."""

    def of(self, tree: ast.Module) -> Iterator[Change]:
        yield from self._bodies(tree, "")

    def _bodies(self, node: ast.AST, scope: str) -> Iterator[Change]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                if not any("Protocol" in ast.unparse(base) for base in child.bases):
                    yield from self._bodies(child, f"{scope}.{child.name}")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name not in UNSEEN:
                    yield from self._function(child, f"{scope}.{child.name}")
            elif isinstance(child, ast.If | ast.Try | ast.With):
                yield from self._bodies(child, scope)

    def _function(self, function: ast.FunctionDef | ast.AsyncFunctionDef, scope: str) -> Iterator[Change]:
        returns = ast.unparse(function.returns) if function.returns else ""
        for statement in function.body:
            yield from self._walk(statement, scope, returns)

    def _walk(self, node: ast.AST, scope: str, returns: str) -> Iterator[Change]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._function(node, f"{scope}.{node.name}")
            return
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.ClassDef) or _says(node):
            return
        if isinstance(node, ast.stmt):
            yield from ((scope, node, new) for new in _statement(node, scope, returns))
        elif isinstance(node, ast.expr):
            yield from ((scope, node, new) for new in _expression(node))
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.Raise) or (isinstance(node, ast.AnnAssign) and child is node.annotation):
                continue
            if isinstance(node, ast.If | ast.While | ast.IfExp) and child is node.test and _plain(node.test):
                yield scope, node.test, f"(not ({ast.unparse(node.test)}))"
            yield from self._walk(child, scope, returns)


def _statement(node: ast.stmt, scope: str, returns: str) -> Iterator[str]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise(exc=ast.expr()) | ast.Continue():
            if "super()" not in ast.unparse(node):
                yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not scope.endswith("__init__"):
            yield "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield f"return not ({ast.unparse(value)})" if returns == "bool" else "return None"


def _expression(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Compare(ops=ops):
            for n, op in enumerate(ops):
                node.ops = [*ops[:n], SWAPPED[type(op)](), *ops[n + 1 :]]  # type: ignore[list-item]
                yield f"({ast.unparse(node)})"
            node.ops = ops
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in SWAPPED:
            node.op = SWAPPED[type(op)]()  # type: ignore[assignment]
            yield f"({ast.unparse(node)})"
            node.op = op
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() as value):
            yield from (str(value + 1), f"({value - 1})")
        case ast.Constant(value=float() as value):
            yield str(value * 2 or 1.0)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[_, _, *_]) if name in CLAMPS:
            yield from (f"({ast.unparse(argument)})" for argument in node.args[:2])


def _plain(test: ast.expr) -> bool:
    """Whether no other change negates the same expression."""
    return not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant)


def _says(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        root = node.value.func
        while isinstance(root, ast.Attribute):
            root = root.value
        return isinstance(root, ast.Name) and root.id in SAID
    return False


def _span(node: ast.stmt | ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
