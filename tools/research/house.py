"""Measures a code tree: sizes of files, functions and classes, import depth and cycles, documented names.

    python tools/research/house.py edgemoe [FOLDER ...]

Tests and `__init__` files of at most 8 lines are left out, as are imports under `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path


def spread(values: list[int]) -> str:
    """Returns median, 90th percentile and largest value, as in "6/18/94"."""
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{statistics.median(ordered):.0f}/{ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))]}/{ordered[-1]}"


def python_files(root: Path) -> list[Path]:
    """Returns the measured files under `root`."""
    return sorted(
        path
        for path in root.rglob("*.py")
        if "tests" not in path.parts and not (path.name == "__init__.py" and len(path.read_text().splitlines()) <= 8)
    )


def module_name(path: Path, root: Path) -> str:
    """Returns the dotted name of the module in `path`."""
    return ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module, names: set[str], typing_only: bool) -> set[str]:
    """Returns the modules of `names` that a file imports, with or without those under TYPE_CHECKING."""
    skipped: set[ast.AST] = set()
    if not typing_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(ast.walk(node))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.update({whole} & names or {node.module} & names)
    return found


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components, leaves first [Tarjan 1972]."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            cut = stack.index(node)
            result.append(stack[cut:])
            del stack[cut:]

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in index:
            visit(node)
    return result


def depth(graph: dict[str, set[str]]) -> int:
    """Returns the number of imports on the longest chain, a cycle counted as one file."""
    parts = components(graph)
    part_of = {name: number for number, part in enumerate(parts) for name in part}
    deepest: list[int] = []
    for number, part in enumerate(parts):
        below = {part_of[target] for name in part for target in graph[name]} - {number}
        deepest.append(1 + max((deepest[one] for one in below), default=0))
    return max(deepest, default=1) - 1


def measure(root: Path) -> dict[str, str]:
    """Returns the table's row of the tree under `root`."""
    files = python_files(root)
    trees = {module_name(path, root): ast.parse(path.read_text()) for path in files}
    names = set(trees)
    runtime = {name: imported(tree, names, False) - {name} for name, tree in trees.items()}
    everything = {name: imported(tree, names, True) - {name} for name, tree in trees.items()}
    functions = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    public = {
        name: [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_"
        ]
        for name, tree in trees.items()
    }
    every = [node for nodes in public.values() for node in nodes]
    lines = [len(path.read_text().splitlines()) for path in files]
    comment_lines = docstring_lines = 0
    for path in files:
        comment_lines += sum(
            1
            for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
            if token.type == tokenize.COMMENT
        )
    for tree in trees.values():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and ast.get_docstring(node, clean=False) is not None
            ):
                text = node.body[0]
                docstring_lines += (text.end_lineno or text.lineno) - text.lineno + 1
    cycles = [part for part in components(runtime) if len(part) > 1]
    typing_cycles = [part for part in components(everything) if len(part) > 1]
    total = sum(lines)
    documented = sum(ast.get_docstring(node) is not None for node in every)
    return {
        "files": str(len(files)),
        "lines": f"{total:,}",
        "lines a file": spread(lines),
        "functions": f"{len(functions):,}",
        "lines a function": spread([(node.end_lineno or 0) - node.lineno + 1 for node in functions]),
        "parameters": spread(
            [len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) for node in functions]
        ),
        "classes": str(len(classes)),
        "methods a class": spread(
            [sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body) for node in classes]
        ),
        "import depth": str(depth(runtime)),
        "cycles (with typing)": f"{len(cycles)} ({len(typing_cycles)})",
        "public names a file": spread([len(nodes) for nodes in public.values()]),
        "public with docstring": f"{100 * documented / max(1, len(every)):.0f} %",
        "comment lines": f"{100 * comment_lines / total:.1f} %",
        "docstring lines": f"{100 * docstring_lines / total:.1f} %",
    }


def main() -> None:
    """Prints a row of the table for each folder named."""
    rows = {name: measure(Path(name).resolve()) for name in sys.argv[1:]}
    columns = list(next(iter(rows.values())))
    print("| | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(row[column] for column in columns) + " |")


if __name__ == "__main__":
    main()
