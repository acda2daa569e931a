"""llm, the command, over TCP; the model is told to it in its own file of models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import use

HOME = Path(use.FOLDER, "llm")
MODELS = f"""\
- model_id: demo
  model_name: {use.MODEL}
  api_base: {use.URL}
  api_key_name: edgemoe
  supports_tools: true
  supports_schema: true
"""
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
    "additionalProperties": False,
}
FUNCTION = """
def get_weather(city: str) -> str:
    "Tells the weather in a city."
    return "It is sunny in " + city
"""


def llm(*words: str, may_end: str = "") -> str:
    env = os.environ | {"LLM_USER_PATH": str(HOME)}
    command = [str(Path(sys.executable).with_name("llm")), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 or (may_end and may_end in done.stderr), done.stderr[-500:]
    return done.stdout + done.stderr


def ask(question: str, *words: str, may_end: str = "") -> str:
    return llm("prompt", "-m", "demo", "-o", "temperature", "0", "--no-log", *words, question, may_end=may_end)


def tool_calls() -> None:
    words = ("--functions", FUNCTION, "--td", "--chain-limit", "2", "-o", "max_tokens", "64")
    said = ask(use.ASK_WEATHER, *words, may_end="Chain limit")  # a small model may call again and again
    assert "Tool call: get_weather" in said, said


def structured() -> None:
    found = json.loads(ask(use.QUESTION, "--schema", json.dumps(PLACE), "-o", "max_tokens", "128"))
    assert set(found) == {"city", "capital"}


if __name__ == "__main__":
    HOME.mkdir(exist_ok=True)
    (HOME / "extra-openai-models.yaml").write_text(MODELS)
    (HOME / "keys.json").write_text(json.dumps({"edgemoe": use.KEY}))
    use.run(
        chat=lambda: use.check_answer(ask(use.QUESTION, "--no-stream")),
        streaming=lambda: use.check_answer(ask(use.QUESTION)),
        tools=tool_calls,
        structured=structured,
    )
