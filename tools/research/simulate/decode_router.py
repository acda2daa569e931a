"""The daemon's routing policies for simulated decode workers: knowledge of these, and offers of requests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.marginal_union import PromptForecast
from edgemoe.policy.routing.offers import RoutingPolicy, RoutingTarget, WaitingRequest
from edgemoe.policy.routing.signatures import absence
from edgemoe.types.arrays import FloatArray
from tools.research.simulate.decode_pool import DecodeOutcome, DecodePool
from tools.research.simulate.decode_traffic import Scene

BLOCKS = 1 << 20  # KV is ample


def place(worker: int) -> str:
    return f"{worker:02d}"


class SimulatedRouter:
    """Owns the expected experts of each worker. A prompt is known by its signature alone."""

    def __init__(
        self, scene: Scene, policy: RoutingPolicy, forecast: PromptForecast, signatures: list[FloatArray]
    ) -> None:
        self._scene, self._policy, self._signatures = scene, policy, signatures
        self._chances = [forecast.chance(each) for each in signatures]
        self._expected = float(scene.lengths.mean())
        self._unions = np.zeros((scene.traffic.workers, *signatures[0].shape), np.float32)

    def choose(self, request: int, room: npt.NDArray[np.bool_], running: npt.NDArray[np.int64], now_s: float) -> int:
        """Returns the policy's choice among the workers with room."""
        slots = self._scene.traffic.slots
        far_s = self._scene.costs.far_s
        views = [
            RoutingTarget(
                place(w),
                slots,
                slots,
                BLOCKS,
                BLOCKS,
                running=int(running[w]),
                union=self._unions[w],
                resident=None if far_s is None else far_s[w],
                decode_s=self._decode_s(w, int(running[w])),
            )
            for w in np.flatnonzero(room).tolist()
        ]
        offered = WaitingRequest(
            str(request),
            prompt_tokens=1,
            arrived_s=now_s,
            expected_tokens=self._expected,
            signature=self._signatures[request],
            chance=self._chances[request],
        )
        worker = int(self._policy.assign([offered], views, now_s)[0].place)
        self._unions[worker] += absence(self._chances[request])
        return worker

    def _decode_s(self, worker: int, running: int) -> float:
        costs, loaded = self._scene.costs, 1 - np.exp(self._unions[worker])
        return costs.step_s + costs.token_s * running + costs.expert_s * float(loaded.sum())

    def ended(self, request: int, worker: int) -> None:
        """Removes an ended request from its worker."""
        self._unions[worker] -= absence(self._chances[request])


def serve(
    scene: Scene,
    policy: RoutingPolicy,
    forecast: PromptForecast,
    signature: Callable[[int], FloatArray] | None = None,
) -> DecodeOutcome:
    """Returns the results of requests under a policy, by their prompts' signatures unless others are given."""
    known = signature or (lambda n: scene.sources[n].prefill)
    traffic = scene.traffic
    router = SimulatedRouter(scene, policy, forecast, [known(n) for n in range(len(scene.sources))])
    pool = DecodePool(scene.requests, traffic.workers, traffic.slots, scene.costs)
    return pool.run(router.choose, router.ended)
