"""The tables of families in README and docs: complete, and their commands can be run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from edgemoe.cli.parser import build_parser
from edgemoe.families.table import FAMILIES, REFUSED
from edgemoe.store.layout import WantedEncodings

ROOT = Path(__file__).parents[2]
MODELS, README = ((ROOT / name).read_text() for name in ("docs/models.md", "README.md"))


def rows(page: str, heading: str) -> Iterator[list[str]]:
    """Yields the rows of the table whose first column has this heading."""
    _, _, table = page.partition(f"| {heading} |")
    for line in table.split("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_architecture_is_in_the_table_of_models_and_nothing_else_is() -> None:
    named = [name for _, architectures, *_ in rows(MODELS, "family") for name in re.findall(r"`(\w+)`", architectures)]
    assert sorted(named) == sorted(FAMILIES)
    assert not set(named) & set(REFUSED)


def test_the_readme_names_every_family_in_the_same_order() -> None:
    _, _, families = README.partition("the directory of a checkpoint:\n\n```\n")
    named = " ".join(families.partition("```")[0].split())
    assert named == "; ".join(family for family, *_ in rows(MODELS, "family"))


def test_the_commands_of_the_readme_are_taken() -> None:
    commands = [row[-1].strip("`") for row in rows(README, "encoding")]
    assert len(commands) > 5
    for command in commands:
        args = build_parser().parse_args(shlex.split(command)[1:])
        if command.startswith("edgemoe pack"):
            assert WantedEncodings.parse(args.experts, args.dense).label
