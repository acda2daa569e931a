"""The scoreboard: sets with digests, entered policies, and the example of its page."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.replay_kit import events_of, naive_misses, random_trace

from edgemoe.errors import ConfigError
from edgemoe.replay import main
from edgemoe.replay.named_policies import NAMED
from edgemoe.replay.replay_policies import MAKERS
from edgemoe.replay.scoreboard import TraceSet, judge, load_policy, load_set, read_sets

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/scoreboard.md"
TRACES = ROOT / "tools/research/traces/sets.toml"


def written(folder: Path, seed: int = 3) -> Path:
    """Writes a file of one set of random routing."""
    lines = ["seq,pos,ids"]
    for number, ids in enumerate(random_trace(seed, requests=4).requests):
        lines += [
            f"{number},{pos},{'|'.join(' '.join(map(str, row)) for row in token)}" for pos, token in enumerate(ids)
        ]
    (folder / "a.ids.csv").write_text("\n".join(lines))
    digest = hashlib.sha256((folder / "a.ids.csv").read_bytes()).hexdigest()
    sets = folder / "sets.toml"
    sets.write_text(
        f'[[set]]\nname = "a"\nmodel = "m"\nlicence = "MIT"\nsource = "here"\n'
        f'files = {{ "a.ids.csv" = "{digest}" }}\nexperts = 12\nexpert_bytes = 1000000\n'
    )
    return sets


def test_the_sets_of_the_checkout_have_their_digests_and_licences() -> None:
    for traces in read_sets(TRACES):
        trace = load_set(traces, TRACES.parent)
        assert trace.experts == traces.experts
        licence = re.search(r"\((LICENSE\.\w+\.txt)\)", traces.licence)
        assert licence
        assert (TRACES.parent / licence[1]).exists()


def test_misses_and_stall_are_those_of_a_naive_cache(tmp_path: Path) -> None:
    sets = written(tmp_path)
    (traces,) = read_sets(sets)
    trace = load_set(traces, tmp_path)
    figures = {each.policy: each for each in judge(traces, trace, MAKERS, [0.25], [1e9])}
    assert {*figures} == {*MAKERS}
    for name in ("lru", "lfu", "lfru", "belady"):
        assert figures[name].misses == naive_misses(events_of(trace, 1), 9, name)
        assert figures[name].stall_ms[0] == pytest.approx(figures[name].misses / trace.tokens)
    assert figures["belady"].closed == 1.0
    assert max(figures[name].closed for name in NAMED) == 0.0


def test_a_set_with_other_bytes_is_refused(tmp_path: Path) -> None:
    sets = written(tmp_path)
    (tmp_path / "a.ids.csv").write_text((tmp_path / "a.ids.csv").read_text() + "\n")
    with pytest.raises(ConfigError, match="SHA-256"):
        main(["scoreboard", str(sets)])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "tables only"),
        ("set = 1", "tables only"),
        ('[[set]]\nname = "a"', "has the keys"),
        ("[[set]", "no file of trace sets"),
    ],
)
def test_a_file_of_sets_that_is_none_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "sets.toml").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_sets(tmp_path / "sets.toml")


def test_numbers_of_a_set_are_bounded(tmp_path: Path) -> None:
    sets = written(tmp_path)
    sets.write_text(sets.read_text().replace("experts = 12", "experts = -1"))
    with pytest.raises(ConfigError, match="above 0"):
        read_sets(sets)


@pytest.mark.parametrize(
    ("entry", "why"),
    [("nothing", "FILE.py:CLASS"), ("gone.py:A", "no class"), ("x.py:B", "no class"), ("x.py:A", "no class")],
)
def test_a_policy_that_cannot_be_entered_is_refused(entry: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("class A:\n    pass\n")
    with pytest.raises(ConfigError, match=why):
        load_policy(f"{tmp_path}/{entry}" if ":" in entry else entry)


def example() -> str:
    (found,) = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())
    return str(found)


def test_the_page_s_example_is_entered_and_is_no_longer_than_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, page = tmp_path / "my_policy.py", tmp_path / "board.html"
    policy.write_text(example())
    assert len(example().splitlines()) <= 40
    entry = f"{policy}:AgedFrequency"
    words = ["scoreboard", str(written(tmp_path)), "--enter", entry, "--capacity", "0.25", "--page", str(page)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["policy"]: row for row in found["rows"]}
    assert rows["belady"]["closed"] == 1.0 >= rows["agedfrequency"]["closed"] > rows["fifo"]["closed"]
    assert found["entered"] == {entry: hashlib.sha256(policy.read_bytes()).hexdigest()}
    assert all(name in page.read_text() for name in (*rows, "MIT", "SHA-256"))
    assert main(words) == 0
    assert "agedfrequency" in capsys.readouterr().out


def test_the_policies_that_know_the_cache_have_one_run_for_each_capacity(tmp_path: Path) -> None:
    trace = random_trace(4)
    both = judge(TraceSet("a", "m", "l", "s", {}, 12, 10), trace, MAKERS, [0.25, 0.5], [1e9])
    for share in (0.25, 0.5):
        alone = judge(TraceSet("a", "m", "l", "s", {}, 12, 10), trace, MAKERS, [share], [1e9])
        assert alone == [each for each in both if each.capacity == share]
    assert np.isfinite([each.closed for each in both]).all()
