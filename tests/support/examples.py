"""How many examples Hypothesis tries: few in the gate, many with `--hypothesis-profile=nightly`."""

from __future__ import annotations

import hypothesis

# The same examples in every run, and no clock: a busy machine is no failure.
GATE = {"deadline": None, "derandomize": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
GATE_EXAMPLES, NIGHTLY_FACTOR = 25, 40


def register_profiles() -> None:
    """Registers the profiles "gate", which is loaded, and "nightly", whose examples differ from run to run."""
    hypothesis.settings.register_profile("gate", **GATE, max_examples=GATE_EXAMPLES)  # type: ignore[arg-type]
    many = {**GATE, "derandomize": False, "max_examples": GATE_EXAMPLES * NIGHTLY_FACTOR}
    hypothesis.settings.register_profile("nightly", **many)  # type: ignore[arg-type]
    hypothesis.settings.load_profile("gate")


def examples(gate: int) -> int:
    """Returns the number of examples for a test that needs `gate` of them in the gate."""
    return gate * (NIGHTLY_FACTOR if hypothesis.settings.get_current_profile_name() == "nightly" else 1)
