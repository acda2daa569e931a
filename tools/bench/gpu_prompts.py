"""Prompts on a GPU: one layer's experts of many tokens, in tiles of several sizes, and whole layers streamed meanwhile.

    python -m tools.bench.gpu_prompts [--only parity,layer,tiles,stream,host] [--tokens 512,2048,8192] [--shapes A,B,C]

Experts are random bytes with sound scales. Each figure is a JSON line; times are the GPU's own, the median of rounds.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
import torch

from edgemoe.encodings.codec import pack
from edgemoe.experts.compute.cuda import TILE_ROWS, GpuExpertKernels, blocks_of, tile_rows
from edgemoe.experts.compute.cuda_link import PinnedSlab, copy_async, moment
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.kernels.gpu import expert_blocks, expert_tiles
from edgemoe.types.experts import SILU, Activation, ExpertGeometry
from edgemoe.types.size_classes import SlabLayout
from edgemoe.types.step import TokenGroups
from tools.bench.gpu import rounded

SWIGLU = Activation("clamped_swiglu", 1.702, 7.0)
SHAPES = {  # experts, top k, hidden, width, activation, biases
    "A": (64, 6, 2048, 1408, SILU, False),
    "B": (32, 4, 2880, 2880, SWIGLU, True),
    "C": (128, 8, 2048, 768, SILU, False),
}
MEASURED = (("A", "int4"), ("B", "mxfp4"), ("B", "int4"), ("C", "int4"), ("C", "bfloat16"), ("C", "fp8"), ("C", "int8"))
TILES = [  # rows, columns, inner, warps, stages
    (64, 128, 64, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 256, 64, 4, 3),
    (64, 256, 64, 8, 3),
    (64, 128, 128, 4, 3),
    (128, 64, 64, 4, 3),
    (128, 128, 64, 4, 2),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 3),
    (128, 128, 128, 4, 2),
    (128, 128, 128, 8, 3),
    (128, 256, 64, 8, 2),
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 3),
]
SWEPT = (("C", "int4", 2048), ("A", "int4", 2048), ("B", "mxfp4", 2048), ("C", "bfloat16", 2048))
ROUNDS, REPEATED = 5, 4
Figure = tuple[str, object]


def geometry_of(shape: str, kind: str, layers: int = 1) -> ExpertGeometry:
    experts, top_k, hidden, width, activation, biases = SHAPES[shape]
    return ExpertGeometry(layers, experts, top_k, hidden, width, "bfloat16", activation, biases, (kind,) * layers)


class Layer:
    """One layer's experts on the GPU; a few experts' bytes are repeated in all slots."""

    def __init__(self, shape: str, kind: str, device: torch.device) -> None:
        self.geometry = geometry = geometry_of(shape, kind)
        self.device, self._rng = device, np.random.default_rng(0)
        stride, encoding = geometry.stride_bytes(0), geometry.encoding(0)
        parts = []
        for rows, columns in (geometry.gate_up_shape, geometry.down_shape):
            some = pack(self._rng.normal(0, 0.02, (64, columns)).astype(np.float32), encoding)
            parts.append(some[np.arange(rows) % 64].reshape(-1))
        if geometry.biases:
            parts.append(self._rng.normal(size=2 * geometry.width + geometry.hidden).astype(np.float32).view(np.uint8))
        one = np.concatenate(parts)
        slab = torch.zeros((geometry.experts, stride), dtype=torch.uint8, device=device)
        slab[:, : len(one)] = torch.from_numpy(one).to(device)
        self.slab = slab.view(-1)
        self.sizes = expert_blocks.constants(geometry, 0, stride)

    @functools.cached_property
    def kernels(self) -> GpuExpertKernels:
        geometry = self.geometry
        layout = SlabLayout.even(geometry.experts, geometry.stride_bytes(0), experts=geometry.experts)
        return GpuExpertKernels(self.slab, layout, geometry)

    def work(self, tokens: int) -> tuple[TokenGroups, torch.Tensor, torch.Tensor]:
        """Makes calls of random experts, hidden states, and rows for the outputs."""
        geometry = self.geometry
        ids = np.argsort(self._rng.random((tokens, geometry.experts)), axis=1)[:, : geometry.top_k]
        group = TokenGroups.of(ids, np.full(ids.shape, 1 / geometry.top_k, np.float32))
        x = torch.randn((tokens, geometry.hidden), dtype=torch.bfloat16, device=self.device)
        out = torch.empty((tokens * geometry.top_k, geometry.hidden), device=self.device)
        return group, x, out

    def flops(self, tokens: int) -> float:
        return tokens * self.geometry.top_k * 6.0 * self.geometry.hidden * self.geometry.width

    def launch(
        self, work: tuple[TokenGroups, torch.Tensor, torch.Tensor], shape: dict[str, int], compute: Any
    ) -> Callable[[], None]:
        """Returns a call that only launches the kernels."""
        group, x, out = work
        given = (
            torch.from_numpy(part).to(self.device)
            for part in (blocks_of(group.experts, group.offsets, shape["ROWS"]), group.calls.astype(np.int32))
        )
        shares = torch.from_numpy(group.weights).to(self.device)
        return functools.partial(compute, x, self.slab, out, *given, shares, self.sizes, shape)


@functools.cache
def layer_of(shape: str, kind: str, device: torch.device) -> Layer:
    return Layer(shape, kind, device)


def compile_all(device: torch.device, only: list[str]) -> Figure:
    """Compiles the kernels of all parts on many threads, by launching them once."""
    began_s, deeds = time.perf_counter(), list[Callable[[], None]]()
    for shape, kind in MEASURED:
        layer = layer_of(shape, kind, device)
        work = layer.work(64)
        deeds.append(layer.launch(work, expert_blocks.block_shape(layer.geometry, 0, 64), expert_blocks.experts))
        for rows in TILE_ROWS:
            tile = expert_tiles.tile_shape(layer.geometry, 0, rows)
            deeds.append(layer.launch(work, tile, expert_tiles.experts_in_tiles))
    for (shape, kind, _), sizes in itertools.product(SWEPT if "tiles" in only else (), TILES):
        layer = layer_of(shape, kind, device)
        deeds.extend(halves(layer, layer.work(64), named(sizes)).values())
    with ThreadPoolExecutor(16) as pool:
        failed = [error for error in pool.map(functools.partial(launched, device), deeds) if error]
    return "compiled", {"s": time.perf_counter() - began_s, "launches": len(deeds), "failed": failed}


def launched(device: torch.device, deed: Callable[[], None]) -> str:
    """Launches once; returns the error, if any."""
    try:
        with torch.inference_mode(), torch.cuda.device(device):
            deed()
    except Exception as error:
        return repr(error)[:200]
    return ""


def named(tile: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("ROWS", "COLS", "INNER", "num_warps", "num_stages"), tile, strict=True))


@functools.cache
def busy() -> torch.Tensor:
    return torch.zeros((8192, 8192), dtype=torch.bfloat16, device="cuda")


def gpu_ms(deed: Callable[[], object], repeated: int = REPEATED) -> float:
    """Returns the median milliseconds of a call, by the GPU's clock."""
    taken = []
    deed()
    for _ in range(ROUNDS):
        torch.mm(busy(), busy())  # the host gets ahead
        start = moment(torch.cuda.current_stream())
        for _ in range(repeated):
            deed()
        end = moment(torch.cuda.current_stream())
        end.synchronize()
        taken.append(float(start.elapsed_time(end)) / repeated)
    return median(taken)


def peak(device: torch.device) -> float:
    """Returns the TFLOP/s of a large product in bfloat16."""
    a, b = (torch.randn((8192, 8192), dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * 8192**3 / gpu_ms(lambda: a @ b) / 1e9


def parity(device: torch.device) -> Iterator[Figure]:
    """Yields the largest difference between tiles and blocks, over the largest value."""
    for (shape, kind), rows in itertools.product(MEASURED, TILE_ROWS):
        layer = layer_of(shape, kind, device)
        group, x, out = layer.work(700)
        want = torch.empty_like(out)
        blocks = expert_blocks.block_shape(layer.geometry, 0, 64)
        layer.launch((group, x, want), blocks, expert_blocks.experts)()
        tiles = expert_tiles.tile_shape(layer.geometry, 0, rows)
        layer.launch((group, x, out), tiles, expert_tiles.experts_in_tiles)()
        error = float((out - want).abs().max() / want.abs().max())
        yield "parity", {"shape": shape, "kind": kind, "rows": rows, "error": error, "right": error < 1e-2}


def layer_times(device: torch.device, shapes: list[str], tokens: list[int], most: float) -> Iterator[Figure]:
    """Yields times of the product's calls, with its choice of kernels, and with the kernels of few rows."""
    for shape, kind in MEASURED:
        if shape not in shapes:
            continue
        layer = layer_of(shape, kind, device)
        for count in tokens:
            work = layer.work(count)
            group, x, out = work
            rows = tile_rows(len(group.calls) / len(group.experts))
            tiles = expert_tiles.tile_shape(layer.geometry, 0, rows)
            ms = gpu_ms(layer.launch(work, tiles, expert_tiles.experts_in_tiles))
            sum_ms = gpu_ms(lambda: out.view(len(x), layer.geometry.top_k, -1).sum(1))  # noqa: B023
            rate = layer.flops(count) / ms / 1e9
            yield "layer", {
                "shape": shape, "kind": kind, "tokens": count, "rows": rows, "ms": ms,
                "sum_ms": sum_ms, "tflop_per_s": rate, "share": rate / most,
            }  # fmt: skip
        if kind in ("int4", "bfloat16") and 2048 in tokens:
            old = expert_blocks.block_shape(layer.geometry, 0, 64)
            ms = gpu_ms(layer.launch(layer.work(2048), old, expert_blocks.experts), 1)
            rate = layer.flops(2048) / ms / 1e9
            yield "blocks", {"shape": shape, "kind": kind, "tokens": 2048, "ms": ms, "tflop_per_s": rate}


def tile_times(device: torch.device, most: float) -> Iterator[Figure]:
    """Yields times of tiles of several sizes, of each kernel."""
    for shape, kind, tokens in SWEPT:
        layer = layer_of(shape, kind, device)
        work = layer.work(tokens)
        for tile in TILES:
            about = {"shape": shape, "kind": kind, "tokens": tokens, "tile": tile}
            try:
                ms = {name: gpu_ms(deed) for name, deed in halves(layer, work, named(tile)).items()}
            except Exception as error:  # too much shared memory; the next may fit
                yield "tile", {**about, "error": repr(error)[:200]}
                continue
            whole = layer.flops(tokens) / 1e9
            yield "tile", {
                **about, "gate_up_ms": ms["gate_up"], "down_ms": ms["down"],
                "share_gate_up": whole * 2 / 3 / ms["gate_up"] / most, "share_down": whole / 3 / ms["down"] / most,
            }  # fmt: skip


def halves(
    layer: Layer, work: tuple[TokenGroups, torch.Tensor, torch.Tensor], tile: dict[str, int]
) -> dict[str, Callable[[], None]]:
    """Returns calls that launch one of the kernels each."""
    group, x, out = work
    sizes, width, hidden = layer.sizes, layer.geometry.width, layer.geometry.hidden
    blocks = torch.from_numpy(blocks_of(group.experts, group.offsets, tile["ROWS"])).to(layer.device)
    calls = torch.from_numpy(group.calls.astype(np.int32)).to(layer.device)
    shares = torch.from_numpy(group.weights).to(layer.device)
    mid = torch.randn((len(calls), width), dtype=torch.bfloat16, device=layer.device)
    first = {name: value for name, value in sizes.items() if name != "down_line"}
    second = {name: sizes[name] for name in ("hidden", "width", "stride", "line", "down_line", "bias", "KIND")}
    return {
        "gate_up": lambda: expert_tiles.tile_gate_up[-(-2 * width // tile["COLS"]), len(blocks)](
            x, layer.slab, mid, blocks, calls, **first, **tile, **expert_blocks.OPTIONS
        ),
        "down": lambda: expert_tiles.tile_down[-(-hidden // tile["COLS"]), len(blocks)](
            mid, layer.slab, out, shares, blocks, calls, **second, **tile, **expert_blocks.OPTIONS
        ),
    }


def host_times(device: torch.device) -> Iterator[Figure]:
    """Yields the host's milliseconds for one layer of 2,048 tokens, by parts."""
    layer = layer_of("C", "int4", device)
    group, x, out = layer.work(2048)
    ids = torch.from_numpy(np.argsort(np.random.default_rng(0).random((2048, 128)), axis=1)[:, :8].copy()).to(device)
    weights = torch.rand(ids.shape, device=device)
    at_host, weights_at_host = ids.numpy(force=True), weights.numpy(force=True)
    parts: dict[str, Callable[[], object]] = {
        "both_to_host": lambda: (ids.numpy(force=True), weights.numpy(force=True)),
        "group": lambda: TokenGroups.of(at_host, weights_at_host),
        "add": lambda: layer.kernels.add(0, group.experts, group, x, out),
        "rows": lambda: torch.zeros_like(out),
    }
    yield "host_ms", {name: host_ms(deed) for name, deed in parts.items()}


def host_ms(deed: Callable[[], object]) -> float:
    taken = []
    for _ in range(12):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        deed()
        taken.append((time.perf_counter() - began_s) * 1e3)
    return median(taken[2:])


def streamed(device: torch.device) -> Iterator[Figure]:
    """Yields the time of layers whose experts are all copied while the layer before computes, two halves by turns."""
    layer = layer_of("C", "int4", device)
    geometry, layers = layer.geometry, 8
    stride, experts = geometry.stride_bytes(0), geometry.experts
    host = HostSlab(SlabLayout.even(experts, stride))
    pinned = PinnedSlab(host, device)
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    slabs = [torch.zeros(experts * stride, dtype=torch.uint8, device=device) for _ in range(2)]

    def stream_layer(number: int) -> None:
        for expert in range(experts):
            copy_async(slabs[number % 2], expert * stride, host, expert * stride, stride, side)

    def run(tokens: int, copies: bool, computes: bool) -> float:
        work = layer.work(tokens)
        tiles = expert_tiles.tile_shape(geometry, 0, tile_rows(tokens * geometry.top_k / experts))
        deed = layer.launch(work, tiles, expert_tiles.experts_in_tiles)
        deed()
        torch.cuda.synchronize()
        began_s, done = time.perf_counter(), list[torch.cuda.Event]()
        for number in range(layers):
            if copies:
                stream_layer(number)
                main.wait_event(moment(side))
            if computes:
                deed()
            done.append(moment(main))
            if number:
                side.wait_event(done[number - 1])  # the half that is copied into next
        torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / layers * 1e3

    for tokens in (512, 2048, 8192):
        copy_ms, compute_ms, both_ms = run(tokens, True, False), run(tokens, False, True), run(tokens, True, True)
        yield "stream", {
            "tokens": tokens, "copy_ms": copy_ms, "compute_ms": compute_ms, "both_ms": both_ms,
            "gb_per_s": experts * stride / copy_ms / 1e6, "tokens_per_s_of_48_layers": tokens / both_ms / 48 * 1e3,
        }  # fmt: skip
    pinned.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="parity,layer,stream,host,tiles", help="parts, by commas (%(default)s)")
    parser.add_argument("--tokens", default="512,2048,8192")
    parser.add_argument("--shapes", default="A,B,C")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    device, began_s = torch.device(args.device), time.perf_counter()
    tokens, only = [int(count) for count in args.tokens.split(",")], args.only.split(",")
    most = peak(device)
    parts = {
        "parity": lambda: parity(device),
        "layer": lambda: layer_times(device, args.shapes.split(","), tokens, most),
        "stream": lambda: streamed(device),
        "host": lambda: host_times(device),
        "tiles": lambda: tile_times(device, most),
    }
    show("peak", {"tflop_per_s": most, "card": torch.cuda.get_device_name(device)}, began_s)
    show(*compile_all(device, only), began_s)
    for name in only:
        try:
            for figure in parts[name]():
                show(*figure, began_s)
        except Exception as error:  # the other parts are worth having
            show(name, {"error": repr(error)[:500]}, began_s)


def show(name: str, figure: object, began_s: float) -> None:
    print(json.dumps({name: rounded(figure), "at_s": round(time.perf_counter() - began_s, 1)}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
