"""The model that is asked about, from whatever there is of it, and the encodings that it can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.store.catalog import is_store, resolve, spec_at
from edgemoe.store.layout import MATRICES
from edgemoe.store.manifest import Manifest, spec_of
from edgemoe.types.encoding import ENCODINGS, Encoding

CHOICES = (("int8", ""), ("int4", ""), ("int4", "int8"))  # experts, dense: what a checkpoint can be packed in besides
HEADER_BYTES = 160  # of one tensor in a file's header, about


@dataclass(frozen=True, slots=True)
class Variant:
    """A model in one encoding, and how to get it so."""

    label: str
    spec: ModelSpec
    packing: str  # options of `edgemoe pack`; "" is the model as it is

    @property
    def dense_bytes(self) -> int:
        """Returns the size of the file of dense weights, to about a page."""
        shapes = dense_shapes(self.spec)
        return sum(dense_size(self.spec, name, shape) + HEADER_BYTES for name, shape in shapes.items())


@dataclass(frozen=True, slots=True)
class Subject:
    """A model: its name, its spec as it is, and its store where it has one."""

    name: str
    spec: ModelSpec
    store: Path | None

    def variants(self) -> Iterator[Variant]:
        """Yields the model as it is, then what it can be packed in; a store is what it is."""
        yield Variant(_label(self.spec), self.spec, "")
        if self.store is not None:
            return
        for experts, dense in CHOICES:
            geometry = self.spec.geometry
            if ENCODINGS[experts].fits(geometry.hidden) and ENCODINGS[experts].fits(geometry.width):
                spec = replace(self.spec, encodings=(experts,) * geometry.layers, dense_encoding=dense)
                if (_label(spec)) != _label(self.spec):
                    yield Variant(_label(spec), spec, f"--experts {experts}" + (f" --dense {dense}" if dense else ""))


def find(name: str, store_dir: Path) -> Subject:
    """Returns the model in a checkpoint's folder, a packed store (by name, too) or a config.json.

    Raises CheckpointError, UnsupportedModel, StoreError.
    """
    path = Path(name).expanduser()
    if path.exists() and not is_store(path):
        about = path.absolute()
        return Subject(about.parent.name if about.is_file() else about.name, spec_at(path), None)
    store = resolve(name, store_dir)
    return Subject(store.name, spec_of(Manifest.read(store)), store)


def dense_size(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of one dense tensor as it is stored."""
    *rows, columns = shape
    size = dense_encoding(spec, name, columns).row_bytes(columns)
    for count in rows:
        size *= count
    return size


def layer_bytes(spec: ModelSpec, layer: int) -> int:
    """Returns the bytes of a layer's dense tensors as they are stored."""
    shapes = dense_shapes(spec).items()
    return sum(dense_size(spec, name, shape) for name, shape in shapes if f".layers.{layer}." in name)


def dense_encoding(spec: ModelSpec, name: str, columns: int) -> Encoding:
    """Returns what a dense tensor is stored in."""
    encoded = ENCODINGS[spec.dense_encoding or spec.dtype]
    return encoded if name.endswith(MATRICES) and encoded.fits(columns) else ENCODINGS[spec.dtype]


def _label(spec: ModelSpec) -> str:
    experts = spec.encodings[0] if spec.encodings else spec.dtype
    return experts + (f", dense {spec.dense_encoding}" if spec.dense_encoding else "")
