"""One request of the request log, and what has become of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgemoe.front.requests.submission import LoggedSubmission
from edgemoe.policy.blame import Attempts
from edgemoe.types.principal import Identity
from edgemoe.types.request import Request


@dataclass(slots=True, eq=False)
class LoggedRequest:
    """One accepted request."""

    request: Request
    ticket: LoggedSubmission
    accepted: float
    emitted: list[int] = field(default_factory=list)
    attempt: int = 0  # 0: not yet submitted
    place: str = ""  # the engine that has it; "" while none does
    attempts: Attempts = field(default_factory=Attempts)
    identity: Identity = field(init=False)

    def __post_init__(self) -> None:
        self.identity = self.request.identity
