"""Splits keep a prompt, and the turns of a conversation, on one side, cached or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine_kit import SPEC, Drive, prompt

from edgemoe.config.settings import RecordSettings
from edgemoe.telemetry.recorder import Recorder
from edgemoe.telemetry.routing_recording import RecordingHeader, read_recording
from edgemoe.types.request import conversation_of
from scoutgate.convert import requests_of
from scoutgate.data import Routes

TURN = [250, 251, 252]  # ends every turn's prompt
USER = [253, 254]  # begins every further turn
PROMPTS = [prompt(40, seed, vocab=250) + TURN for seed in range(30)]


def recorded(directory: Path, *rounds: list[list[int]]) -> list[Routes]:
    """Records an engine's routes of the prompts, one round after the other."""
    recorder = Recorder(
        RecordSettings(dir=str(directory)),
        RecordingHeader("digest", SPEC.geometry.layers, SPEC.geometry.experts, SPEC.geometry.top_k),
    )
    drive = Drive(blocks=400, observe=recorder.add)
    for number, prompts in enumerate(rounds):
        for n, tokens in enumerate(prompts):
            drive.submit(tokens, f"{number}.{n}", max_tokens=2)
        drive.run()
    recorder.close()
    (file,) = directory.glob("*.routes")
    return list(requests_of(read_recording(file)[1]))


def groups(requests: list[Routes]) -> list[int]:
    return sorted(request.group(number) for number, request in enumerate(requests))


def test_a_prompt_of_which_the_prefix_cache_had_a_part_is_in_the_split_of_the_whole_one(tmp_path: Path) -> None:
    requests = recorded(tmp_path, PROMPTS, PROMPTS)
    assert sum(len(request.tokens) < len(PROMPTS[0]) for request in requests) == len(PROMPTS)  # the prefix cache's
    assert len(groups(requests)) == 2 * len(PROMPTS)
    assert len(set(groups(requests))) == len(PROMPTS)


def test_the_turns_of_a_conversation_are_in_one_split(tmp_path: Path) -> None:
    second = [[*tokens, 7, 8, *USER, *prompt(9, 99 + n, vocab=250), *TURN] for n, tokens in enumerate(PROMPTS)]
    requests = recorded(tmp_path, PROMPTS, second)
    assert len(set(groups(requests))) == len(PROMPTS)


@pytest.mark.parametrize("tokens", [[], [4], [4, 4], [1, 1, 1, 1, 1], [1, 2, 3, 1, 2]])
def test_every_prompt_belongs_to_some_conversation(tokens: list[int]) -> None:
    assert conversation_of(tokens) == conversation_of(list(tokens))
    assert 0 <= conversation_of(tokens) < 1 << 56
    assert conversation_of([*tokens, 9]) != conversation_of(tokens)
