"""How far an engine has come in loading, in words, for every client that waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def loading_text(at: Mapping[str, Any]) -> str:
    """Returns the phase, its share, what is under way, and the seconds of the phase, of /health's "loading"."""
    share = f" {at['fraction']:.0%}" if at["fraction"] else ""
    detail = f" ({at['detail']})" if at.get("detail") else ""
    return f"{at['phase']}{share}{detail}, for {at.get('phase_s', 0.0):.0f} s"
