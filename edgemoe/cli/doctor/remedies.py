"""What doctor looks at, and what to do where it is not as it should be. docs/troubleshooting.md is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["pass", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look found."""

    check: str  # a key of REMEDIES
    state: State
    said: str


REMEDIES = {
    "settings": "`edgemoe config` shows every setting and where it comes from; correct the line that is named.",
    "versions": "Install edgemoe again, in the same environment as the command (`pip install .` in a clone): it brings "
    "what is missing.",
    "processor": "Use a machine whose processor has AVX2, FMA and F16C, or a 64-bit Arm one; give a virtual machine "
    "the host's processor (QEMU's `-cpu host`). EDGEMOE_PROCESSOR is for development only: unset it.",
    "gpu": "Install NVIDIA's driver and a torch built for CUDA (`pip install torch`), then log in again; `nvidia-smi` "
    "must list the GPU. Without one, set device.0.kind to cpu.",
    "gpu-link": "Put the GPU into the slot that is wired for all its lanes (often the one next to the processor), "
    "without a riser, and look into the firmware's settings of that slot. GPUs that are idle lower the generation: "
    "look again while it works.",
    "memory": "Close other programs, set lower budgets (memory.ram_bytes, memory.kv_bytes), raise the control group's "
    "limit (MemoryMax), or pack the model in 4 bits: `edgemoe plan MODEL` compares.",
    "memlock": "Raise the limit of locked memory: `ulimit -l unlimited`, or LimitMEMLOCK=infinity in the unit.",
    "disk": "Free space where the stores lie: `edgemoe models list`, then `edgemoe models remove NAME`; or set "
    "model.store_dir to another disk: of a service to a folder of its user, then `sudo edgemoe service install` again.",
    "disk-rate": "Put the stores on a faster disk (model.store_dir), or hold more experts in memory: "
    "`edgemoe plan MODEL` says how much that helps.",
    "clock": "Set the clock of the box that is named, and have it kept: `timedatectl set-ntp true`.",
    "store": "`edgemoe models verify NAME` lists what is damaged; packing the checkpoint again mends it.",
    "model": "Correct model.path or model.store_dir (`edgemoe config` says where they are set), or mount the disk that "
    "is missing; `edgemoe models` lists what is there.",
    "device": "Set device.N.kind to a GPU that `nvidia-smi` lists, counted from cuda:0, or to cpu.",
    "kernels": "`chmod 700 FOLDER` for the folder that is named, as the user of the daemon.",
    "open-files": "Raise the limit: `ulimit -n 65536` before `edgemoe serve`, or LimitNOFILE=65536 in the unit.",
    "port": "Stop what listens there (`ss -ltnp` names it), or choose another: `--port`, or api.tcp in the settings.",
    "keys": "Keys are for their owner alone: `chmod 600 FILE`, and `chown` to the user of the daemon. `edgemoe key new "
    "NAME` makes one for a client, `edgemoe keygen FILE` one for a box.",
    "permission": "Join the socket's group: `sudo usermod --append --groups edgemoe $USER`, then log in again. "
    "Other files that you may not look at are looked at by `sudo edgemoe doctor`.",
    "daemon": "Start it with `edgemoe serve`, or `systemctl start edgemoe`; `journalctl --unit edgemoe` says why it "
    "ended.",
    "engine": "Do what the line says; `edgemoe reload`, a changed setting of the engine, or a restart of the daemon "
    "has it tried again. The engine's own lines are in the daemon's log (`journalctl --unit edgemoe`).",
    "unit": "`systemctl status edgemoe` says why; `sudo edgemoe service install --model DIR` installs it anew.",
    "peer-list": "On every box the list of peers (cluster.peers_file) must have the key and the address that the "
    "named box has now; `edgemoe keygen` prints a box's entry.",
    "ports": "Correct the peer's address in cluster.peers_file, start the daemon there, and let its ports through the "
    "firewalls of both boxes: cluster.listen has the control channel's, cluster.calls_port and bulk_port the others "
    "(0 takes any free ones, which no firewall knows).",
    "peers": "Look at `edgemoe status --cluster` on both boxes. All must serve the same store: copy it, or pack the "
    "same checkpoint alike. A box that is reachable but not heard has another key in one of the lists of peers.",
    "leader": "Raft needs more than half of the voters: start the boxes that are gone, or add `edgemoe witness`. With "
    'coordination = "single", start the box that cluster.leader names.',
}


def page() -> str:
    """Returns docs/troubleshooting.md."""
    rows = "\n".join(f"| {check} | {remedy} |" for check, remedy in REMEDIES.items())
    return f"""\
# When something is wrong

`edgemoe doctor` looks at all of this, says what it found, and ends with 1 if anything fails. `--verify` reads the whole
store; `--json` is for a bug report, and holds no keys. `edgemoe bench` has the figures for one.

| doctor's line | what to do |
|---|---|
{rows}
"""
