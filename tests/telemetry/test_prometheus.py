"""The Grafana board and the alert rules, asked of a real Prometheus that reads a real daemon's /metrics."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.front_kit import STORES, http_client, running, settings_for
from support.ports import free_ports
from support.waiting import until

from edgemoe.api import metrics as front_names
from edgemoe.config.settings import DeviceSettings, MemorySettings
from edgemoe.demo import model_path
from edgemoe.front.main import WORKER
from edgemoe.store.packer import ensure_store
from edgemoe.telemetry import metrics as names

MONITORING = Path(__file__).parents[2] / "docs/monitoring"
BOARD = json.loads((MONITORING / "grafana.json").read_text())
CLUSTER = "Cluster: "  # panels that a box alone has nothing for
KEY = "0123456789abcdef"
CONFIG = """
global: {scrape_interval: 1s}
scrape_configs:
  - job_name: edgemoe
    authorization: {credentials_file: %s}
    static_configs: [{targets: ["127.0.0.1:%d"]}]
"""
needs_prometheus = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("prometheus"), reason="prometheus is not installed (apt-get install prometheus)"
    ),
]


def queries() -> list[tuple[str, str]]:
    """Yields every query of the board, with its panel's title, as Grafana would put it for all models and boxes."""
    filled = {"$__rate_interval": "10s", "$model": ".*", "$instance": ".*"}
    found = []
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for variable, value in filled.items():
                query = query.replace(variable, value)
            found.append((panel["title"], query))
    return found


def test_board_and_alerts_ask_for_metrics_that_there_are() -> None:
    known = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    source = (
        Path(front_names.__file__).read_text() + (Path(front_names.__file__).parents[1] / "front/main.py").read_text()
    )
    asked = set(re.findall(r"\bedgemoe_\w+", json.dumps(BOARD) + (MONITORING / "alerts.yml").read_text()))
    for name in asked - known:
        plain = re.sub(r"_(bucket|seconds_bucket|total)$", "", name).removeprefix("edgemoe_")
        assert plain in source, f"{name} is no metric of ours"


def test_panels_do_not_overlap_and_all_have_descriptions() -> None:
    places: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        area = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert panel["title"]
        assert not places & area
        assert at["x"] + at["w"] <= 24
        places |= area


class TestWithPrometheus:
    pytestmark = needs_prometheus

    def test_promtool_accepts_the_rules_and_their_tests(self) -> None:
        for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
            done = subprocess.run(
                ["promtool", *words], cwd=MONITORING, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.timeout(1800)
    async def test_every_query_of_the_board_has_data_from_a_daemon(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        keys.write_text(KEY + "\n")
        keys.chmod(0o600)
        served, listens = free_ports(2)
        settings = settings_for(
            tmp_path,
            ensure_store(model_path(), STORES),
            api={"tcp": f"127.0.0.1:{served}", "api_key_file": str(keys)},
            memory=MemorySettings(ram_bytes=9 << 20),
            device=(DeviceSettings(kind="emulated", expert_bytes=4 << 20, link_bytes_per_s=200_000_000),),
        )
        (tmp_path / "key").write_text(KEY)
        config = tmp_path / "prometheus.yml"
        config.write_text(CONFIG % (tmp_path / "key", served))
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
        command += [f"--web.listen-address=127.0.0.1:{listens}", "--log.level=error"]
        async with running(settings, WORKER), http_client(settings) as http:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            talking = asyncio.ensure_future(talk(http))
            try:
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listens}", timeout=60) as prometheus:
                    for title, query in queries():
                        if not title.startswith(CLUSTER):
                            await until(lambda query=query: has_data(prometheus, query))  # type: ignore[misc]
            finally:
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)
                process.terminate()
                process.wait(60)


async def talk(http: httpx.AsyncClient) -> None:
    """Keeps the daemon busy."""
    while True:
        for prompt in ("Once upon a time there was a fox", "What is the capital of France?"):
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True}
            await http.post("/v1/completions", json=body)


async def has_data(prometheus: httpx.AsyncClient, query: str) -> bool:
    """Whether Prometheus has a number for it. Raises AssertionError where it is no query."""
    try:
        answer = await prometheus.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:  # it comes up
        return False
    told = answer.json()
    assert told["status"] == "success", f"{query}: {told.get('error')}"
    return any(sample["value"][1] != "NaN" for sample in told["data"]["result"])
