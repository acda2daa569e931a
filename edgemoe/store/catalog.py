"""The packed stores on this box: listed, verified and removed, for the command line."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec

import msgspec

from edgemoe import demo
from edgemoe.config.settings import ModelSettings
from edgemoe.durable import remove_file, remove_tree
from edgemoe.errors import CheckpointError, StoreError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec
from edgemoe.store.checkpoint import CONFIG, INDEX, PICKLES, Checkpoint, check_tokenizer, read_config, read_json
from edgemoe.store.files import ARRIVING, is_in_use, last_used_s, lock_store, page_memory
from edgemoe.store.gguf.checkpoint_of_gguf import gguf_at, open_checkpoint
from edgemoe.store.hub_names import hub_name, suggestion
from edgemoe.store.layout import KEEP, WantedEncodings, plan, precision
from edgemoe.store.manifest import JOURNAL, MANIFEST, Manifest, model_of, spec_of, verify_copy, verify_weights
from edgemoe.store.packer import Check, Progress, ensure_store, no_check, no_progress
from edgemoe.store.quantisation_config import check_method, is_reordered, mlx_quantisation, quantisation
from edgemoe.store.reader import ExpertStore
from edgemoe.types.encoding import minimum_encoding, zero_encoding
from edgemoe.types.experts import padded
from edgemoe.types.model_info import commonest_first, encodings_text

KEPT = {"mxfp4": "mxfp4", "fp8": "fp8"}  # quant_method -> the encoding of its experts in a store


def spec_at(path: Path) -> ModelSpec:
    """Returns the spec of a checkpoint's folder, or of a config.json, without reading its weights.

    Raises CheckpointError and UnsupportedModel with the content found and a remedy.
    """
    check_path_exists(path)
    if gguf_at(path) is not None:
        checkpoint = open_checkpoint(path)
        laid = plan(checkpoint, WantedEncodings()).spec
        spec = spec_from_config({**checkpoint.config, "dtype": laid.dtype})
        return replace(spec, encodings=laid.encodings, dense_encoding=laid.dense_encoding)
    if path.is_dir() and not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} has no {CONFIG}: is this a model's folder?")
    if path.is_file() and path.suffix != ".json":
        raise CheckpointError(f"{path} is a file, and no GGUF; name the folder of its model")
    config = read_config(path) if path.is_dir() else read_json(path)
    check_method(config)
    spec = spec_from_config({**config, "dtype": precision(config)})
    kept = _kept(config)
    return replace(spec, encodings=(kept,) * spec.geometry.layers) if kept else spec


def first_missing_part(path: Path) -> Path | None:
    """Returns the first folder or file of a path that is not there; None where all is."""
    return next((each for each in (*reversed(path.parents), path) if not each.exists()), None)


def fault_of_weights(directory: Path) -> str:
    """Returns the reason why a folder's files cannot be packed; "" where they can, or where it has no weights."""
    patterns = (INDEX, "*.safetensors", *PICKLES)
    if not any(path for pattern in patterns for path in directory.glob(pattern)):
        return ""
    try:
        plan(Checkpoint.open(directory), WantedEncodings())
        check_tokenizer(directory)
    except (CheckpointError, UnsupportedModel) as error:
        return str(error)
    return ""


def check_path_exists(path: Path) -> None:
    """Raises CheckpointError where a path is not there, or is a pipe or a device."""
    if missing := first_missing_part(path):
        about = f"a link to {os.readlink(missing)}, which" if missing.is_symlink() else missing
        raise CheckpointError(f"{path} is not there: {about} is missing; is the path right, and its disk mounted?")
    if not (path.is_dir() or path.is_file()):
        raise CheckpointError(f"{path} is neither a folder nor a file; name the folder of a model, or a GGUF file")


def _kept(config: Mapping[str, Any]) -> str:
    """Returns the encoding in which a quantised checkpoint keeps its experts; "" where it is not quantised."""
    if about := mlx_quantisation(config):
        size, bits = about.get("group_size"), about.get("bits")
        stored = minimum_encoding(bits, size) if isinstance(size, int) and isinstance(bits, int) else None
        return stored.name if stored else "int8"
    given = quantisation(config)
    if (method := given.get("quant_method")) in KEPT:
        return KEPT[method]
    if method in ("awq", "gptq", "auto-round"):
        return _of_groups(8 if given.get("bits") == 8 else 4, given.get("group_size"), is_reordered(config))
    if method == "modelopt":
        return "fp8" if given.get("quant_algo") == "FP8" else "int4"
    weights = [(group.get("weights") or {}) for group in (given.get("config_groups") or {}).values()]
    if any(about.get("type", "int") == "int" and about.get("symmetric") is False for about in weights):
        about = weights[0]
        return _of_groups(8 if about.get("num_bits") == 8 else 4, about.get("group_size"), is_reordered(config))
    kinds = {f"{about.get('type', 'int')}{about.get('num_bits', '')}" for about in weights}
    held = {"int4": "int4", "int8": "int8", "float8": "fp8"}
    held["float4"] = "mxfp4" if "mxfp4" in str(given.get("format")) else "int4"
    return held.get(min(kinds, default=""), "")


def _of_groups(bits: int, group: object, is_reordered: bool) -> str:
    """Returns the encoding of codes in groups with zero points; of rows with one scale, `group` is -1 or None."""
    size = group if isinstance(group, int) and group > 0 else 128
    held = None if is_reordered else zero_encoding(bits, size)
    return held.name if held else "int8" if bits == 8 else "int4"


P = ParamSpec("P")
UNFINISHED = "unfinished: pack or pull it again to go on"


HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # OWNER/NAME


def is_store(path: Path) -> bool:
    """Returns whether a packed store lies there, finished or not."""
    return (path / MANIFEST).is_file() or (path / JOURNAL).is_file()


def find_stores(store_dir: str | Path) -> list[Path]:
    """Returns the stores in `store_dir`, by name; skips stores that this user may not read."""
    directory, found = Path(store_dir).expanduser(), list[Path]()
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        with suppress(PermissionError):  # as a disk's lost+found is, where the disk is mounted there
            found += [path] if is_store(path) else []
    return found


def resolve(name: str, store_dir: str | Path) -> Path:
    """Returns the store given by path, directory's name in `store_dir`, or model's name if that is unique.

    The hub's name of a model, OWNER/NAME or a short one, finds the store that was pulled.

    Raises StoreError naming the stores that there are, and CheckpointError where a path is not there.
    """
    for path in (Path(name).expanduser(), Path(store_dir).expanduser() / name):
        if is_store(path):
            return path
    path = Path(name if Path(name).expanduser().exists() else hub_name(name)).expanduser()
    is_of_hub = bool(HUB_NAME.fullmatch(str(path))) and not path.exists()
    if ("/" in name or path != Path(path.name) or path.is_symlink()) and not is_of_hub:
        check_path_exists(path)
    remedy = f"; `edgemoe pull {name}` fetches it" if is_of_hub else suggestion(name)
    if missing := first_missing_part(Path(store_dir).expanduser()):
        raise StoreError(
            f"no store of the name {name!r}: {missing}, where model.store_dir lies, is missing (was nothing packed "
            f"yet, or is its disk not mounted?){remedy}"
        )
    stores = find_stores(store_dir)
    matching = [each for each in stores if model_of(each.name) == path.name]
    if len(matching) == 1:
        return matching[0]
    which = "several stores" if matching else "no store"
    there = ", ".join(each.name for each in matching or stores) or "none"
    raise StoreError(f"{which} of the name {name!r}; in {store_dir} there are: {there}{'' if matching else remedy}")


def store_of(
    model: ModelSettings, progress: Callable[[str], AbstractContextManager[Progress]], check: Check = no_check
) -> ModelSettings:
    """Returns `model` with the `path` and name of its packed store, which is packed now if `path` is a checkpoint.

    A name that is set stays. Without a model it is the demo model. `check` may refuse a checkpoint before it is packed;
    `progress` opens a progress display with a title. Raises StoreError, CheckpointError.
    """
    if not model.path:
        model = msgspec.structs.replace(model, path=str(demo.model_path()), name=model.name or demo.NAME)
    path = Path(model.path).expanduser()
    if not path.exists():
        path = resolve(model.path, model.store_dir)
    if not is_store(path):
        spec_at(path)
        check_tokenizer(path)
    elif not (path / MANIFEST).is_file():
        raise StoreError(f"{path} is {UNFINISHED}")
    with progress(f"packing {path.name}") as advance:
        wanted = WantedEncodings.parse(model.experts, KEEP)
        store = ensure_store(path, model.store_dir, advance, wanted, check)
    return msgspec.structs.replace(model, path=str(store.absolute()), name=model.name or Manifest.load(store).name)


@dataclass(frozen=True, slots=True)
class StoreCard:
    """A store's entry in a list. An unfinished or damaged one has little more than `state`."""

    path: str
    state: str
    last_used_s: float  # since 1970: when it was last packed or served; 0 where that is not known
    in_use: bool = False
    bytes: int = 0
    family: str = ""
    layers: int = 0
    experts: str = ""
    precision: str = ""

    @property
    def last_use(self) -> str:
        """Returns when that was, to the minute."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.last_used_s)) if self.last_used_s else ""
        return "now" if self.in_use else when


def describe(path: Path) -> StoreCard:
    """Returns a store's entry in a list."""
    known: dict[str, Any] = {"path": str(path), "last_used_s": last_used_s(path), "in_use": is_in_use(path)}
    if not (path / MANIFEST).is_file():
        return StoreCard(**known, state=UNFINISHED)
    try:
        manifest = Manifest.load(path)
        spec = spec_of(manifest)
    except (StoreError, CheckpointError) as error:
        return StoreCard(**known, state=str(error))
    present, total = sum(len(layer.experts) for layer in manifest.layers), spec.geometry.count
    encodings = commonest_first([layer.encoding or spec.dtype for layer in manifest.layers])
    return StoreCard(
        **known,
        state="complete" if present == total else f"{present} of {total} experts",
        bytes=manifest.total_bytes,
        family=spec.family,
        layers=spec.layers,
        experts=f"{spec.router.experts}, top {spec.router.top_k}",
        precision=encodings_text(encodings, manifest.dense.encoding, spec.dtype),
    )


def verify(store: str | Path, progress: Progress = no_progress) -> list[StoreError]:
    """Reads the whole store and returns everything that is wrong with it."""
    store = Path(store)
    faults: list[StoreError] = []
    try:
        manifest = Manifest.load(store)
        with ExpertStore(store, manifest) as opened:
            done_bytes = 0
            for bytes_read, fault in _verified(store, manifest, opened):
                done_bytes += bytes_read
                progress(done_bytes, manifest.total_bytes)
                faults += [fault] if fault else []
    except StoreError as fault:
        faults.append(fault)
    return faults


def _verified(store: Path, manifest: Manifest, opened: ExpertStore) -> Iterator[tuple[int, StoreError | None]]:
    """Verifies a store part by part; yields the bytes read of each, and its fault."""
    room = page_memory(padded(max((entry.bytes for layer in manifest.layers for entry in layer.experts), default=1)))
    for layer, part in enumerate(manifest.layers):
        if part.experts:
            yield 0, _fault(verify_weights, store, part)
        for entry in part.experts:
            yield padded(entry.bytes), _fault(opened.read_into, layer, entry.expert, room)
    for weights in (manifest.dense, *manifest.tables):
        yield weights.bytes, _fault(verify_weights, store, weights)
    for copy in manifest.files:
        yield copy.bytes, _fault(verify_copy, store, copy)


def _fault(check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> StoreError | None:
    try:
        check(*args, **kwargs)
    except StoreError as fault:
        return fault
    return None


def remove(store: str | Path) -> None:
    """Deletes a store. Raises StoreError where it is none, or is being served, packed or pulled."""
    path = Path(store)
    if not is_store(path) or path.is_symlink():
        raise StoreError(f"{path} is no packed store; nothing was removed")
    try:
        with lock_store(path, exclusive=True), lock_store(path, exclusive=True, lock=ARRIVING):
            for part in path.iterdir():
                if part.is_dir() and not part.is_symlink():
                    remove_tree(part)
                elif part.name not in (MANIFEST, JOURNAL):
                    remove_file(part)
            remove_tree(path)  # manifest and journal last, so that a removal cut short can be run again
    except OSError as error:
        raise StoreError(f"{error.filename or path} cannot be removed: {error.strerror}") from error
