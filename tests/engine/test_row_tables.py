"""A model whose table stays on disk answers as transformers does, with few of its rows in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drafting import drafting
from support.engine_kit import Drive, Model, prompt
from support.family_kit import PREFIX, check_goes_on, check_prefix_is_reused, drive_all, family_model
from support.kept import KERNELS
from support.tiny_models import FAMILIES, SIZES

from edgemoe.engine.steps import following_tokens
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.store.manifest import DENSE, rows_file
from edgemoe.store.row_table import LEAST_SLOTS
from edgemoe.telemetry import metrics as names
from edgemoe.worker.service import row_metrics

TABLE = {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 310}
LENGTHS, TOKENS, VOCAB = [5, 150, 40], 32, 96


@dataclass
class Tabled:
    """The engine's model by one way of computing, and transformers'."""

    model: Model
    oracle: Any
    folder: Path

    @torch.inference_mode()
    def check(self, length: int, answer: Sequence[int]) -> None:
        """Checks a greedy answer to the prompt of this length against transformers."""
        asked = prompt(length, length, VOCAB)
        logits = self.oracle(torch.tensor([[*asked, *answer[:-1]]])).logits[0]
        assert logits[length - 1 :].argmax(1).tolist() == list(answer)

    def table_metrics(self) -> dict[str, float]:
        return row_metrics(self.model.table)

    def table_file(self) -> Path:
        return self.folder / "store" / rows_file(0)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    made = Kernels(1, bf16=False, directory=KERNELS)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["kernels", "torch"])
def tabled(
    request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tabled]:
    """A model with as few rows in memory as there may be, which is fewer than one step of a prompt has."""
    folder = tmp_path_factory.mktemp("tabled")
    make_config, make_model, own = FAMILIES["gemma4_text"]
    torch.manual_seed(0)
    oracle = make_model(make_config(**{**SIZES, **own, **TABLE})).eval()
    for name, values in itertools.chain(oracle.named_parameters(), oracle.named_buffers()):
        if name.endswith((".scale", "expert_scale", "scalar")):
            values.data += 0.1 * torch.randn_like(values)
    oracle.save_pretrained(folder / "hf")
    with family_model(folder / "hf", folder / "store", kernels, 6, row_cache_bytes=1) as model:
        if request.param == "torch":
            decoder = Decoder.load(model.spec, folder / "store" / DENSE, "cpu", table=model.table)
            model = model._replace(decoder=decoder)
        yield Tabled(model, oracle, folder)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"step_tokens": 16},
        {"blocks": 14, "preemption": "recompute", "output_reserve": 0.0},
        {"blocks": 14, "preemption": "park", "output_reserve": 0.0},
        {"prefix_cache": False, "max_sequences": 2},
    ],
    ids=str,
)
def test_greedy_answers_are_those_of_transformers(tabled: Tabled, settings: dict[str, Any]) -> None:
    before = tabled.table_metrics()
    for length, answer in zip(LENGTHS, drive_all(tabled.model, LENGTHS, TOKENS, **settings), strict=True):
        assert len(answer) == TOKENS
        tabled.check(length, answer)
    after = tabled.table_metrics()
    assert after[names.ROW_SLOTS] == LEAST_SLOTS < len(set(prompt(150, 150, VOCAB))), "rows have to go and come again"
    assert after[names.ROW_READ_BYTES] > before[names.ROW_READ_BYTES]


def test_drafts_change_no_token(tabled: Tabled) -> None:
    """Drafts come from the right answer with some tokens changed, so that some are accepted and others are not."""
    (right,) = drive_all(tabled.model, [150], TOKENS)
    drive = Drive(model=tabled.model, drafts="lookup")
    with drafting():
        said = [token if place % 9 else (token + 1) % VOCAB for place, token in enumerate(right, start=1)]
        drive.submit(prompt(150, 150, VOCAB), expected=said, max_tokens=TOKENS)
        drive.run()
    assert drive.tokens() == right
    assert drive.engine.speculation is not None
    assert drive.engine.speculation.accepted > 0


def test_a_prefix_is_reused_and_another_engine_goes_on(tabled: Tabled) -> None:
    (expected,) = drive_all(tabled.model, [PREFIX], TOKENS)
    check_prefix_is_reused(tabled.model, expected)
    check_goes_on(tabled.model, PREFIX, expected, 11)


def test_rows_are_begun_as_soon_as_tokens_are_known(tabled: Tabled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the next chunk while this one is computed, and of a sampled token before its step is planned."""
    begun: list[list[int]] = []
    taken: list[list[int]] = []
    table = tabled.model.table
    begin, take = table.begin_reads, table.take_rows
    monkeypatch.setattr(table, "begin_reads", lambda tokens: (begun.append(tokens.tolist()), begin(tokens)))
    monkeypatch.setattr(table, "take_rows", lambda rows: (taken.append(rows.tolist()), take(rows))[1])
    asked, drive = prompt(40, 40, VOCAB), Drive(model=tabled.model, step_tokens=16)
    drive.submit(asked, max_tokens=3)
    drive.step()
    assert begun == [asked[:16], asked[16:32]]
    assert taken == [asked[:16]]
    drive.step()
    drive.step()
    (first,) = drive.tokens()
    assert begun[2:] == [asked[16:32], asked[32:], asked[32:], [first]]
    drive.run()
    assert taken == [asked[:16], asked[16:32], asked[32:], [first], [drive.tokens()[1]]]


def test_no_tokens_follow_the_end_of_a_prompt() -> None:
    assert following_tokens([]).tolist() == []


def test_a_damaged_row_ends_the_requests_that_need_it_alone(tabled: Tabled) -> None:
    file = tabled.table_file()
    whole = file.read_bytes()
    rows, size = 310, (len(whole) - 4096) // 310
    hurt = bytearray(whole)
    hurt[4096 + 95 * size] ^= 1
    assert 4096 + rows * size == len(whole)
    others = [token for token in prompt(60, 9, VOCAB) if token != 95]
    expected = Drive(model=tabled.model)
    expected.submit(others, max_tokens=5)
    expected.run()
    file.write_bytes(hurt)
    try:
        tabled.model.table.take_rows(torch.arange(100, 100 + LEAST_SLOTS).numpy())  # row 95 leaves memory
        drive = Drive(model=tabled.model)
        drive.submit([1, 95, 2], "damaged")
        drive.submit(others, "sound", max_tokens=5)
        drive.run()
    finally:
        file.write_bytes(whole)
    assert drive.end("damaged").finish == "error"
    assert "row 95 is damaged" in str(drive.end("damaged").error)
    assert drive.tokens("sound") == expected.tokens()
    again = Drive(model=tabled.model)
    again.submit([1, 95, 2], max_tokens=4)
    again.run()
    assert len(again.tokens()) == 4
