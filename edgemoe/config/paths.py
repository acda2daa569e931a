"""Where files are that no setting names: the service's, root's beside an installed service, or the user's own."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgemoe.config.settings import FORMS, TEXT, Settings
from edgemoe.errors import ConfigError

FILE_NAME = "edgemoe.toml"
PATHS = frozenset(
    {
        *(
            "model.path",
            "model.store_dir",
            "model.mirrors",
            "cache.state_file",
            "cache.scoutgate",
            "record.dir",
            "service.runtime_dir",
        ),
        *("api.socket", "api.api_key_file", "cluster.key_file", "cluster.peers_file", "cluster.state_dir"),
        *("cluster.etcd_password_file", "cluster.etcd_ca", "cluster.etcd_cert", "cluster.etcd_key"),
    }
)  # settings in which "~" is a home directory
SERVICE_UNIT, SERVICE_STATE = Path("etc/systemd/system/edgemoe.service"), Path("var/lib/edgemoe")


def search_path(env: Mapping[str, str], root: Path = Path("/")) -> tuple[Path, ...]:
    """Returns the files to read when none is named; the later one wins."""
    user = Path(env.get("XDG_CONFIG_HOME") or _home(env) / ".config")
    return root / "etc/edgemoe" / FILE_NAME, user / "edgemoe" / FILE_NAME


def fill_paths(settings: Settings, env: Mapping[str, str], root: Path = Path("/")) -> Settings:
    """Returns `settings` with empty paths filled in from the environment, which no other module reads."""
    socket = Path(settings.api.socket or default_socket(env)).absolute()
    stores = _stores(settings, env, root)
    runtime = Path(settings.service.runtime_dir or beside(socket)).absolute()
    keys = settings.api.api_key_file or default_keys(env, root)
    settings = _replaced(settings, socket=str(socket), stores=str(stores), runtime=str(runtime), keys=str(keys))
    cluster = settings.cluster
    if cluster.node and not cluster.state_dir:
        cluster = msgspec.structs.replace(cluster, state_dir=str(stores.with_name("cluster") / cluster.node))
        settings = msgspec.structs.replace(settings, cluster=cluster)
    return settings


def cluster_folder(settings: Settings, env: Mapping[str, str], root: Path = Path("/")) -> Path:
    """Returns the folder of this box's own part of a cluster, where no settings name it."""
    return Path(settings.cluster.state_dir or _stores(settings, env, root).with_name("cluster"))


def _stores(settings: Settings, env: Mapping[str, str], root: Path) -> Path:
    return Path(settings.model.store_dir or (service_state(env, root) or _cache(env)) / "stores").absolute()


def beside(socket: Path) -> Path:
    """Returns the default runtime directory of a daemon that listens at `socket`."""
    return socket.with_suffix(".run")


def default_socket(env: Mapping[str, str]) -> Path:
    """Returns the service's socket under systemd and for root, else one in the user's runtime directory."""
    service = env.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if service or (os.geteuid() == 0 and not env.get("XDG_RUNTIME_DIR")):
        return Path(service or "/run/edgemoe") / "edgemoe.sock"
    return Path(env.get("XDG_RUNTIME_DIR") or _cache(env)) / "edgemoe.sock"


def default_keys(env: Mapping[str, str], root: Path = Path("/")) -> Path:
    """Returns the service's file of API keys, where that is whose state we use, else one beside the user's settings."""
    return (service_state(env, root) or search_path(env)[-1].parent) / "api-keys"


def service_state(env: Mapping[str, str], root: Path = Path("/")) -> Path | None:
    """Returns the folder of the service's stores and keys: under systemd, and for root beside an installed service."""
    if service := env.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(service)
    return root / SERVICE_STATE if os.geteuid() == 0 and (root / SERVICE_UNIT).is_file() else None


def _cache(env: Mapping[str, str]) -> Path:
    return Path(env.get("XDG_CACHE_HOME") or _home(env) / ".cache") / "edgemoe"


def _home(env: Mapping[str, str]) -> Path:
    """Returns $HOME, or the home directory in the list of users where that is empty or not set."""
    if home := env.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # as in a container that is started by a number
        return Path("/")


def _replaced(settings: Settings, *, socket: str, stores: str, runtime: str, keys: str) -> Settings:
    """Returns the settings with these paths. Raises ConfigError for one that cannot be written as text."""
    for key, path in {"api.socket": socket, "model.store_dir": stores, "api.api_key_file": keys}.items():
        if not re.match(TEXT, path):
            raise ConfigError(f"{key} is by default {path!a}, and has to be {FORMS[TEXT]}: set another")
    replace = msgspec.structs.replace
    return replace(
        settings,
        model=replace(settings.model, store_dir=stores),
        api=replace(settings.api, socket=socket, api_key_file=keys),
        service=replace(settings.service, runtime_dir=runtime),
    )
