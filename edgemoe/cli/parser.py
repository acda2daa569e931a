"""Defines the command line: every command, its options and help. Imports nothing but argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import edgemoe
from edgemoe.cli import help_texts as texts


class PlainHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of texts, and gives options more room than argparse does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"max_help_position": 28, "width": 110})


class CommandParser(argparse.ArgumentParser):
    """A parser that lists its words and inner commands, for completion and suggestions."""

    def words(self) -> Iterator[tuple[str, str]]:
        """Yields each long option, choice and command that may stand on the line, with its help."""
        for action in self._actions:
            if isinstance(action.choices, dict):
                yield from ((name, parser.summary) for name, parser in action.choices.items())
            elif action.option_strings:
                yield action.option_strings[-1], action.help or ""
            else:
                yield from ((str(choice), "") for choice in action.choices or ())

    def inner(self) -> Iterator[tuple[str, CommandParser]]:
        """Yields the commands, or a command's actions."""
        for action in self._actions:
            if isinstance(action.choices, dict):
                yield from action.choices.items()

    @property
    def summary(self) -> str:
        return (self.description or "").partition("\n")[0]


def command(subparsers: Any, name: str, handler: str, summary: str, epilog: str = "") -> CommandParser:
    """Adds a command, or an action of one, and returns its parser. `handler` is the "module:function" that runs it."""
    parser: CommandParser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=PlainHelpFormatter,
    )
    parser.set_defaults(handler=handler, passes_arguments=False)
    return parser


def actions(parser: argparse.ArgumentParser) -> Any:
    """Returns the subparsers for a command's actions; the namespace's `action` names the one given."""
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")


def settings_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name and override settings."""
    parser.add_argument("--config", metavar="FILE", help="read settings from this file only")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="one setting, as in memory.ram_bytes=12GiB"
    )


def client_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that find the daemon."""
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket (default: as in the settings)")
    settings_options(parser)


def sampling_options(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    """Adds the sampling options of a request, and the options that find the daemon."""
    until = max_tokens or "what the context allows"
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", default=max_tokens, help=f"longest answer, in tokens (default: {until})"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens up to this mass")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end where this text appears")
    client_options(parser)


SERVICE_CONFIG = "/etc/edgemoe/edgemoe.toml"


def serve(subparsers: Any) -> None:
    """Adds the command `edgemoe serve`."""
    parser = command(
        subparsers, "serve", "edgemoe.cli.serve_command:serve", "run the daemon in the foreground", texts.SERVE
    )
    parser.add_argument("--model", metavar="DIR", help="a packed store, a Hugging Face checkpoint, or a store's name")
    parser.add_argument("--socket", metavar="PATH", help="where the API listens")
    parser.add_argument("--host", metavar="HOST", help="listen by TCP, too, on this address (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, help="listen by TCP, too, on this port (default: 8080)")
    parser.add_argument("--experts", metavar="ENCODING", help="where the model is packed now, as in `pack`; or auto")
    help_text = "a box of a cluster to join; may be given several times (docs/cluster.md)"
    parser.add_argument("--invite", metavar="TOKEN", help="join a cluster by this invitation first")
    parser.add_argument("--join", metavar="NODE,HOST:PORT,KEY", action="append", help=help_text)
    settings_options(parser)


def pack(subparsers: Any) -> None:
    """Adds the command `edgemoe pack`."""
    parser = command(subparsers, "pack", "edgemoe.cli.pack:run", "turn a checkpoint into a store", texts.PACK)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory with config.json and *.safetensors")
    parser.add_argument("store", metavar="STORE", nargs="?", help="directory to write (default: in model.store_dir)")
    _encoding_options(parser)
    parser.add_argument("--check", metavar="FILE", help="compare the store with the checkpoint on this text")
    parser.add_argument("--wait", action="store_true", help="pack shards as they arrive, and wait for the missing ones")
    parser.add_argument("--delete-shards", action="store_true", help="delete each shard as soon as it is packed")
    settings_options(parser)


def pull(subparsers: Any) -> None:
    """Adds the command `edgemoe pull`."""
    summary = "fetch a model from the hub, packing it on the way, or a store from other boxes"
    parser = command(subparsers, "pull", "edgemoe.cli.pull_command:run", summary, texts.PULL)
    parser.add_argument("model", metavar="MODEL", help="OWNER/NAME on the hub; with --from-peers, as boxes call it")
    parser.add_argument("--from-peers", action="store_true", help="from the boxes of this cluster that have it")
    parser.add_argument("--rate", metavar="BYTES/s", help="with --from-peers, as in 40MB/s (default: no limit)")
    parser.add_argument("--revision", metavar="NAME", default="main", help="a branch, tag or commit (default: main)")
    parser.add_argument("--quant", metavar="NAME", default="", help="one of a repository's GGUF files, as in Q4_K_M")
    _encoding_options(parser)
    settings_options(parser)


def models(subparsers: Any) -> None:
    """Adds `edgemoe models` and its actions."""
    handler = "edgemoe.cli.models_command:run"
    found = actions(command(subparsers, "models", handler, "list, verify or remove packed stores", texts.MODELS))
    listed = command(found, "list", handler, "list the packed stores on this box", texts.MODELS_LIST)
    listed.add_argument("--json", action="store_true", help="for programs")
    settings_options(listed)
    verified = command(found, "verify", handler, "read a whole store and compare every checksum", texts.MODELS_VERIFY)
    removed = command(found, "remove", handler, "delete a store", texts.MODELS_REMOVE)
    removed.add_argument("--yes", action="store_true", help="without asking")
    for parser in (verified, removed):
        parser.add_argument("model", metavar="MODEL", help="a store's name or directory")
        settings_options(parser)


def generate(subparsers: Any) -> None:
    """Adds the command `edgemoe generate`."""
    parser = command(subparsers, "generate", "edgemoe.cli.conversation:generate", "continue a prompt", texts.GENERATE)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="read from standard input if not given")
    sampling_options(parser, max_tokens=128)
    _model_option(parser)


def run(subparsers: Any) -> None:
    """Adds the command `edgemoe run`."""
    summary = "fetch a model where it is not here, serve it, and chat with it"
    parser = command(subparsers, "run", "edgemoe.cli.run_command:run", summary, texts.RUN)
    parser.add_argument("model", metavar="MODEL", help="a short name, OWNER/NAME, a store, a checkpoint, or `demo`")
    parser.add_argument("--experts", metavar="ENCODING", default="keep", help="of a model that is packed, as in `pack`")
    parser.add_argument("--quant", metavar="NAME", default="", help="of a model to fetch, as in `pull`")
    _chat_options(parser)


def chat(subparsers: Any) -> None:
    """Adds the command `edgemoe chat`."""
    parser = command(subparsers, "chat", "edgemoe.cli.conversation:chat", "hold a conversation", texts.CHAT)
    _chat_options(parser)
    _model_option(parser)


def _model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="one of the daemon's models (default: the first)")


def _chat_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a conversation."""
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="one question instead of a conversation")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--stats", action="store_true", help="show how fast each answer came")
    sampling_options(parser)


AGENTS = ("claude", "codex", "opencode")


def launch(subparsers: Any) -> None:
    """Adds the command `edgemoe launch`."""
    summary = "start a coding agent that uses the running daemon"
    parser = command(subparsers, "launch", "edgemoe.cli.launch_command:run", summary, texts.LAUNCH)
    parser.add_argument("agent", choices=AGENTS, metavar="AGENT", help=f"one of {', '.join(AGENTS)}")
    parser.add_argument("--model", metavar="NAME", help="a served model or an alias (default: the first model)")
    client_options(parser)


def status(subparsers: Any) -> None:
    """Adds the command `edgemoe status`."""
    parser = command(subparsers, "status", "edgemoe.cli.status_command:run", "show the running daemon", texts.STATUS)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--watch", action="store_true", help="keep redrawing")
    parser.add_argument(
        "--cluster", action="store_true", help="the boxes: who leads, who holds what, how the links are"
    )
    client_options(parser)


def top(subparsers: Any) -> None:
    """Adds the command `edgemoe top`."""
    summary = "watch the running daemon in the terminal"
    client_options(command(subparsers, "top", "edgemoe.cli.top:run", summary, texts.TOP))


def dashboard(subparsers: Any) -> None:
    """Adds the command `edgemoe dashboard`."""
    summary = "show the running daemon's page in a browser"
    parser = command(subparsers, "dashboard", "edgemoe.cli.dashboard:run", summary, texts.DASHBOARD)
    parser.add_argument(
        "--port", metavar="PORT", type=int, default=0, help="on this loopback port (default: a free one)"
    )
    parser.add_argument("--no-open", action="store_true", help="print the address, and open nothing")
    client_options(parser)


def proxy(subparsers: Any) -> None:
    """Adds the command `edgemoe proxy`."""
    summary = "lead apps to the boxes of a cluster, and go on with answers when one is gone"
    parser = command(subparsers, "proxy", "edgemoe.cli.proxy_command:run", summary, texts.PROXY)
    parser.add_argument("front", metavar="ADDRESS", nargs="+", help="http://HOST:PORT or unix:PATH; best first")
    parser.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:8090", help="(default: %(default)s)")
    parser.add_argument("--socket", metavar="PATH", help="listen on a Unix socket instead, for its user and group")
    parser.add_argument("--requests", metavar="N", type=int, default=256, help="most at a time (default: %(default)s)")


def reload(subparsers: Any) -> None:
    """Adds the command `edgemoe reload`."""
    summary = "have the running daemon load its forecaster of experts again"
    client_options(command(subparsers, "reload", "edgemoe.cli.client:reload", summary, texts.RELOAD))


def config(subparsers: Any) -> None:
    """Adds the command `edgemoe config`."""
    parser = command(subparsers, "config", "edgemoe.cli.show_config:run", "show the settings in force", texts.CONFIG)
    parser.add_argument("key", metavar="KEY", nargs="?", help="print the value of this one alone")
    parser.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--example", action="store_true", help="print the commented example file instead")
    settings_options(parser)


def service(subparsers: Any) -> None:
    """Adds `edgemoe service` and its actions."""
    handler = "edgemoe.cli.service_command:run"
    found = actions(command(subparsers, "service", handler, "install, uninstall or show the service", texts.SERVICE))
    installed = command(found, "install", handler, "have systemd run the daemon", texts.SERVICE_INSTALL)
    installed.add_argument("--model", metavar="DIR", default="", help="what to serve (default: as in the settings)")
    installed.add_argument("--config", metavar="FILE", default=SERVICE_CONFIG, help="its settings file")
    installed.add_argument("--socket-group", metavar="GROUP", default="edgemoe", help="who may use the socket")
    installed.add_argument("--no-start", action="store_true", help="enable it, but do not start it now")
    summary = "take the service away; settings and stores stay"
    removed = command(found, "uninstall", handler, summary, texts.SERVICE_UNINSTALL)
    shown = command(found, "status", handler, "show what is installed and running", texts.SERVICE_STATUS)
    for parser in (installed, removed):
        parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    for parser in (installed, removed, shown):
        parser.add_argument("--root", metavar="DIR", default="/", help="install under DIR and run no commands")


def replay(subparsers: Any) -> None:
    """Adds the command `edgemoe replay`."""
    summary = "replay a recorded routing trace through cache policies"
    parser = subparsers.add_parser("replay", help=summary, description=f"{summary.capitalize()}.", add_help=False)
    parser.set_defaults(handler="edgemoe.replay:main", passes_arguments=True)


def plan(subparsers: Any) -> None:
    """Adds the command `edgemoe plan`."""
    summary = "tell whether a model fits here, and how fast it will be"
    parser = command(subparsers, "plan", "edgemoe.cli.plan:run", summary, texts.PLAN)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, a packed store, or only a config.json")
    parser.add_argument("--context", type=int, metavar="N", default=0, help="tokens of a sequence (default: 4096)")
    parser.add_argument("--sequences", type=int, metavar="N", default=4, help="sequences at once (default: 4)")
    parser.add_argument("--prompt", type=int, metavar="N", default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--boxes", type=int, metavar="N", default=1, help="boxes like this one (default: 1)")
    parser.add_argument("--box", metavar="NAME:MEMORY", action="append", default=[], help="a box, as in tower:24GB")
    parser.add_argument("--link", metavar="RATE", help="between the boxes (default: 1Gbit/s)")
    parser.add_argument("--disk", metavar="RATE", help="of each box's disk, as in 3GB/s (default: measured here)")
    parser.add_argument(
        "--routing", choices=("usual", "even"), default="usual", help="how unevenly experts are chosen (default: usual)"
    )
    parser.add_argument("--experts", metavar="ENCODING", default="", help="as in `pack`, or `all` (default: some)")
    parser.add_argument("--json", action="store_true", help="for programs")
    settings_options(parser)


def bench(subparsers: Any) -> None:
    """Adds the command `edgemoe bench`."""
    summary = "measure the running daemon at 1, 4 and 16 streams"
    parser = command(subparsers, "bench", "edgemoe.cli.bench:run", summary, texts.BENCH)
    parser.add_argument("--prompt", type=int, metavar="N", default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--tokens", type=int, metavar="N", default=32, help="tokens of an answer (default: 32)")
    parser.add_argument("--json", action="store_true", help="for programs")
    client_options(parser)


def doctor(subparsers: Any) -> None:
    """Adds the command `edgemoe doctor`."""
    summary = "find what is wrong on this box, and say what to do"
    parser = command(subparsers, "doctor", "edgemoe.cli.doctor.doctor_command:run", summary, texts.DOCTOR)
    parser.add_argument("--verify", action="store_true", help="read the whole store and compare every checksum")
    parser.add_argument("--json", action="store_true", help="for a bug report; holds no keys")
    client_options(parser)


def cluster(subparsers: Any) -> None:
    """Adds `edgemoe cluster` and its actions."""
    handler = "edgemoe.cli.cluster_command:run"
    found = actions(command(subparsers, "cluster", handler, "list and change the boxes of a cluster", texts.CLUSTER))
    listed = command(found, "list", handler, "list the boxes, and who votes", texts.CLUSTER_LIST)
    listed.add_argument("--json", action="store_true", help="for programs")
    begun = command(found, "init", handler, "begin a cluster, or have the members of lists agreed", texts.CLUSTER_INIT)
    begun.add_argument("--node", metavar="NAME", help="this box's name, on a box alone (default: the machine's)")
    begun.add_argument("--address", metavar="HOST:PORT", help="where others reach it, on a box alone (port 7540)")
    invited = command(found, "invite", handler, "print an invitation for one more box", texts.CLUSTER_INVITE)
    invited.add_argument("--hours", type=float, metavar="N", default=24.0, help="for which it stands (default: 24)")
    voted = command(found, "vote", handler, "give a box a vote, once it has caught up", texts.CLUSTER_VOTE)
    unvoted = command(found, "unvote", handler, "take a box's vote; it stays in the cluster", texts.CLUSTER_UNVOTE)
    removed = command(found, "remove", handler, "take a box out of the cluster", texts.CLUSTER_REMOVE)
    removed.add_argument("--dead", action="store_true", help="the box is gone for good")
    keyed = command(found, "replace-key", handler, "give this box another key", texts.CLUSTER_REPLACE_KEY)
    recovered = command(found, "recover", handler, "go on when most voters are lost", texts.CLUSTER_RECOVER)
    recovered.add_argument("--yes", action="store_true", help="whatever it costs; without it, the cost is printed")
    for parser in (invited, voted, unvoted, removed):
        parser.add_argument("node", metavar="NODE", help="the box's name")
    for parser in (listed, begun, invited, voted, unvoted, removed, keyed, recovered):
        client_options(parser)


def keygen(subparsers: Any) -> None:
    """Adds the command `edgemoe keygen`."""
    parser = command(
        subparsers, "keygen", "edgemoe.cli.key:keygen", "make this box's key for a cluster of boxes", texts.KEYGEN
    )
    parser.add_argument("file", metavar="FILE", help="the secret key to write (0600); must not exist yet")
    parser.add_argument("--node", metavar="NAME", help="the box's name among the boxes")
    parser.add_argument("--address", metavar="HOST:PORT", help="where the others reach its control channel")


def witness(subparsers: Any) -> None:
    """Adds the command `edgemoe witness`."""
    parser = command(
        subparsers, "witness", "edgemoe.cli.serve_command:witness", "vote among boxes, without a model", texts.WITNESS
    )
    settings_options(parser)


def completion(subparsers: Any) -> None:
    """Adds the command `edgemoe completion`."""
    summary = "print what makes a shell complete these commands"
    parser = command(subparsers, "completion", "edgemoe.cli.completion:run", summary, texts.COMPLETION)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def key(subparsers: Any) -> None:
    """Adds `edgemoe key` and its actions."""
    handler = "edgemoe.cli.key:run"
    found = actions(command(subparsers, "key", handler, "keep the keys of clients that come by TCP", texts.KEY))
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
    """Adds the options for the encodings of a store's weights."""
    parser.add_argument(
        "--experts", metavar="ENCODING[,LAYER=ENCODING...]", default="keep", help="auto, int4, q4_k, int8, bf16, keep"
    )
    parser.add_argument("--dense", metavar="ENCODING", default="keep", help="of others: int4, int8, bf16, f32, keep")
    parser.add_argument("--allow-nonfinite", action="store_true", help="pack weights that are not numbers, too")


GROUPS: tuple[tuple[str, tuple[Callable[[Any], None], ...]], ...] = (
    ("Serve a model", (serve, service, key, config, reload)),
    ("Talk to it", (run, chat, generate, launch)),
    ("See what it does", (status, top, dashboard, bench, doctor)),
    ("Keep models", (plan, pull, pack, models)),
    ("Several boxes", (cluster, keygen, witness, proxy)),
    ("Tools", (completion, replay)),
)
DEFAULT_ACTIONS = {
    "models": "list",
    "cluster": "list",
    "service": "status",
    "key": "list",
}  # of a command given without an action


def build_parser() -> CommandParser:
    """Returns the parser. Each command's namespace has `handler`, the "module:function" that runs it."""
    parser = CommandParser(
        prog="edgemoe",
        usage="edgemoe COMMAND [OPTION ...]",
        epilog=texts.AFTER_OVERVIEW,
        formatter_class=PlainHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"edgemoe {edgemoe.__version__}")
    found = parser.add_subparsers(
        prog="edgemoe", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for _, several in GROUPS:
        for add in several:
            add(found)
    summaries = {name: inner.summary for name, inner in parser.inner()}
    parser.description = "\n\n".join([texts.OVERVIEW, *_groups(summaries)])
    return parser


def add_default_action(words: Sequence[str]) -> list[str]:
    """Returns a command line with the default action added to a command that is given without one."""
    said = list(words)
    if (
        said
        and said[0] in DEFAULT_ACTIONS
        and (len(said) == 1 or (said[1][:1] == "-" and said[1] not in ("-h", "--help")))
    ):
        said.insert(1, DEFAULT_ACTIONS[said[0]])
    return said


def split_behind(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns a command line and, of `edgemoe launch`, the agent's own words, which stand behind `--`."""
    at = words.index("--") if words[:1] == ["launch"] and "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def _groups(summaries: Mapping[str, str]) -> Iterator[str]:
    """Yields the commands of each group with their summaries, a line each."""
    for title, several in GROUPS:
        yield "\n".join([f"{title}:", *(f"  {add.__name__:12}{summaries[add.__name__]}" for add in several)])
