"""Open-loop load on a running daemon over its Unix socket: latency, goodput and prefix hits by rate.

    python -m tools.bench.serve --socket /run/edgemoe/edgemoe.sock --trace conv.csv.gz --rates 1,2,4 --requests 100

Requests are sent when due. TTFT is the time from sending to the first token, ITL the time between tokens, TPOT its mean
in a request (guidellm's ITL). Goodput counts requests per second within both limits. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from tools.bench.arrivals import Arrival, Shape, from_trace, poisson

console = Console(stderr=True)


@dataclass(slots=True)
class Outcome:
    """One request's result. Times in seconds since it was sent; `status` 0 means that the connection failed."""

    status: int = 0
    late_s: float = 0.0  # between its due time and its sending
    ttft_s: float = float("nan")
    token_gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    last_s: float = float("nan")  # time of the last token
    error: str = ""

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else float("nan")


async def send(client: httpx.AsyncClient, model: str, arrival: Arrival, timeout_s: float) -> Outcome:
    """Sends one completion request and reads its stream to the end."""
    outcome = Outcome(prompt_tokens=len(arrival.prompt))
    body = {
        "model": model,
        "prompt": list(arrival.prompt),
        "max_tokens": arrival.output_tokens,
        "min_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            outcome.status = response.status_code
            if response.status_code != 200:
                outcome.error = (await response.aread()).decode(errors="replace")[:200]
                return outcome
            await _read_stream(response, outcome, started)
    except (httpx.HTTPError, TimeoutError) as error:
        outcome.error = repr(error)
    return outcome


async def _read_stream(response: httpx.Response, outcome: Outcome, started: float) -> None:
    last = started
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            outcome.error = str(chunk["error"])
        now = time.perf_counter()
        if chunk.get("choices") and chunk["choices"][0]["text"]:
            outcome.last_s = now - started
            if outcome.tokens == 0:
                outcome.ttft_s = now - started
            else:
                outcome.token_gaps_s.append(now - last)
            outcome.tokens += 1
            last = now
        if usage := chunk.get("usage"):
            outcome.tokens = usage["completion_tokens"]
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def run_load(socket: str, model: str, arrivals: list[Arrival], timeout_s: float) -> tuple[list[Outcome], float]:
    """Sends every arrival when it is due. Returns the outcomes, and the seconds until the last answer."""
    transport = httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=None) as client:
        started = time.perf_counter()

        async def one(arrival: Arrival) -> Outcome:
            await asyncio.sleep(max(0.0, arrival.at_s - (time.perf_counter() - started)))
            late_s = time.perf_counter() - started - arrival.at_s
            outcome = await send(client, model, arrival, timeout_s)
            outcome.late_s = late_s
            return outcome

        outcomes = await asyncio.gather(*(one(a) for a in arrivals))
        return list(outcomes), time.perf_counter() - started


def summarise(outcomes: list[Outcome], span_s: float, slo_ttft_s: float, slo_tpot_s: float) -> dict[str, Any]:
    """Computes percentiles in milliseconds and rates per second. Pure."""
    done = [o for o in outcomes if o.status == 200 and not o.error]
    good = [o for o in done if o.ttft_s <= slo_ttft_s and not o.tpot_s > slo_tpot_s]
    prompt_tokens = sum(o.prompt_tokens for o in done)
    return {
        "requests": len(outcomes),
        "completed": len(done),
        "rejected": sum(o.status == 429 for o in outcomes),
        "failed": sum(o.status != 429 and (o.status != 200 or bool(o.error)) for o in outcomes),
        "errors": sorted({o.error for o in outcomes if o.error})[:3],
        "span_s": round(span_s, 3),
        "output_tokens_per_s": round(sum(o.tokens for o in done) / span_s, 2),
        "goodput_per_s": round(len(good) / span_s, 3),
        "prefix_hit_share": round(sum(o.cached_tokens for o in done) / prompt_tokens, 4) if prompt_tokens else 0.0,
        "ttft_ms": _percentiles([o.ttft_s for o in done]),
        "tpot_ms": _percentiles([o.tpot_s for o in done]),
        "itl_ms": _percentiles([gap for o in done for gap in o.token_gaps_s]),
        "late_ms": _percentiles([o.late_s for o in outcomes]),
    }


def _percentiles(values_s: list[float]) -> dict[str, float]:
    values = np.array(values_s, dtype=np.float64)
    values = values[~np.isnan(values)] * 1000
    if not len(values):
        return {}
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    named = {"mean": values.mean(), "p50": p50, "p90": p90, "p99": p99}
    return {name: round(float(value), 2) for name, value in named.items()}


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="open-loop load")
    for column in (
        "req/s",
        "done",
        "429",
        "failed",
        "tok/s",
        "goodput/s",
        "prefix hits",
        "TTFT p50/p99",
        "ITL p50/p99",
    ):
        table.add_column(column, justify="right")
    for r in results:
        ttft, itl = (r[k] or {"p50": float("nan"), "p99": float("nan")} for k in ("ttft_ms", "itl_ms"))
        table.add_row(
            f"{r['rate']:g}",
            str(r["completed"]),
            str(r["rejected"]),
            str(r["failed"]),
            f"{r['output_tokens_per_s']:.1f}",
            f"{r['goodput_per_s']:.2f}",
            f"{r['prefix_hit_share']:.0%}",
            f"{ttft['p50']:.0f} / {ttft['p99']:.0f} ms",
            f"{itl['p50']:.0f} / {itl['p99']:.0f} ms",
        )
    console.print(table)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Plots latency against offered rate, one line a percentile."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    rates = [r["rate"] for r in results]
    for axis, key in zip(axes, ("ttft_ms", "tpot_ms", "itl_ms"), strict=True):
        for name in ("p50", "p90", "p99"):
            axis.plot(rates, [r[key].get(name, float("nan")) for r in results], marker="o", label=name)
        axis.set(title=key[:-3].upper(), xlabel="requests per second", ylabel="ms", yscale="log")
        axis.legend()
    figure.savefig(path, dpi=120)


def make_arrivals(args: argparse.Namespace, rate: float, seed: int) -> list[Arrival]:
    shape = Shape(args.vocab, args.scale, args.max_prompt_tokens, args.max_output_tokens)
    if args.trace:
        return from_trace(args.trace, rate, args.requests, shape, seed)
    return poisson(rate, args.requests, shape, seed, args.prompt_tokens, args.output_tokens, args.fixed)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--socket", required=True, help="the daemon's Unix socket")
    p.add_argument("--rates", default="1", help="offered requests per second, comma-separated")
    p.add_argument("--requests", type=int, default=100, help="requests per rate")
    p.add_argument("--trace", type=Path, help="an Azure .csv.gz or Mooncake .jsonl.gz trace; none: Poisson arrivals")
    p.add_argument("--scale", type=float, default=1.0, help="factor on the trace's token counts")
    p.add_argument("--prompt-tokens", type=int, default=200, help="mean prompt length of Poisson arrivals")
    p.add_argument("--output-tokens", type=int, default=64, help="mean output length of Poisson arrivals")
    p.add_argument("--fixed", action="store_true", help="Poisson arrivals of exactly these lengths")
    p.add_argument("--max-prompt-tokens", type=int, default=1024)
    p.add_argument("--max-output-tokens", type=int, default=128)
    p.add_argument("--slo-ttft-s", type=float, default=2.0)
    p.add_argument("--slo-tpot-s", type=float, default=0.2)
    p.add_argument("--timeout-s", type=float, default=300.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--vocab", type=int, default=1000, help="prompt token ids are drawn below this")
    p.add_argument("--plot", type=Path, help="write latency against rate to this PNG")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    base = httpx.Client(transport=httpx.HTTPTransport(uds=args.socket), base_url="http://edgemoe", timeout=10)
    model = base.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    results = []
    for number, rate in enumerate(float(r) for r in args.rates.split(",")):
        arrivals = make_arrivals(args, rate, args.seed + number)
        outcomes, span_s = asyncio.run(run_load(args.socket, model, arrivals, args.timeout_s))
        results.append({"rate": rate, **summarise(outcomes, span_s, args.slo_ttft_s, args.slo_tpot_s)})
    show(results)
    if args.plot:
        plot(results, args.plot)
    print(json.dumps({"model": model, "trace": str(args.trace or "poisson"), "results": results}))
    return 0 if all(r["failed"] == 0 for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
