"""The clients: their packages, and the scripts that use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

USES = Path(__file__).with_name("uses")
TORCH = "torch==2.13.0"
FEATURES = ("chat", "streaming", "tools", "structured")  # columns of the table; a script may try more


@dataclass(frozen=True, slots=True)
class Client:
    """One real client, pinned. `script` prints its results, one line of JSON for each feature."""

    name: str
    requires: tuple[str, ...]  # the first is the client itself
    script: str

    @property
    def package(self) -> str:
        return self.requires[0]

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".cjs")


CLIENTS = (
    Client("openai", ("openai==3.57.0",), "openai_python.py"),
    Client("openai-2", ("openai==2.54.0",), "openai_python.py"),
    Client("openai-npm", ("openai@7.59.0", "zod@4.6.7"), "openai_npm.cjs"),
    Client("anthropic", ("anthropic==2.14.0",), "anthropic_python.py"),
    Client("litellm", ("litellm==1.110.2", "mcp==2.3.0"), "litellm_python.py"),
    Client("langchain-openai", ("langchain-openai==1.7.4",), "langchain.py"),
    Client("ollama", ("ollama==0.6.3",), "ollama_python.py"),
    Client("ollama-npm", ("ollama@0.6.4",), "ollama_npm.cjs"),
    Client("langchain-ollama", ("langchain-ollama==1.1.0",), "langchain_ollama_python.py"),
    Client(
        "ai-sdk",
        ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140"),
        "ai_sdk.cjs",
    ),
    Client("mistralai", ("mistralai==3.7.0",), "mistral_python.py"),
    Client("instructor", ("instructor==1.17.0",), "instructor_python.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",), "pydantic_ai_python.py"),
    Client("haystack", ("haystack-ai==3.4.1",), "haystack_python.py"),
    Client("llama-index", ("llama-index-llms-openai-like==0.8.1",), "llama_index_python.py"),
    Client("autogen", ("autogen-ext[openai]==0.7.5", "autogen-agentchat==0.7.5"), "autogen_python.py"),
    Client("semantic-kernel", ("semantic-kernel==1.45.0",), "semantic_kernel_python.py"),
    Client("smolagents", ("smolagents[openai]==1.26.0",), "smolagents_python.py"),
    Client("dspy", ("dspy==3.4.1",), "dspy_python.py"),
    Client("llm", ("llm==0.36",), "llm_command.py"),
    Client("aider", ("aider-chat==0.86.2",), "aider_command.py"),
    Client("guidellm", ("guidellm==0.8.1", TORCH), "guidellm_command.py"),
    Client("lm_eval", ("lm_eval[api]==0.4.13", "transformers==5.23.0", TORCH), "lm_eval_command.py"),
)
