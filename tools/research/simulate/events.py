"""The simulator's event loop [Prism, IV-C]: batches go layer by layer, and wait for busy resources.

A layer's experts at home run on the GPUs that hold them, others by calls to few and idle boxes, over both links. A
layer ends with its last expert. GPUs and links serve in order of arrival. A prompt's first step is its prompt, each
further step one token; prompts of a server may step together (`Host.sequences`). Compiled; times are seconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from tools.research.simulate.event_heap import Heap, Ints, Numbers, heap_of, pop, push

ONE, NONE = np.uint64(1), np.uint64(0)
LAYER, GATE, CALL, REPLY, DONE, ARRIVES, QUEUES = range(7)
CALLS = 1 << 16  # at once, at most
PERIOD_S = 0.01  # in which a box's control group may use its share of the processor
DECODE_STEPS, DECODE_S, EXPERTS, REMOTE, CALLED, CORE_S = range(6)  # of `Result.boxes`
_compiled: Any = numba.njit(nogil=True, error_model="numpy")


class Prompts(NamedTuple):
    """P prompts, with their routes one after the other."""

    at_s: Numbers  # [P] ascending
    server: Ints  # [P] its server
    first: Ints  # [P] its first token in `routes`
    tokens: Ints  # [P] of prompt and answer
    emitted: Ints  # [P] of these, the answer's
    routes: npt.NDArray[np.int16]  # [T, L, k]


class Host(NamedTuple):
    """Costs of a box beside computing, on its one processor."""

    share: Numbers  # [N] share of the processor that each box may use; inf: all
    sequences: int  # that step together at a box; 0: each prompt by itself
    request_s: float  # for each request
    step_s: float  # for each step
    prompt_s: float  # for each layer of a step with prompts
    call_s: float  # for each outgoing call
    serve_s: float  # for each incoming call
    devices: Ints  # [N] devices that compute beside the processor, if experts take time on them
    read_s: float  # of an expert on one of them


def all_computing(servers: int) -> Host:
    """Returns hosts without costs: only GPUs take time."""
    return Host(np.full(servers, np.inf), 0, 0.0, 0.0, 0.0, 0.0, 0.0, np.ones(servers, np.int64), 0.0)


class Cluster(NamedTuple):
    """The cluster: N servers of at most G GPUs."""

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
    host: Host


class Calls(NamedTuple):
    """Calls in progress."""

    batch: Ints
    server: Ints
    sent: Ints  # tokens
    experts: Ints  # [calls, G]
    tokens: Ints  # [calls, G] their tokens together
    free: Ints  # unused entries
    unused: Ints  # [1] number of unused entries


class Batches(NamedTuple):
    """W batches: one for each prompt, or one for each server, with at most S prompts at once."""

    server: Ints  # [W]
    prompts: Ints  # [W, S]
    size: Ints  # [W]
    layer: Ints  # [W]
    pending: Ints  # [W] experts that its layer waits for
    gated_s: Numbers  # [W] when its layer was gated
    began_s: Numbers  # [W] when its step began
    step: Ints  # [P] of each prompt
    line: Ints  # [N, P] prompts that wait for a place, in order of arrival
    ends: Ints  # [N, 2] begin and end of the line


class Used(NamedTuple):
    """Times at which resources are free again."""

    gpus: Numbers  # [N, G]
    links: Numbers  # [2, N] out, and in
    devices: Numbers  # [N] all that compute beside a box's processor
    period: Ints  # [N] period in which the box used its processor last
    spent_s: Numbers  # [N] processor time used in it


class Result(NamedTuple):
    """Results of a simulation."""

    end_s: Numbers  # [P]
    first_s: Numbers  # [P] time of the first token
    local: Ints  # [3] experts computed at home, experts in all, calls
    waits: Numbers  # [P] seconds between gates and their last remote expert
    boxes: Numbers  # [N, 6] decode steps, seconds in them, distinct experts of steps, remote ones, calls, core seconds


@_compiled
def _work(share: Numbers, used: Used, boxes: Numbers, now: float, server: int, gpu: int, work_s: float) -> float:
    """Occupies a GPU, or a box's processor, for a time. Returns its end."""
    if work_s <= 0.0:
        return now
    start = max(now, used.gpus[server, gpu])
    boxes[server, CORE_S] += work_s
    if share[server] == np.inf:
        used.gpus[server, gpu] = start + work_s
        return start + work_s
    while True:
        period = max(used.period[server], int(start / PERIOD_S))
        if period > used.period[server]:
            used.period[server], used.spent_s[server] = period, 0.0
        part = min(work_s, share[server] * PERIOD_S - used.spent_s[server], max((period + 1) * PERIOD_S - start, 0.0))
        used.spent_s[server] += part
        start, work_s = start + part, work_s - part
        if work_s <= 1e-9:
            used.gpus[server, gpu] = start
            return start
        used.period[server], used.spent_s[server] = period + 1, 0.0
        start = max(start, (period + 1) * PERIOD_S)


@_compiled
def _compute(
    cluster: Cluster, used: Used, result: Result, now: float, server: int, experts: Ints, tokens: Ints
) -> float:
    """Computes experts [G] for tokens [G] on a server's GPUs. Returns the end of the last one."""
    end = now
    for gpu in range(cluster.gpus[server]):
        if experts[gpu]:
            work_s = cluster.launch_s + cluster.expert_s * experts[gpu] + cluster.token_s * tokens[gpu]
            end = max(end, _work(cluster.host.share, used, result.boxes, now, server, gpu, work_s))
    rounds = np.ceil(experts.sum() / cluster.host.devices[server])
    if cluster.host.read_s > 0.0 and rounds:
        used.devices[server] = max(now, used.devices[server]) + rounds * cluster.host.read_s
        end = max(end, used.devices[server])
    return end


@_compiled
def _send(cluster: Cluster, links: Numbers, now: float, source: int, sink: int, tokens: int) -> float:
    """Sends tokens over two links. Returns their arrival."""
    begin = max(now, links[0, source], links[1, sink])
    end = begin + tokens * cluster.link_s
    links[0, source], links[1, sink] = end, end
    return end + cluster.delay_s


@_compiled
def _assign(cluster: Cluster, layer: int, missing: Ints, wait: Numbers, peer: Ints) -> None:
    """Assigns each missing expert a server that has it, `peer` [E].

    Repeatedly chooses the server with the least time for each of its remaining experts. `wait` [N] is a call's time
    before and after its computation.
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
def _waits(cluster: Cluster, used: Used, now: float, tokens: int) -> Numbers:
    """Returns the time of a call of `tokens` to each server, without its experts."""
    host = cluster.host
    wait = np.empty(len(used.gpus))
    for server in range(len(wait)):
        there = max(now, used.links[1, server]) + tokens * cluster.link_s + cluster.delay_s
        busy = max(there, used.gpus[server, : cluster.gpus[server]].max(), used.devices[server])
        own = host.call_s + host.serve_s + cluster.launch_s
        wait[server] = busy - now + own + tokens * cluster.link_s + cluster.delay_s
    return wait


@_compiled
def _span(prompts: Prompts, step: int, p: int) -> tuple[int, int]:
    """Returns the first token of a step, and its end."""
    filled = prompts.tokens[p] - prompts.emitted[p]
    if step == 0:
        return prompts.first[p], prompts.first[p] + filled
    return prompts.first[p] + filled + step - 1, prompts.first[p] + filled + step


@_compiled
def _gate(
    prompts: Prompts,
    cluster: Cluster,
    batches: Batches,
    used: Used,
    heap: Heap,
    calls: Calls,
    result: Result,
    now: float,
    w: int,
) -> None:
    """Starts a layer's experts, here and by calls."""
    home, at = batches.server[w], batches.layer[w]
    experts = cluster.homes.shape[1]
    wanted = np.zeros(experts, np.int64)
    tokens = 0
    for p in batches.prompts[w, : batches.size[w]]:
        begin, end = _span(prompts, batches.step[p], p)
        tokens += end - begin
        for token in range(begin, end):
            for expert in prompts.routes[token, at]:
                wanted[expert] += 1
    peer = np.full(experts, -1, np.int64)
    own = cluster.device[home, at]
    here, here_tokens = np.zeros(used.gpus.shape[1], np.int64), np.zeros(used.gpus.shape[1], np.int64)
    for expert in np.flatnonzero(wanted):
        result.local[1] += wanted[expert]
        if own[expert] >= 0:
            here[own[expert]] += 1
            here_tokens[own[expert]] += wanted[expert]
            result.local[0] += wanted[expert]
    missing = np.flatnonzero((wanted > 0) & (own < 0))
    result.boxes[home, EXPERTS] += here.sum() + len(missing)
    result.boxes[home, REMOTE] += len(missing)
    batches.pending[w] = 1
    if len(missing):
        _assign(cluster, at, missing, _waits(cluster, used, now, tokens), peer)
        sent = np.zeros(len(used.gpus), np.int64)
        for p in batches.prompts[w, : batches.size[w]]:
            begin, end = _span(prompts, batches.step[p], p)
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
            calls.batch[call], calls.server[call], calls.sent[call] = w, server, sent[server]
            calls.experts[call] = 0
            calls.tokens[call] = 0
            for expert in missing:
                if peer[expert] == server:
                    gpu = cluster.device[server, at, expert]
                    calls.experts[call, gpu] += 1
                    calls.tokens[call, gpu] += wanted[expert]
            batches.pending[w] += 1
            result.local[2] += 1
            result.boxes[home, CALLED] += 1
            packed = _work(cluster.host.share, used, result.boxes, now, home, 0, cluster.host.call_s)
            push(heap, _send(cluster, used.links, packed, home, server, sent[server]), CALL, call)
    push(heap, _compute(cluster, used, result, now, home, here, here_tokens), DONE, w)


@_compiled
def _begin(cluster: Cluster, batches: Batches, used: Used, heap: Heap, result: Result, now: float, w: int) -> None:
    """Begins a server's next step, with waiting prompts as far as there is room."""
    ends = batches.ends[w]
    while batches.size[w] < cluster.host.sequences and ends[0] < ends[1]:
        batches.prompts[w, batches.size[w]] = batches.line[w, ends[0]]
        batches.size[w] += 1
        ends[0] += 1
    if batches.size[w]:
        batches.began_s[w] = now
        push(heap, _work(cluster.host.share, used, result.boxes, now, w, 0, cluster.host.step_s), LAYER, w)


@_compiled
def _emit(prompts: Prompts, batches: Batches, result: Result, now: float, w: int) -> None:
    """Ends a step: each prompt has a token more, and complete ones leave."""
    size, decodes = 0, True
    for n in range(batches.size[w]):
        p = batches.prompts[w, n]
        if batches.step[p] == 0:
            result.first_s[p] = now
            decodes = False
        batches.step[p] += 1
        if batches.step[p] > prompts.emitted[p] - 1:
            result.end_s[p] = now
        else:
            batches.prompts[w, size] = p
            size += 1
    batches.size[w] = size
    if decodes:
        result.boxes[batches.server[w], DECODE_STEPS] += 1
        result.boxes[batches.server[w], DECODE_S] += now - batches.began_s[w]


@_compiled
def run(
    prompts: Prompts, cluster: Cluster, batches: Batches, used: Used, heap: Heap, calls: Calls, result: Result
) -> None:
    """Runs all prompts; fills `result`."""
    layers, together = cluster.homes.shape[0], cluster.host.sequences > 0
    share, request_s = cluster.host.share, cluster.host.request_s
    for p in range(len(prompts.at_s)):
        push(heap, prompts.at_s[p], ARRIVES if together else LAYER, p)
    while heap.size[0]:
        now, kind, what = pop(heap)
        if kind == ARRIVES:
            server = prompts.server[what]
            push(heap, _work(share, used, result.boxes, now, server, 0, request_s), QUEUES, what)
        elif kind == QUEUES:
            server = prompts.server[what]
            batches.line[server, batches.ends[server, 1]] = what
            batches.ends[server, 1] += 1
            if batches.size[server] == 0:
                _begin(cluster, batches, used, heap, result, now, server)
        elif kind == LAYER:
            home = batches.server[what]
            tokens, prompt_s = 0, 0.0
            for p in batches.prompts[what, : batches.size[what]]:
                begin, end = _span(prompts, batches.step[p], p)
                tokens += end - begin
                if batches.step[p] == 0:
                    prompt_s = cluster.host.prompt_s
            work_s = cluster.dense_s + cluster.dense_token_s * tokens + prompt_s
            gpu = what % cluster.gpus[home]
            push(heap, _work(share, used, result.boxes, now, home, gpu, work_s), GATE, what)
        elif kind == GATE:
            batches.gated_s[what] = now
            _gate(prompts, cluster, batches, used, heap, calls, result, now, what)
        elif kind == CALL:
            server = calls.server[what]
            begun = _work(share, used, result.boxes, now, server, 0, cluster.host.serve_s)
            done = _compute(cluster, used, result, begun, server, calls.experts[what], calls.tokens[what])
            push(heap, done, REPLY, what)
        elif kind == REPLY:
            w = calls.batch[what]
            back = _send(cluster, used.links, now, calls.server[what], batches.server[w], calls.sent[what])
            calls.free[calls.unused[0]] = what
            calls.unused[0] += 1
            push(heap, back, DONE, w)
        else:
            batches.pending[what] -= 1
            if batches.pending[what] == 0:
                for p in batches.prompts[what, : batches.size[what]]:
                    result.waits[p] += now - batches.gated_s[what]
                batches.layer[what] += 1
                if batches.layer[what] < layers:
                    push(heap, now, LAYER, what)
                    continue
                batches.layer[what] = 0
                _emit(prompts, batches, result, now, what)
                if together:
                    _begin(cluster, batches, used, heap, result, now, what)
                elif batches.size[what]:
                    batches.began_s[what] = now
                    push(heap, now, LAYER, what)


def _batches(prompts: Prompts, servers: int, sequences: int) -> Batches:
    count = len(prompts.at_s)
    server = np.arange(servers) if sequences else prompts.server
    members = np.zeros((servers, sequences), np.int64) if sequences else np.arange(count)[:, None]
    size, layer, pending = np.zeros((3, len(server)), np.int64)
    gated_s, began_s = np.zeros((2, len(server)))
    line = np.zeros((servers, count) if sequences else (servers, 0), np.int64)
    size += not sequences
    ends = np.zeros((servers, 2), np.int64)
    return Batches(server, members, size, layer, pending, gated_s, began_s, np.zeros(count, np.int64), line, ends)


def simulate(prompts: Prompts, cluster: Cluster) -> Result:
    """Returns the results of the prompts on the cluster."""
    count, servers, gpus = len(prompts.at_s), len(cluster.gpus), int(cluster.gpus.max())
    batch, server, sent = np.zeros((3, CALLS), np.int64)
    experts, tokens = np.zeros((2, CALLS, gpus), np.int64)
    calls = Calls(batch, server, sent, experts, tokens, np.arange(CALLS), np.array([CALLS]))
    free_s, links_s, devices_s, spent_s = np.zeros((servers, gpus)), np.zeros((2, servers)), *np.zeros((2, servers))
    used = Used(free_s, links_s, devices_s, np.zeros(servers, np.int64), spent_s)
    result = Result(np.zeros(count), np.zeros(count), np.zeros(3, np.int64), np.zeros(count), np.zeros((servers, 6)))
    batches = _batches(prompts, servers, cluster.host.sequences)
    run(prompts, cluster, batches, used, heap_of(count + 4 * CALLS), calls, result)
    return result
