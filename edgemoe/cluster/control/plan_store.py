"""The plan that this box goes by, kept on disk so that a restart goes on with it while there is no leader."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from edgemoe.cluster.control.coordination.store import PlanRef
from edgemoe.durable import replace_file
from edgemoe.errors import PeerRefused
from edgemoe.types.bounds import MAX_NODES
from edgemoe.types.placement import PlacementPlan, digest_of

log = logging.getLogger(__name__)
MAX_PLAN_BYTES = 4 << 20


class PlanStore:
    """`plan` and its name `ref`, or None. One owner, one event loop."""

    def __init__(self, path: Path) -> None:
        self.plan: PlacementPlan | None = None
        self.ref: PlanRef | None = None
        self._data, self._path = b"", path
        try:
            data = path.read_bytes()
            plan = read_plan(data)
        except FileNotFoundError:
            return
        except PeerRefused as error:
            log.warning("the plan kept on disk is not used", extra={"file": str(path), "why": str(error)})
            return
        self._hold(plan, data)

    def is_newer_than(self, plan: PlacementPlan) -> bool:
        """Returns whether a later plan for the same model is held already."""
        held = self.plan
        return held is not None and held.model == plan.model and (held.epoch, held.version) > (plan.epoch, plan.version)

    def adopt(self, plan: PlacementPlan, data: bytes = b"") -> None:
        """Goes by this plan from now on, also where it cannot be kept on disk; `data` is what it was read from."""
        data = data or msgspec.msgpack.encode(plan)
        self._hold(plan, data)
        try:
            replace_file(self._path, data)
        except OSError as error:
            log.error("the plan is forgotten at the next start", extra={"file": str(self._path), "why": error.strerror})

    def bytes_of(self, digest: str) -> bytes:
        """Returns the plan of that digest, to be sent. Raises PeerRefused where it is another's."""
        if self.plan is None or self.ref is None or self.ref.digest != digest:
            raise PeerRefused(f"the plan {digest[:12]} is not here")
        return self._data

    def _hold(self, plan: PlacementPlan, data: bytes) -> None:
        """The bytes are kept as they came: a later release may have written more into them than is read here."""
        self.plan, self.ref, self._data = plan, PlanRef(plan.version, digest_of(data)), data


def read_plan(data: bytes | memoryview, digest: str = "") -> PlacementPlan:
    """Returns a plan from its bytes, checked; `digest` is what it must have, if given. Raises PeerRefused."""
    if len(data) > MAX_PLAN_BYTES:
        raise PeerRefused(f"a plan of {len(data)} bytes; {MAX_PLAN_BYTES} are read")
    try:
        plan = msgspec.msgpack.decode(data, type=PlacementPlan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerRefused(f"a plan that cannot be read: {error}") from error
    size = -(-plan.layers * plan.experts // 8)
    parts = (*plan.homes, *plan.goal, *plan.disk)
    numbers_fit = len(plan.nodes) == len(plan.homes) <= MAX_NODES
    numbers_fit = numbers_fit and {len(plan.goal), len(plan.disk)} <= {0, len(plan.nodes)}
    sizes_fit = numbers_fit and all(len(homes) == size for homes in parts)
    if not sizes_fit or len(set(plan.nodes)) != len(plan.nodes) or min(plan.layers, plan.experts, plan.version) < 1:
        raise PeerRefused("a plan whose parts do not fit together")
    if digest and digest_of(data) != digest:
        raise PeerRefused(f"a plan of digest {digest_of(data)[:12]} instead of {digest[:12]}")
    return plan
