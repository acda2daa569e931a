"""What encodings a store is to have, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.errors import ConfigError
from edgemoe.store.manifest import Manifest
from edgemoe.types.bounds import is_number
from edgemoe.types.encoding import ENCODINGS
from edgemoe.types.experts import ExpertGeometry

KEEP = "keep"
CHOICES = {"int4": "int4", "int8": "int8", "bf16": "bfloat16", KEEP: KEEP}  # as asked for -> an encoding's name


@dataclass(frozen=True, slots=True)
class WantedEncodings:
    """The encoding of experts, by layer where it differs, and of dense matrices; `KEEP` leaves them as they are."""

    experts: str = KEEP
    dense: str = KEEP
    layers: tuple[tuple[str, str], ...] = ()  # "first", "last" or a layer's number, and its experts' encoding

    @classmethod
    def parse(cls, experts: str, dense: str) -> WantedEncodings:
        """Reads "int4,first=int8,last=int8" and "int8". Raises ConfigError."""
        usual, *others = experts.split(",")
        layers = []
        for other in others:
            layer, equals, name = other.strip().partition("=")
            by_number = is_number(layer)
            if not equals or not (layer in ("first", "last") or by_number):
                raise ConfigError(f"--experts: {other!r} is no LAYER=ENCODING, such as first=int8, last=int8 or 3=int8")
            layers.append((str(int(layer)) if by_number else layer, _choice(name, "--experts")))
        return cls(_choice(usual, "--experts"), _choice(dense, "--dense"), tuple(sorted(layers)))

    def of_layer(self, layer: int, layers: int) -> str:
        """Returns the encoding of one layer's experts."""
        named = dict(self.layers)
        for key in named:
            if is_number(key) and int(key) >= layers:
                raise ConfigError(f"--experts: there is no layer {key} with experts; it has {layers}, from 0 on")
        ends = {at: named[end] for end, at in (("first", 0), ("last", layers - 1)) if end in named}
        return named.get(str(layer)) or ends.get(layer) or self.experts

    def allows(self, found: Manifest, geometry: ExpertGeometry, is_quantised: bool) -> bool:
        """Returns whether a finished store can be in these encodings, as far as names and sizes tell.

        What a checkpoint that `is_quantised` had is not known, so that `KEEP` allows anything of it.
        """
        asked: list[tuple[str, str, tuple[int, ...]]] = [(self.dense, found.dense.encoding, (geometry.hidden,))]
        sizes = (geometry.hidden, geometry.width)
        for number, layer in enumerate(found.layers):
            asked.append((self.of_layer(number, geometry.layers), layer.encoding, sizes))
        return all(_fits(name, held or found.dtype, columns, is_quantised) for name, held, columns in asked)

    @property
    def label(self) -> str:
        """Returns what the store's name says of it; "" where everything is kept."""
        if self == WantedEncodings():
            return ""
        parts = [self.experts, *(f"{layer}-{name}" for layer, name in self.layers)]
        parts += [f"dense-{self.dense}"] if self.dense != KEEP else []
        return "-".join(parts)


def _fits(name: str, held: str, columns: tuple[int, ...], is_quantised: bool) -> bool:
    if name == KEEP:
        return is_quantised or not ENCODINGS[held].group
    return held == name or not all(map(ENCODINGS[name].fits, columns))


def _choice(name: str, option: str) -> str:
    if name.strip() not in CHOICES:
        raise ConfigError(f"{option}: {name.strip()!r} is none of {', '.join(CHOICES)}")
    return CHOICES[name.strip()]
