"""Chooses the encoding of experts by this box's memory: the fewest misses, and of those the least loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgemoe.cli.plan.speed import missed

NEAR = 1.05  # times the fewest misses, within which the loss decides


@dataclass(frozen=True, slots=True)
class EncodingOffer:
    """One encoding of a model here. `packing` is the option of `edgemoe pack`; "" is the model as it is."""

    encoding: str
    packing: str
    bits: float  # of an expert's weight
    in_vram: float  # shares of all experts
    in_ram: float
    divergence: float  # of its predictions from the checkpoint's, on the demo model

    def misses(self, curve: str) -> tuple[float, float]:
        """Returns the shares of a step's experts that come from the disk, and that are in RAM but not in VRAM."""
        from_disk = missed(self.in_ram, curve)
        return from_disk, max(0.0, missed(self.in_vram, curve) - from_disk) if self.in_vram else 0.0

    def reason(self, curve: str) -> str:
        """Returns the reason for this choice."""
        from_disk, from_ram = self.misses(curve)
        shares = [f"{self.in_vram:.0%} of the experts in VRAM"] if self.in_vram else []
        shares.append(f"{self.in_ram:.0%} in RAM")
        missing = f"{from_disk:.1%} of a step's experts come from the disk"
        missing += f", {from_ram:.1%} from RAM" if self.in_vram else ""
        lost = f"KL divergence {self.divergence:.2g}" if self.divergence else "nothing is lost"
        return f"{self.encoding}: {self.bits:.3g} bits a weight, {', '.join(shares)}, {missing}; {lost}"


def choose(offers: Sequence[EncodingOffer], curve: str) -> EncodingOffer:
    """Returns the offer with the fewest misses; of offers with about as few, the one that loses least."""
    for which in range(2):
        counts = [offer.misses(curve)[which] for offer in offers]
        offers = [offer for offer, count in zip(offers, counts, strict=True) if count <= NEAR * min(counts) + 1e-9]
    return min(offers, key=lambda offer: (offer.divergence, offer.bits))
