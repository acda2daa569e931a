"""Defines the commands, their options and their help."""

from __future__ import annotations

import argparse
from typing import Any

from edgemoe.cli.parser import texts
from edgemoe.cli.parser.options import actions, client_options, command, sampling_options, settings_options

SERVICE_CONFIG = "/etc/edgemoe/edgemoe.toml"


def serve(commands: Any) -> None:
    """Adds `edgemoe serve`."""
    parser = command(commands, "serve", "edgemoe.cli.serve:serve", "run the daemon in the foreground", texts.SERVE)
    parser.add_argument("--model", metavar="DIR", help="a packed store, a Hugging Face checkpoint, or a store's name")
    parser.add_argument("--socket", metavar="PATH", help="where the API listens")
    parser.add_argument("--host", metavar="HOST", help="listen by TCP, too, on this address (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, help="listen by TCP, too, on this port (default: 8080)")
    parser.add_argument("--join", metavar="NODE,HOST:PORT,KEY", help="a box of a cluster to join (docs/cluster.md)")
    settings_options(parser)


def pack(commands: Any) -> None:
    """Adds `edgemoe pack`."""
    parser = command(
        commands, "pack", "edgemoe.cli.pack:run", "turn a Hugging Face checkpoint into a store", texts.PACK
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory with config.json and *.safetensors")
    parser.add_argument("store", metavar="STORE", nargs="?", help="directory to write (default: in model.store_dir)")
    _encoding_options(parser)
    parser.add_argument("--check", metavar="FILE", help="compare the store with the checkpoint on this text")
    parser.add_argument("--wait", action="store_true", help="pack shards as they arrive, and wait for the missing ones")
    parser.add_argument("--delete-shards", action="store_true", help="delete each shard as soon as it is packed")
    settings_options(parser)


def pull(commands: Any) -> None:
    """Adds `edgemoe pull`."""
    summary = "fetch a model from the hub, packing it on the way, or a store from other boxes"
    parser = command(commands, "pull", "edgemoe.cli.pull:run", summary, texts.PULL)
    parser.add_argument("model", metavar="MODEL", help="OWNER/NAME on the hub; with --from-peers, as boxes call it")
    parser.add_argument("--from-peers", action="store_true", help="from the boxes of this cluster that have it")
    parser.add_argument("--rate", metavar="BYTES/s", help="with --from-peers, as in 40MB/s (default: no limit)")
    parser.add_argument("--revision", metavar="NAME", default="main", help="a branch, tag or commit (default: main)")
    _encoding_options(parser)
    settings_options(parser)


def models(commands: Any) -> None:
    """Adds `edgemoe models` and its actions."""
    handler = "edgemoe.cli.models:run"
    found = actions(command(commands, "models", handler, "list, verify or remove packed stores", texts.MODELS))
    listed = command(found, "list", handler, "list the packed stores on this box", texts.MODELS_LIST)
    listed.add_argument("--json", action="store_true", help="for programs")
    settings_options(listed)
    verified = command(found, "verify", handler, "read a whole store and compare every checksum", texts.MODELS_VERIFY)
    removed = command(found, "remove", handler, "delete a store", texts.MODELS_REMOVE)
    removed.add_argument("--yes", action="store_true", help="without asking")
    for parser in (verified, removed):
        parser.add_argument("model", metavar="MODEL", help="a store's name or directory")
        settings_options(parser)


def generate(commands: Any) -> None:
    """Adds `edgemoe generate`."""
    parser = command(commands, "generate", "edgemoe.cli.chat.talk:generate", "continue a prompt", texts.GENERATE)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="read from standard input if not given")
    sampling_options(parser, max_tokens=128)


def chat(commands: Any) -> None:
    """Adds `edgemoe chat`."""
    parser = command(commands, "chat", "edgemoe.cli.chat.talk:chat", "hold a conversation", texts.CHAT)
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="one question instead of a conversation")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--stats", action="store_true", help="show how fast each answer came")
    sampling_options(parser)


def status(commands: Any) -> None:
    """Adds `edgemoe status`."""
    parser = command(commands, "status", "edgemoe.cli.status:run", "show the running daemon", texts.STATUS)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--watch", action="store_true", help="keep redrawing")
    parser.add_argument(
        "--cluster", action="store_true", help="the boxes: who leads, who holds what, how the links are"
    )
    client_options(parser)


def top(commands: Any) -> None:
    """Adds `edgemoe top`."""
    summary = "watch the running daemon in the terminal"
    client_options(command(commands, "top", "edgemoe.cli.look.top:run", summary, texts.TOP))


def dashboard(commands: Any) -> None:
    """Adds `edgemoe dashboard`."""
    summary = "show the running daemon's page in a browser"
    parser = command(commands, "dashboard", "edgemoe.cli.look.dashboard:run", summary, texts.DASHBOARD)
    parser.add_argument(
        "--port", metavar="PORT", type=int, default=0, help="on this loopback port (default: a free one)"
    )
    parser.add_argument("--no-open", action="store_true", help="print the address, and open nothing")
    client_options(parser)


def reload(commands: Any) -> None:
    """Adds `edgemoe reload`."""
    summary = "have the running daemon load its forecaster of experts again"
    client_options(command(commands, "reload", "edgemoe.cli.reload:run", summary, texts.RELOAD))


def config(commands: Any) -> None:
    """Adds `edgemoe config`."""
    parser = command(commands, "config", "edgemoe.cli.settings:run", "show the settings in force", texts.CONFIG)
    parser.add_argument("key", metavar="KEY", nargs="?", help="print the value of this one alone")
    parser.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--example", action="store_true", help="print the commented example file instead")
    settings_options(parser)


def service(commands: Any) -> None:
    """Adds `edgemoe service` and its actions."""
    handler = "edgemoe.cli.service:run"
    found = actions(command(commands, "service", handler, "install, uninstall or show the service", texts.SERVICE))
    installed = command(found, "install", handler, "have systemd run the daemon", texts.SERVICE_INSTALL)
    installed.add_argument("--model", metavar="DIR", default="", help="what to serve (default: as in the settings)")
    installed.add_argument("--config", metavar="FILE", default=SERVICE_CONFIG, help="its settings file")
    installed.add_argument("--socket-group", metavar="GROUP", default="edgemoe", help="who may use the socket")
    installed.add_argument("--no-start", action="store_true", help="enable it, but do not start it now")
    removed = command(
        found, "uninstall", handler, "take the service away; settings and stores stay", texts.SERVICE_UNINSTALL
    )
    shown = command(found, "status", handler, "show what is installed and running", texts.SERVICE_STATUS)
    for parser in (installed, removed):
        parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    for parser in (installed, removed, shown):
        parser.add_argument("--root", metavar="DIR", default="/", help="install under DIR and run no commands")


def replay(commands: Any) -> None:
    """Adds `edgemoe replay`."""
    summary = "replay a recorded routing trace through cache policies"
    parser = commands.add_parser("replay", help=summary, description=f"{summary.capitalize()}.", add_help=False)
    parser.set_defaults(handler="edgemoe.replay:main", passes_arguments=True)


def plan(commands: Any) -> None:
    """Adds `edgemoe plan`."""
    summary = "tell whether a model fits here, and how fast it will be"
    parser = command(commands, "plan", "edgemoe.cli.plan:run", summary, texts.PLAN)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, a packed store, or only a config.json")
    parser.add_argument("--context", type=int, metavar="N", default=0, help="tokens of a sequence (default: 4096)")
    parser.add_argument("--sequences", type=int, metavar="N", default=4, help="sequences at once (default: 4)")
    parser.add_argument("--prompt", type=int, metavar="N", default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--boxes", type=int, metavar="N", default=1, help="boxes like this one (default: 1)")
    parser.add_argument(
        "--routing", choices=("usual", "even"), default="usual", help="how unevenly experts are chosen (default: usual)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    settings_options(parser)


def bench(commands: Any) -> None:
    """Adds `edgemoe bench`."""
    summary = "measure the running daemon at 1, 4 and 16 streams"
    parser = command(commands, "bench", "edgemoe.cli.bench:run", summary, texts.BENCH)
    parser.add_argument("--prompt", type=int, metavar="N", default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--tokens", type=int, metavar="N", default=32, help="tokens of an answer (default: 32)")
    parser.add_argument("--json", action="store_true", help="for programs")
    client_options(parser)


def doctor(commands: Any) -> None:
    """Adds `edgemoe doctor`."""
    summary = "find what is wrong on this box, and say what to do"
    parser = command(commands, "doctor", "edgemoe.cli.doctor.command:run", summary, texts.DOCTOR)
    parser.add_argument("--verify", action="store_true", help="read the whole store and compare every checksum")
    parser.add_argument("--json", action="store_true", help="for a bug report; holds no keys")
    client_options(parser)


def keygen(commands: Any) -> None:
    """Adds `edgemoe keygen`."""
    parser = command(
        commands, "keygen", "edgemoe.cli.cluster:keygen", "make this box's key for a cluster of boxes", texts.KEYGEN
    )
    parser.add_argument("file", metavar="FILE", help="the secret key to write (0600); must not exist yet")
    parser.add_argument("--node", metavar="NAME", help="the box's name among the boxes")
    parser.add_argument("--address", metavar="HOST:PORT", help="where the others reach its control channel")


def witness(commands: Any) -> None:
    """Adds `edgemoe witness`."""
    parser = command(
        commands, "witness", "edgemoe.cli.cluster:witness", "vote among boxes, without a model", texts.WITNESS
    )
    settings_options(parser)


def completion(commands: Any) -> None:
    """Adds `edgemoe completion`."""
    summary = "print what makes a shell complete these commands"
    parser = command(commands, "completion", "edgemoe.cli.parser.completion:run", summary, texts.COMPLETION)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def key(commands: Any) -> None:
    """Adds `edgemoe key` and its actions."""
    handler = "edgemoe.cli.key:run"
    found = actions(command(commands, "key", handler, "keep the keys of clients that come by TCP", texts.KEY))
    listed = command(found, "list", handler, "list the keys' names and limits", texts.KEY_LIST)
    listed.add_argument("--json", action="store_true", help="for programs")
    made = command(found, "new", handler, "make a key", texts.KEY_NEW)
    made.add_argument(
        "--at-once", type=int, metavar="N", default=0, help="requests that it may have at once (default: any number)"
    )
    shown = command(found, "show", handler, "print a key", texts.KEY_SHOW)
    removed = command(found, "remove", handler, "take a key away, from now on", texts.KEY_REMOVE)
    for parser in (made, removed):
        parser.add_argument("name", metavar="NAME", help="what the key is called")
    shown.add_argument("name", metavar="NAME", nargs="?", help="what the key is called (default: the first)")
    for parser in (listed, made, shown, removed):
        settings_options(parser)


def _encoding_options(parser: argparse.ArgumentParser) -> None:
    """Adds what a store's weights are to be encoded in."""
    parser.add_argument(
        "--experts", metavar="ENCODING[,LAYER=ENCODING...]", default="keep", help="int4, int8, bf16 or keep (default)"
    )
    parser.add_argument("--dense", metavar="ENCODING", default="keep", help="of all other matrices, likewise")
