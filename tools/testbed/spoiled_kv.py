"""A daemon whose engine damages some of the keys and values that it hands out, after it has summed them up.

    python -m tools.testbed.spoiled_kv serve --config FILE      as `python -m edgemoe` would

One part in SPOILT_EVERY that a peer fetches has a bit flipped. Nothing else differs.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from typing import Any

from edgemoe.cluster.data.kv_fetch import KVFetchServer
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.front.engine_process import EngineProcess

SPOILT_EVERY = 40
ENGINE = "edgemoe.worker"
serve = KVFetchServer.serve
served = [0]


async def serve_spoilt(self: KVFetchServer, question: Question[Any], asked: Any) -> Answer[Any]:
    """Answers with the requested part; one in SPOILT_EVERY has a bit flipped."""
    answer = await serve(self, question, asked)
    served[0] += 1
    if served[0] % SPOILT_EVERY:
        return answer
    part = bytearray(answer.tensors[0])
    part[served[0] * 997 % len(part)] ^= 16
    return Answer(answer.message, [memoryview(part)])


start = EngineProcess.start.__func__  # type: ignore[attr-defined]


async def start_spoilt(cls: type[EngineProcess], command: Sequence[str], settings: Any, address: str) -> EngineProcess:
    """Starts the engine with this module, too."""
    made: EngineProcess = await start(cls, (command[0], "-m", "tools.testbed.spoiled_kv", ENGINE), settings, address)
    return made


if __name__ == "__main__":
    KVFetchServer.serve = serve_spoilt  # type: ignore[method-assign]
    EngineProcess.start = classmethod(start_spoilt)  # type: ignore[assignment, method-assign]
    if sys.argv[1:] == [ENGINE]:
        del sys.argv[1]
        runpy.run_module(ENGINE, run_name="__main__", alter_sys=True)
    else:
        runpy.run_module("edgemoe", run_name="__main__", alter_sys=True)
