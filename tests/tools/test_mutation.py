"""The tool that changes sources, on a room of two functions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

from tools.mutation.__main__ import main
from tools.mutation.mutants import mutants_of
from tools.mutation.rooms import ROOMS, Room

ROOT = Path(__file__).parents[2]
ROOM = {"house": Room(("house",), ("tests/test_*.py",))}
SOURCE = '''
"""A room."""

LIMIT = 5  # tests go by its name


def bounded(n: int = 3) -> int:
    """At most the limit."""
    return min(n, LIMIT)


def spin(n: int) -> int:
    while n > 0:
        n -= 1
    return n
'''
TESTS = """
from house.room import LIMIT, bounded, spin

def test_the_bound():
    assert [bounded(n) for n in (4, 5, 6)] == [4, LIMIT, LIMIT]

def test_the_end():
    assert spin(2) <= 0
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # these tests start at once
    for name, text in {"house/__init__.py": "", "house/room.py": SOURCE, "tests/test_room.py": TESTS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def changes(source: str, tmp_path: Path) -> set[tuple[str, str]]:
    path = tmp_path / "x.py"
    path.write_text(dedent(source))
    return {(one.old, one.new) for one in mutants_of(path, "x.py")}


def test_behaviour_is_mutated_and_messages_are_not(tmp_path: Path) -> None:
    source = """
    LIMIT = 4
    class Shelf(Protocol):
        def has(self) -> bool:
            return len(self) > 1
    def deed(self, n: int = 2) -> bool:
        '''n < 3'''
        log.info("n < %d", n - 1)
        assert n < 9
        if self.ready and n < LIMIT:
            os.fsync(self.fd)
        if not n:
            raise ValueError(f"{n + 1} < 2")
        return self.clamp(max(n, 0))
    """
    assert changes(source, tmp_path) == {
        ("self.ready and n < LIMIT", "(self.ready or n < LIMIT)"),
        ("n < LIMIT", "(n <= LIMIT)"),
        ("os.fsync(self.fd)", "pass"),
        ("not n", "(n)"),
        ('raise ValueError(f"{n + 1} < 2")', "pass"),
        ("return self.clamp(max(n, 0))", "return not (self.clamp(max(n, 0)))"),
        ("max(n, 0)", "(n)"),
        ("max(n, 0)", "(0)"),
        ("0", "1"),
        ("0", "(-1)"),
    }


def test_a_key_outlives_lines_that_move(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(SOURCE)
    before = mutants_of(tmp_path / "x.py", "x.py")
    (tmp_path / "x.py").write_text("\n\nimport os\n" + SOURCE)
    after = mutants_of(tmp_path / "x.py", "x.py")
    assert [one.key for one in before] == [one.key for one in after]
    assert len({one.key for one in before}) == len(before)
    assert before[0].line + 3 == after[0].line


def test_survivors_are_shown_and_tried_mutants_are_not_repeated(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["house", "--count", "6", "--seed", "3", "--least-s", "1", "--json"]
    assert main(words, root, ROOM) == 1
    rows = json.loads(capsys.readouterr().out)
    assert {row["outcome"] for row in rows} == {"killed", "survived", "timed out"}
    assert all(row["file"] == "house/room.py" and row["diff"].startswith("@@") for row in rows)
    tried = (root / ".cache/mutants.jsonl").read_text()
    assert main(words, root, ROOM) == 1
    assert json.loads(capsys.readouterr().out) == rows
    assert (root / ".cache/mutants.jsonl").read_text() == tried
    assert (root / "house/room.py").read_text() == SOURCE


def test_tests_that_fail_anyway_say_nothing_about_mutants(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "tests/test_room.py").write_text("def test_it():\n    assert False\n")
    assert main(["house"], root, ROOM) == 2
    assert "without any change" in capsys.readouterr().err


def test_a_modules_own_tests_run_first_and_the_others_on_survivors(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MET", str(root / "met"))
    met = "import os, pathlib\n\ndef test_it():\n    pathlib.Path(os.environ['MET']).open('a').write('{} ')\n"
    (root / "house/room.py").write_text("def two():\n    return 2\n\ndef one():\n    return 1\n")
    (root / "tests/test_room.py").write_text(
        met.format("own") + "    from house import room\n    assert room.two() == 2\n"
    )
    (root / "tests/test_every.py").write_text(
        met.format("other") + "    import importlib\n    assert importlib.import_module('house').one() == 1\n"
    )
    (root / "house/__init__.py").write_text("from .room import one\n")
    assert ROOM["house"].own_tests(root, "house/room.py") == ["tests/test_room.py"]
    assert main(["house", "--count", "9", "--least-s", "20"], root, ROOM) == 0
    killed = capsys.readouterr().out
    assert "4 killed, 0 timed out, 0 survived of 4" in killed
    assert Counter((root / "met").read_text().split()) == {"own": 1 + 4, "other": 1 + 2}


def test_every_room_has_sources_and_tests() -> None:
    for name, room in ROOMS.items():
        assert all((ROOT / source).exists() for source in room.sources), name
        assert room.test_files(ROOT), name
