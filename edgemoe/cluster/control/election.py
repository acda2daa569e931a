"""Keeps one box the leader: claims when there is none, renews, steps down by its own clock. Engine-independent."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from edgemoe.cluster.control.coordination.store import CoordStore
from edgemoe.errors import CoordUnavailable, StaleEpoch

log = logging.getLogger(__name__)
MARGIN = 0.1  # share of the lease by which a leader steps down early, for clocks that run apart
RENEWALS = 4  # per lease


class Election:
    """Runs for leader as `node` for as long as `run` runs. `epoch` answers whether it leads now."""

    def __init__(
        self,
        store: CoordStore,
        node: str,
        clock: Callable[[], float],
        rng: random.Random,
        above: Callable[[], int] = lambda: 0,
        hindered: Callable[[], bool] = lambda: False,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`above` is the highest epoch that is known of: the ones claimed here are higher, none while `hindered`.

        `changed` is called where it leads, or no longer; not where that is only by the clock.
        """
        self._store, self._node, self._clock, self._rng = store, node, clock, rng
        self._above, self._hindered, self._changed = above, hindered, changed
        self._epoch = 0
        self._until = float("-inf")

    def epoch(self) -> int:
        """Returns the epoch in which this box leads at this moment; 0 when it does not, or can no longer be sure."""
        return self._epoch if self._clock() < self._until else 0

    async def run(self) -> None:
        """Claims and renews until cancelled; then resigns."""
        try:
            while True:
                await (self._lead() if self._epoch else self._follow())
        finally:
            if epoch := self.epoch():
                self._until = float("-inf")
                await self._resign(epoch)

    async def _follow(self) -> None:
        if self._store.view().leader or self._hindered():
            await self._store.changed(self._store.lease_s / RENEWALS)
            return
        await asyncio.sleep(self._rng.uniform(0, self._store.lease_s / 10))
        if self._store.view().leader:
            return
        sent = self._clock()
        try:
            self._hold(await self._store.claim(self._node, self._above()), sent)
        except (StaleEpoch, CoordUnavailable) as error:
            log.debug("claim refused", extra={"why": str(error)})
            await asyncio.sleep(self._store.lease_s / 10)

    async def _lead(self) -> None:
        sent = self._clock()
        try:
            async with asyncio.timeout(max(0.0, self._until - sent)):
                await self._store.renew(self._epoch)
            self._hold(self._epoch, sent)
            await asyncio.sleep(self._store.lease_s / RENEWALS)
        except StaleEpoch:
            self._step_down()
        except (CoordUnavailable, TimeoutError):
            if self._clock() >= self._until:
                self._step_down()
            else:
                await asyncio.sleep(self._store.lease_s / 20)

    def _hold(self, epoch: int, sent: float) -> None:
        known, self._epoch = self._epoch, epoch
        self._until = sent + self._store.lease_s * (1 - MARGIN)
        if epoch != known:
            self._changed()

    def _step_down(self) -> None:
        self._epoch, self._until = 0, float("-inf")
        self._changed()

    async def _resign(self, epoch: int) -> None:
        try:
            async with asyncio.timeout(self._store.lease_s):
                await self._store.resign(epoch)
        except (CoordUnavailable, StaleEpoch, TimeoutError) as error:
            log.info("could not resign; the lease will lapse", extra={"epoch": epoch, "why": str(error)})
