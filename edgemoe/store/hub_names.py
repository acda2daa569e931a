"""Short names of models on the hub, in the form that Ollama's users know."""

from __future__ import annotations

HUB_NAMES = {
    "deepseek-r1:671b": "deepseek-ai/DeepSeek-R1",
    "deepseek-v2:16b": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "deepseek-v3:671b": "deepseek-ai/DeepSeek-V3",
    "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2",
    "gemma4:26b": "google/gemma-4-26B-A4B-it",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "glm-4.6": "zai-org/GLM-4.6",
    "glm-4.7": "zai-org/GLM-4.7",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "glm-5": "zai-org/GLM-5",
    "gpt-oss:120b": "openai/gpt-oss-120b",
    "gpt-oss:20b": "openai/gpt-oss-20b",
    "granite3.1-moe:3b": "ibm-granite/granite-3.1-3b-a800m-instruct",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "mistral-small-4": "mistralai/Mistral-Small-4-119B-2603",
    "mixtral:8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "mixtral:8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "nemotron3:30b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "olmoe": "allenai/OLMoE-1B-7B-0924-Instruct",
    "qwen3-coder:30b": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "qwen3-coder:480b": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "qwen3-next:80b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3.5:35b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3.6:35b": "Qwen/Qwen3.6-35B-A3B",
    "qwen3:235b": "Qwen/Qwen3-235B-A22B",
    "qwen3:30b": "Qwen/Qwen3-30B-A3B",
}


def hub_name(name: str) -> str:
    """Returns OWNER/NAME for a short name, and other names unchanged. A "-" may stand for the ":"."""
    asked = name.lower().replace(":", "-")
    return next((full for short, full in HUB_NAMES.items() if short.replace(":", "-") == asked), name)


def suggestion(name: str) -> str:
    """Returns the end of an error for a name that has no "/": the short names that begin alike; "" for none."""
    family = name.lower().partition(":")[0]
    close = [short for short in HUB_NAMES if short.startswith(family)]
    return f"; short names are {', '.join(close)}" if close and family else ""
