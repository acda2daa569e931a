"""Layers that need the choice of the layer before them stay on its box."""

from __future__ import annotations

import json

import pytest
from families.test_sparse_families import GLM

from edgemoe.config.settings import ClusterSettings, Settings
from edgemoe.errors import ConfigError
from edgemoe.families.config import spec_from_config
from edgemoe.worker.stage_parts import spec_of_stage

SPEC = spec_from_config(json.loads(json.dumps(GLM)) | {"index_topk_pattern": "FSSFSF"})


def test_a_box_cannot_begin_with_a_layer_that_has_no_indexer() -> None:
    for line in ("a:0-1 b:2-5", "a:0-2 b:3-3 c:4-5"):
        with pytest.raises(ConfigError, match=r"layer [24] needs the layer before it.* one of 0, 3, 5"):
            spec_of_stage(SPEC, Settings(cluster=ClusterSettings(node="a", stages=line)))


def test_it_may_begin_with_any_other_layer() -> None:
    settings = Settings(cluster=ClusterSettings(node="b", stages="a:0-2 b:3-4 c:5-5"))
    assert spec_of_stage(SPEC, settings).held_layers == range(3, 5)
