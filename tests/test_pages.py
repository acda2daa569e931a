"""What README and docs name is there: paths in backticks and links to files, the sections they point to included."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP = {path.name for path in ROOT.iterdir()}


def quoted_paths(page: Path) -> Iterator[str]:
    """What stands in backticks and begins as a path in the root does: `tests/support/`, `tools/check --fix`."""
    text = re.sub(r"(?s)```.*?```", "", page.read_text())
    for quoted in re.findall(r"`([^`\s]+)[^`]*`", text):
        if "/" in quoted and quoted.partition("/")[0] in TOP:
            yield quoted


def anchors(page: Path) -> set[str]:
    """The sections of a page, as GitHub names them in addresses."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_in_backticks_exists(page: Path) -> None:
    lost = [quoted for quoted in quoted_paths(page) if not (ROOT / quoted).exists()]
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[\w.]+)", (ROOT / "README.md").read_text()))
    assert linked == {str(page.relative_to(ROOT)) for page in PAGES[1:]}
