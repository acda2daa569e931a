"""Predicts the time to the next use of every expert, learned while serving, and saves the learned state.

Source of the score: W of [Two-Tier, 4.1], with gamma per step: decay^time to the next need, in steps and parts of a
step. Memory is bounded. The work is compiled (`next_use_step`, `next_use_work`). See docs/design/prediction.md.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from edgemoe.durable import replace_file
from edgemoe.experts.predict import online_mlp as learner
from edgemoe.experts.predict.forecast_blend import BINS as SHARES
from edgemoe.experts.predict.forecast_blend import FUSE_CHANCES, HORIZONS, SAMPLE, AwaitedForecast
from edgemoe.experts.predict.next_use_step import (
    FOLLOW,
    LOG_DECAY,
    MARK,
    MOST,
    PROMPT,
    PROMPTS,
    START,
    STATE,
    STEP,
    TRACKS,
    WIDEST,
)
from edgemoe.experts.predict.next_use_work import AWAITED, FINISHED, WORK
from edgemoe.experts.predict.online_mlp import FEATURES, OnlineMLP, OwnHistory
from edgemoe.experts.predict.routing_memory import ALIGNED, APPEND, BINS, LOOKS, NONE, SHARE_OF_PAST, RoutingMemory
from edgemoe.jit.intrinsics import sem_init
from edgemoe.jit.object_cache import CompiledPart, link
from edgemoe.types.arrays import FloatArray, IntArray, place_of

Arrays = Mapping[str, Any]


def write_state(path: Path, arrays: Arrays) -> None:
    """Writes the file atomically, readable by the owner only. Raises OSError."""
    replace_file(path, save(dict(arrays)))


def read_state(path: Path) -> Arrays | None:
    """Returns the arrays; None if the file holds none."""
    try:
        arrays: Arrays = load_file(path)
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError, KeyError):  # of types that NumPy lacks
        return None
    return arrays


def has_memory_for(saved: Arrays, shape: Sequence[int], words: int, slots: int) -> bool:
    """Whether a state has a sound memory of this model's tokens."""
    if any(name not in saved for name in ("shape", "chosen", "before", "written")):
        return False
    before, chosen = saved["before"], saved["chosen"]
    filled = before.size
    return (
        saved["shape"].tolist() == list(shape)
        and before.dtype == chosen.dtype == np.int64
        and chosen.shape == (shape[0], words, filled)
        and filled <= slots
        and (filled == 0 or (before.min() >= NONE and before.max() < filled))
        and saved["written"].shape == (1,)
        and not _beyond(chosen, shape[1])
    )


def has_weights_like(saved: Arrays, learned: Arrays) -> bool:
    """Whether the saved weights are complete and finite: as many, of the same shapes and types, as `learned`."""
    return all(
        name in saved
        and saved[name].shape == ours.shape
        and saved[name].dtype == ours.dtype
        and np.isfinite(saved[name]).all()
        for name, ours in learned.items()
    ) and bool((saved["visits"] > 0).all())


def refill_memory(saved: Arrays, memory: RoutingMemory) -> None:
    """Fills the memory, token by token from the oldest on; that of the file may have been smaller."""
    chosen, before = saved["chosen"].view(np.uint64), saved["before"]
    start = int(saved["written"][0]) % max(1, len(before))
    memory.clear()
    moved = {NONE: NONE}
    for old in [*range(start, len(before)), *range(start)]:
        moved[old] = memory.append(np.ascontiguousarray(chosen[:, :, old]), moved.get(int(before[old]), NONE))


def _beyond(chosen: Any, experts: int) -> bool:
    """Whether bits are set of experts that there are not."""
    used = experts % 64
    return bool(used) and bool((chosen.view(np.uint64)[:, -1] >> np.uint64(used)).any())


MEMORY_BYTES = 64 << 20  # of recall
MOST_SLOTS = 32768  # tokens: a kind of text that comes back after 8,000 others is known still
FEW = 4  # layers that are followed while the GIL is held
PREDICTOR = CompiledPart((APPEND, FOLLOW, FUSE_CHANCES, MARK, START, WORK), "predictor")
Ids = npt.NDArray[np.int16]
PLACES = {name: place_of(STATE, name) for name in STATE.names or ()}


def link_predictor(directory: Path | None) -> None:
    """Has the compiled code ready: from `directory`, or compiles it, which takes seconds."""
    link(PREDICTOR.codes, directory, PREDICTOR.variant)


class NextUsePredictor:
    """Owns the learned state. A step calls `begin`, `update_ranks` when ranks are needed, and `end`.

    The thread that runs the steps calls these three. `work` and all methods that read or change the state may run on
    another thread. Until `work` has finished the previous step, `update_ranks` does nothing.
    """

    def __init__(self, layers: int, experts: int, top_k: int, seed: int = 0) -> None:
        link_predictor(None)
        self.layers, self.experts, self.top_k = layers, experts, top_k
        each, of_layer = (layers, experts), (layers,)
        self.scores = np.zeros(each, np.float32)  # log odds, kept up to date within a step
        self.ranks = np.zeros(each, np.float32)  # the same with forecasts blended in; any thread reads
        self.memory = RoutingMemory(layers, experts, min(MOST_SLOTS, MEMORY_BYTES // (layers * experts)))
        self.learner = OnlineMLP(layers, experts, seed)
        self.history = OwnHistory(layers, experts, top_k)
        self.visited: IntArray = np.full(layers, NONE, np.int64)  # step in which each layer ran last
        self.known = np.zeros((layers, FEATURES, experts), np.float32)
        self.later = (np.arange(layers) / layers * LOG_DECAY).astype(np.float32)  # [L]
        stride = -(-layers // ALIGNED)
        match_step = np.full(1, (1 - SHARE_OF_PAST) / (-(-layers // stride) * top_k), np.float32)
        stats = np.tile(np.array([-1.5, -0.6], np.float32), (2, 1))  # features: no match, of one
        share = (np.arange(256) / 255).astype(np.float32)
        slots, words = self.memory.slots, self.memory.words
        self._awaited_keys: IntArray = np.zeros((AWAITED, SAMPLE), np.int64)
        self._awaited_horizon: IntArray = np.zeros((AWAITED, SAMPLE), np.int64)
        self._awaited_values = np.zeros((AWAITED, 2, SAMPLE), np.float32)
        self._trust, self._deadline = np.ones(1, np.float32), np.zeros(2, np.int64)
        self._steps: npt.NDArray[Any] = np.zeros(2, STEP)
        self._prompts: npt.NDArray[Any] = np.zeros(PROMPTS, PROMPT)
        self._arrays: dict[str, npt.NDArray[Any]] = {
            "steps": self._steps, "match_step": match_step, "scores": self.scores, "ranks": self.ranks,
            "known": self.known, "visited": self.visited, "locks": np.zeros(of_layer, np.int64), "later": self.later,
            "odds": learner.odds(1 - share), "scratch": np.zeros((layers, 3, experts), np.float32),
            "same": np.zeros((layers, 3), np.float32),
            "match": np.zeros((TRACKS, 2, slots), np.float32), "half": np.zeros(TRACKS, np.int64),
            "token": np.zeros((TRACKS, layers, words), np.uint64), "latest": np.full(TRACKS, NONE, np.int64),
            "running": np.zeros(TRACKS + 1, np.int64), "near": np.zeros((2, TRACKS, WIDEST), np.int64),
            "near_weights": np.zeros((2, TRACKS, WIDEST), np.float32), "near_n": np.zeros((2, TRACKS), np.int64),
            "stats": stats, "counts": np.zeros(BINS, np.int64), "trust": self._trust,
            "shares": np.zeros((HORIZONS, SHARES), np.float32), "etas": np.zeros(HORIZONS, np.float32),
            "awaited_keys": self._awaited_keys, "awaited_horizon": self._awaited_horizon,
            "awaited_values": self._awaited_values,
            "prompts": self._prompts, "semaphore": np.zeros(8, np.int64), "deadline": self._deadline,
        }  # fmt: skip
        self._record = np.zeros(1, STATE)
        self._view = self._record.view(np.int64)
        self.address = self._record.ctypes.data
        numbers = {"layers": layers, "experts": experts, "stride": stride, "memory": self.memory.address}
        numbers |= {"history": self.history.address}
        numbers |= {"learner": self.learner.address, "allowed": LOOKS, "looking": LOOKS}
        numbers |= dict.fromkeys(("begun", "ended", "finished", "heard", "adopted", "listened"), NONE)
        numbers |= {name: array.ctypes.data for name, array in self._arrays.items()}
        for name, number in numbers.items():
            self._view[PLACES[name]] = number
        sem_init(numbers["semaphore"], 0, 0)
        self._tracks: OrderedDict[Hashable, int] = OrderedDict()
        self._kept: list[Any] = [None, None]  # the arrays of the two steps' records
        self._forecasts: list[Any] = [None, None]
        self._told: list[Any] = [None] * PROMPTS  # the arrays of prompts' records
        START.call(self.address)

    # --- for the thread that runs the steps

    def begin(self, sequences: Sequence[Hashable], ids: Ids, rows: IntArray) -> bool:
        """Begins a step in which each of the sequences decodes one token; only TRACKS sequences are tracked.

        Each layer's routing is written into `ids` [L, T, k] int16, over -1, in the order of the layers. `rows` [S] are
        the sequences' tokens. Returns False if `work` is two steps behind: the step is then not learned from.
        """
        view = self._view
        if view[PLACES["begun"]] > view[PLACES["ended"]]:  # it failed
            self._steps["failed"][view[PLACES["begun"]] % 2] = 1
            self.end()
        number = int(view[PLACES["begun"]]) + 1
        if view[PLACES["finished"]] < number - 2:
            return False
        tracks = np.zeros((2, TRACKS), np.int64)  # and whether each is new
        tracked = sequences[:TRACKS]
        for i, name in enumerate(tracked):
            tracks[:, i] = self._track(name)
        rows = np.ascontiguousarray(rows, np.int64)
        self._kept[number % 2] = (ids, rows, tracks)
        at = (ids.ctypes.data, *ids.shape[1:], len(rows), rows.ctypes.data, len(tracked), tracks.ctypes.data)
        self._steps[number % 2] = (*at, tracks[1].ctypes.data, 0)
        self._mark("begun", number)
        return True

    def update_ranks(self, layers: int = 0) -> None:
        """Updates the ranks of the layers that have run, about `layers` of them."""
        (FOLLOW.call if layers > FEW else FOLLOW.call_briefly)(self.address)

    def add_forecast(self, probs: FloatArray, trust: float) -> None:
        """Adds a forecast of the running step and the next one, [2, L, E], to blend in."""
        probs = np.ascontiguousarray(probs, np.float32)
        self._forecasts = [self._forecasts[1], probs]  # the one before may be read now
        self._trust[0] = trust
        self._view[PLACES["probs"]] = probs.ctypes.data
        self._mark("heard", int(self._view[PLACES["begun"]]))

    def add_prompt(self, name: Hashable, ids: Ids, behind: bool = False) -> bool:
        """Adds the routing of a sequence's prompt tokens, `ids` [L, T, k]; before `end`, if a step runs.

        With `behind` they are tokens behind the one that the sequence decodes in the running step. False where too many
        prompts wait for `work`: then this one is not learned from.
        """
        told = int(self._view[PLACES["told"]])
        if told - self._view[PLACES["taken"]] == PROMPTS:
            return False
        track, fresh = self._track(name)
        ids = np.ascontiguousarray(ids[:, -(self.memory.slots // MOST) :], np.int16)
        self._told[told % PROMPTS] = ids
        self._prompts[told % PROMPTS] = (ids.ctypes.data, *ids.shape[1:], track, fresh, self.begun if behind else NONE)
        self._mark("told", told + 1)
        return True

    def end(self) -> None:
        """Ends the running step."""
        self._mark("ended", int(self._view[PLACES["begun"]]))

    # --- for the thread beside it

    def work(self, wait_s: float = 0.0) -> bool:
        """Predicts for the running step, finishes it when it has ended, and begins with the next one. Then True.

        False where it has not ended after `wait_s`, or `stop` or `wake` came.
        """
        view, until_s = self._view, time.time() + wait_s
        self._deadline[:] = int(until_s), int(until_s % 1 * 1e9)
        view[PLACES["waits"]] = wait_s > 0
        WORK.call(self.address)
        view[PLACES["nudged"]] = 0
        return bool(view[PLACES["result"]] == FINISHED)

    def stop(self) -> None:
        """Makes `work` return without waiting from now on."""
        self._mark("stop", 1)

    def wake(self) -> None:
        """Has `work` return if it waits."""
        self._mark("nudged", 1)

    def set_looks(self, looks: int) -> None:
        """Sets the alignments per step, from the step after the next on."""
        self._view[PLACES["allowed"]] = looks

    def set_fusion(self, shares: FloatArray, etas: FloatArray) -> None:
        """Sets calibrations and weights of the blend, by horizon."""
        self._arrays["shares"][:], self._arrays["etas"][:] = shares, etas

    def pop_awaited(self) -> list[AwaitedForecast]:
        """Returns, once, the forecasts of some experts in the step finished last."""
        awaited = []
        for row in range(int(self._view[PLACES["awaited"]])):
            for horizon in np.unique(self._awaited_horizon[row]).tolist():
                those = self._awaited_horizon[row] == horizon
                awaited.append(
                    AwaitedForecast(horizon, self._awaited_keys[row, those], *self._awaited_values[row][:, those])
                )
        self._view[PLACES["awaited"]] = 0
        return awaited

    @property
    def step(self) -> int:
        """The running step: steps that are finished."""
        return int(self._view[PLACES["finished"]]) + 1

    @property
    def begun(self) -> int:
        """The step that was begun last."""
        return int(self._view[PLACES["begun"]])

    @property
    def looking(self) -> int:
        """Returns how often the running step is predicted for."""
        return int(self._view[PLACES["looking"]])

    @property
    def idle(self) -> bool:
        """Whether `work` waits, and has seen to every mark."""
        view = self._view
        return bool(view[PLACES["idle"]]) and view[PLACES["handled"]] == view[PLACES["marks"]]

    @property
    def phase(self) -> FloatArray:
        """The log of the decay by each layer's place in the round, [L]."""
        phase: FloatArray = self.later + np.where(self.visited == self.step, LOG_DECAY, np.float32(0))
        return phase

    def phase_of(self, layer: int) -> float:
        """Returns the `phase` of one layer."""
        return float(self.later[layer]) + (float(LOG_DECAY) if self.visited[layer] == self.step else 0.0)

    # --- state

    def learned(self) -> dict[str, Any]:
        """Returns the arrays to save, by name."""
        filled = self.memory.filled
        return {
            "shape": np.array([self.layers, self.experts, self.top_k], np.int64),
            "chosen": np.ascontiguousarray(self.memory.chosen[:, :, :filled]).view(np.int64),
            "before": self.memory.before[:filled],
            "written": np.array([self.memory.written], np.int64),
            **self._adapted(),
        }

    def restore(self, saved: Mapping[str, Any]) -> bool:
        """Restores the saved state before the first step. Returns False, and changes nothing, if it does not fit.

        Another release's file restores at least the memory, which takes longest to learn.
        """
        memory = self.memory
        shape = [self.layers, self.experts, self.top_k]
        if not has_memory_for(saved, shape, memory.words, memory.slots):
            return False
        refill_memory(saved, memory)
        if has_weights_like(saved, self._adapted()):
            self.history.restore(saved, self.step)
            self.learner.restore(saved["weights"])
        START.call(self.address)
        return True

    def _adapted(self) -> dict[str, Any]:
        return self.history.learned(self.step) | {"weights": self.learner.weights}

    # --- inside

    def _mark(self, name: str, value: int) -> None:
        MARK.call_briefly(self.address, 8 * PLACES[name], value)

    def _track(self, name: Hashable) -> tuple[int, bool]:
        """Returns the track of a sequence, and whether it is new."""
        track, fresh = self._tracks.pop(name, NONE), False
        if track == NONE:
            fresh = True
            track = self._tracks.popitem(last=False)[1] if len(self._tracks) == TRACKS else len(self._tracks)
        self._tracks[name] = track
        return track, fresh
