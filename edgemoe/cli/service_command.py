"""Runs `edgemoe service`: installs the package's unit files, removes them, and reports their state.

An installation is planned as a list of (path, text), then written, so that --dry-run and --root DIR show and test the
same steps. An existing settings file is never changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgemoe.config.loading import flatten, load
from edgemoe.durable import make_folder, remove_file, remove_tree, replace_file
from edgemoe.errors import ServiceError, write_remedy

SOCKET = Path("/run/edgemoe/edgemoe.sock")
UNITS = ("edgemoe.service", "edgemoe.socket")
LEARNING = ("edgemoe-scoutgate.service", "edgemoe-scoutgate.timer")  # installed, but the timer is not enabled
_SYSTEM = Path("/etc/systemd/system")
_HIDDEN_BY_UNIT = ("/home", "/root", "/run/user")  # ProtectHome=tmpfs
_PRIVATE_TO_UNIT = ("/tmp", "/var/tmp")  # PrivateTmp; files there are also removed in time
_STATE = Path("/var/lib/edgemoe")  # WorkingDirectory, too
_WRITABLE = (str(_STATE), "/run/edgemoe")  # StateDirectory, RuntimeDirectory
_WRITTEN = ("model.store_dir", "record.dir", "cluster.state_dir", "cache.scoutgate")  # settings: folders
_READ = (
    *("api.api_key_file", "cluster.key_file", "cluster.peers_file"),
    *("cluster.etcd_password_file", "cluster.etcd_ca", "cluster.etcd_cert", "cluster.etcd_key"),
)  # settings: files
_COMMAND_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class InstallOptions:
    """Options of an installation. Files are written under `root`; commands run only where that is "/"."""

    root: Path = Path("/")
    model: str = ""  # directory of a store or a checkpoint; "" leaves it to the settings
    config: Path = Path("/etc/edgemoe/edgemoe.toml")
    socket_group: str = "edgemoe"
    start: bool = True
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class InstalledFile:
    """A file to install; `keep` leaves an existing one unchanged, on uninstall too."""

    path: Path
    text: str
    keep: bool = False


def templates() -> Path:
    """Returns the folder of unit files: inside the package in a wheel, beside it in a checkout."""
    found = Path(__file__).parents[1] / "systemd"
    return found if found.is_dir() else Path(__file__).parents[2] / "systemd"


def planned_files(options: InstallOptions) -> list[InstalledFile]:
    """Returns every file of an installation, paths without `root`. Raises ServiceError for invalid options."""
    model = _existing(options.model, "--model") if options.model else None
    folder = templates()
    refresh = [sys.executable, "-m", "scoutgate.refresh", "--config", str(options.config), "--max-minutes", "30"]
    refresh += ["--model", str(model)] if model else []
    reload = _joined([str(_program()), "reload", "--socket", str(SOCKET)])
    serve = _with(_read(folder / UNITS[0]), "ExecStart", _command(options, model))
    learn = _with(_read(folder / LEARNING[0]), "ExecStart", _joined(refresh))
    learn = _with(learn, "ConditionPathExists", str(options.config).replace("%", "%%"))
    files = [
        InstalledFile(_SYSTEM / UNITS[0], _with(serve, "ExecReload", reload)),
        InstalledFile(_SYSTEM / UNITS[1], _with(_read(folder / UNITS[1]), "SocketGroup", options.socket_group)),
        InstalledFile(_SYSTEM / LEARNING[0], _with(learn, "ExecStartPost", f"-{reload}")),
        InstalledFile(_SYSTEM / LEARNING[1], _read(folder / LEARNING[1])),
        InstalledFile(Path("/etc/sysusers.d/edgemoe.conf"), _read(folder / "sysusers.conf")),
        InstalledFile(Path("/etc/tmpfiles.d/edgemoe.conf"), _read(folder / "tmpfiles.conf")),
        InstalledFile(options.config, _read(folder / "edgemoe.toml"), keep=True),
    ]
    stated = _stated(options)
    models = [*([model] if model else _models_of(stated, "model.")), *_models_of(stated, "models.")]
    lines = [f"BindReadOnlyPaths={_escaped(bind)}\n" for bind in _binds(options, models, stated)]
    lines += [f"{_way(place)}={_escaped(f'-{place}')}\n" for place in _written(stated)]
    if lines:
        text = "# What the service reads under /home or /root, and writes outside of /var/lib/edgemoe.\n[Service]\n"
        files += [InstalledFile(path, text + "".join(lines)) for path in _paths_files(Path("/"))]
    return files


def install(options: InstallOptions) -> list[str]:
    """Installs all files and starts the service. Returns a line for each thing done. Raises ServiceError."""
    files = planned_files(options)
    done = [_place(file, options) for file in files]
    planned = {options.root / file.path.relative_to("/") for file in files}
    done += [_take_away(path, options) for path in _ours(options.root) if path not in planned]
    commands = [["systemd-sysusers"], ["systemd-tmpfiles", "--create", "edgemoe.conf"], ["systemctl", "daemon-reload"]]
    commands.append(["systemctl", "enable", *UNITS])
    if (
        options.start
    ):  # restarts a running service with the new units; without waiting, because a new model is packed first
        commands.append(["systemctl", "restart", "--no-block", *reversed(UNITS)])
    return done + _run_all(commands, options)


def uninstall(options: InstallOptions) -> list[str]:
    """Stops the service and removes its files; settings and packed stores stay. Returns a line for each thing done."""
    done = _run_all([["systemctl", "disable", "--now", *UNITS, LEARNING[1]]], options, tolerant=True)
    done += [_take_away(path, options) for path in _ours(options.root)]
    return done + _run_all([["systemctl", "daemon-reload"]], options, tolerant=True)


def is_installed(root: Path = Path("/")) -> bool:
    """Returns whether a unit of the service is there."""
    return any((root / "etc/systemd/system" / unit).exists() for unit in UNITS)


def status(root: Path = Path("/")) -> list[tuple[str, str]]:
    """Returns (name, state) of each file and unit."""
    rows = [(str(path), "installed" if path in _ours(root) else "missing") for path in _paths(root)]
    if root == Path("/") and shutil.which("systemctl"):
        for unit in UNITS:
            asked = [_output(["systemctl", verb, unit]) for verb in ("is-enabled", "is-active")]
            rows.append((unit, ", ".join(word or "unknown" for word in asked)))
    return rows


# --- files -----------------------------------------------------------------------------------------------------


def _paths(root: Path) -> list[Path]:
    names = [
        *(f"systemd/system/{unit}" for unit in (*UNITS, *LEARNING)),
        "sysusers.d/edgemoe.conf",
        "tmpfiles.d/edgemoe.conf",
    ]
    return [root / "etc" / name for name in names]


def _paths_files(root: Path) -> list[Path]:
    return [root / f"etc/systemd/system/{unit}.d/paths.conf" for unit in (UNITS[0], LEARNING[0])]


def _ours(root: Path) -> list[Path]:
    return [path for path in (*_paths(root), *_paths_files(root)) if path.is_file()]


def _take_away(path: Path, options: InstallOptions) -> str:
    if not options.dry_run:
        remove_file(path)
        if path.parent.name.endswith(".service.d") and not any(path.parent.iterdir()):
            remove_tree(path.parent)
    return f"remove {path}"


def _place(file: InstalledFile, options: InstallOptions) -> str:
    path = options.root / file.path.relative_to("/")
    if file.keep and path.exists():
        return f"keep {path}"
    if not options.dry_run:
        try:
            make_folder(path.parent)
            replace_file(path, file.text.encode(), 0o644)
        except OSError as error:
            remedy = write_remedy(error, "run this as root, or see --root")
            raise ServiceError(f"cannot write {path}: {error.strerror}; {remedy}") from error
    return f"write {path}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"this installation of edgemoe lacks {path.name}: {error}") from error


def _with(text: str, key: str, value: str) -> str:
    """Returns `text` with its only line `key=...` set to `value`."""
    replaced, count = re.subn(rf"(?m)^{key}=.*$", lambda _: f"{key}={value}", text)
    assert count == 1, key
    return replaced


def _command(options: InstallOptions, model: Path | None) -> str:
    words = [str(_program()), "serve", "--config", str(options.config)]
    words += ["--model", str(model)] if model else []
    return _joined(words)


def _joined(words: Sequence[str]) -> str:
    """Returns a command for ExecStart, with "$" escaped."""
    return " ".join(_escaped(word.replace("$", "$$")) for word in words)


def _escaped(word: str | Path) -> str:
    """Returns a word escaped for a unit file, where "%" is special and quoting is as in C."""
    word = str(word).replace("%", "%%")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _program() -> Path:
    """Returns the `edgemoe` command of this installation. Raises ServiceError where there is none."""
    beside = Path(sys.executable).with_name("edgemoe")
    found = beside if beside.is_file() else Path(shutil.which("edgemoe") or "")
    if not found.is_file():
        raise ServiceError(f"there is no edgemoe command beside {sys.executable}; install the package first")
    return found.absolute()


def _existing(path: str, option: str) -> Path:
    found = Path(path).absolute()
    if not found.is_dir():
        raise ServiceError(f"{option} {found} is not a directory; give a packed store or a Hugging Face checkpoint")
    return found


def _stated(options: InstallOptions) -> Mapping[str, Any]:
    """Returns the values that the settings file states, by "section.key"; none where there is no file yet."""
    file = options.root / options.config.relative_to("/")
    if not file.is_file():
        return {}
    loaded = load(file, env={}, root=options.root)
    return {key: value for key, value in flatten(loaded.settings).items() if loaded.origins[key] != "default" and value}


def _models_of(stated: Mapping[str, Any], section: str) -> list[Path]:
    """Returns the directories of the models in the settings, without names of stores in store_dir."""
    keys = (key for key in stated if key.startswith(section) and key.endswith(".path"))
    return [path for key in keys if os.path.isdir(path := _STATE / stated[key])]


def _binds(options: InstallOptions, models: Sequence[Path], stated: Mapping[str, Any]) -> list[str]:
    """Returns the paths that the service reads and ProtectHome hides: Python, the package, settings, files, model.

    A model in Hugging Face's cache consists of links into a directory of blobs, which is included. A file that the
    settings name need not be there yet, which "-" says to systemd. Raises ServiceError for paths in temporary
    directories.
    """
    own = dict.fromkeys(_installation(), "this installation of edgemoe") | {options.config: "--config"}
    parts = [part for model in models for part in (model, *_linked_folders(model))]
    files = {_STATE / stated[key]: key for key in _READ if key in stated}
    files |= {_STATE / folder: "model.mirrors" for folder in stated.get("model.mirrors", ())}
    for path, what in (own | dict.fromkeys(parts, "the model") | files).items():
        if any(path.resolve().is_relative_to(place) for place in _PRIVATE_TO_UNIT):
            raise ServiceError(
                f"{what} lies in {path}, which a service does not see and which is emptied some day. "
                "Move it, to /opt or /srv for example, and install the service from there"
            )
    written = _written(stated)  # files there are visible with their folder, and stay writable
    needed = [*own, *(path for path in (*parts, *files) if not any(map(path.is_relative_to, written)))]
    hidden = [path for path in dict.fromkeys(needed) if any(map(path.is_relative_to, _HIDDEN_BY_UNIT))]
    return [f"-{path}" if path in files else str(path) for path in hidden]


def _linked_folders(model: Path) -> list[Path]:
    return sorted({file.resolve().parent for file in model.iterdir()} - {model})


def _written(stated: Mapping[str, Any]) -> list[Path]:
    """Returns the folders that the settings have the service write to, where it may not by itself."""
    folders = [_STATE / stated[key] for key in _WRITTEN if key in stated]
    folders += [(_STATE / stated["cache.state_file"]).parent] if "cache.state_file" in stated else []
    return [folder for folder in dict.fromkeys(folders) if not any(map(folder.is_relative_to, _WRITABLE))]


def _way(folder: Path) -> str:
    """Returns the directive that lets the service write there."""
    return "BindPaths" if any(map(folder.is_relative_to, _HIDDEN_BY_UNIT)) else "ReadWritePaths"


def _installation() -> list[Path]:
    return [Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[2]]


# --- commands --------------------------------------------------------------------------------------------------


def _run_all(commands: Sequence[Sequence[str]], options: InstallOptions, *, tolerant: bool = False) -> list[str]:
    if options.root != Path("/"):
        return []
    done = []
    for command in commands:
        done.append(f"run {' '.join(command)}")
        if not options.dry_run:
            _run(command, tolerant=tolerant)
    return done


def _run(command: Sequence[str], *, tolerant: bool) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    else:
        why = result.stderr.strip() if result.returncode else ""
    if why and not tolerant:
        raise ServiceError(f"`{' '.join(command)}` failed: {why}; the files are in place, see `journalctl -u edgemoe`")


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def run(args: argparse.Namespace) -> int:
    """Installs, uninstalls or shows the service."""
    if args.action == "status":
        root = Path(args.root)
        rows = status(root)
        if not is_installed(root):
            print("edgemoe is not installed as a service; `sudo edgemoe service install --model DIR` does that")
            return 0
        width = max(len(thing) for thing, _ in rows)
        print("\n".join(f"{thing:{width}}  {state}" for thing, state in rows))
        return 0
    if args.action == "uninstall":
        options = InstallOptions(root=Path(args.root), dry_run=args.dry_run)
    else:
        options = InstallOptions(
            root=Path(args.root),
            model=args.model,
            config=Path(args.config).absolute(),
            socket_group=args.socket_group,
            start=not args.no_start,
            dry_run=args.dry_run,
        )
    done = install(options) if args.action == "install" else uninstall(options)
    print("\n".join(f"{'would ' if options.dry_run else ''}{line}" for line in done))
    if args.action == "install":
        print(
            f"\nApps reach the model at {SOCKET}. Members of the group {options.socket_group} may use it:\n"
            f"  sudo usermod --append --groups {options.socket_group} USER   (who then logs in again)\n"
            f"Settings are in {options.config}; after a change: sudo systemctl restart edgemoe"
        )
    return 0
