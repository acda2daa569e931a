from __future__ import annotations

from edgemoe.api.metrics import render_metrics
from edgemoe.telemetry.metrics import BYTES_MOVED, TIER_HITS, named, parse, select

PAGE = """\
# HELP edgemoe_tier_hits_total Calls
# TYPE edgemoe_tier_hits_total counter
edgemoe_tier_hits_total{tier="ram"} 30.0
edgemoe_tier_hits_total{tier="vram"} 70.0
edgemoe_bytes_moved_total{from="nvme",to="ram"} 1.5e+06
edgemoe_bytes_moved_total{from="ram",to="vram"} 5e5
edgemoe_num_requests_waiting 2
"""


def test_values_of_the_metrics_page_are_read_by_full_name() -> None:
    metrics = parse(PAGE)
    assert metrics[named(TIER_HITS, tier="ram")] == 30
    assert metrics[named(BYTES_MOVED, **{"from": "nvme", "to": "ram"})] == 1.5e6
    assert metrics["edgemoe_num_requests_waiting"] == 2


def test_metrics_are_summed_over_the_labels_that_are_left_open() -> None:
    metrics = parse(PAGE)
    assert select(metrics, TIER_HITS) == 100
    assert select(metrics, BYTES_MOVED, to="vram") == 5e5
    assert select(metrics, "edgemoe_nothing") == 0


def test_the_models_name_on_a_page_is_no_part_of_a_figures_name() -> None:
    page = render_metrics({'a "quoted" name': {"edgemoe_a": 1.0, named("edgemoe_b", why="x"): 2.0}})
    assert parse(page) == {"edgemoe_a": 1.0, named("edgemoe_b", why="x"): 2.0}


def test_figures_of_several_models_are_read_as_their_sums() -> None:
    page = render_metrics({"a": {"edgemoe_x": 1.0, "edgemoe_y": 5.0}, "b": {"edgemoe_x": 2.0}})
    assert page.count("# TYPE edgemoe_x gauge") == 1
    assert parse(page) == {"edgemoe_x": 3.0, "edgemoe_y": 5.0}
