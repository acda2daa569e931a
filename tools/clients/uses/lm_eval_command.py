"""lm_eval, the evaluation harness, over TCP: chats, completions, and how likely given continuations are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import use

FOLDER = Path(use.FOLDER, "lm_eval")
DATA = [{"question": f"What is the capital of {a}?", "answer": b} for a, b in (("France", "Paris"), ("Italy", "Rome"))]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
GENERATE = """\
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}
filter_list: [{name: city, filter: [{function: regex, regex_pattern: "(Paris|Rome)"}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
"""
CHOOSE = """\
doc_to_choice: "['Banana banana banana.', 'The capital is {{answer}}.']"
doc_to_target: 1
metric_list: [{metric: acc}]
"""


def evaluate(task: str, model: str, route: str, *words: str) -> float:
    results = FOLDER / f"{task}-{model}"
    arguments = {
        "model": use.MODEL,
        "base_url": f"{use.URL}/{route}",
        "tokenizer": use.TOKENIZER,
        "tokenizer_backend": "huggingface",
        "max_length": 2048,
    }
    command = [
        str(Path(sys.executable).with_name("lm_eval")),
        *("run", "--model", model, "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        *("--tasks", task, "--include_path", str(FOLDER), "--output_path", str(results), *words),
    ]
    env = os.environ | {"OPENAI_API_KEY": use.KEY}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    found = json.loads(next(results.rglob("results_*.json")).read_text())["results"][task]
    return next(value for name, value in found.items() if name.startswith(("exact_match,", "acc,")))


def chat() -> None:
    right = evaluate("cities", "local-chat-completions", "chat/completions", "--apply_chat_template")
    assert right == 1.0, f"{right} of the answers are right"


def log_likelihoods() -> None:
    right = evaluate("choices", "local-completions", "completions")
    assert right == 1.0, f"{right} of the choices are right"


def completions() -> None:
    evaluate("cities", "local-completions", "completions")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    data = FOLDER / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, DATA)))
    for name, kind, rest in (("cities", "generate_until", GENERATE), ("choices", "multiple_choice", CHOOSE)):
        (FOLDER / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, data=data) + rest)
    use.run(chat=chat, log_likelihoods=log_likelihoods, completions=completions)
