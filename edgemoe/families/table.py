"""The table of families: how each architecture names its tensors, and what its configuration leaves unsaid."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture names its tensors, and what its configuration leaves unsaid.

    Names are those of transformers 5; `older` holds (part, the part as transformers 4 spells it).
    """

    name: str  # `model_type` of the configuration
    architecture: str
    width_key: str  # where the configuration has the experts' width
    projections: tuple[str, str, str]  # gate, up and down of one expert where each is a tensor of its own
    qk_norm: bool
    norm_topk: bool | None  # None: the configuration says
    default_theta: float
    default_eps: float
    older: tuple[tuple[str, str], ...] = ()

    def spellings(self, name: str) -> tuple[str, ...]:
        """`name` as each version of transformers writes it, newest first."""
        return (name, *(name.replace(new, old) for new, old in self.older if new in name))

    def stacked(self, layer: int) -> tuple[str, str]:
        """Tensors with a whole layer's experts: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
        base = f"model.layers.{layer}.mlp.experts"
        return f"{base}.gate_up_proj", f"{base}.down_proj"

    def separate(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Tensors of one expert: gate [I, H], up [I, H] and down [H, I]; see `spellings`."""
        base = f"model.layers.{layer}.mlp.experts.{expert}"
        gate, up, down = self.projections
        return f"{base}.{gate}.weight", f"{base}.{up}.weight", f"{base}.{down}.weight"


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            name="mixtral",
            architecture="MixtralForCausalLM",
            width_key="intermediate_size",
            projections=("w1", "w3", "w2"),
            qk_norm=False,
            norm_topk=True,
            default_theta=1e6,
            default_eps=1e-5,
            older=((".mlp.", ".block_sparse_moe."),),
        ),
        Family(
            name="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            width_key="moe_intermediate_size",
            projections=("gate_proj", "up_proj", "down_proj"),
            qk_norm=True,
            norm_topk=None,
            default_theta=1e4,
            default_eps=1e-6,
        ),
    )
}
