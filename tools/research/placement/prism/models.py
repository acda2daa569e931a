"""The two models of the evaluation, and the tasks of their boxes.

`demo` stands for Mixtral: few experts, real prompts. `constructed` stands for DeepSeek-V2-Lite: 26 layers of 64 random
experts, 6 a token, with tasks as skewed and different as its own. Each task has its own words; gates prefer experts by
task. [Prism, IV-A]'s prompts are not available; `STAND_INS` lists the substitutes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from edgemoe.demo import model_path
from edgemoe.families.config import spec_from_config
from edgemoe.store.packer import ensure_store
from tools.bench.make_model import TOKENIZER_FILES, make_config, tensors
from tools.testbed.float32_model import float32_demo

SETTINGS = ("specialised", "mixed")
STAND_INS = {
    "bbh_multistep_arithmetic_two": "BIG-bench, arithmetic",
    "bbh_geometric_shapes": "BIG-bench, ASCII recognition",
    "bbh_causal_judgement": "BIG-bench, abstract narrative",
    "pubmedqa_medical": "MMLU-Pro",
    "xquad_en": "WikiText",
    "humaneval_code": "Tako",
}
WORDS = ("words 1", "words 2", "words 3", "words 4", "words 5", "words 6")
MIX = 0.6  # share of a box's requests of its own task in the mixed setting; the others share the rest
VOCAB, FIRST_WORD = 4096, 3
LAYERS, HIDDEN, EXPERTS, TOP_K, WIDTH = 26, 128, 64, 6, 64
STD = 0.5  # of a matrix's outputs for inputs of standard deviation 1
MOST_SKEW = 0.5  # deviation of a gate's preference by task in the layer of most skew, against .9 by token
TO_TASK = 0.4  # length of a task's direction against a token's noise
IN_TASK = 6.0  # the head's preference for the task's words: more than the highest of its random parts
LENGTH = float(np.hypot(1.0, TO_TASK))
Values = npt.NDArray[np.float32]
Prompts = dict[str, list[list[int]]]


@dataclass(frozen=True, slots=True)
class Model:
    """One of the two models, and its requests."""

    name: str
    store: Path
    share: float  # share of its experts that a device has room for [Prism, IV-A]
    tasks: tuple[str, ...]  # three of the specialised setting, three of the mixed one
    answer_tokens: dict[str, int]  # by setting
    rate: dict[str, float]  # requests a second at each box, by setting
    expert_s: float  # time of a device for an expert
    expert_share: float  # share of a remote call's time that one expert takes, as measured under these requests
    requests: int  # at each box, in a run

    def tasks_of(self, setting: str) -> tuple[str, ...]:
        return self.tasks[:3] if setting == SETTINGS[0] else self.tasks[3:]

    def weights(self, setting: str) -> npt.NDArray[np.float64]:
        """Returns the shares of the setting's tasks in each box's requests, [N, 3]."""
        if setting == SETTINGS[0]:
            return np.eye(3)
        return np.where(np.eye(3, dtype=bool), MIX, (1 - MIX) / 2)

    def tokens_of(self, task: str) -> int:
        return self.answer_tokens[SETTINGS[self.tasks.index(task) // 3]]


def demo(work: Path) -> Model:
    return Model(
        "demo",
        float32_demo(work),
        share=0.3,
        tasks=tuple(STAND_INS),
        answer_tokens={"specialised": 4, "mixed": 6},
        rate={"specialised": 1.8, "mixed": 1.5},
        expert_s=3e-4,
        expert_share=0.3,
        requests=100,
    )


def constructed(work: Path) -> Model:
    return Model(
        "constructed",
        make_constructed(work),
        share=0.35,
        tasks=WORDS,
        answer_tokens={"specialised": 2, "mixed": 3},
        rate={"specialised": 1.2, "mixed": 1.0},
        expert_s=1e-4,
        expert_share=0.3,
        requests=80,
    )


MODELS = {"demo": demo, "constructed": constructed}


# --- prompts ----------------------------------------------------------------------------------------------------


def prompts_of(model: Model, folder: Path, count: int, tokens: int) -> Prompts:
    """Returns `count` prompts of each task, of `tokens` at most."""
    if model.name == "constructed":
        return {task: words_of(number, count, tokens) for number, task in enumerate(model.tasks)}
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    return {task: read_prompts(folder / f"{task}.jsonl.gz", tokenizer, count, tokens) for task in model.tasks}


def read_prompts(path: Path, tokenizer: Tokenizer, count: int, tokens: int) -> list[list[int]]:
    """Returns the beginnings of a task's prompts, without their common beginning."""
    with gzip.open(path, "rt") as file:
        texts = [json.loads(line)["prompt"] for line in file]
    ends = zip(min(texts), max(texts), strict=False)
    shared = next((n for n, (a, b) in enumerate(ends) if a != b), 0)
    found = [tokenizer.encode(text[shared:]).ids[:tokens] for text in texts]
    return [found[n % len(found)] for n in range(count)]


def words_of(task: int, count: int, tokens: int) -> list[list[int]]:
    """Draws prompts of a task's words in random order."""
    rng = np.random.default_rng((17, task))
    own = np.flatnonzero(task_of(np.arange(VOCAB)) == task)
    drawn: list[list[int]] = rng.choice(own[own >= FIRST_WORD], (count, tokens)).tolist()
    return drawn


def task_of(token: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the task of each word."""
    return token * len(WORDS) // VOCAB


# --- the constructed checkpoint ---------------------------------------------------------------------------------


def make_constructed(work: Path, layers: int = LAYERS) -> Path:
    """Packs the model into `work` unless it is there already. Returns the store."""
    checkpoint = work / f"constructed-{layers}-{TO_TASK}-{MOST_SKEW}"
    if not checkpoint.exists():
        fresh = work / f"{checkpoint.name}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        config = make_config(_shape(layers))
        (fresh / "config.json").write_text(json.dumps(config, indent=1))
        for file in TOKENIZER_FILES:
            if (model_path() / file).exists():
                shutil.copy(model_path() / file, fresh / file)
        rng = np.random.default_rng(3)
        directions = _directions(rng)
        spec = spec_from_config(config)
        weights = {name: _values(name, shape, layers, directions, rng) for name, shape in tensors(spec, "separate")}
        save_file(weights, fresh / "model.safetensors", {"format": "pt"})
        fresh.rename(checkpoint)
    return ensure_store(checkpoint, work / "stores")


def _shape(layers: int) -> argparse.Namespace:
    return argparse.Namespace(
        family="qwen3_moe",
        layers=layers,
        hidden=HIDDEN,
        heads=4,
        kv_heads=2,
        head_dim=32,
        experts=EXPERTS,
        expert_width=WIDTH,
        top_k=TOP_K,
        vocab=VOCAB,
        context=2048,
        dtype="float32",
        tied=False,
    )


def _directions(rng: np.random.Generator) -> Values:
    """Returns a direction for each task, [T, H], at right angles, with values of mean square 1."""
    square = np.linalg.qr(rng.standard_normal((HIDDEN, len(WORDS))))[0].T
    return (square * np.sqrt(HIDDEN)).astype(np.float32)


def _values(name: str, shape: tuple[int, ...], layers: int, directions: Values, rng: np.random.Generator) -> Values:
    """Returns a tensor. A normed hidden state is (noise + TO_TASK * direction) / LENGTH, roughly."""
    if "norm" in name:
        return np.ones(shape, np.float32)
    noise = rng.standard_normal(shape, np.float32)
    if "embed" in name:
        return noise + np.float32(TO_TASK) * directions[task_of(np.arange(VOCAB))]
    to_task = np.float32(LENGTH / TO_TASK / HIDDEN) * directions  # [T, H] times the state: 1 for its task
    if "lm_head" in name:
        return noise / np.float32(np.sqrt(HIDDEN)) + np.float32(IN_TASK) * to_task[task_of(np.arange(VOCAB))]
    if name.endswith("mlp.gate.weight"):
        skew = skew_of(int(name.split(".")[2]), layers)
        liking = rng.standard_normal((shape[0], len(WORDS)), np.float32)
        return np.asarray(noise / np.float32(np.sqrt(HIDDEN)) + np.float32(skew) * (liking @ to_task), np.float32)
    return noise * np.float32(STD / np.sqrt(shape[-1]))


def skew_of(layer: int, layers: int) -> float:
    """Returns the strength of a layer's preference by task: from 0 to MOST_SKEW, very different in neighbours."""
    return MOST_SKEW * (layer * 7 % layers) / max(1, layers - 1)
