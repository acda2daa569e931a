"""Reports of boxes become comparable counts, even if one of them is wrong."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.reports import report

from edgemoe.cluster.control.messages import BoxReport, LinkReport
from edgemoe.cluster.control.planning.observation import BYTES_PER_S, EXPERT_CALL_S, observe, successions
from edgemoe.types.placement import ACTIVITY_HALF_LIFE_S

LAYERS, EXPERTS, TOP_K = 2, 6, 2


def routes(*choices: tuple[int, int], tokens: int = 30) -> np.ndarray:
    """Reports tokens that choose these experts in both layers, one choice after the other."""
    return np.array([[choices[each % len(choices)]] * LAYERS for each in range(tokens)], np.int16)


def test_nodes_with_more_tokens_weigh_more() -> None:
    seen = observe([report(routes((0, 1), (0, 2)), 6), report(routes((4, 5), tokens=60), 6), None], LAYERS, EXPERTS)
    assert seen.top_k == TOP_K
    share = seen.activations / seen.activations[1, 0, 4]
    np.testing.assert_allclose(share[:, 1], [[0.5, 0.25, 0.25, 0, 0, 0], [0, 0, 0, 0, 1, 1], [0] * 6], atol=1e-3)
    assert [row[:3] for row in seen.pairs[0].tolist()] == [[0, 0, 1], [0, 0, 2], [1, 0, 1], [1, 0, 2]]
    assert seen.pairs[0][:, 3] == pytest.approx(seen.activations[0, 0, 1], rel=1e-3)
    assert len(seen.pairs[2]) == 0
    # in a steady state of 1 token a second a decayed count is that of a half-life over ln 2
    assert seen.per_s * seen.activations[1, 0, 4] == pytest.approx(60 / (ACTIVITY_HALF_LIFE_S / np.log(2)), rel=1e-3)


def test_a_new_box_weighs_by_its_tokens_per_second() -> None:
    young = report(routes((0, 1)), 6, tokens_per_s=2.0)
    old = report(routes((4, 5), tokens=900), 6, tokens_per_s=1.0)
    seen = observe([young, old], LAYERS, EXPERTS)
    assert seen.per_s * seen.activations[0, 0, 0] == pytest.approx(2.0, rel=1e-3)
    assert seen.per_s * seen.activations[1, 0, 4] == pytest.approx(1.0, rel=1e-3)


def test_experts_of_long_steps_are_counted_by_steps() -> None:
    table = np.array([[65535, 32768, 0, 0, 0, 6554]] * LAYERS, "<u2").tobytes()  # of steps, of 10 tokens each
    prompts = report(routes((0, 1)), 6, tokens_per_s=5.0, computed=table, steps_per_token=0.1)
    silent = report(routes((4, 5)), 6, tokens_per_s=5.0)
    seen = observe([prompts, silent, None], LAYERS, EXPERTS)
    assert seen.steps_per_token.tolist() == [0.1, 1.0, 1.0]
    np.testing.assert_allclose(seen.per_s * seen.computed[0, 1], [0.5, 0.25, 0, 0, 0, 0.05], rtol=1e-3)
    np.testing.assert_array_equal(seen.computed[1], seen.activations[1])
    cut_off = msgspec.structs.replace(prompts, computed=table[:-2])
    strange = msgspec.structs.replace(prompts, steps_per_token=7.0)
    assert observe([cut_off], LAYERS, EXPERTS).steps_per_token.tolist() == [1.0]
    assert observe([strange], LAYERS, EXPERTS).steps_per_token.tolist() == [1.0], "no token takes several steps"


def test_calls_take_as_long_as_a_box_s_links() -> None:
    links = (LinkReport("b", 0.004, 1e6, 0.001), LinkReport("c", 0.002, 1e6))
    seen = observe([report(routes((0, 1)), 6, links=links), None], LAYERS, EXPERTS)
    assert seen.call_s == pytest.approx([0.0035, EXPERT_CALL_S])
    assert seen.expert_share == pytest.approx(0.2), "of the link on which experts were computed"
    assert observe([report(routes((0, 1)), 6, links=links[1:]), None], LAYERS, EXPERTS).expert_share == 0
    assert seen.bytes_per_s.tolist() == [1e6, BYTES_PER_S]


def test_successions_are_the_reported_ones_and_the_rest_is_spread() -> None:
    tokens = routes((0, 1), (2, 3), tokens=20)
    told, rare = report(tokens, 6, successions=True), report(routes((4, 5), tokens=2), 6, successions=True)
    seen = observe([told, rare, None], LAYERS, EXPERTS)
    passed = successions([told, rare, None], seen) / (seen.activations[0, 0, 0] / 10)
    expected = np.zeros((1, 6, 6))
    expected[0, :2, :2] = expected[0, 2:4, 2:4] = 10
    expected[0, 4:, 4:] = 2
    np.testing.assert_allclose(passed, expected, rtol=1e-3, atol=1e-3)
    heaviest = msgspec.structs.replace(told, passed=told.passed[:8])  # one of 0 after 0: 70 of 80 are not told
    partly = successions([heaviest], observe([heaviest], LAYERS, EXPERTS))[0]
    assert partly[0, 0] / partly.sum() == pytest.approx(10 / 80, rel=1e-3)
    others = partly[:4, :4].ravel()[1:]
    np.testing.assert_allclose(others, 70 / 80 / 15 * partly.sum(), rtol=1e-3)


def test_successions_of_experts_that_there_are_not_are_passed_over() -> None:
    table = np.array([[1, 0, 0, 9], [0, 6, 1, 9], [0, 1, 6, 9], [0, 2, 3, 9]], "<u2").tobytes()
    told = BoxReport("m", 30.0, np.full((LAYERS, EXPERTS), 20000, "<u2").tobytes(), passed=table + b"123")
    seen = observe([told], LAYERS, EXPERTS)
    passed = successions([told], seen)
    assert passed[0, 2, 3] < 0.1 * np.delete(passed.ravel(), 2 * EXPERTS + 3).min()
    assert passed.sum() == pytest.approx(seen.top_k * seen.activations[0, 0].sum(), rel=0.1)


@pytest.mark.parametrize(
    "told",
    [
        BoxReport("m", 30.0, b"\0" * 7),
        BoxReport("m", 0.0, b"\1" * 2 * LAYERS * EXPERTS),
        BoxReport("m", 5e-324, b"\1" * 2 * LAYERS * EXPERTS),
        BoxReport("m", 30.0, b"", pairs=b"\0" * 16),
    ],
    ids=["another shape", "no tokens", "next to none", "pairs alone"],
)
def test_impossible_reports_count_as_missing(told: BoxReport) -> None:
    seen = observe([told, report(routes((0, 1)), 6)], LAYERS, EXPERTS)
    assert not seen.activations[0].any()
    assert not len(seen.pairs[0])
    assert seen.activations[1].any()
    alone = observe([told], LAYERS, EXPERTS)
    assert (alone.top_k, alone.activations.any()) == (0, False)


def test_pairs_of_experts_that_there_are_not_are_passed_over() -> None:
    pairs = np.array([[1, 2, 3, 9], [0, 0, 1, 9], [0, 6, 1, 9], [2, 0, 1, 9], [0, 3, 3, 9]], np.uint16).tobytes()
    told = BoxReport("m", 30.0, np.full((LAYERS, EXPERTS), 20000, np.uint16).tobytes(), pairs=pairs)
    cut_off = msgspec.structs.replace(told, pairs=pairs + b"123")
    for each in (told, cut_off):
        assert observe([each], LAYERS, EXPERTS).pairs[0].tolist() == [[0, 0, 1, 9], [1, 2, 3, 9]]


def test_pairs_of_a_box_with_next_to_no_requests_are_no_pairs_that_never_are() -> None:
    pairs = np.array([[0, 0, 1, 900], [1, 2, 3, 900]], np.uint16).tobytes()
    busy, idle = (
        BoxReport("m", rate, np.full((LAYERS, EXPERTS), 20000, np.uint16).tobytes(), pairs=pairs) for rate in (1e5, 1.0)
    )
    seen = observe([busy, idle], LAYERS, EXPERTS)
    assert len(seen.pairs[0]) == 2
    assert len(seen.pairs[1]) == 0
