"""The effect of a long prompt on other streams: the time between their tokens, before it and during it.

    python -m tools.bench.long_prompt --socket /run/edgemoe/edgemoe.sock --prompt-tokens 16384 --streams 4

Against a running daemon. `--streams` requests decode without end; after a while one long prompt arrives. Gaps before it
and until its first token are compared. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

WARM_UP_S = 2.0
WARM_TOKENS = 1024


class Stream:
    """One endless completion, with the times of its tokens."""

    def __init__(self, client: httpx.AsyncClient, model: str, prompt: Sequence[int], tokens: int) -> None:
        self._client = client
        self._body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        self.at_s: list[float] = []
        self.first = asyncio.Event()

    async def run(self) -> None:
        async with self._client.stream("POST", "/v1/completions", json=self._body) as response:
            if response.status_code != 200:
                raise SystemExit((await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self.at_s.append(time.perf_counter())
                    self.first.set()

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Returns the gaps between tokens, if the later token came within this time."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return [after - before for before, after in pairs if start_s <= after <= end_s]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    transport = httpx.AsyncHTTPTransport(uds=args.socket)
    async with httpx.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=None) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        random = np.random.default_rng(args.seed)

        def prompt(tokens: int) -> list[int]:
            return [int(token) for token in random.integers(3, args.vocab, tokens)]

        await Stream(client, model, prompt(WARM_TOKENS), 1).run()  # from the disk into memory
        streams = [Stream(client, model, prompt(16), args.stream_tokens) for _ in range(args.streams)]
        tasks = [asyncio.ensure_future(stream.run()) for stream in streams]
        await asyncio.gather(*(stream.first.wait() for stream in streams))
        await asyncio.sleep(WARM_UP_S)
        alone_s = time.perf_counter()
        await asyncio.sleep(args.seconds)
        came_s = time.perf_counter()
        long = Stream(client, model, prompt(args.prompt_tokens), 1)
        await long.run()
        first_s = long.at_s[0]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {
            "model": model,
            "streams": args.streams,
            "prompt_tokens": args.prompt_tokens,
            "prompt_ttft_s": round(first_s - came_s, 2),
            "alone_itl_ms": percentiles([gap for s in streams for gap in s.gaps_s(alone_s, came_s)]),
            "beside_itl_ms": percentiles([gap for s in streams for gap in s.gaps_s(came_s, first_s)]),
        }


def percentiles(gaps_s: list[float]) -> dict[str, float]:
    """Returns p50, p99 and the longest in milliseconds. Pure."""
    if not gaps_s:
        return {}
    p50, p99, longest = np.percentile(np.array(gaps_s) * 1e3, [50, 99, 100])
    return {"p50": round(p50, 1), "p99": round(p99, 1), "max": round(longest, 1), "tokens": len(gaps_s)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True, help="the daemon's Unix socket")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    parser.add_argument("--stream-tokens", type=int, default=8000, help="enough to outlast the measurement")
    parser.add_argument("--seconds", type=float, default=5.0, help="without the long prompt")
    parser.add_argument("--vocab", type=int, default=1000, help="prompt token ids are drawn below this")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
