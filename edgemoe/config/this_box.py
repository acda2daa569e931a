"""This box's own part of a cluster, where no settings name it: written by `edgemoe cluster init` and an invitation."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgemoe.config.settings import ClusterSettings, NodeName
from edgemoe.durable import read_plain
from edgemoe.errors import ConfigError
from edgemoe.types.bounds import Text

THIS_BOX = "this-box.json"  # in the folder of the cluster's state
MAX_FILE_BYTES = 4096
LISTEN = "0.0.0.0:7540"


class ThisBox(msgspec.Struct, frozen=True):
    """Settings of `[cluster]` that nobody has to write."""

    node: NodeName
    listen: Text
    address: Text
    key_file: Text
    state_dir: Text


def read_this_box(folder: Path) -> ThisBox | None:
    """Returns the content of the file in the folder; None without one. Raises ConfigError for a damaged one."""
    path = folder / THIS_BOX
    try:
        return msgspec.json.decode(read_plain(path, MAX_FILE_BYTES), type=ThisBox)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # of another user, whose daemon this is not
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; remove it to serve alone, or join again") from error


def fill_this_box(cluster: ClusterSettings, folder: Path) -> ClusterSettings:
    """Returns the settings with this box's part filled in, where they name no node and the folder has one."""
    if cluster.node or (box := read_this_box(folder)) is None:
        return cluster
    return msgspec.structs.replace(
        cluster,
        node=box.node,
        listen=cluster.listen or box.listen,
        address=cluster.address or box.address,
        key_file=cluster.key_file or box.key_file,
        state_dir=cluster.state_dir or box.state_dir,
        coordination="raft",
    )
