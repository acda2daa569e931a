"""Faults with separate prefill and decode: box a prefills all requests, b and c decode them."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgemoe.telemetry import metrics as names
from tools.bench.fault_trial import Record, Trial
from tools.testbed.daemons import Daemon

ROLES = {"a": "prefill", "b": "decode", "c": "decode"}
PROMPT_TOKENS = 400  # 24 whole blocks that can be fetched
SETTINGS: tuple[tuple[str, object], ...] = (("engine.prefix_cache", True),)
LINK_MBITS = 10  # of the prefilling box, so that a transfer takes a while
BEGIN_S = 15.0  # within which a hand-over begins
CLEAN_S = 60.0  # after which no block may be held


def prefill_kill(trial: Trial) -> Record:
    """Kills the prefilling box with SIGKILL while blocks travel."""
    hit = trial.cluster["a"]
    hit.box.rate(LINK_MBITS)
    return _hit(trial, hit, names.KV_FETCHED_BLOCKS, hit.kill)


def decode_kill(trial: Trial) -> Record:
    """Kills a decoding box with SIGKILL during its work."""
    hit = trial.cluster[trial.rng.choice("bc")]
    return _hit(trial, hit, names.HANDED_OVER, hit.kill)


def kv_corrupt(trial: Trial) -> Record:
    """Damages some of the blocks that box a sends."""
    return _hit(trial, None, names.KV_FETCHED_BLOCKS, lambda: None)


def _hit(trial: Trial, hit: Daemon | None, sign: str, fault: Callable[[], None]) -> Record:
    """Sends requests to all other boxes; `fault` comes once the metric `sign` has risen on any box."""
    fronts = [daemon for daemon in trial.cluster if daemon is not hit]
    trial.whole_s = (
        trial.whole_s or 1.0
    )  # without an undisturbed run first, after which blocks would be cached at their destination
    before, seen = _sums(trial, sign), [0.0]

    def come() -> None:
        ends = time.monotonic() + BEGIN_S
        while time.monotonic() < ends and not seen[0]:
            seen[0] = _sums(trial, sign) - before
        time.sleep(trial.rng.uniform(0.0, 0.5))
        trial.mark()
        fault()

    failed = _sums(trial, names.KV_FETCH_FAILURES)
    found = trial.requests([*fronts, *fronts], come, waits=False)
    refused = _sums(trial, names.KV_FETCH_FAILURES) - failed
    trial.cluster.bed.mend()
    if hit is not None:
        trial.again(hit)
    return {
        "hit": hit.box.name if hit is not None else "a",
        "requests": found,
        "begun": seen[0],
        "failed_pulls": refused,
        "leaked": _leaked(trial),
    }


def _sums(trial: Trial, family: str) -> float:
    """Returns the sum of a metric over all live boxes."""
    return sum(names.select(daemon.metrics(), family) for daemon in trial.cluster if daemon.alive)


def _leaked(trial: Trial) -> float:
    """Returns the blocks that are still held without a request, after CLEAN_S at the latest."""
    ends = time.monotonic() + CLEAN_S
    while (held := _sums(trial, names.KV_BLOCKS_REFERENCED)) and time.monotonic() < ends:
        time.sleep(0.2)
    return held
