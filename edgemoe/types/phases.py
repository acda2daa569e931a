"""What a box does of requests: reads prompts, writes answers, or both."""

from __future__ import annotations

from typing import Literal

Phases = Literal["both", "prefill", "decode"]
