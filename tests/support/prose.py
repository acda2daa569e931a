"""What is written for people: the docstrings and comments of sources, and the pages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("edgemoe", "scoutgate", "tools") for path in (ROOT / folder).rglob("*.py"))
DOCS = sorted((ROOT / "docs").glob("*.md"))
FIGURES = sorted((ROOT / "tools/bench/results").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS, ROOT / "tools/bench/RESULTS.md", *FIGURES]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring and comment of a source; all of a page but its code."""
    text = path.read_text()
    if path.suffix == ".md":
        yield 1, re.sub(r"(?s)```.*?```|`[^`]*`", "", text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            said := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, said
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
