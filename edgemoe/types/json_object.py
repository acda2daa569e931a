"""The type of a JSON object. Processes that hold no arrays import it, and no NumPy with it."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
