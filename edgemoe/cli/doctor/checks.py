"""Checks of `edgemoe doctor`: the box, its settings, the running daemon and other boxes; the remedy of each.

docs/troubleshooting.md is generated from REMEDIES.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import edgemoe
from edgemoe.api.api_keys import read_keys
from edgemoe.cli import service_command as systemd_units
from edgemoe.cli.client import Client
from edgemoe.cluster.rpc.keys import load_secret
from edgemoe.config.loading import LoadedSettings
from edgemoe.config.settings import ClusterSettings, Settings
from edgemoe.config.sizes import format_rate, format_size
from edgemoe.errors import CheckpointError, EdgemoeError, ServiceError, StoreError, UnsupportedProcessor
from edgemoe.front.listen import OLLAMA_TCP, bound_socket
from edgemoe.front.peers_list import listed
from edgemoe.store import catalog
from edgemoe.store.catalog import check_path_exists, first_missing_part, resolve
from edgemoe.store.manifest import MANIFEST, Manifest
from edgemoe.telemetry import metrics as names
from edgemoe.types.json_object import Json
from edgemoe.types.machine import Machine
from edgemoe.types.model_info import loading_text

State = Literal["pass", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    check: str  # a key of REMEDIES
    state: State
    said: str


REMEDIES = {
    "settings": "`edgemoe config` shows every setting and where it comes from; correct the line that is named.",
    "versions": "Install edgemoe again, in the same environment as the command (`pip install .` in a clone): it "
    "brings the missing packages.",
    "processor": "Use a machine whose processor has AVX2, FMA and F16C, or a 64-bit Arm one; give a virtual machine "
    "the host's processor (QEMU's `-cpu host`). EDGEMOE_PROCESSOR is for development only: unset it.",
    "gpu": "Install NVIDIA's driver and a torch built for CUDA (`pip install torch`), then log in again; `nvidia-smi` "
    "must list the GPU. Without one, set device.0.kind to cpu.",
    "gpu-link": "Put the GPU into the slot that is wired for all its lanes (often the one next to the processor), "
    "without a riser. Check the firmware's settings of that slot. Idle GPUs lower the generation: check again while "
    "it works.",
    "memory": "Close other programs, set lower budgets (memory.ram_bytes, memory.kv_bytes), raise the control group's "
    "limit (MemoryMax), or pack the model in 4 bits: `edgemoe plan MODEL` compares.",
    "memory-damage": "Test the machine's memory (memtest86+), and replace the module that fails. The daemon has read "
    "the damaged experts again; its log names them.",
    "memlock": "Raise the limit of locked memory: `ulimit -l unlimited`, or LimitMEMLOCK=infinity in the unit.",
    "disk": "Free space where the stores lie: `edgemoe models list`, then `edgemoe models remove NAME`; or set "
    "model.store_dir to another disk: of a service to a folder of its user, then `sudo edgemoe service install` again.",
    "disk-rate": "Put the stores on a faster disk (model.store_dir), or hold more experts in memory: "
    "`edgemoe plan MODEL` says how much that helps.",
    "clock": "Set the clock of the box that is named, and have it kept: `timedatectl set-ntp true`.",
    "store": "`edgemoe models verify NAME` lists the damaged files; packing the checkpoint again mends them.",
    "model": "Correct model.path or model.store_dir (`edgemoe config` names the files that set them), or mount the "
    "missing disk; `edgemoe models` lists the stores.",
    "device": "Set device.N.kind to a GPU that `nvidia-smi` lists, counted from cuda:0, or to cpu.",
    "kernels": "`chmod 700 FOLDER` for the folder that is named, as the user of the daemon.",
    "open-files": "Raise the limit: `ulimit -n 65536` before `edgemoe serve`, or LimitNOFILE=65536 in the unit.",
    "port": "Stop the process that listens there (`ss -ltnp` names it), or choose another: `--port`, or api.tcp and "
    "api.ollama_tcp in the settings.",
    "keys": "Keys are for their owner alone: `chmod 600 FILE`, and `chown` to the user of the daemon. `edgemoe key new "
    "NAME` makes one for a client, `edgemoe keygen FILE` one for a box.",
    "permission": "Join the socket's group: `sudo usermod --append --groups edgemoe $USER`, then log in again. "
    "Other files that you may not look at are looked at by `sudo edgemoe doctor`.",
    "daemon": "Start it with `edgemoe serve`, or `systemctl start edgemoe`; `journalctl --unit edgemoe` says why it "
    "ended.",
    "engine": "Follow the line's remedy; then `edgemoe reload`, a changed setting of the engine, or a restart of the "
    "daemon starts it again. The engine's own lines are in the daemon's log (`journalctl --unit edgemoe`).",
    "unit": "`systemctl status edgemoe` says why; `sudo edgemoe service install --model DIR` installs it again.",
    "peer-list": "On every box the list of peers (cluster.peers_file) must have the key and the address that the "
    "named box has now; `edgemoe keygen` prints a box's entry.",
    "ports": "Correct the peer's address in cluster.peers_file, start the daemon there, and let its ports through the "
    "firewalls of both boxes. The control channel's port is in cluster.listen, the others in cluster.calls_port and "
    "bulk_port (0 takes any free one, which no firewall knows).",
    "stages": "Start that box, or divide the layers over the others: `edgemoe plan MODEL --box NAME:MEMORY` helps.",
    "peers": "Look at `edgemoe status --cluster` on both boxes. All must serve the same store: copy it, or pack the "
    "same checkpoint alike. A box that is reachable but not heard has another key in one of the lists of peers.",
    "leader": "An election needs most of the voters: start the boxes that are gone, or add `edgemoe witness`. "
    'With coordination = "single", start the box that cluster.leader names.',
    "etcd": "Install Debian's etcd-server (3.4 or newer) and openssl on every voter, or name the program in "
    "cluster.etcd_program; let cluster.etcd_port (0: any free one, which no firewall knows) through the firewalls.",
}


def page() -> str:
    """Returns docs/troubleshooting.md."""
    rows = "\n".join(f"| {check} | {remedy} |" for check, remedy in REMEDIES.items())
    return f"""\
# When something is wrong

`edgemoe doctor` checks all of this, prints the results, and ends with 1 if anything fails. `--verify` reads the whole
store; `--json` is for a bug report, and holds no keys. `edgemoe bench` has the figures for one.

| doctor's line | what to do |
|---|---|
{rows}
"""


LEAST_FREE, ENOUGH_FREE = 0.05, 4 << 30  # share and bytes of the disk of the stores; either will do
SLOW_BYTES_PER_S = 400e6  # below it a miss takes longer than most models' layers
LEAST_RAM_BYTES = 2 << 30
USUAL_LOCKED_BYTES = 8 << 20  # may be locked where nobody has set less
AHEAD_S = 60.0  # that a file may be from the future
DRIVER = Path("/proc/driver/nvidia/version")


def software() -> Iterator[CheckResult]:
    """Checks the versions of Python and edgemoe, and that its requirements are installed."""
    missing = []
    try:
        required = importlib.metadata.requires("edgemoe") or ()
    except importlib.metadata.PackageNotFoundError:
        said = f"edgemoe {edgemoe.__version__} runs from the source tree {Path(edgemoe.__file__).parents[1]}"
        yield CheckResult("versions", "warning", f"{said} and is not installed, so what it needs was not looked at")
        required = ()
    for line in required:
        name = re.match(r"[\w.-]+", line)
        if name and "extra ==" not in line and not _version(name[0]):
            missing.append(name[0])
    said = f"edgemoe {edgemoe.__version__}, Python {platform.python_version()}, torch {_version('torch') or 'missing'}"
    if missing:
        yield CheckResult("versions", "failure", f"{said}; not installed: {', '.join(missing)}")
    else:
        yield CheckResult("versions", "pass", said)


def processor() -> Iterator[CheckResult]:
    """Checks whether the processor can run the kernels."""
    try:
        from edgemoe.jit.compile_target import TARGET, check_processor  # loads LLVM

        check_processor()
    except UnsupportedProcessor as error:
        yield CheckResult("processor", "failure", str(error))
    else:
        yield CheckResult("processor", "pass", f"code is compiled for {TARGET.name}")


def gpus(machine: Machine) -> Iterator[CheckResult]:
    """Checks the GPUs, and whether torch can use them."""
    if machine.gpus:
        names = ", ".join(f"{gpu.name} ({format_size(gpu.free_bytes)} free)" for gpu in machine.gpus)
        usable = "+cpu" not in _version("torch")
        yield CheckResult(
            "gpu", "pass" if usable else "failure", names + ("" if usable else "; torch is built without CUDA")
        )
        yield from links(machine)
    elif DRIVER.exists():
        yield CheckResult("gpu", "failure", "there is a driver, and no GPU that this process may use")
    else:
        yield CheckResult("gpu", "pass", "none; experts are computed by the CPU")


def links(machine: Machine) -> Iterator[CheckResult]:
    """Checks each GPU's link to the host, over which experts from RAM reach it."""
    for gpu in machine.gpus:
        if (link := gpu.link) is None:
            yield CheckResult("gpu-link", "pass", f"the driver does not tell {gpu.name}'s link")
            continue
        slow = link.lanes < link.most_lanes or (link.generation < link.most_generation and not link.idle)
        said = f"{gpu.name}: PCIe {link.generation} x{link.lanes} of {link.most_generation} x{link.most_lanes}"
        said += ", idle" if link.idle else ""
        yield CheckResult("gpu-link", "warning" if slow else "pass", said)


def memory(machine: Machine) -> Iterator[CheckResult]:
    """Checks the RAM that is free for this process, and the limit of locked memory."""
    free, total = machine.ram_available_bytes, machine.ram_total_bytes
    said = f"{format_size(free)} of {format_size(total)} free, {machine.cpus} cores"
    yield CheckResult("memory", "pass" if free >= LEAST_RAM_BYTES else "warning", said)
    limit = machine.memlock_bytes
    if limit is None or limit >= total // 2:
        yield CheckResult("memlock", "pass", "no limit" if limit is None else format_size(limit))
    else:
        state: State = "warning" if machine.gpus or limit < USUAL_LOCKED_BYTES else "pass"
        said = f"{format_size(limit)} may be locked" + ("; copies to a GPU are slower" if machine.gpus else "")
        yield CheckResult("memlock", state, said)


def disk(store_dir: Path, rate: Callable[[Path], float]) -> Iterator[CheckResult]:
    """Checks free space and speed of the stores' disk. `rate` measures bytes a second."""
    place = next(each for each in (store_dir, *store_dir.parents) if each.exists())
    found = os.statvfs(place)
    free, total = found.f_bavail * found.f_frsize, max(1, found.f_blocks * found.f_frsize)
    said = f"{format_size(free)} of {format_size(total)} free at {place}"
    if free < min(LEAST_FREE * total, ENOUGH_FREE):
        yield CheckResult("disk", "failure", said)
        return
    yield CheckResult("disk", "pass", said)
    if not os.access(place, os.W_OK):
        yield CheckResult("disk", "warning", f"{place} may not be written by this user: no model is packed there")
    elif bytes_per_s := rate(place):
        slow = bytes_per_s < SLOW_BYTES_PER_S
        yield CheckResult("disk-rate", "warning" if slow else "pass", f"reads {format_rate(bytes_per_s)} at {place}")


def clock(files: Iterator[Path], now_s: float) -> Iterator[CheckResult]:
    """Checks the dates of this box's files: none may be after `now_s`."""
    ahead = {file: file.stat().st_mtime - now_s for file in files if file.exists()}
    latest = max(ahead, key=lambda file: ahead[file], default=None)
    if latest is not None and ahead[latest] > AHEAD_S:
        yield CheckResult(
            "clock", "failure", f"it is at least {ahead[latest]:,.0f} s behind: {latest} is from the future"
        )
    else:
        yield CheckResult("clock", "pass", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now_s)))


def stores(settings: Settings, *, verify: bool) -> Iterator[CheckResult]:
    """Checks the served store, or all stores: their manifests, and with `verify` every checksum."""
    path = Path(settings.model.path)
    found = [path] if settings.model.path and catalog.is_store(path) else catalog.find_stores(settings.model.store_dir)
    for store in found:
        if not (store / MANIFEST).is_file():
            yield CheckResult("store", "warning", f"{store.name} is {catalog.UNFINISHED}")
            continue
        try:
            faults: list[EdgemoeError] = [*catalog.verify(store)] if verify else []
            if not verify:
                Manifest.load(store)
        except EdgemoeError as error:
            faults = [error]
        if faults:
            yield CheckResult("store", "failure", str(faults[0]))
        else:
            yield CheckResult(
                "store", "pass", f"{store.name} is {'whole' if verify else 'complete; --verify reads it all'}"
            )


def keys(loaded: LoadedSettings) -> Iterator[CheckResult]:
    """Checks the key files that the settings use. `edgemoe serve` makes the default one."""
    api, cluster = loaded.settings.api, loaded.settings.cluster
    readers: list[tuple[Path, Callable[[Path], object]]] = []
    there = Path(api.api_key_file).exists()
    if api.needs_keys and not there and loaded.origins["api.api_key_file"] == "default":
        yield CheckResult("keys", "pass", f"`edgemoe serve` makes {api.api_key_file}")
    elif there or api.needs_keys:
        readers.append((Path(api.api_key_file), read_keys))
    if cluster.node:
        readers.append((Path(cluster.key_file), load_secret))
    for file, read in readers:
        try:
            read(file)
        except EdgemoeError as error:
            yield CheckResult("keys", "failure", str(error))
        else:
            yield CheckResult("keys", "pass", f"{file} is private")


def dated(settings: Settings) -> Iterator[Path]:
    """Yields files that were written in the past."""
    yield Path(edgemoe.__file__)
    stores_found = catalog.find_stores(settings.model.store_dir)
    yield from (store / MANIFEST for store in (*stores_found, Path(settings.model.path or "/nowhere")))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


LEAST_FILES = 1024  # each client and each file of a store is one
OTHERS_MAY_WRITE = 0o022


def port(settings: Settings, *, runs: bool) -> Iterator[CheckResult]:
    """Checks the addresses of TCP listeners: they must be free, unless a daemon with these settings runs."""
    if runs:
        return
    api = settings.api
    for address, setting in ((api.tcp, "api.tcp"), (api.ollama_address, OLLAMA_TCP)):
        if not address:
            continue
        try:
            bound_socket(address, setting).close()
        except ServiceError as error:
            yield CheckResult("port", "failure", str(error))
        else:
            yield CheckResult("port", "pass", f"{address} is free")


def model(loaded: LoadedSettings) -> Iterator[CheckResult]:
    """Whether model.path and model.store_dir are there. A folder of stores that is the default is made when needed."""
    named, store_dir = loaded.settings.model, Path(loaded.settings.model.store_dir)
    missing = first_missing_part(store_dir.parent)
    if missing and loaded.origins["model.store_dir"] != "default":
        yield CheckResult("model", "failure", f"model.store_dir is {store_dir}, but {missing} is missing")
    if not named.path:
        return
    path = Path(named.path).expanduser()
    try:
        if path != Path(path.name):
            check_path_exists(path)
        elif not path.exists():
            path = resolve(named.path, store_dir)
    except (CheckpointError, StoreError) as error:
        yield CheckResult("model", "failure", f"model.path: {error}")
    else:
        yield CheckResult("model", "pass", f"model.path is {path}")


def devices(settings: Settings, machine: Machine) -> Iterator[CheckResult]:
    """Whether each GPU that is named is there."""
    for number, device in enumerate(settings.device):
        kind, _, index = device.kind.partition(":")
        if kind == "cuda" and int(index or 0) >= len(machine.gpus):
            there = ", ".join(f"cuda:{gpu.index}" for gpu in machine.gpus) or "none"
            yield CheckResult("device", "failure", f"device.{number}.kind is {device.kind}; GPUs here: {there}")


def budgets(settings: Settings, machine: Machine) -> Iterator[CheckResult]:
    """Whether the memory that the settings name is there at all."""
    memory, total = settings.memory, machine.ram_total_bytes
    asked = {f"memory.{name}": getattr(memory, name) or 0 for name in ("ram_bytes", "kv_bytes")}
    named = " and ".join(f"{key} ({format_size(size)})" for key, size in asked.items() if size)
    if sum(asked.values()) > total:
        yield CheckResult("memory", "failure", f"{named} are more than the {format_size(total)} that this box has")


def kernels(settings: Settings) -> Iterator[CheckResult]:
    """Whether compiled kernels can be kept: nobody else may write their folder."""
    folder = Path(settings.model.store_dir).with_name("kernels")
    if not folder.exists():
        return
    status = folder.stat()
    if status.st_mode & OTHERS_MAY_WRITE:
        yield CheckResult("kernels", "warning", f"others can write {folder}, so kernels are compiled at each start")
    elif status.st_uid != os.geteuid():
        yield CheckResult("kernels", "pass", f"{folder} belongs to another user, whose daemon keeps kernels there")
    else:
        yield CheckResult("kernels", "pass", f"{folder} is private")


def open_files(settings: Settings) -> Iterator[CheckResult]:
    """Whether as many files may be open as clients and stores take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = max(LEAST_FILES, settings.api.max_connections)
    if hard != resource.RLIM_INFINITY and hard < least:
        yield CheckResult("open-files", "failure", f"{hard} files may be open at once; the daemon needs {least}")
    else:
        yield CheckResult("open-files", "pass", "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} at once")


REACH_S = 2.0
NEAR_S, FAR_S = 1.0, 60.0  # by how much two boxes' clocks may be apart


def daemon(path: Path) -> tuple[list[CheckResult], Json]:
    """Returns whether a daemon answers, and its /health; {} where none does."""
    try:
        with Client(path) as client:
            try:
                listens = client.is_listening()
            except ServiceError:
                return [CheckResult("permission", "failure", f"you may not use {path}")], {}
            if not listens:
                starting = client.starting()
                said = f"the one at {path} still starts: {starting}" if starting else f"none answers at {path}"
                return [CheckResult("daemon", "warning", said)], {}
            health: Json = json.loads(client.text("/health", accept_unavailable=True))
            release = str(json.loads(client.text("/version"))["version"])
            reached = json.loads(client.text("/reach"))["boxes"] if health.get("cluster") else []
            metrics = names.parse(client.text("/metrics"))
    except (EdgemoeError, ValueError, KeyError) as error:
        return [CheckResult("daemon", "failure", str(error))], {}
    return [*_described(health, release, path), *damaged_memory(metrics), *neighbours(reached)], health


def damaged_memory(metrics: Mapping[str, float]) -> Iterator[CheckResult]:
    """Reports experts whose bytes changed in the daemon's memory."""
    pages, experts = (names.select(metrics, name) for name in (names.FAILING_PAGES, names.EXPERTS_DAMAGED))
    if experts:
        said = f"{experts:.0f} experts were damaged in memory" + (f", {pages:.0f} pages repeatedly" if pages else "")
        yield CheckResult("memory-damage", "failure" if pages else "warning", said)


def _described(health: Json, release: str, path: Path) -> Iterator[CheckResult]:
    status, engine = str(health.get("status")), health.get("engine") or {}
    model = (health.get("model") or {}).get("id", "the daemon")
    so_far = f" ({loading_text(loading)})" if (loading := health.get("loading")) else ""
    failure = health.get("cannot_start")  # which is the engine's
    state: State = "pass" if status == "ready" or failure else "failure" if status == "failed" else "warning"
    yield CheckResult("daemon", state, f"{model} {'has' if status == 'failed' else 'is'} {status}{so_far} at {path}")
    for each in health.get("models") or []:
        failed = each["state"] == "failed"
        said = each["reason"] or ("loaded" if each["state"] == "ready" else each["state"])
        yield CheckResult("model", "failure" if failed else "pass", f"{each['name']}: {said}")
    if failure:
        yield CheckResult("engine", "failure", failure["reason"])
    elif engine.get("starts", 1) > 1:
        why = f"the engine has been started {engine['starts']} times; it last ended: {engine.get('last_end')}"
        yield CheckResult("daemon", "warning", why)
    if release != edgemoe.__version__:
        said = f"the daemon is {release}, this command {edgemoe.__version__}: restart the daemon"
        yield CheckResult("versions", "warning", said)


def neighbours(boxes: list[Json]) -> Iterator[CheckResult]:
    """Checks the ports and clocks of other boxes, as the daemons have probed each other."""
    for each in boxes:
        node = each["node"]
        if why := each.get("why"):
            yield CheckResult("ports", "warning", f"{node} does not say what it reaches: {why}")
        dead = [f"{node}'s {lane} port is not reached from here" for lane in each["from_here"]]
        dead += [f"our {lane} port is not reached from {node}" for lane in each.get("from_there", ())]
        if dead:
            yield CheckResult("ports", "failure", "; ".join(dead))
        elif not why:
            yield CheckResult("ports", "pass", f"{node}: control, calls and bulk, in both directions")
        if "ahead_s" in each:
            yield _clock(node, float(each["ahead_s"]), float(each["within_s"]))


def _clock(node: str, ahead_s: float, within_s: float) -> CheckResult:
    apart_s = max(0.0, abs(ahead_s) - within_s)
    state: State = "failure" if apart_s > FAR_S else "warning" if apart_s > NEAR_S else "pass"
    which = "ahead of" if ahead_s > 0 else "behind"
    return CheckResult(
        "clock", state, f"{node}'s is {abs(ahead_s):,.3f} s {which} ours, give or take {within_s:,.3f} s"
    )


def unit() -> Iterator[CheckResult]:
    """Checks the state of the installed systemd units."""
    rows = dict(systemd_units.status())
    if not systemd_units.is_installed():
        yield CheckResult("unit", "pass", "not installed as a service")
        return
    said = ", ".join(f"{thing} {state}" for thing, state in rows.items())
    yield CheckResult("unit", "failure" if "failed" in said else "pass", said)


def boxes(settings: ClusterSettings, health: Json) -> Iterator[CheckResult]:
    """Checks the list of peers, their ports from here, and the members in the daemon's `health`."""
    if not settings.node:
        return
    try:
        peers = listed(settings)
    except EdgemoeError as error:
        yield CheckResult("peer-list", "failure", str(error))
        return
    yield CheckResult("peer-list", "pass", f"{settings.node} with {', '.join(sorted(peers)) or 'nobody'}")
    for node, peer in sorted(peers.items()):
        if node != settings.node and peer.address:
            reached = _reaches(peer.address)
            said = f"{node} at {peer.address}" + ("" if reached else " is not reached from here")
            yield CheckResult("ports", "pass" if reached else "failure", said)
    if cluster := health.get("cluster"):
        yield from members(cluster)


def members(cluster: Json) -> Iterator[CheckResult]:
    """Checks the members and the leader that the daemon reports."""
    for member in cluster.get("members", [])[1:]:
        state, why = member.get("state"), member.get("why")
        release = member.get("release")
        said = f"{member.get('node')} is {state}" + (f": {why}" if why else "") + (f", of {release}" if release else "")
        yield CheckResult("peers", "pass" if state == "here" and not why else "failure", said)
        if release and release != cluster["members"][0].get("release"):
            said = f"{member.get('node')} runs {release}: update the older of the boxes"
            yield CheckResult("versions", "warning", said)
    if double := cluster.get("double"):
        yield CheckResult("peers", "failure", double)
    leader = cluster.get("leader")
    trouble = cluster.get("trouble")
    said = f"{leader} leads" if leader else "nobody leads; the boxes go on with the last plan"
    yield CheckResult("leader", "pass" if leader else "failure", said + (f" ({trouble})" if trouble else ""))


def _reaches(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH_S):
            return True
    except (OSError, ValueError):
        return False
