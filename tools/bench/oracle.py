"""transformers in a process of its own, controlled by its parent.

Started by `tools.bench.decode`, like `tools.bench.llama`. The first line of standard input is a JSON object with the
model's config. Each further line is a question, answered by one line on the protocol's file descriptor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def spawn(
    module: str, config: dict[str, Any], threads: int, environment: dict[str, str], python: str = sys.executable
) -> Oracle:
    """Starts a module's process, with `python` as its interpreter; its model has random weights."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [python, "-m", module, str(writer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment,
        pass_fds=[writer],
    )
    os.close(writer)
    oracle = Oracle(module, process, os.fdopen(reader))
    oracle.ask(config=config, threads=threads)
    return oracle


class Oracle:
    """The parent's side."""

    def __init__(self, name: str, process: subprocess.Popen[str], answers: Any) -> None:
        self._name, self._process, self._answers = name, process, answers

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"{self._name} ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Server:
    """The child's side: one cache per experts implementation."""

    def __init__(self, config: dict[str, Any], threads: int) -> None:
        import torch
        import transformers

        self._torch, self._transformers, self._caches = torch, transformers, dict[str, Any]()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        made = transformers.AutoConfig.for_model(**config)
        dtype = getattr(torch, config["dtype"])
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)
        self._model = model.to_empty(device="cpu").eval().requires_grad_(False)
        model.model.rotary_emb = type(model.model.rotary_emb)(made)  # buffers were not on the meta device alone
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)

    def begin(self, implementation: str, tokens: list[list[int]]) -> None:
        """Makes a new cache with these prompts [batch, n] in it.

        It uses the eager implementation: the batched one copies 3 MB of weights for each token and expert.
        """
        cache = self._caches[implementation] = self._transformers.DynamicCache(config=self._model.config)
        self._feed("eager", cache, tokens)

    def decode(self, implementation: str, steps: list[list[list[int]]]) -> float:
        """Returns the mean seconds of a step; each is [batch, 1]."""
        start = time.perf_counter()
        for step in steps:
            self._feed(implementation, self._caches[implementation], step)
        return (time.perf_counter() - start) / len(steps)

    def _feed(self, implementation: str, cache: Any, tokens: list[list[int]]) -> None:
        with self._torch.inference_mode():
            self._model.set_experts_implementation(implementation)
            ids = self._torch.tensor(tokens)
            self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)


def serve(make: Callable[..., object]) -> None:
    """Makes a server from the first line, and answers the others by its methods."""
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        server = make(**json.loads(sys.stdin.readline()))
        print("null", file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(server, request.pop("do"))(**request)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(Server)
