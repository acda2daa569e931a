"""Traces of other programs give the tokens that these programs routed, or are refused with the reason."""

from __future__ import annotations

import base64
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest

from edgemoe.errors import ConfigError
from edgemoe.replay.trace import load

DRAW = np.random.default_rng(1)
IDS = np.sort(np.argsort(DRAW.random((2, 5, 3, 8)), axis=3)[..., :2], axis=3).astype(np.int16)  # [requests, T, L, k]


def npy(ids: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, ids)
    return stream.getvalue()


def bigmoe() -> str:
    rows = ["# route_trace v1", "# model=m arch=a n_layer=3 n_expert=8 n_expert_used=2"]
    rows.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped")
    for turn, ids in enumerate(IDS):
        rows += [f"{turn},0,0,0,0,5,0.5,0,10,0", f"{turn},0,0,0,1,6,0.5,0,10,0"]  # of the prompt
        for step, token in enumerate(ids):
            for layer, experts in enumerate(token):
                rows += [f"{turn},1,{step + 1},{layer},{i},{e},nan,1,0,0" for i, e in enumerate(experts)]
    return "\n".join(rows) + "\n"


def colibri() -> str:
    rows, call = [], 0
    for ids in IDS:
        for layer in range(3):  # a prompt of two rows
            rows += [f"{call} {row} {layer} 1:0.7000 2:0.3000" for row in range(2)]
            call += 1
        for number, token in enumerate(ids):
            for layer, experts in enumerate(token):
                rows.append(f"{call} 0 {layer} " + " ".join(f"{e}:0.5000" for e in experts[::-1]))
                call += 1
            if number == 1:
                rows.append(f"{call} 0 3 4:0.5000 5:0.5000")  # a layer for drafts
                call += 1
    return "\n".join(rows) + "\n"


def vllm(encode: bool, split: bool) -> list[dict[str, object]]:
    prompt = np.flip(IDS[0], axis=0)
    answers = []
    for ids in IDS:
        whole = ids if split else np.concatenate([prompt, ids])
        routed = base64.b64encode(npy(whole)).decode() if encode else whole.tolist()
        answer: dict[str, object] = {"choices": [{"index": 0, "routed_experts": routed}]}
        answer["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids) + 1}
        answer["prompt_routed_experts"] = prompt.tolist() if split else None
        answers.append(answer)
    return answers


TEXTS = {
    "route.csv": bigmoe(),
    "colibri.txt": colibri(),
    "lists.json": json.dumps(vllm(False, True)),
    "encoded.jsonl": "\n".join(json.dumps(answer) for answer in vllm(True, True)),
    "together.jsonl": "\n".join(json.dumps(answer) for answer in vllm(True, False)),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [*TEXTS])
def test_every_program_s_trace_gives_the_decoded_tokens(name: str, packed: bool, tmp_path: Path) -> None:
    raw = TEXTS[name].encode()
    file = tmp_path / (f"{name}.gz" if packed else name)
    file.write_bytes(gzip.compress(raw) if packed else raw)
    trace = load([file])
    assert [ids.tolist() for ids in trace.requests] == IDS.tolist()
    assert trace.experts == 8


def test_arrays_of_numpy_are_one_request_each(tmp_path: Path) -> None:
    for name, ids in zip("ab", IDS, strict=True):
        (tmp_path / f"{name}.npy").write_bytes(npy(ids))
    assert [ids.tolist() for ids in load([tmp_path / "a.npy", tmp_path / "b.npy"]).requests] == IDS.tolist()


def claimed(ids: np.ndarray) -> bytes:
    """Returns an array whose header claims a million times the tokens."""
    return npy(ids).replace(b"(5, 3, 2)", b"(5000000, 3, 2)".ljust(9))


@pytest.mark.parametrize(
    ("name", "raw", "why"),
    [
        ("a.route.csv", b"# route_trace v1\nturn,phase,step,layer,slot\n", "no column 'expert'"),
        ("b.route.csv", bigmoe().encode()[:-30], "columns"),
        ("c.route.csv", bigmoe().replace("1,1,3,2,", "1,0,3,2,").encode(), "different shapes"),
        ("d.txt", colibri().encode().replace(b" 0:", b" x:"), "line"),
        ("e.txt", b"0 0 0 1:0.5 1:0.5\n", "twice"),
        ("f.txt", b"0 0 0 1:0.5 -1:0.0\n", "experts from -1"),
        ("g.txt", b"0 0 0 1:0.5\n0 1 0 1:0.5\n", "no decoded tokens"),
        ("h.json", b'{"choices": []}', "no answer has routed_experts"),
        ("i.json", b'{"a": 1}', "no list of choices"),
        ("j.json", b'{"choices": [{"routed_experts": "@@"}]}', "base64|padding|digit"),
        ("k.json", b'{"choices": [{"routed_experts": [[1, 2]]}]}', "shape"),
        ("q.json", b'{"choices": [{"routed_experts": [[[1, 1]]]}], "usage": 5}', "twice"),
        ("r.json", b'{"choices": 1}', "no list of choices"),
        ("l.json", b"[" * 100000, "recursion|Expecting"),
        ("m.npy", npy(IDS[0].astype(np.float32)), "not .tokens, layers, k."),
        ("n.npy", npy(IDS[0])[:-8], "more than it has"),
        ("o.npy", claimed(IDS[0]), "more than it has|header|no NumPy array"),
        ("p.npy", b"\x93NUMPY\x01\x00", "no NumPy array"),
    ],
)
def test_a_damaged_trace_is_refused_with_the_reason(name: str, raw: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match=why):
        load([file])
