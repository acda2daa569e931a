"""The simulator's clock [Prism, IV-C]: every prompt goes layer by layer, and waits where something is in use.

    dense     attention and gate, on the GPU that the prompt was given to
    experts   those at home here, on the GPUs that hold them; the others by calls to boxes that have them, to few, and
              to those that are free
    call      over the link of the caller and that of the called, then on the called one's GPUs, and back
    layer     is done with its last expert; a step with its last layer; a prompt with its last step

Whatever is used (a GPU, a link in each direction) serves what comes to it in the order of its coming. A prompt's first
step is all its tokens but those that it emits, each further step one token. Compiled; times are seconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ONE, NONE = np.uint64(1), np.uint64(0)
LAYER, GATE, CALL, REPLY, DONE = 0, 1, 2, 3, 4
CALLS = 1 << 16  # under way at once, at most
_compiled: Any = numba.njit(nogil=True, error_model="numpy")


class Prompts(NamedTuple):
    """What is asked for. P prompts, whose routes lie one after the other."""

    at_s: Numbers  # [P] ascending
    server: Ints  # [P] whose it is
    first: Ints  # [P] its first token in `routes`
    tokens: Ints  # [P] of prompt and answer
    emitted: Ints  # [P] of these, the answer's
    routes: npt.NDArray[np.int16]  # [T, L, k]


class Cluster(NamedTuple):
    """What there is. N servers of at most G GPUs."""

    homes: npt.NDArray[np.uint64]  # [L, E] a bit for each server
    device: npt.NDArray[np.int8]  # [N, L, E] GPU; -1: not there
    gpus: Ints  # [N]
    dense_s: float  # of a layer's attention and gate
    dense_token_s: float
    launch_s: float  # of a layer's experts on a GPU
    expert_s: float  # of each
    token_s: float  # of each expert of a token
    link_s: float  # of a token to another box, or back
    delay_s: float  # of a link, one way


class Heap(NamedTuple):
    """Events by time: of equals the one that was put in first."""

    time: Numbers
    order: Ints
    kind: Ints
    what: Ints  # prompt, or call
    size: Ints  # [2] how many, and how many there ever were


class Calls(NamedTuple):
    """Calls under way."""

    prompt: Ints
    server: Ints
    sent: Ints  # tokens
    experts: Ints  # [calls, G]
    tokens: Ints  # [calls, G] that they have, together
    free: Ints  # those that are not in use
    unused: Ints  # [1] how many of these


class Result(NamedTuple):
    """What came of it."""

    end_s: Numbers  # [P]
    first_s: Numbers  # [P] when the first token was there
    local: Ints  # [3] experts computed at home, experts in all, calls
    waits: Numbers  # [P] seconds between gates and their last remote expert


@_compiled
def _before(heap: Heap, a: int, b: int) -> bool:
    if heap.time[a] != heap.time[b]:
        return bool(heap.time[a] < heap.time[b])
    return bool(heap.order[a] < heap.order[b])


@_compiled
def _swap(heap: Heap, a: int, b: int) -> None:
    heap.time[a], heap.time[b] = heap.time[b], heap.time[a]
    heap.order[a], heap.order[b] = heap.order[b], heap.order[a]
    heap.kind[a], heap.kind[b] = heap.kind[b], heap.kind[a]
    heap.what[a], heap.what[b] = heap.what[b], heap.what[a]


@_compiled
def _push(heap: Heap, time: float, kind: int, what: int) -> None:
    at = heap.size[0]
    heap.size[0] += 1
    heap.size[1] += 1
    heap.time[at], heap.order[at], heap.kind[at], heap.what[at] = time, heap.size[1], kind, what
    while at > 0 and _before(heap, at, (at - 1) // 2):
        _swap(heap, at, (at - 1) // 2)
        at = (at - 1) // 2


@_compiled
def _pop(heap: Heap) -> tuple[float, int, int]:
    time, kind, what = heap.time[0], heap.kind[0], heap.what[0]
    heap.size[0] -= 1
    last = heap.size[0]
    _swap(heap, 0, last)
    at = 0
    while True:
        least = at
        for child in (2 * at + 1, 2 * at + 2):
            if child < last and _before(heap, child, least):
                least = child
        if least == at:
            return time, kind, what
        _swap(heap, at, least)
        at = least


@_compiled
def _compute(cluster: Cluster, free: Numbers, now: float, server: int, experts: Ints, tokens: Ints) -> float:
    """Has a server's GPUs compute experts [G] of so many tokens [G]; when the last one is done."""
    end = now
    for gpu in range(cluster.gpus[server]):
        if experts[gpu]:
            work = cluster.launch_s + cluster.expert_s * experts[gpu] + cluster.token_s * tokens[gpu]
            free[server, gpu] = max(now, free[server, gpu]) + work
            end = max(end, free[server, gpu])
    return end


@_compiled
def _send(cluster: Cluster, links: Numbers, now: float, source: int, sink: int, tokens: int) -> float:
    """Sends so many tokens; when they are there. `links` [2, N] are those out and in."""
    begin = max(now, links[0, source], links[1, sink])
    end = begin + tokens * cluster.link_s
    links[0, source], links[1, sink] = end, end
    return end + cluster.delay_s


@_compiled
def _assign(cluster: Cluster, layer: int, missing: Ints, wait: Numbers, peer: Ints) -> None:
    """Gives each missing expert a server that has it, `peer` [E].

    Again and again the one that takes least time for each of the rest that it has. `wait` [N] is what a call takes
    before it computes and after.
    """
    left, homes = len(missing), cluster.homes[layer]
    while left:
        best, least = -1, np.inf
        for server in range(len(wait)):
            count = 0
            for expert in missing:
                if peer[expert] < 0 and homes[expert] >> np.uint64(server) & ONE:
                    count += 1
            if count and wait[server] / count < least:
                best, least = server, wait[server] / count
        for expert in missing:
            if peer[expert] < 0 and homes[expert] >> np.uint64(best) & ONE:
                peer[expert] = best
                left -= 1


@_compiled
def _waits(cluster: Cluster, free: Numbers, links: Numbers, now: float, tokens: int) -> Numbers:
    """What a call of so many tokens to each server takes, but for its experts."""
    wait = np.empty(len(free))
    for server in range(len(free)):
        there = max(now, links[1, server]) + tokens * cluster.link_s + cluster.delay_s
        busy = max(there, free[server, : cluster.gpus[server]].max())
        wait[server] = busy - now + cluster.launch_s + tokens * cluster.link_s + cluster.delay_s
    return wait


@_compiled
def _gate(
    prompts: Prompts, cluster: Cluster, state: Any, heap: Heap, calls: Calls, result: Result, now: float, p: int
) -> None:
    """Sends a layer's experts to where they are computed."""
    step, layer, pending, free, links, _ = state
    home, at = prompts.server[p], layer[p]
    begin, end = _span(prompts, step[p], p)
    experts = cluster.homes.shape[1]
    wanted = np.zeros(experts, np.int64)
    for token in range(begin, end):
        for expert in prompts.routes[token, at]:
            wanted[expert] += 1
    peer = np.full(experts, -1, np.int64)
    own = cluster.device[home, at]
    here, here_tokens = np.zeros(free.shape[1], np.int64), np.zeros(free.shape[1], np.int64)
    for expert in np.flatnonzero(wanted):
        result.local[1] += wanted[expert]
        if own[expert] >= 0:
            here[own[expert]] += 1
            here_tokens[own[expert]] += wanted[expert]
            result.local[0] += wanted[expert]
    missing = np.flatnonzero((wanted > 0) & (own < 0))
    pending[p] = 1
    if len(missing):
        _assign(cluster, at, missing, _waits(cluster, free, links, now, end - begin), peer)
        sent = np.zeros(len(free), np.int64)
        for token in range(begin, end):
            to = NONE
            for expert in prompts.routes[token, at]:
                if peer[expert] >= 0 and not to >> np.uint64(peer[expert]) & ONE:
                    to |= ONE << np.uint64(peer[expert])
                    sent[peer[expert]] += 1
        for server in np.flatnonzero(sent):
            calls.unused[0] -= 1
            if calls.unused[0] < 0:
                raise RuntimeError("too many calls under way at once: nothing is served as fast as it comes")
            call = calls.free[calls.unused[0]]
            calls.prompt[call], calls.server[call], calls.sent[call] = p, server, sent[server]
            calls.experts[call] = 0
            calls.tokens[call] = 0
            for expert in missing:
                if peer[expert] == server:
                    gpu = cluster.device[server, at, expert]
                    calls.experts[call, gpu] += 1
                    calls.tokens[call, gpu] += wanted[expert]
            pending[p] += 1
            result.local[2] += 1
            _push(heap, _send(cluster, links, now, home, server, sent[server]), CALL, call)
    _push(heap, _compute(cluster, free, now, home, here, here_tokens), DONE, p)


@_compiled
def _span(prompts: Prompts, step: int, p: int) -> tuple[int, int]:
    """The tokens of a step."""
    filled = prompts.tokens[p] - prompts.emitted[p]
    if step == 0:
        return prompts.first[p], prompts.first[p] + filled
    return prompts.first[p] + filled + step - 1, prompts.first[p] + filled + step


@_compiled
def run(prompts: Prompts, cluster: Cluster, heap: Heap, calls: Calls, result: Result) -> None:
    """Lets all prompts go through; fills `result`."""
    servers, layers = len(cluster.gpus), cluster.homes.shape[0]
    count = len(prompts.at_s)
    step, layer, pending = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    free, links = np.zeros((servers, cluster.gpus.max())), np.zeros((2, servers))
    gated = np.zeros(count)
    state = (step, layer, pending, free, links, gated)
    for p in range(count):
        _push(heap, prompts.at_s[p], LAYER, p)
    while heap.size[0]:
        now, kind, what = _pop(heap)
        if kind == LAYER:
            home = prompts.server[what]
            gpu = what % cluster.gpus[home]
            begin, end = _span(prompts, step[what], what)
            free[home, gpu] = max(now, free[home, gpu]) + cluster.dense_s + cluster.dense_token_s * (end - begin)
            _push(heap, free[home, gpu], GATE, what)
        elif kind == GATE:
            gated[what] = now
            _gate(prompts, cluster, state, heap, calls, result, now, what)
        elif kind == CALL:
            server = calls.server[what]
            done = _compute(cluster, free, now, server, calls.experts[what], calls.tokens[what])
            _push(heap, done, REPLY, what)
        elif kind == REPLY:
            p = calls.prompt[what]
            back = _send(cluster, links, now, calls.server[what], prompts.server[p], calls.sent[what])
            calls.free[calls.unused[0]] = what
            calls.unused[0] += 1
            _push(heap, back, DONE, p)
        else:
            pending[what] -= 1
            if pending[what] == 0:
                result.waits[what] += now - gated[what]
                layer[what] += 1
                if layer[what] == layers:
                    layer[what] = 0
                    if step[what] == 0:
                        result.first_s[what] = now
                    step[what] += 1
                if step[what] <= prompts.emitted[what] - 1:
                    _push(heap, now, LAYER, what)
                else:
                    result.end_s[what] = now


def simulate(prompts: Prompts, cluster: Cluster) -> Result:
    """Returns what comes of the prompts on the cluster."""
    count, gpus = len(prompts.at_s), int(cluster.gpus.max())
    size = count + 4 * CALLS
    ints = [np.zeros(size, np.int64) for _ in range(3)]
    heap = Heap(np.zeros(size), ints[0], ints[1], ints[2], np.zeros(2, np.int64))
    prompt, server, sent = np.zeros((3, CALLS), np.int64)
    experts, tokens = np.zeros((2, CALLS, gpus), np.int64)
    calls = Calls(prompt, server, sent, experts, tokens, np.arange(CALLS), np.array([CALLS]))
    result = Result(np.zeros(count), np.zeros(count), np.zeros(3, np.int64), np.zeros(count))
    run(prompts, cluster, heap, calls, result)
    return result
