"""The engine over the real decoder and real tiers, smaller than the model: transformers' tokens in all conditions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import tiny_checkpoint, tiny_model
from support.engine_kit import Drive, Model, prompt
from support.kept import KERNELS
from support.waiting import wait_until

from edgemoe.config.budgets import DeviceBudget
from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.tiers.slots import PrefetchPriority
from edgemoe.families.config import spec_from_config
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.manifest import DENSE
from edgemoe.store.packer import pack
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import Tier

LENGTHS = [3, 40, 17, 70, 1, 33, 20]
STYLES: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.3}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    made = Kernels(1, bf16=False, directory=KERNELS)
    yield made
    made.close()


@contextlib.contextmanager
def running(tiers: ExpertTiers) -> Iterator[None]:
    """Runs the tiers' event loop on a thread of its own."""

    async def serve() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await tiers.run()

    loop = asyncio.new_event_loop()
    task = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    yield
    loop.call_soon_threadsafe(task.cancel)
    thread.join(60)
    loop.close()
    tiers.close()
    tiers.check_integrity(idle=True)


BUDGETS = {  # slots in RAM, and on each device
    "resident": (18, ()),
    "half in RAM, a quarter on a device": (9, (4,)),
    "all in RAM, a quarter behind a slow link": (18, (4,)),
    "two slots": (2, ()),
}


@contextlib.contextmanager
def model_within(budget: str, checkpoint: Path, kernels: Kernels, directory: Path) -> Iterator[Model]:
    """Yields the model with 18 experts, packed to `directory`."""
    ram, devices = BUDGETS[budget]
    manifest = pack(checkpoint, directory)
    spec = spec_from_config(manifest.spec_config)
    geometry = spec.geometry
    policy, slow = LRU(geometry.layers, geometry.experts), "slow" in budget
    link_bytes_per_s = geometry.stride_bytes(0) / 5e-3 if slow else 1e12
    with ExpertStore(directory, manifest) as store:
        tiers = ExpertTiers(
            geometry,
            store,
            TierMemory(
                ram * geometry.stride_bytes(0),
                [DeviceBudget("emulated", slots * geometry.stride_bytes(0), link_bytes_per_s) for slots in devices],
            ),
            {Tier.RAM: policy, Tier.VRAM: policy},
            kernels,
        )
        with running(tiers):
            decoder = Decoder.load(spec, directory / DENSE, "cpu", kernels)
            yield Model(decoder, tiers.experts, spec, partial(KVCache, spec.kv_layout))
            assert tiers.experts.cpu_experts.experts or not slow, "the CPU computed nothing from RAM"


@pytest.fixture(scope="module", params=BUDGETS)
def model(
    request: pytest.FixtureRequest, checkpoint: Path, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """The model in budgets from ample to the smallest."""
    with model_within(request.param, checkpoint, kernels, tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture(scope="module")
def alone(checkpoint: Path, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Each request's tokens on an idle engine with all experts in RAM; the greedy ones are transformers' own."""
    found = {}
    with model_within("resident", checkpoint, kernels, tmp_path_factory.mktemp("alone")) as model:
        for n, length in enumerate(LENGTHS):
            drive = Drive(model=model)
            drive.submit(prompt(length, n, 96), seed=n, max_tokens=16, **STYLES[n % len(STYLES)])
            drive.run()
            found[n] = drive.tokens()
    return found


def drive_all(model: Model, **settings: Any) -> Drive:
    drive = Drive(model=model, **settings)
    for n, length in enumerate(LENGTHS):
        drive.submit(prompt(length, n, 96), f"r{n}", seed=n, max_tokens=16, **STYLES[n % len(STYLES)])
        drive.step()
    drive.run()
    return drive


def test_greedy_tokens_equal_transformers_in_any_batch_and_budget(model: Model) -> None:
    drive, oracle = drive_all(model), tiny_model("qwen3_moe")
    for n in range(0, len(LENGTHS), len(STYLES)):
        tokens = [*prompt(LENGTHS[n], n, 96), *drive.tokens(f"r{n}")]
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens]), use_cache=False).logits[0].argmax(-1).tolist()
        assert tokens[LENGTHS[n] :] == expected[LENGTHS[n] - 1 : -1]


def test_sampled_tokens_do_not_depend_on_company_budget_or_chunks(model: Model, alone: dict[int, list[int]]) -> None:
    drives = [drive_all(model), drive_all(model, step_tokens=16, max_sequences=3), drive_all(model, prefix_cache=False)]
    for n in range(len(LENGTHS)):
        assert all(drive.tokens(f"r{n}") == alone[n] for drive in drives)


@pytest.mark.parametrize("way", ["recompute", "park"])
def test_pre_emption_changes_no_token(model: Model, alone: dict[int, list[int]], way: str) -> None:
    drive = drive_all(model, blocks=7, output_reserve=0.0, preemption=way)
    assert drive.engine.scheduler.paused_total[way] > 0
    for n in range(len(LENGTHS)):
        assert drive.tokens(f"r{n}") == alone[n]


def test_a_replay_from_any_token_gives_the_same_continuation(model: Model, alone: dict[int, list[int]]) -> None:
    for n, whole in alone.items():
        for cut in range(0, 16, 5):
            drive = Drive(model=model)
            drive.submit(
                prompt(LENGTHS[n], n, 96),
                emitted=whole[:cut],
                attempt=2,
                seed=n,
                max_tokens=16,
                **STYLES[n % len(STYLES)],
            )
            drive.run()
            assert drive.tokens() == whole[cut:]


def test_a_prompt_that_the_prefix_cache_has_gives_the_same_tokens(model: Model, alone: dict[int, list[int]]) -> None:
    drive = Drive(model=model)
    for attempt in (1, 2):
        drive.submit(prompt(70, 3, 96), f"r{attempt}", seed=3, max_tokens=16, **STYLES[0])
        drive.run()
        assert drive.tokens(f"r{attempt}") == alone[3]
    assert drive.engine.scheduler.prefix_tokens["hit"] == 64


def failing(real: Callable[..., Any], when: Callable[[int], bool]) -> Callable[..., Any]:
    """Wraps `real`: calls whose number, from 1, `when` accepts raise."""
    calls = itertools.count(1)

    def call(*args: Any, **options: Any) -> Any:
        if when(next(calls)):
            raise OSError("the test says so")
        return real(*args, **options)

    return call


class FailingSlab:
    """A slab whose reads fail if `when` accepts their number, from 1."""

    def __init__(self, real: Any, when: Callable[[int], bool]) -> None:
        self.layout, self.slot = real.layout, failing(real.slot, when)


def check_nothing_is_held(model: Model) -> None:
    """Fails if a slot stays pinned or a load on its way soon after the last step."""
    residency, loader = model.experts.residency, model.experts.loader
    for priority in PrefetchPriority:
        loader.prefetch((), priority)
    wait_until(lambda: not any(pool.loads for pool in (residency.ram, *residency.devices)))
    wait_until(lambda: all(link.idle() for link in loader.links))
    wait_until(lambda: not residency.ram.pins.any())
    residency.check_integrity(idle=True)


@pytest.mark.parametrize("stage", ["begin", "add", "end"])
def test_a_device_error_on_one_request_costs_that_request_alone(
    model: Model, alone: dict[int, list[int]], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = model.experts
    for compute in (*experts._computes, experts.cpu_experts._compute):
        real = getattr(compute, stage)
        monkeypatch.setattr(compute, stage, failing(real, lambda _: "bad" in experts._step.meta.requests))
    drive = Drive(model=model)
    drive.submit(prompt(50, 99, 96), "bad")
    for n, length in enumerate(LENGTHS):
        drive.submit(prompt(length, n, 96), f"r{n}", seed=n, max_tokens=16, **STYLES[n % len(STYLES)])
    drive.run()
    assert drive.end("bad").error_code == "request_failed"
    assert {n: drive.tokens(f"r{n}") for n in alone} == alone
    check_nothing_is_held(model)


@pytest.mark.parametrize("stage", ["begin", "add", "end"])
def test_occasional_device_errors_cost_no_token(
    model: Model, alone: dict[int, list[int]], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for compute in (*model.experts._computes, model.experts.cpu_experts._compute):
        monkeypatch.setattr(compute, stage, failing(getattr(compute, stage), lambda call: call % 211 == 40))
    drive = drive_all(model)
    assert {n: drive.tokens(f"r{n}") for n in alone} == alone
    assert drive.engine.loop.steps.blamed == 0
    check_nothing_is_held(model)


def test_a_copy_to_a_device_that_fails_now_and_then_costs_no_token(
    model: Model, alone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for link in model.experts.loader.links:
        monkeypatch.setattr(link, "_source", FailingSlab(link._source, lambda call: call % 211 == 40))
    drive = drive_all(model)
    assert {n: drive.tokens(f"r{n}") for n in alone} == alone
    assert drive.engine.loop.steps.blamed == 0
    check_nothing_is_held(model)


@pytest.mark.parametrize("settings", [{}, {"blocks": 7, "output_reserve": 0.0, "preemption": "recompute"}])
def test_log_probabilities_of_prompts_equal_transformers(model: Model, settings: dict[str, Any]) -> None:
    """In chunks, among other requests, paused, and with the whole prompt in the prefix cache."""
    drive, oracle = Drive(model=model, **settings), tiny_model("qwen3_moe")
    for turn in (1, 2):
        for n, length in enumerate(LENGTHS):
            wanted = {"prompt_logprobs": n} if n % 3 < 2 else {}
            drive.submit(prompt(length, n, 96), f"r{n} {turn}", seed=n, max_tokens=16, **wanted)
            drive.step()
        drive.run()
        for n, length in enumerate(LENGTHS):
            first, *others = [one for one in drive.emitted if one.request == f"r{n} {turn}"]
            assert not any(one.prompt_logprobs for one in others)
            if n % 3 == 2:
                assert not first.prompt_logprobs
                continue
            tokens = prompt(length, n, 96)
            with torch.inference_mode():
                expected = oracle(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
            assert len(first.prompt_logprobs) == length - 1
            for place, (logprob, top) in enumerate(first.prompt_logprobs):
                assert logprob == pytest.approx(float(expected[place, tokens[place + 1]]), abs=1e-4)
                assert [token for token, _ in top] == expected[place].topk(n).indices.tolist()
