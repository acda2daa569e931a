"""Papers are cited by a key of docs/references.md, in sources and pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from support.prose import PAGES, ROOT, SOURCES, prose

REFERENCES = ROOT / "docs/references.md"
KEYS = re.findall(r"(?m)^\* \*\*([\w-]+)\*\*: ", REFERENCES.read_text())

# "[Prism, III-C2]" is a citation; "[T, heads]" is a shape, "list[Name]" a type, "[name](address)" a link.
# "[HEADS]" is a shape where HEADS is a constant of a kernel.
CITED = re.compile(r"(?<![\w\]\"'])\[([A-Z][\w-]{2,})(?:, [^]]+)?\](?!\()")
BY_OTHER_MEANS = re.compile(
    r"\barXiv\b|\bet al\b|\bRFC \d|\b[Tt]he paper\b"
    r"|\b[Dd]esign(?:'s)? page|(?<!docs/)\bdesign/|\bALGORITHMS\b|\bARCHITECTURE\b|\bfamilies\.md|\bfindings\b"
)


def cited(path: Path) -> Iterator[tuple[int, str]]:
    sizes = set(re.findall(r"\b(\w+): tl\.constexpr", path.read_text()))
    for line, text in prose(path):
        yield from ((line, match[1]) for match in CITED.finditer(text) if match[1] not in sizes)


def test_every_key_that_is_cited_is_in_the_references() -> None:
    unknown = [f"{path}:{line}: {key}" for path in (*SOURCES, *PAGES) for line, key in cited(path) if key not in KEYS]
    assert not unknown


def test_every_reference_is_listed_once_and_cited_somewhere() -> None:
    assert len(KEYS) > 10
    assert sorted(KEYS) == sorted(set(KEYS))
    assert set(KEYS) == {key for path in SOURCES for _, key in cited(path)}


def test_papers_are_cited_by_key_and_nothing_outside_the_repository_is_meant() -> None:
    for path in (*SOURCES, *PAGES):
        if path != REFERENCES:
            for line, text in prose(path):
                assert not (found := BY_OTHER_MEANS.search(text)), f"{path}:{line}: {found and found[0]}"
