"""What boxes report becomes counts that can be compared, whatever one of them says."""

from __future__ import annotations

import numpy as np
import pytest
from support.reports import report

from edgemoe.cluster.control.planning.observation import CALL_S, observe
from edgemoe.cluster.rpc.control_messages import LinkReport, Report
from edgemoe.types.placement import ACTIVITY_HALF_LIFE_S

LAYERS, EXPERTS, TOP_K = 2, 6, 2


def routes(*choices: tuple[int, int], tokens: int = 30) -> np.ndarray:
    """Tokens that choose these in both layers, one choice after the other."""
    return np.array([[choices[each % len(choices)]] * LAYERS for each in range(tokens)], np.int16)


def test_who_has_had_more_tokens_counts_for_more() -> None:
    seen = observe([report(routes((0, 1), (0, 2)), 6), report(routes((4, 5), tokens=60), 6), None], LAYERS, EXPERTS)
    assert seen.top_k == TOP_K
    share = seen.activations / seen.activations[1, 0, 4]
    np.testing.assert_allclose(share[:, 1], [[0.5, 0.25, 0.25, 0, 0, 0], [0, 0, 0, 0, 1, 1], [0] * 6], atol=1e-3)
    assert [row[:3] for row in seen.pairs[0].tolist()] == [[0, 0, 1], [0, 0, 2], [1, 0, 1], [1, 0, 2]]
    assert seen.pairs[0][:, 3] == pytest.approx(seen.activations[0, 0, 1], rel=1e-3)
    assert len(seen.pairs[2]) == 0
    # in a steady state of 1 token a second a decayed count is that of a half-life over ln 2
    assert seen.per_s * seen.activations[1, 0, 4] == pytest.approx(60 / (ACTIVITY_HALF_LIFE_S / np.log(2)), rel=1e-3)


def test_calls_take_what_a_box_s_links_take() -> None:
    links = (LinkReport("b", 0.004, 1e6, 0.001), LinkReport("c", 0.002, 1e6))
    seen = observe([report(routes((0, 1)), 6, links=links), None], LAYERS, EXPERTS)
    assert seen.call_s == pytest.approx([0.0035, CALL_S])


@pytest.mark.parametrize(
    "told",
    [
        Report("m", 30.0, b"\0" * 7),
        Report("m", 0.0, b"\1" * 2 * LAYERS * EXPERTS),
        Report("m", 30.0, b"", pairs=b"\0" * 16),
    ],
    ids=["another shape", "no tokens", "pairs alone"],
)
def test_what_does_not_fit_counts_as_not_said(told: Report) -> None:
    seen = observe([told, report(routes((0, 1)), 6)], LAYERS, EXPERTS)
    assert not seen.activations[0].any()
    assert not len(seen.pairs[0])
    assert seen.activations[1].any()


def test_pairs_of_experts_that_there_are_not_are_passed_over() -> None:
    pairs = np.array([[1, 2, 3, 9], [0, 0, 1, 9], [0, 6, 1, 9], [2, 0, 1, 9], [0, 3, 3, 9]], np.uint16).tobytes()
    told = Report("m", 30.0, np.full((LAYERS, EXPERTS), 20000, np.uint16).tobytes(), pairs=pairs)
    assert observe([told], LAYERS, EXPERTS).pairs[0].tolist() == [[0, 0, 1, 9], [1, 2, 3, 9]]
