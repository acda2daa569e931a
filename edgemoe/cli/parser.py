"""Defines every command, its options and its help. Imports nothing but argparse."""

from __future__ import annotations

import argparse
from typing import Any

import edgemoe

_OVERVIEW = """\
Serve Mixture-of-Experts language models larger than the memory of this machine, to any OpenAI client on it.

First steps:
  edgemoe serve                               the small demo model, in the foreground
  edgemoe serve --model ./Qwen3-30B-A3B       a Hugging Face checkpoint; packed on first use
  edgemoe chat                                talk to it, from another terminal
  edgemoe status                              which tier serves the experts, queue, memory
  sudo edgemoe service install --model DIR    have systemd run it
"""

_SERVE = """\
Examples:
  edgemoe serve --model ./Qwen3-30B-A3B
  edgemoe serve --model ./Mixtral-8x7B --set memory.ram_bytes=48GiB --set device.0.kind=cuda:0
  edgemoe serve --set device.0.kind=emulated --set device.0.expert_bytes=4MiB --set device.0.link_bytes_per_s=2GB/s

Memory budgets that are not set are worked out from what is free, and printed. SIGTERM or Ctrl-C lets running
requests finish (service.drain_s); a second one does not.
"""

_PACK = """\
A store holds each expert as one aligned run that is one read from disk. A pack that was interrupted goes on where
it stopped; packing a finished store again verifies it and mends what is damaged.

With --experts and --dense weights are stored in 8 or 4 bits, which is half and a quarter of what memory, links and
disk have to hold and move. "keep" leaves them as the checkpoint has them. --experts takes other encodings for some
layers of experts, by number (from 0), "first" and "last". --check says what that costs on a text: the divergence of
what the store and the checkpoint foretell.

Shards (model-00001-of-00016.safetensors ...) can be packed while others are still being fetched: --wait takes each as
it arrives. --delete-shards deletes each one that is packed, so that the disk never has to hold both checkpoint and
store; alone it packs what is there and says what is missing. config.json and the index have to be there first.

Examples:
  edgemoe pack ./Qwen3-30B-A3B /srv/models/qwen3-30b
  edgemoe pack ./Qwen3-30B-A3B --experts int4 --dense int8
  edgemoe pack ./Qwen3-30B-A3B --experts int4,first=int8,last=int8 --check ./notes.txt
  edgemoe pack ./Qwen3-30B-A3B --experts int4 --wait --delete-shards
"""

_MODELS = """\
Examples:
  edgemoe models list
  edgemoe models verify Qwen3-30B-A3B     read everything, compare every checksum
  edgemoe models remove Qwen3-30B-A3B     give the disk space back
"""

_GENERATE = """\
Examples:
  edgemoe generate "def fibonacci(n):" --max-tokens 64
  git diff | edgemoe generate --temperature 0
The prompt is continued as it is; `edgemoe chat` uses the model's chat template. Ctrl-C cancels the request.
"""

_CHAT = """\
Examples:
  edgemoe chat                            a conversation; an empty line or Ctrl-D ends it
  edgemoe chat "What is a monad?"         one question, one answer
  edgemoe chat --system "Answer in French" --temperature 0.7
Ctrl-C stops the answer that is being given.
"""

_STATUS = """\
Examples:
  edgemoe status
  edgemoe status --watch                  redrawn every two seconds until Ctrl-C
  edgemoe status --cluster                the other boxes
  edgemoe status --json | jq .health
"""

_RELOAD = """\
The daemon reads the export in cache.scoutgate again; requests go on meanwhile. An export that is damaged or for
another model is refused, and the one in use stays. SIGHUP does the same; its answer is in the log.

Example:
  edgemoe reload
"""

_CONFIG = """\
Examples:
  edgemoe config                          every setting in force and where it comes from
  edgemoe config api.socket               one of them, for scripts
  edgemoe config --set cache.policy=lfu --changed
  edgemoe config --example > edgemoe.toml
Settings are read from /etc/edgemoe/edgemoe.toml, then ~/.config/edgemoe/edgemoe.toml, then --set.
"""

_SERVICE = """\
Examples:
  sudo edgemoe service install --model /srv/models/qwen3-30b
  edgemoe service install --dry-run       say what would be done
  edgemoe service status
  sudo edgemoe service uninstall          settings and packed stores stay

The socket is /run/edgemoe/edgemoe.sock. Members of its group, "edgemoe" unless --socket-group names another, may
use the model; nobody else may: sudo usermod --append --groups edgemoe USER, who then logs in again.
"""

_KEYGEN = """\
Example:
  edgemoe keygen /etc/edgemoe/key --node kitchen --address 192.0.2.7:7540
What is printed goes into the list of peers of every box; the file stays on this one. docs/cluster.md has more.
"""

_WITNESS = """\
With two boxes, neither can tell whether the other has died or only the link. A witness on any third machine votes
with them; it needs no model, no GPU and little memory. It reads the [cluster] section: node, key_file, listen,
peers_file, coordination = "raft".

Example:
  edgemoe witness --config /etc/edgemoe/edgemoe.toml
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser. Each command's namespace has `handler`, the "module:function" that runs it."""
    parser = argparse.ArgumentParser(prog="edgemoe", description=_OVERVIEW, formatter_class=_Raw)
    parser.add_argument("--version", action="version", version=f"edgemoe {edgemoe.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        _serve,
        _pack,
        _models,
        _generate,
        _chat,
        _status,
        _reload,
        _config,
        _service,
        _keygen,
        _witness,
        _replay,
    ):
        add(commands)
    return parser


class _Raw(argparse.RawDescriptionHelpFormatter):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"max_help_position": 28, "width": 110})


def _command(commands: Any, name: str, handler: str, summary: str, epilog: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=epilog, formatter_class=_Raw
    )
    parser.set_defaults(handler=handler, passes_arguments=False)
    return parser


def _settings_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="read settings from this file only")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="one setting, as in memory.ram_bytes=12GiB"
    )


def _client_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket (default: as in the settings)")
    _settings_options(parser)


def _serve(commands: Any) -> None:
    parser = _command(commands, "serve", "edgemoe.cli.serve:serve", "run the daemon in the foreground", _SERVE)
    parser.add_argument("--model", metavar="DIR", help="a packed store, a Hugging Face checkpoint, or a store's name")
    parser.add_argument("--socket", metavar="PATH", help="where the API listens")
    parser.add_argument("--join", metavar="NODE,HOST:PORT,KEY", help="a box of a cluster to join (docs/cluster.md)")
    _settings_options(parser)


def _pack(commands: Any) -> None:
    parser = _command(commands, "pack", "edgemoe.cli.pack:run", "turn a Hugging Face checkpoint into a store", _PACK)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory with config.json and *.safetensors")
    parser.add_argument("store", metavar="STORE", nargs="?", help="directory to write (default: in model.store_dir)")
    parser.add_argument(
        "--experts", metavar="ENCODING[,LAYER=ENCODING...]", default="keep", help="int4, int8, bf16 or keep (default)"
    )
    parser.add_argument("--dense", metavar="ENCODING", default="keep", help="of all other matrices, likewise")
    parser.add_argument("--check", metavar="FILE", help="compare the store with the checkpoint on this text")
    parser.add_argument("--wait", action="store_true", help="pack shards as they arrive, and wait for the missing ones")
    parser.add_argument("--delete-shards", action="store_true", help="delete each shard as soon as it is packed")
    _settings_options(parser)


def _models(commands: Any) -> None:
    parser = _command(commands, "models", "edgemoe.cli.models:run", "list, verify or remove packed stores", _MODELS)
    parser.add_argument("action", choices=("list", "verify", "remove"), nargs="?", default="list")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a store's name or directory (verify, remove)")
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    parser.add_argument("--json", action="store_true", help="for programs")
    _settings_options(parser)


def _sampling_options(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    until = max_tokens or "what the context allows"
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", default=max_tokens, help=f"longest answer, in tokens (default: {until})"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens up to this mass")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end where this text appears")
    _client_options(parser)


def _generate(commands: Any) -> None:
    parser = _command(commands, "generate", "edgemoe.cli.talk:generate", "continue a prompt", _GENERATE)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="read from standard input if not given")
    _sampling_options(parser, max_tokens=128)


def _chat(commands: Any) -> None:
    parser = _command(commands, "chat", "edgemoe.cli.talk:chat", "hold a conversation", _CHAT)
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="one question instead of a conversation")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    _sampling_options(parser)


def _status(commands: Any) -> None:
    parser = _command(commands, "status", "edgemoe.cli.status:run", "show the running daemon", _STATUS)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--watch", action="store_true", help="keep redrawing")
    parser.add_argument(
        "--cluster", action="store_true", help="the boxes: who leads, who holds what, how the links are"
    )
    _client_options(parser)


def _reload(commands: Any) -> None:
    summary = "have the running daemon load its forecaster of experts again"
    _client_options(_command(commands, "reload", "edgemoe.cli.reload:run", summary, _RELOAD))


def _config(commands: Any) -> None:
    parser = _command(commands, "config", "edgemoe.cli.settings:run", "show the settings in force", _CONFIG)
    parser.add_argument("key", metavar="KEY", nargs="?", help="print the value of this one alone")
    parser.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--example", action="store_true", help="print the commented example file instead")
    _settings_options(parser)


def _service(commands: Any) -> None:
    parser = _command(
        commands, "service", "edgemoe.cli.service:run", "install, uninstall or show the service", _SERVICE
    )
    parser.add_argument("action", choices=("install", "uninstall", "status"), nargs="?", default="status")
    parser.add_argument("--model", metavar="DIR", default="", help="what to serve (default: as in the settings)")
    parser.add_argument("--config", metavar="FILE", default="/etc/edgemoe/edgemoe.toml", help="its settings file")
    parser.add_argument("--socket-group", metavar="GROUP", default="edgemoe", help="who may use the socket")
    parser.add_argument("--no-start", action="store_true", help="enable it, but do not start it now")
    parser.add_argument("--root", metavar="DIR", default="/", help="install under DIR and run no commands")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def _replay(commands: Any) -> None:
    summary = "replay a recorded routing trace through cache policies"
    parser = commands.add_parser("replay", help=summary, add_help=False)
    parser.set_defaults(handler="edgemoe.replay:main", passes_arguments=True)


def _keygen(commands: Any) -> None:
    parser = _command(
        commands, "keygen", "edgemoe.cli.cluster:keygen", "make this box's key for a cluster of boxes", _KEYGEN
    )
    parser.add_argument("file", metavar="FILE", help="the secret key to write (0600); must not exist yet")
    parser.add_argument("--node", metavar="NAME", help="the box's name among the boxes")
    parser.add_argument("--address", metavar="HOST:PORT", help="where the others reach its control channel")


def _witness(commands: Any) -> None:
    parser = _command(commands, "witness", "edgemoe.cli.cluster:witness", "vote among boxes, without a model", _WITNESS)
    _settings_options(parser)
