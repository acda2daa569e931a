"""Paths, links and sections named in README and docs exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.prose import DOCS, PAGES, ROOT, SOURCES, prose, tree_of
from test_layering import COMPOSERS, LAYERS, within

ARCHITECTURE = ROOT / "docs/architecture.md"
WHERE = ROOT / "docs/design/where.md"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
TOP = {path.name for path in ROOT.iterdir()}


def quoted_paths(page: Path) -> Iterator[str]:
    """Yields paths in backticks that begin in the root: `tests/support/`, `tools/check --fix`."""
    text = re.sub(r"(?s)```.*?```", "", page.read_text())
    for quoted in re.findall(r"`([^`\s]+)[^`]*`", text):
        if "/" in quoted and quoted.partition("/")[0] in TOP:
            yield quoted


def anchors(page: Path) -> set[str]:
    """Returns the sections of a page, as GitHub names them in addresses."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_path_in_backticks_exists() -> None:
    lost = [(page.name, quoted) for page in PAGES for quoted in quoted_paths(page) if not (ROOT / quoted).exists()]
    assert not lost


def test_every_file_that_a_source_names_exists() -> None:
    """By its path from the root; "/etc/edgemoe/edgemoe.toml" is none."""
    for source in SOURCES:
        for line, text in prose(source):
            for path in re.findall(r"(?<![\w/.])((?:edgemoe|scoutgate|tests|tools|docs)/[\w/]+\.\w+)\b", text):
                assert (ROOT / path).exists(), f"{source}:{line}: {path}"


def broken_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                yield f"{page.name}: {target}"


def test_every_link_to_a_file_leads_somewhere() -> None:
    assert not [link for page in PAGES for link in broken_links(page)]


def linked_pages(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target in re.findall(r"\]\(([\w/.]+\.md)", page.read_text())}


def test_the_readme_leads_to_every_page_and_the_architecture_to_every_design() -> None:
    designs = {page for page in DOCS if page.parent.name == "design"}
    assert linked_pages(ROOT / "README.md") >= set(DOCS) - designs
    assert linked_pages(ARCHITECTURE) >= designs


def defined(file: Path) -> set[str]:
    """Returns the names defined in a module: functions, constants, classes, and methods as "Class.method"."""
    names: set[str] = set()
    for node in tree_of(file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, FUNCTIONS)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def undefined(page: Path) -> Iterator[str]:
    """Yields the names that stand before a file in parentheses and are not defined there.

    The forms are "`Name` (`path.py`)" and "`Name`, `Class.method` (`path.py`)"; links to the file count as well.
    """
    text = " ".join(page.read_text().split())
    before = r"((?:`[\w.]+`,? (?:and |to )?)+)"
    for quoted, path in re.findall(before + r"\(`([\w/]+\.py)`\)", text):
        yield from (
            f"{name} is not in {path}" for name in re.findall(r"`([\w.]+)`", quoted) if name not in defined(ROOT / path)
        )
    for quoted, path in re.findall(r"\[((?:`[\w.]+`,? ?)+)\]\(([\w/.]+\.py)\)", text):
        file = (page.parent / path).resolve()
        yield from (
            f"{name} is not in {path}" for name in re.findall(r"`([\w.]+)`", quoted) if name not in defined(file)
        )


def test_a_name_with_a_file_is_defined_there() -> None:
    assert not [name for page in PAGES for name in undefined(page)]


def test_the_order_of_the_rooms_is_the_one_that_is_kept() -> None:
    block = WHERE.read_text().partition("## The order of the rooms")[2].split("```")[1]
    lines = [line.split(", ") for line in block.split("\n") if line]
    level = {room: number for number, line in enumerate(lines) for room in line}
    assert {room.partition(".")[0] for room in (*LAYERS, *COMPOSERS)} - {"__main__"} == {
        room.partition(".")[0] for room in level
    }
    for room in level.keys() & LAYERS.keys():
        for allowed in LAYERS[room]:
            home = max((one for one in level if within(allowed, one)), key=len)
            assert level[home] < level[room] or within(home, room) or home == room, f"{room} may import {allowed}"


def test_the_glossary_has_each_term_once() -> None:
    terms = re.findall(r"(?m)^\* \*\*([^*]+)\*\*", (ROOT / "docs/glossary.md").read_text())
    assert len(terms) > 80
    assert sorted(terms) == sorted(set(terms))
