"""Routing traces that other programs write: vLLM's routed experts, colibri's ROUTE_TRACE, BigMoeOnEdge's route csv.

Each reader takes a file's text and returns the decoded tokens of its requests, each [T, L, k]. Each raises ValueError,
or a subclass of it, with the fault.
"""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int16]
BIGMOE = "# route_trace v"  # begins the first line
DECODE = 1  # BigMoeOnEdge's phase of generated tokens


def as_ids(array: Any) -> Ids:
    """Returns an array of experts [T, L, k] as a request. Raises ValueError."""
    ids = np.asarray(array)
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer) or 0 in ids.shape[1:]:
        raise ValueError(
            f"routed experts have the shape {ids.shape} of {ids.dtype}, not [tokens, layers, k] of integers"
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= np.iinfo(np.int16).max:
        raise ValueError(f"experts from {ids.min()} to {ids.max()}")
    ids = np.sort(ids.astype(np.int16), axis=2)
    if (ids[:, :, 1:] == ids[:, :, :-1]).any():
        raise ValueError("a token chose one expert twice")
    return ids


def read_npy(raw: bytes) -> Ids:
    """Reads a file of `numpy.save`, as of `output.outputs[0].routed_experts` in vLLM. Raises ValueError."""
    return as_ids(_load(raw))


def parse_vllm(text: str) -> list[Ids]:
    """Reads answers of vLLM with --enable-return-routed-experts: one JSON object, a list, or one object a line."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    answers = found if isinstance(found, list) else [found]
    requests = [ids for answer in answers for ids in _choices(answer)]
    if not requests:
        raise ValueError("no answer has routed_experts")
    return requests


def _choices(answer: Any) -> Iterator[Ids]:
    """Yields the generated tokens of each choice. Arrays without a separate prompt may begin with the prompt's."""
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise ValueError("an answer has no list of choices")
    for choice in answer["choices"]:
        routed = choice.get("routed_experts") if isinstance(choice, dict) else None
        if routed is None:
            continue
        ids = as_ids(_load(base64.b64decode(routed, validate=True)) if isinstance(routed, str) else routed)
        prompt, generated = _usage(answer)
        if answer.get("prompt_routed_experts") is None and 0 <= prompt + generated - len(ids) <= 1:
            ids = ids[prompt:]  # the last token was not run
        yield ids


def _usage(answer: dict[str, Any]) -> tuple[int, int]:
    """Returns the tokens of the prompt and of the answer, 0 if the answer does not state both."""
    usage = answer.get("usage")
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else []
    known = [count for count in counts if type(count) is int and count >= 0]
    return (known[0], known[1]) if len(known) == 2 else (0, 0)


def parse_colibri(text: str) -> list[Ids]:
    """Reads lines `<call> <row> <layer> <expert>:<gate> ...`, calls in order.

    A pass over the layers whose calls have several rows is a prompt, and begins a request. Layers that a few passes
    have only, such as those for drafts, are left out.
    """
    lines = [_colibri_line(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError("it has no lines")
    calls = [
        (rows[0][2], [row[3] for row in rows]) for rows in (list(each) for _, each in groupby(lines, lambda x: x[0]))
    ]
    turns = [i for i, (before, now) in enumerate(pairwise(calls), 1) if now[0] <= before[0]]
    passes = [dict(calls[first:last]) for first, last in pairwise([0, *turns, len(calls)])]
    layers, _ = Counter(tuple(each) for each in passes).most_common(1)[0]
    requests: list[list[list[list[int]]]] = [[]]
    for each in passes:
        if any(len(rows) > 1 for rows in each.values()):
            requests.append([])
        elif all(layer in each for layer in layers):
            requests[-1].append([each[layer][0] for layer in layers])
    return _of_equal_widths(requests)


def _colibri_line(number: int, words: list[str]) -> tuple[int, int, int, list[int]]:
    try:
        call, row, layer = map(int, words[:3])
        return call, row, layer, [int(word.partition(":")[0]) for word in words[3:]]
    except ValueError as error:
        raise ValueError(f"line {number} is not <call> <row> <layer> <expert>:<gate> ...: {error}") from error


def parse_bigmoe(text: str) -> list[Ids]:
    """Reads the csv of `--route-trace`, one row for each turn, phase, step, layer and slot."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if not lines:
        raise ValueError("it has no rows")
    names = lines[0].split(",")
    wanted = ("turn", "phase", "step", "layer", "expert")
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"it has no column {missing[0]!r}")
    places = [names.index(name) for name in wanted]
    tokens: dict[int, dict[int, dict[int, list[int]]]] = {}
    for line in lines[1:]:
        cells = line.split(",")
        if len(cells) != len(names):
            raise ValueError(f"a row has {len(cells)} of {len(names)} columns: {line[:60]!r}")
        turn, phase, step, layer, expert = (int(cells[place]) for place in places)
        if phase == DECODE:
            tokens.setdefault(turn, {}).setdefault(step, {}).setdefault(layer, []).append(expert)
    return _of_equal_widths([[list(step.values()) for step in turn.values()] for turn in tokens.values()])


def _of_equal_widths(requests: list[list[list[list[int]]]]) -> list[Ids]:
    """Returns requests of tokens of layers of experts as arrays. Raises ValueError where layers or experts lack."""
    kept = [tokens for tokens in requests if tokens]
    if not kept:
        raise ValueError("it has no decoded tokens")
    shapes = {(len(token), *{len(experts) for experts in token}) for tokens in kept for token in tokens}
    if len(shapes) != 1:
        raise ValueError(f"its tokens are of different shapes (layers, experts): {sorted(shapes)[:3]}")
    return [as_ids(tokens) for tokens in kept]


def _load(raw: bytes) -> Any:
    """Returns a NumPy array, whose header is checked before anything is allocated. Raises ValueError."""
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(stream)
    except ValueError as error:
        raise ValueError(f"no NumPy array: {error}") from error
    stated_bytes = int(np.prod(shape, dtype=np.float64)) * dtype.itemsize
    if stated_bytes > len(raw) - stream.tell():
        raise ValueError(f"its header states {shape} of {dtype}, more than it has")
    return np.load(io.BytesIO(raw), allow_pickle=False)
