"""Holds the texts that each command's help shows below its options: examples and advice."""

from __future__ import annotations

import textwrap

from edgemoe.store.hub_names import HUB_NAMES

OVERVIEW = (
    "Serve Mixture-of-Experts language models larger than the memory of this machine, to any OpenAI client on it."
)

AFTER_OVERVIEW = """\
First steps:
  edgemoe run qwen3:30b --experts int4        fetch a model, serve it, and chat with it
  edgemoe serve --model ./Qwen3-30B-A3B       a Hugging Face checkpoint; packed on first use
  edgemoe chat                                talk to it, from another terminal

`edgemoe COMMAND --help` has options and examples; `edgemoe completion bash` lets the shell complete them.
"""

SERVE = """\
Examples:
  edgemoe serve --model ./Qwen3-30B-A3B
  edgemoe serve --model ./Qwen3-30B-A3B --port 8080             by TCP, too; `edgemoe key show` has the key
  edgemoe serve --model ./Mixtral-8x7B --set memory.ram_bytes=48GiB --set device.0.kind=cuda:0
  edgemoe serve --set device.0.kind=emulated --set device.0.expert_bytes=4MiB --set device.0.link_bytes_per_s=2GB/s

Memory budgets that are not set are worked out from what is free, and printed. SIGTERM, Ctrl-C or the end of its
terminal lets running requests finish (service.drain_s); a second one does not.
"""

PACK = """\
A store holds each expert as one aligned run that is one read from disk. A pack that was interrupted goes on where
it stopped; packing a finished store again verifies it and mends what is damaged.

With --experts and --dense weights are stored in 8 or 4 bits, which is half and a quarter of what memory, links and
disk have to hold and move. "keep" leaves them as the checkpoint has them. --experts auto chooses by the memory of this
box: the fewest experts to fetch, and of encodings with as few, the least loss; it prints the choice. --experts takes
other encodings for some layers of experts, by number (from 0), "first" and "last". --check says what that costs on a
text: the divergence of what the store and the checkpoint foretell.

Shards (model-00001-of-00016.safetensors ...) can be packed while others are still being fetched: --wait takes each as
it arrives. --delete-shards deletes each one that is packed, so that the disk never has to hold both checkpoint and
store; alone it packs what is there and says what is missing. config.json and the index have to be there first.

Examples:
  edgemoe pack ./Qwen3-30B-A3B /srv/models/qwen3-30b
  edgemoe pack ./Qwen3-30B-A3B --experts int4 --dense int8
  edgemoe pack ./Qwen3-30B-A3B --experts int4,first=int8,last=int8 --check ./notes.txt
  edgemoe pack ./Qwen3-30B-A3B --experts int4 --wait --delete-shards
"""

PULL = """\
Fetches safetensors, configuration, tokenizer and templates, verifies each file by the hub's hash, and packs every shard
while the next one comes; a packed shard is deleted, so that the disk needs room for the store and one shard. Run again
after an interruption it goes on where it was. The token is HF_TOKEN or the one of `hf auth login`; HF_ENDPOINT names
another hub. --experts and --dense are those of `edgemoe pack`.

With --from-peers the store comes from the boxes in this box's list of peers that serve it: pieces from several at once,
each compared with its checksum. A daemon can serve what has come once the dense weights are there (docs/cluster.md).

Of a repository with GGUF files one is fetched, which --quant names where there are several.

Examples:
  edgemoe pull Qwen/Qwen3-30B-A3B
  edgemoe pull Qwen/Qwen3-30B-A3B-GGUF --quant Q4_K_M
  edgemoe pull Qwen/Qwen3-30B-A3B --experts int4 --dense int8
  edgemoe pull Qwen/Qwen3-30B-A3B --revision refs/pr/5
  edgemoe pull --from-peers Qwen3-30B-A3B-int4
  edgemoe pull --from-peers Qwen3-30B-A3B-int4 --rate 40MB/s
"""

MODELS = """\
Without an action it lists them. Examples:
  edgemoe models
  edgemoe models verify Qwen3-30B-A3B
"""

MODELS_LIST = """\
Examples:
  edgemoe models list
  edgemoe models list --json
"""

MODELS_VERIFY = """\
Prints what is damaged and ends with 1 if anything is; packing the checkpoint again mends it. Example:
  edgemoe models verify Qwen3-30B-A3B
"""

MODELS_REMOVE = """\
Gives the disk space back. A store that is being served or packed stays. Example:
  edgemoe models remove Qwen3-30B-A3B
"""

GENERATE = """\
Examples:
  edgemoe generate "def fibonacci(n):" --max-tokens 64
  git diff | edgemoe generate --temperature 0
The prompt is continued as it is; `edgemoe chat` uses the model's chat template. Ctrl-C cancels the request.
"""

RUN = """\
Examples:
  edgemoe run demo                        the small model that is part of edgemoe
  edgemoe run qwen3:30b --experts int4    fetched, packed in 4 bits, served, and a conversation
  edgemoe run unsloth/Qwen3-30B-A3B-GGUF --quant Q4_K_M
  edgemoe run ./Qwen3-30B-A3B "What is a monad?"

The daemon that it starts answers other clients, too, and ends with the conversation. `edgemoe serve` keeps one running.
Where a daemon with this model runs, the conversation is with that one. `edgemoe plan` tells beforehand how fast a model
will be. Short names (docs/models.md has their repositories):
"""
RUN += textwrap.fill(", ".join(HUB_NAMES), 110)

CHAT = """\
Examples:
  edgemoe chat                            a conversation; /help shows its commands, Ctrl-D ends it
  edgemoe chat "What is a monad?"         one question, one answer
  edgemoe chat --system "Answer in French" --temperature 0.7
  edgemoe chat --stats "Name a river"     and how many tokens a second
Ctrl-C stops the answer that is being given. Lines that were typed are kept in ~/.local/state/edgemoe/chat-history.
"""

LAUNCH = """\
Examples:
  edgemoe launch claude                   Claude Code with the served model
  edgemoe launch codex -- exec "explain this repository"
  edgemoe launch opencode -- run "write a test for parse()"
Words behind -- are the agent's own. It gets a loopback port and a token for this once, the model and its context
length; its files stay as they are. docs/clients.md has the settings for other machines and other agents.
"""

STATUS = """\
Examples:
  edgemoe status
  edgemoe status --watch                  redrawn every two seconds until Ctrl-C
  edgemoe status --cluster                the other boxes
  edgemoe status --json | jq .health
"""

TOP = """\
Speeds, tiers, requests with their phase and, in a cluster, the boxes; redrawn each second. `q` ends it.

Example:
  edgemoe top
"""

DASHBOARD = """\
Examples:
  edgemoe dashboard                       a port and a token for this once; both are gone after Ctrl-C
  edgemoe dashboard --no-open --port 8088
A daemon that listens by TCP (`edgemoe serve --port`) shows the same page there, for its key.
"""

PROXY = """\
Run it on the box of the apps. It tries the addresses in order, and holds each client's stream: if a box is gone or
stands still, another one goes on behind the tokens that came. Keys are passed on; the boxes check them.

Examples:
  edgemoe proxy http://192.0.2.7:8080 http://192.0.2.8:8080
  edgemoe proxy --listen 0.0.0.0:8090 http://192.0.2.7:8080 http://192.0.2.8:8080
  edgemoe proxy --socket /run/user/1000/edgemoe.sock unix:/run/edgemoe/edgemoe.sock http://192.0.2.8:8080
"""

RELOAD = """\
The daemon reads the export in cache.scoutgate again; requests go on meanwhile. An export that is damaged or for
another model is refused, and the one in use stays. SIGHUP does the same; its answer is in the log.

Example:
  edgemoe reload
"""

CONFIG = """\
Examples:
  edgemoe config                          every setting in force and where it comes from
  edgemoe config api.socket               one of them, for scripts
  edgemoe config --set cache.policy=lfu --changed
  edgemoe config --example > edgemoe.toml
Settings are read from /etc/edgemoe/edgemoe.toml, then ~/.config/edgemoe/edgemoe.toml, then --set.
"""

SERVICE = """\
Without an action it shows the status. Examples:
  sudo edgemoe service install --model /srv/models/qwen3-30b
  edgemoe service status
"""

SERVICE_INSTALL = """\
Writes systemd units, a user and a settings file, then starts it. Examples:
  sudo edgemoe service install --model /srv/models/qwen3-30b
  edgemoe service install --dry-run       say what would be done

The socket is /run/edgemoe/edgemoe.sock. Members of its group, "edgemoe" unless --socket-group names another, may
use the model; nobody else may: sudo usermod --append --groups edgemoe USER, who then logs in again.
"""

SERVICE_UNINSTALL = """\
Settings and packed stores stay. Example:
  sudo edgemoe service uninstall
"""

SERVICE_STATUS = """\
Example:
  edgemoe service status
"""

CLUSTER = """\
A cluster's members and voters are agreed between its voters, and every box keeps the list. docs/cluster.md has more.

Examples:
  edgemoe cluster list
  edgemoe cluster vote attic
  edgemoe cluster remove shed --dead
"""

CLUSTER_LIST = """\
Prints a line for each box. The exit status is 1 while no majority of the voters answers.

Example:
  edgemoe cluster list
"""

CLUSTER_INVITE = """\
The token holds addresses of boxes, their keys, the name of the new box and a key of its own. It lets in one box, once.

Example:
  edgemoe cluster invite attic
On the new box, the token that it prints goes behind `edgemoe serve --invite`.
"""

CLUSTER_INIT = """\
On a box alone, it becomes the first box of a cluster, with the only vote, when its daemon starts again.
Boxes that list each other in files become members by agreement, once and for all; all boxes go on serving. From then
on the lists are not needed: `edgemoe cluster` changes the members.

Example:
  edgemoe cluster init --node kitchen --address 192.0.2.7:7540
"""

CLUSTER_VOTE = """\
Votes are given and taken one at a time. A box that gets one runs etcd (Debian's etcd-server) and first catches up.
Three voters stand the death of one, five that of two.

Example:
  edgemoe cluster vote attic
"""

CLUSTER_UNVOTE = """\
The box serves on. A vote is not taken where the other voters would be no majority.

Example:
  edgemoe cluster unvote attic
"""

CLUSTER_REMOVE = """\
A box that runs first gives its experts to the others, as far as they have room. It is then let in no more, and serves
alone. Say --dead for a box that does not answer and will not come back.

Example:
  edgemoe cluster remove shed
"""

CLUSTER_REPLACE_KEY = """\
The other boxes accept both keys until this box comes with the new one, at its next start. Then only that one is valid.

Example:
  edgemoe cluster replace-key
"""

CLUSTER_RECOVER = """\
For the last box of a cluster whose other voters will not come back. Where a majority still answers, it is refused.

Example:
  edgemoe cluster recover --yes
"""

KEYGEN = """\
Example:
  edgemoe keygen /etc/edgemoe/key --node kitchen --address 192.0.2.7:7540
What is printed goes into the list of peers of every box; the file stays on this one. docs/cluster.md has more.
"""

WITNESS = """\
With two boxes, neither can tell whether the other has died or only the link. A witness on any third machine votes
with them; it needs etcd (Debian's etcd-server), but no model, no GPU and little memory. It reads the [cluster] section:
node, key_file, listen, peers_file, coordination = "raft".

Example:
  edgemoe witness --config /etc/edgemoe/edgemoe.toml
"""

COMPLETION = """\
Examples, for the shells that are started from then on:
  edgemoe completion bash > ~/.local/share/bash-completion/completions/edgemoe
  edgemoe completion zsh > "${fpath[1]}/_edgemoe"
  edgemoe completion fish > ~/.config/fish/completions/edgemoe.fish
"""

KEY = """\
Clients of a TCP port give a key; those of the Unix socket need none. Keys lie in api.api_key_file (0600), which the
daemon reads again whenever it changes. Without an action they are listed. Examples:
  edgemoe key
  edgemoe key new laptop
"""

KEY_LIST = """\
Examples:
  edgemoe key list
  edgemoe key list --json
"""

KEY_NEW = """\
Prints the key. With --at-once, a request beyond the limit is refused with 429 until one has ended. Examples:
  edgemoe key new laptop
  edgemoe key new kiosk --at-once 2
"""

KEY_SHOW = """\
Examples:
  edgemoe key show
  export OPENAI_API_KEY=$(edgemoe key show laptop)
"""

KEY_REMOVE = """\
Requests that run go on; the next one is refused. Example:
  edgemoe key remove laptop
"""

PLAN = """\
Needs no weights: a config.json is enough. Memory is divided as `edgemoe serve` would divide it now; times are
measured on layers of the model's own shapes with random weights, and how many experts are missing is read from a
curve that other models' routing gave. It takes up to a minute, and says on standard error what it does. Where the
time does not suffice, as on a busy machine that has to compile kernels, the limit by the rates of memory and disk is
shown: "< 3.1". With --boxes a layer's missing experts are computed by other boxes or read from the disk, as is
faster, and the last line compares this with one box. A GPU's speed is not foretold. Some encodings are shown;
--experts all shows every one, --experts q4_k+q6_k that one. The last lines name the choice of --experts auto. Where
the dense weights do not fit a box, the layers are divided over several, by the memory that --box names for each.

Examples:
  edgemoe plan ./Qwen3-30B-A3B
  edgemoe plan ./config.json --context 32768 --sequences 8
  edgemoe plan ./Qwen3-30B-A3B --boxes 3 --link 1Gbit/s --disk 3GB/s --set memory.ram_bytes=12GiB
  edgemoe plan ./DeepSeek-V3 --box tower:24GB --box attic:24GB --box laptop:16GB
"""

BENCH = """\
Prompts are random tokens, and answers are sampled, so that no cache knows them. The figures to quote in a bug report.
Beside them stands what this machine allows, as `edgemoe plan` reckons, and what limits it: the least time of a step
with memory divided as the daemon has it, measured while the daemon has nothing to do.

Examples:
  edgemoe bench
  edgemoe bench --prompt 2000 --tokens 100
  edgemoe bench --json > bench.json
"""

DOCTOR = """\
Looks at versions, GPU, memory, disk, clock, stores, keys, the daemon and the other boxes, and ends with 1 if anything
fails. The speed of the disk takes a file of 256 MiB for a moment.

Examples:
  edgemoe doctor
  edgemoe doctor --verify
  edgemoe doctor --json > doctor.json
"""
