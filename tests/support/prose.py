"""Docstrings and comments of sources, and text of pages, each file read and parsed once."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tools.prose_check import comments, docstrings, statements

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("edgemoe", "scoutgate", "tools") for path in (ROOT / folder).rglob("*.py"))
DOCS = sorted((ROOT / "docs").rglob("*.md"))
FIGURES = sorted(page for room in ("bench", "research") for page in (ROOT / "tools" / room / "results").glob("*.md"))
TOP_PAGES = [path for path in sorted(ROOT.glob("*.md")) if path.name != "CHANGELOG.md"]
PAGES = [*TOP_PAGES, *DOCS, ROOT / "tools/bench/RESULTS.md", *FIGURES]


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), str(path))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Returns all nodes of a source's tree, which must not be changed."""
    return list(ast.walk(tree_of(path)))


@functools.cache
def prose(path: Path) -> list[tuple[int, str]]:
    """Returns line and text of each docstring and comment of a source, or the text of a page without code."""
    if path.suffix == ".md":
        text = re.sub(r"(?s)```.*?```|`[^`]*`", "", text_of(path))
        return [(1, re.sub(r"(?<=\])\([^)\s]*\)", "(address)", text))]
    tree = tree_of(path)
    found = [*docstrings(path, tree, list(statements(tree))), *comments(path, text_of(path))]
    return [(passage.line, passage.text) for passage in found]
