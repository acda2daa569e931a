"""The prose check finds the bad examples, leaves the good ones, and no room of the tree has more than it is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose_check import (
    ROOT,
    Fault,
    allowances,
    faults_in_page,
    faults_in_source,
    over_allowance,
    same_names,
    tree_faults,
)

HERE = Path("edgemoe/example.py")

# rule, a docstring that breaks it, and one that says the same
FUNCTIONS = [
    ("verb", "The place of each number [E].", "Assigns each column [E] to a device."),
    ("verb", "Seconds that a read takes, as measured.", "Returns the measured seconds of a read."),
    ("verb", "Experts of a layer, the hottest first.", "Yields a layer's experts, the hottest first."),
    ("verb", "Until cancelled, serves forwarded requests.", "Serves forwarded requests until cancelled."),
    ("verb", "`fuse` blends two forecasts into one.", "Blends two forecasts into one."),
    ("verb", "Build the table of paths.", "Builds the table of paths."),
    ("short", "Raises ConfigError.", "Raises ConfigError for an unknown key."),
    ("short", "Returns it.", "Returns the live request."),
    ("what", "Returns what some chose that ended.", "Returns the expert counts of requests that ended."),
    ("what", "Reads whatever the peer sent.", "Reads the peer's answer."),
    ("who", "Returns who is obeyed, and in which epoch.", "Returns the leader that is obeyed, and its epoch."),
    ("who", "Returns whom the request is from.", "Returns the principal of the request."),
    ("where", "Returns where the experts of a layer lie.", "Returns the slots of a layer's experts."),
    ("those", "Returns those that run.", "Returns the running requests."),
    ("those", "Moves experts to those with room.", "Moves experts to nodes with room."),
    (
        "whose",
        "Posts chunks for requests, whose last token is next, and drops others.",
        "Posts the requests' last chunks.",
    ),
    ("is to", "Returns the engine that is to run it.", "Returns the engine that must run it."),
    ("is to", "Packs the layers that are to be kept.", "Packs the layers that `kept` names."),
    ("so many", "Opens files for so many layers.", "Opens one file for each of `layers`."),
    ("is told", "Is told which connections come and go.", "Ignores connection events: the default listener."),
    ("old word", "Names the parcel anew each time it is sent.", "Gives the parcel a new name for each attempt."),
    ("old word", "Lists a peer's files, lest one be missed.", "Lists a peer's files, so that none is missed."),
    ("long", "Returns the slot, " + "slot and " * 11 + "slot.", "Returns slots, " + "slot and " * 11 + "slot."),
    ("long", "Returns one; " + "then another " * 12, "Returns one slot. " + "Then another " * 12),
]
CLASSES = [
    ("one owner", "One owner, one event loop.", "Live requests by name, used on the front's event loop."),
    ("short", "One owner.", "Bounds of one request."),
    ("what", "What a layer attends with.", "Queries, keys and values of a layer."),
    ("where", "Where a run takes place.", "The machine and clock of a run."),
    ("those", "Those that raft has lead now.", "The leaders that Raft elected."),
]
COMMENTS = [
    ("what", "what has not changed is not told again", "unchanged values are not sent again"),
    ("who", "whoever is called gave back at once", "the callee returned at once"),
    ("so many", "an expert is late after so many times its time", "a fetch is late after LATE times its expected time"),
]
ERRORS = [
    ("what", '"what it holds is no store"', '"{path} holds no manifest.json: name a packed store"'),
    ("is to", 'f"{path} is to be a folder"', 'f"{path} must be a folder: make it, or name another one"'),
]
NAMES = [("name", "look", "probe_machine"), ("name", "_take", "_reserve_slot"), ("name", "settle", "freeze_heap")]
PAGE = [
    (
        "what",
        "It keeps of each request whatever it takes to run it again.",
        "It keeps the state to restart each request.",
    ),
    ("what", "| `route` | what takes a request |", "| `route` | the policy that assigns requests |"),
    ("long", "A box " + "and a box " * 10, "A box " + "and a box " * 9),
    ("long", "* An item " + "and an item " * 10, "* An item " + "and one " * 13),
]


def source_rules(source: str) -> set[str]:
    return {fault.rule for fault in faults_in_source(HERE, source)}


@pytest.mark.parametrize(
    ("frame", "examples"),
    [
        ('def f():\n    """{}"""\n', FUNCTIONS),
        ('class C:\n    """{}"""\n', CLASSES),
        ("# {}\nx = 1\n", COMMENTS),
        ("x = 1  # {}\n", COMMENTS),
        ("def f():\n    raise ValueError({})\n", ERRORS),
        ("class C:\n    def {}(self): pass\n", NAMES),
    ],
    ids=["function", "class", "comment", "comment after code", "error", "name"],
)
def test_each_rule_finds_its_bad_example_and_passes_the_good_one(
    frame: str, examples: list[tuple[str, str, str]]
) -> None:
    for rule, bad, good in examples:
        assert rule in source_rules(frame.replace("{}", bad, 1)), bad
        assert not source_rules(frame.replace("{}", good, 1)), good


def test_a_page_is_read_without_its_headings_table_heads_and_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    around = (
        "# What is this\n\n```\nwhat is code\n```\n\n| what | where |\n|---|---|\n| a | b |\n\n{}\n\nWhat is asked?\n"
    )
    for rule, bad, good in PAGE:
        for text, found in ((bad, {rule}), (good, set[str]())):
            page.write_text(around.replace("{}", text))
            assert {fault.rule for fault in faults_in_page(page)} == found, text


def test_a_property_a_class_and_a_test_may_be_described_by_a_noun() -> None:
    for head in ("class C:", "@property\ndef size(self):", "@cached_property\ndef size(self):", "def test_one():"):
        assert not source_rules(f'{head}\n    """The bytes of a slab\'s slots."""\n')


def test_a_header_has_five_lines_at_most() -> None:
    lines = ["Holds slabs of memory."] + ["", "They are allocated once."] * 4
    assert not source_rules('"""' + "\n".join(lines) + '\n"""\n')
    assert source_rules('"""' + "\n".join([*lines, "Slots are cut from them."]) + '\n"""\n') == {"header"}


def test_text_in_code_and_quotes_is_not_read() -> None:
    assert not source_rules('def f():\n    """Returns the words `what it was` and "what it is"."""\n')
    assert not source_rules('x = """\n# what a long string has\n"""\n')


def test_a_file_name_occurs_once() -> None:
    same, other, metrics = Path("edgemoe/a/pieces.py"), Path("edgemoe/b/pieces.py"), Path("edgemoe/a/metrics.py")
    found = list(same_names([same, other, metrics, Path("edgemoe/b/metrics.py"), Path("edgemoe/a/one.py")]))
    assert [(fault.path, fault.rule) for fault in found] == [(same, "file name"), (other, "file name")]


def test_a_fault_more_than_the_tree_is_allowed_is_reported_with_the_room_that_has_it() -> None:
    faults = [Fault(ROOT / "edgemoe/nowhere/file.py", 1, "what", "", "")] * sum(allowances().values())
    assert not over_allowance(faults)
    assert set(over_allowance([*faults, Fault(ROOT / "edgemoe/nowhere/file.py", 1, "what", "", "")])) == {
        "edgemoe/nowhere"
    }


def test_no_room_has_more_faults_than_it_is_allowed() -> None:
    over = over_allowance(tree_faults())
    assert not over, "\n".join(str(fault) for found in over.values() for fault in found[:20])
