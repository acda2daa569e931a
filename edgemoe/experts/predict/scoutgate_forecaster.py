"""Runs ScoutGate beside the engine [Two-Tier, 4.2]: forecasts on a thread of its own, and their live score.

The compute thread only posts notes when a step begins and ends. The thread stays within a share of the steps' time.
If forecasts get worse than the export promised, `trust` falls from 1 towards 0.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.durable import replace_file
from edgemoe.errors import ConfigError
from edgemoe.experts.predict.forecast_blend import ExpertForecast
from edgemoe.experts.predict.scoutgate_model import ScoutGateExport, its_and_ours, promised_loss, read_export
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ServedModel
from edgemoe.types.step import StepMeta, StepRouting

log = logging.getLogger(__name__)

DECAY = 0.998  # of the live score, per forecast


@dataclass(slots=True)
class ForecastScore:
    """Decayed score of one horizon's forecasts."""

    weight: float = 1e-9
    hits: float = 0.0
    loss: float = 0.0
    forecast: float = 0.0
    happened: float = 0.0

    def add(self, p: FloatArray, hot: FloatArray, top_k: int) -> None:
        """Adds one sequence's forecast and outcome, [L, E] each."""
        safe = np.clip(p, 1e-6, 1 - 1e-6)
        top = np.argpartition(-p, top_k - 1, axis=1)[:, :top_k]
        hits = np.take_along_axis(hot, top, 1).mean()
        loss = -np.where(hot > 0, np.log(safe), np.log1p(-safe)).mean()
        for name, value in (
            ("weight", 1.0),
            ("hits", hits),
            ("loss", loss),
            ("forecast", p.sum()),
            ("happened", hot.sum()),
        ):
            setattr(self, name, getattr(self, name) * DECAY + float(value))


def write_scores(file: Path, export: str, scores: Sequence[ForecastScore]) -> None:
    """Keeps the scores of an export, which its hash names. Logs where that fails."""
    try:
        replace_file(file, json.dumps({"export": export, "scores": [asdict(score) for score in scores]}).encode())
    except OSError as error:
        log.warning(f"how good forecasts were is not kept: {error}")


def read_scores(file: Path, export: str, horizons: int) -> list[ForecastScore]:
    """Returns the saved scores of this export, by horizon; fresh scores if the file is missing or of another export."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        scores = [ForecastScore(**{name: float(value) for name, value in each.items()}) for each in kept["scores"]]
        usable = all(math.isfinite(value) and value >= 0 for each in scores for value in asdict(each).values())
        if usable and kept["export"] == export and len(scores) == horizons and all(each.weight for each in scores):
            return scores
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass  # scoring restarts: only the trust in an export is lost
    return [ForecastScore() for _ in range(horizons)]


CHUNK = 8192  # rows of the embedding projected at once


class TokenEmbedding(Protocol):
    """The main model's embedding [V, H], as its decoder has it, encoded or not."""

    columns: int  # H

    def __len__(self) -> int:
        """Returns V, the number of tokens."""

    def rows_at(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these numbers [n], float32 [n, H]."""


@dataclass(slots=True)
class TokenWindow:
    """One sequence: its last tokens, and the experts of the very last."""

    tokens: deque[int]
    end: int = 0  # position after the last token
    previous: IntArray | None = None  # [L * k], counted through all layers


@dataclass(frozen=True, slots=True)
class ForecastTables:
    """Tables that no token changes, computed once. `projected` [V, d_proj] is step 3 of the whole vocabulary."""

    export: ScoutGateExport
    projected: torch.Tensor
    towers: torch.Tensor  # [rank, horizons * L * E], calibration's scale included
    own: torch.Tensor  # [horizons * L * E]
    experts: int = field(default=0)

    @classmethod
    def of(cls, export: ScoutGateExport, embedding: TokenEmbedding) -> ForecastTables:
        """Works them out from the embedding on any device, of which it decodes or copies a chunk at a time."""
        gate, experts = export.gate, export.shape.experts[0]
        with torch.inference_mode():
            projected = torch.empty(len(embedding), gate.shape.projection, dtype=torch.float16)
            for numbers in torch.split(torch.arange(len(embedding)), CHUNK):
                projected[numbers] = gate.project(embedding.rows_at(numbers).cpu()).half()
            towers, own = gate.towers()
            scale = export.scale.repeat_interleave(experts)
            towers, own = towers * scale[:, None], own * scale + export.shift.repeat_interleave(experts)
            return cls(export, projected, towers.T.contiguous(), own, experts)

    @property
    def promised_loss(self) -> float:
        return promised_loss(self.export.record)

    def probs(self, tracks: list[TokenWindow]) -> FloatArray:
        """Returns calibrated forecasts for each sequence, [S, horizons, L, E]."""
        shape = self.export.shape
        window = torch.full((len(tracks), shape.window), -1)
        previous = torch.full((len(tracks), shape.layers * shape.top_k), shape.total)
        for row, track in enumerate(tracks):
            window[row, shape.window - len(track.tokens) :] = torch.tensor(list(track.tokens))
            if track.previous is not None:
                previous[row] = torch.from_numpy(track.previous)
        z = self.projected[window.clamp_min(0)].float()
        summary = self.export.gate.summary(z, window >= 0, previous, None)
        logits = torch.addmm(self.own, summary, self.towers)
        probs: FloatArray = logits.sigmoid().view(len(tracks), shape.horizons, shape.layers, self.experts).numpy()
        return probs


SHARE = 0.03  # of a step's time that forecasting may cost, on average,
STALL_SHARE = 0.2  # but of its stall, in which a core has nothing else to do
SAVED_STEPS = 8  # of that may be saved up


class TimeBudget:
    """Charges processor time against the steps' allowance. For the thread that `clock` measures."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent_s = self._credit_s = 0.0  # up to the latest step's end, and the time that may be spent since

    @property
    def overdrawn(self) -> bool:
        """Returns whether more was spent, up to the latest step's end, than its share."""
        return self._credit_s < 0

    def begin(self) -> None:
        """Resets the budget; earlier costs do not count."""
        self._spent_s, self._credit_s = self._clock(), 0.0

    def end_step(self, routing: StepRouting) -> None:
        """Adds a step's share, and subtracts the time spent since the previous step ended."""
        spent_s, self._spent_s = self._spent_s, self._clock()
        share_s = SHARE * (routing.step_s - routing.stall_s) + STALL_SHARE * routing.stall_s
        self._credit_s = min(self._credit_s + share_s - (self._spent_s - spent_s), SAVED_STEPS * share_s)


NOTES = 64  # that may wait for the thread; older ones are dropped
SAVE_S = 60.0  # between two times that the score is kept
TRACKS = 4096  # sequences whose last tokens are kept


def read_fitting_export(
    directory: Path, served: ServedModel, tokenizer: str, embedding: TokenEmbedding
) -> ScoutGateExport:
    """Reads the export in `directory` and checks that it fits the served model. Raises ConfigError if it does not.

    `tokenizer` is the checksum of tokenizer.json, as in the store's manifest. An empty digest or checksum fits all.
    """
    try:
        export = read_export(directory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shape, model, ours = export.shape, export.record["model"], served.geometry
    wanted = {
        "layers x experts": (list(shape.experts), [ours.experts] * ours.layers),
        "experts per token": (shape.top_k, ours.top_k),
        "embedding width": (shape.embedding, embedding.columns),
        "model digest": its_and_ours(export.record, "digest", served.digest),
        "tokenizer": its_and_ours(export.record, "tokenizer", tokenizer),
    }
    for what, (its, wants) in wanted.items():
        if its != wants:
            name = model.get("id", "another model")
            raise ConfigError(f"{directory} is a ScoutGate for {name}: its {what} is {its}, the served model's {wants}")
    if shape.hidden:
        raise ConfigError(
            f"{directory} needs hidden states, which it is not given while serving; train it with --no-hidden"
        )
    return export


class ScoutGateForecaster:
    """Owns the sequences' last tokens, the forecast and its live score. Idle before `load`; `close` ends the thread."""

    def __init__(
        self,
        served: ServedModel,
        tokenizer: str,
        embedding: TokenEmbedding,
        clock: Callable[[], float] = time.thread_time,
        state_file: Path | None = None,
    ) -> None:
        """Takes the arguments of `read_fitting_export`; the embedding [V, H] is the engine's own, and is not copied.

        `clock` is the thread's processor time. `state_file` keeps the scores of forecasts, every minute and at the end.
        """
        self.forecast: ExpertForecast | None = None  # the latest; replaced whole, so it may be read from any thread
        self.skipped = 0  # forecasts that were not made because the next step had begun
        self.left_out = 0  # forecasts that were not made because the thread's time was spent
        self.loads, self.refused = 0, 0  # exports
        self._served, self._tokenizer, self._embedding = served, tokenizer, embedding
        self._budget, self._state_file, self._saved_s = TimeBudget(clock), state_file, time.monotonic()
        self._tables: ForecastTables | None = None  # in use
        self._fresh: ForecastTables | None = None  # to be used from the next note on
        self._tracks: OrderedDict[str, TokenWindow] = OrderedDict()
        self._notes: deque[tuple[int, StepMeta | StepRouting]] = deque(maxlen=NOTES)
        self._latest: tuple[int, list[str], FloatArray] = (-1, [], np.empty(0, np.float32))
        self._live: list[ForecastScore] = []  # by horizon
        self._ahead: dict[str, FloatArray] = {}  # the last step's forecast of each sequence's next token
        self._seconds: deque[float] = deque(maxlen=512)
        self._step = 0
        self._wake, self._idle, self._closed = threading.Condition(), True, False
        self._thread = threading.Thread(target=self._run, name="scoutgate", daemon=True)
        self._thread.start()

    def load(self, directory: Path) -> None:
        """Takes the export in `directory` into use, from the next step on. Any thread; a second or so.

        Raises ConfigError where it cannot be used; the one in use before stays.
        """
        try:
            export = read_fitting_export(directory, self._served, self._tokenizer, self._embedding)
        except ConfigError:
            self.refused += 1
            raise
        tables = ForecastTables.of(export, self._embedding)
        with self._wake:
            self._fresh = tables
            self.loads += 1
            self._idle = False
            self._wake.notify()

    # --- the compute thread's side ---

    def on_step_begun(self, meta: StepMeta, ids: npt.NDArray[np.int16] | None = None) -> None:
        """Begins a step; `learn` gets its routing at its end."""
        self._step += 1
        self._post(meta)

    def learn(self, routing: StepRouting) -> None:
        """Ends the step that was begun last."""
        self._post(routing)

    def _post(self, note: StepMeta | StepRouting) -> None:
        with self._wake:
            self._notes.append((self._step, note))
            self._idle = False
            self._wake.notify()

    # --- read by fusion and /metrics ---

    @property
    def trust(self) -> float:
        """1 while the live log-loss is at most the export's; falls to 0 at twice that. 0 without an export."""
        tables, live = self._tables, self._live[:1]
        if tables is None or not live:
            return 0.0
        promised = tables.promised_loss
        if live[0].weight < 64 or not promised:
            return 1.0
        return float(np.clip(2 - live[0].loss / live[0].weight / promised, 0, 1))

    def metrics(self) -> dict[str, float]:
        """Returns live recall, calibration and speed by their final names."""
        metrics = {
            names.SCOUTGATE_TRUST: self.trust,
            names.SCOUTGATE_SKIPPED: float(self.skipped),
            names.SCOUTGATE_LEFT_OUT: float(self.left_out),
            names.SCOUTGATE_LOADS: float(self.loads),
            names.SCOUTGATE_REFUSED: float(self.refused),
        }
        for horizon, live in enumerate(self._live):
            label = str(horizon)
            metrics[named(names.SCOUTGATE_RECALL, horizon=label)] = live.hits / live.weight
            metrics[named(names.SCOUTGATE_LOG_LOSS, horizon=label)] = live.loss / live.weight
            metrics[named(names.SCOUTGATE_CALIBRATION, horizon=label)] = live.forecast / max(live.happened, 1e-9)
        seconds = sorted(self._seconds) or [0.0]
        metrics[names.SCOUTGATE_SECONDS] = seconds[int(0.99 * (len(seconds) - 1))]
        return metrics

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until every note is handled. Returns False after `timeout_s`."""
        with self._wake:
            return self._wake.wait_for(lambda: self._idle, timeout_s)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(5.0)

    # --- the thread's side ---

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (taken := self._next_note()) is not None:
            with torch.inference_mode():
                match taken:
                    case ForecastTables():
                        self._use_tables(taken)
                    case (step, StepMeta() as meta):
                        self._forecast(step, meta)
                    case (step, StepRouting() as routing):
                        self._learn(step, routing)
                        if time.monotonic() > self._saved_s + SAVE_S:
                            self._save()
                        self._budget.end_step(routing)
        self._save()

    def _next_note(self) -> tuple[int, StepMeta | StepRouting] | ForecastTables | None:
        with self._wake:
            if not self._notes and self._fresh is None:
                self._idle = True
                self._wake.notify_all()
            self._wake.wait_for(lambda: self._notes or self._fresh or self._closed)
            if self._closed:
                return None
            fresh, self._fresh = self._fresh, None
            return fresh or self._notes.popleft()

    def _save(self) -> None:
        self._saved_s = time.monotonic()
        if self._state_file is not None and self._tables is not None:
            write_scores(self._state_file, self._tables.export.record["sha256"], self._live)

    def _use_tables(self, tables: ForecastTables) -> None:
        """Switches to other tables, and drops all earlier forecasts."""
        self._tracks.clear()  # windows may differ
        self._ahead.clear()
        self._latest = (-1, [], np.empty(0, np.float32))
        self.forecast = None
        horizons = tables.export.shape.horizons
        if self._state_file is None:
            self._live = [ForecastScore() for _ in range(horizons)]
        else:
            self._live = read_scores(self._state_file, tables.export.record["sha256"], horizons)
        self._tables = tables
        self._budget.begin()

    def _forecast(self, step: int, meta: StepMeta) -> None:
        if (tables := self._tables) is None:
            return
        began = time.perf_counter()
        begins, ends = np.cumsum(meta.query_lens) - meta.query_lens, meta.sure_rows + 1
        for request, begin, end in zip(meta.requests, begins.tolist(), ends.tolist(), strict=True):
            tokens, position = meta.tokens[begin:end], int(meta.positions[begin])
            self._append(request, tokens, position, tables.export.shape.window)
        decoding = [request for request, decodes in zip(meta.requests, meta.decode, strict=True) if decodes]
        if not decoding:
            return
        if self._step > step:  # it is over already
            self.skipped += 1
            return
        if self._budget.overdrawn:
            self.left_out += 1
            return
        probs = tables.probs([self._tracks[request] for request in decoding])  # [S, horizons, L, E]
        self._latest = step, decoding, probs
        self.forecast = ExpertForecast(step, 1 - np.prod(1 - probs, axis=0, dtype=np.float32))
        self._seconds.append(time.perf_counter() - began)

    def _append_accepted(self, meta: StepMeta, window: int) -> None:
        """Appends drafted tokens that were accepted."""
        if len(meta.drafted):
            for request, row, count in zip(meta.requests, meta.sure_rows.tolist(), meta.drafted.tolist(), strict=True):
                if count:
                    drafted = slice(row + 1, row + 1 + count)
                    self._append(request, meta.tokens[drafted], int(meta.positions[row + 1]), window)

    def _append(self, request: str, tokens: IntArray, position: int, window: int) -> None:
        track = self._tracks.pop(request, None)
        if track is None or track.end != position:  # new, or begun again elsewhere
            track = TokenWindow(deque(maxlen=window), position)
        track.tokens.extend(tokens[-window:].tolist())
        track.end = position + len(tokens)
        self._tracks[request] = track
        while len(self._tracks) > TRACKS:
            self._tracks.popitem(last=False)

    def _learn(self, step: int, routing: StepRouting) -> None:
        if self._tables is None:
            return
        sizes = self._served.geometry
        layers, experts, top_k = sizes.layers, sizes.experts, sizes.top_k
        self._append_accepted(routing.meta, self._tables.export.shape.window)
        rows = routing.meta.sure_rows  # [S] of the tokens for which forecasts were made
        flat = routing.ids[:, rows].astype(np.int64)  # [L, S, k]
        flat += (np.arange(layers) * experts)[:, None, None]
        made_at, made_for, probs = self._latest
        said, self._ahead = self._ahead, {}
        for row, request in enumerate(routing.meta.requests):
            chosen = flat[:, row].ravel()
            if (track := self._tracks.get(request)) is not None:
                track.previous = chosen
            before = said.get(request)
            forecast = made_at == step and request in made_for
            if before is None and not forecast:
                continue
            hot = np.zeros((layers, experts), np.float32)
            hot.ravel()[chosen] = 1
            if before is not None:
                self._live[1].add(before, hot, top_k)
            if forecast:
                mine = probs[made_for.index(request)]
                self._live[0].add(mine[0], hot, top_k)
                if len(mine) > 1:
                    self._ahead[request] = mine[1]
