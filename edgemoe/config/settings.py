"""Defines the settings of a daemon, one frozen struct per section of the TOML file.

Sizes are bytes and may be written "12GiB" or "1.5 GB" in TOML; rates are bytes per second ("8GB/s").
0 and "" mean "decide from what the machine has" where a field says so. `config.loading` reads files, and
fills in the paths that depend on the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgemoe.types.bounds import is_loopback, is_port
from edgemoe.types.placement import PlacementPolicy
from edgemoe.types.request import Phases
from edgemoe.types.stages import parse_stages

Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Natural = Annotated[int, Meta(ge=0, le=1 << 24)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Rate = Annotated[float, Meta(ge=0, le=1e15)]
Share = Annotated[float, Meta(ge=0, le=1)]
TEXT, NODE_NAME = r"^[^\x00-\x1f\x7f\ud800-\udfff]*\Z", r"^([a-z0-9][a-z0-9-]{0,62})?\Z"
SERVED_NAME, DEVICE = r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", r"^(auto|cpu|emulated|cuda:[0-9]{1,3})\Z"
Text = Annotated[str, Meta(max_length=4096, pattern=TEXT)]  # a path, an address, a name
NodeName = Annotated[str, Meta(pattern=NODE_NAME)]
ServedName = Annotated[str, Meta(pattern=rf"^{SERVED_NAME}\Z")]
FORMS = {  # of texts, in words
    TEXT: "text in UTF-8 without control characters",
    NODE_NAME: "1 to 63 small letters, digits and dashes, no dash first",
    rf"^{SERVED_NAME}\Z": "1 to 128 letters, digits, dots, dashes, underscores, colons and slashes, no mark first",
    DEVICE: "auto, cpu, emulated or cuda:N",
}


LOOPBACK = "127.0.0.1"
MOST_MODELS = 64  # in `models`


class SettingsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, and an unknown key is an error."""


class ModelSettings(SettingsSection, frozen=True, kw_only=True):
    path: Text = ""  # a packed store or a Hugging Face checkpoint directory; "" is the demo model
    experts: Text = "keep"  # encoding of experts where a checkpoint is packed, as in `edgemoe pack`; or "auto"
    name: Text = ""  # the name that clients use; "" is the directory's name
    store_dir: Text = ""  # where packed stores lie; "" is $XDG_CACHE_HOME/edgemoe, or the service's state directory
    # folders on other disks with copies of packed stores: experts are read from all disks side by side
    mirrors: Annotated[tuple[Text, ...], Meta(max_length=8)] = ()


class NamedModelSettings(SettingsSection, frozen=True, kw_only=True):
    """A further model, which the daemon loads when it is asked for by its name."""

    path: Text = ""  # as model.path; "" is the packed store of that name
    pin: bool = False  # loaded at start, and never unloaded
    idle_s: Seconds = 300.0  # without a request after which it is unloaded; 0: only where another needs its memory
    memory_bytes: Bytes = 0  # of RAM that it may take in all; 0: as much as it needs, at most memory.models_bytes
    vram_bytes: Bytes = 0  # likewise of each GPU


class MemorySettings(SettingsSection, frozen=True, kw_only=True):
    ram_bytes: Bytes = 0  # expert bytes kept in RAM; 0: free memory minus headroom
    kv_bytes: Bytes = 0  # keys and values; 0: enough for max_sequences of typical length, bounded by free memory
    kv_disk_bytes: Bytes = 0  # keys and values kept in model.store_dir across restarts; 0: none
    row_cache_bytes: Bytes = 0  # rows of tables that stay on disk; 0: a 64th of free memory, or 2048 rows
    headroom_bytes: Bytes = 1 << 30  # left free on the host when budgets are worked out
    limit_bytes: Bytes = 0  # of RAM for weights, keys and values of the model together; 0: free memory minus headroom
    models_bytes: Bytes = 0  # of RAM for all loaded models together; 0: free memory minus headroom, at start


class DeviceSettings(SettingsSection, frozen=True, kw_only=True):
    kind: Annotated[str, Meta(pattern=DEVICE)] = "auto"  # auto | cuda:N | cpu | emulated
    expert_bytes: Bytes = 0  # slab for experts; 0: free memory minus headroom (cuda); required for emulated
    limit_bytes: Bytes = 0  # cuda only: of VRAM for all of the model; 0: free memory minus headroom
    link_bytes_per_s: Rate = 0.0  # emulated only: speed of the RAM -> device link
    memory_bytes_per_s: Rate = 0.0  # emulated only: speed at which it reads experts to compute; 0: the processor's own


class EngineSettings(SettingsSection, frozen=True, kw_only=True):
    max_sequences: Count = 64  # running at once
    step_tokens: Count = 512  # token budget of one step, decode and chunked prefill together
    mixed_step_s: Seconds = 0.25  # aim for steps that prefill beside decoding; 0: step_tokens alone decides
    # of a step's duration without the surplus of other principals: the most with it; 0: no bound
    step_stretch: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.5
    max_queue: Count = 256  # waiting requests; beyond it 429
    context_tokens: Natural = 0  # 0: the model's own
    scheduler: Literal["sjf", "fcfs"] = "sjf"  # shortest job first with aging, or first come
    preemption: Literal["recompute", "park"] = "recompute"
    prefix_cache: bool = True
    share_prefixes: bool = False  # among keys and users, who can then tell whether others sent a prompt
    prompt_activations: Literal["int8", "float"] = "int8"  # with encoded weights of bfloat16 models, by AVX-512 VNNI
    kv_cache_dtype: Literal["auto", "int8"] = "auto"  # of keys and values; auto: the model's own
    drafts: Literal["off", "lookup"] = "off"  # speculative decoding: tokens drafted from prompt and output
    cuda_graphs: bool = True  # decode steps as CUDA graphs where every expert is in VRAM or pinned RAM
    threads: Annotated[int, Meta(ge=0, le=4096)] = 0  # compute threads; 0: all cores that the process may use


class CacheSettings(SettingsSection, frozen=True, kw_only=True):
    policy: Literal["learned", "two-tier", "lru"] = "learned"
    containment: bool = True  # RAM holds the experts of VRAM too
    prefetch: bool = True
    state_file: Text = ""  # learned state kept across restarts; "" is beside the store
    scoutgate: Text = ""  # folder of an exported ScoutGate; "" forecasts without one


class ApiSettings(SettingsSection, frozen=True, kw_only=True):
    socket: Text = ""  # "" is $XDG_RUNTIME_DIR/edgemoe.sock, or /run/edgemoe/edgemoe.sock as a service
    socket_group: Text = ""  # group that may use the socket; "" leaves the process's own
    tcp: Text = ""  # HOST:PORT of an optional TCP listener, for clients with a key
    ollama_tcp: Text = ""  # HOST:PORT of a TCP listener for clients of Ollama's API; a port alone is on 127.0.0.1
    ollama_keyless: bool = False  # that listener needs no key; on loopback addresses only
    api_key_file: Text = ""  # "" is beside the user's settings, or in the service's state directory
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 8 << 20
    aliases: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()  # names that mean the served model too; "*" is any
    cors_origins: tuple[str, ...] = ()  # of pages that may call the TCP listener from a browser; "*" is any
    hosts: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()  # further names of this machine, for the page
    max_connections: Count = 1024  # at once; at most half of the files that the process may open
    request_timeout_s: Seconds = 600.0  # that a request may make no progress

    @property
    def ollama_address(self) -> str:
        """Returns `ollama_tcp` as HOST:PORT; "" where there is no such listener."""
        return f"{LOOPBACK}:{self.ollama_tcp}" if self.ollama_tcp.isdecimal() else self.ollama_tcp

    @property
    def needs_keys(self) -> bool:
        """Returns whether a listener asks its clients for keys."""
        return bool(self.tcp or (self.ollama_tcp and not self.ollama_keyless))


class LogSettings(SettingsSection, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class RecordSettings(SettingsSection, frozen=True, kw_only=True):
    dir: Text = ""  # "" records nothing
    max_bytes: Bytes = 1 << 30  # oldest files go first
    hints: bool = False  # also each gate's choice a layer early, for scoutgate.evaluate
    hidden: bool = False  # also the inputs of each layer's gate and experts, and the gate's probabilities


class ServiceSettings(SettingsSection, frozen=True, kw_only=True):
    runtime_dir: Text = ""  # 0700, holds the ipc sockets; "" is beside the API socket
    drain_s: Seconds = 30.0  # SIGTERM: how long running requests may take to finish
    max_restarts: Natural = 5  # engine crashes within five minutes before giving up


Route = Literal["pull", "gimbal", "eldr", "least"]  # docs/cluster.md describes them


class ClusterSettings(SettingsSection, frozen=True, kw_only=True):
    node: NodeName = ""  # this box's name among the boxes; "" is a box on its own
    key_file: Text = ""  # its secret key
    listen: Text = ""  # HOST:PORT of the control channel; the engine's are on the same host
    address: Text = ""  # HOST:PORT where the others reach it; "": as listen, where that names a host
    peers_file: Text = ""  # the list of boxes: node, address and public key of each
    join: Text = ""  # NODE,HOST:PORT,KEY of boxes of a cluster to join, separated by spaces, instead of a list
    state_dir: Text = ""  # epoch, last plan, the voters' etcd; "" is beside the stores
    coordination: Literal["single", "raft", "etcd"] = "single"
    leader: NodeName = ""  # single: the node that leads, for ever; "" is this one
    lease_s: Annotated[float, Meta(ge=0.3, le=60)] = 1.5  # without a sign of life for so long, a leader is deposed
    etcd_program: Text = ""  # raft: the etcd that voters run; "" is the one on PATH
    etcd_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # raft: for the other voters' members; 0: any free one, kept
    etcd: Text = ""  # etcd: URLs, separated by commas
    etcd_prefix: Text = "/edgemoe/"
    etcd_user: Text = ""
    etcd_password_file: Text = ""
    etcd_ca: Text = ""  # PEM files: the trusted authority, and this box's certificate and key
    etcd_cert: Text = ""
    etcd_key: Text = ""
    placement: PlacementPolicy = "rendezvous"  # by which the leader looks for better plans
    replicas: Count = 2  # boxes that hold each expert, in memory or on disk, as far as there is room
    absent_s: Seconds = 30.0  # a box that has been gone for so long loses its homes to others
    may_leave: bool = False  # no expert has its home here, so that this box may come and go
    migrate_s: Seconds = 300.0  # between looks for a better plan; 0: experts move only where they must
    migrate_steps: Count = 3000  # of a box, between reviews of the plan of placement = gimbal, besides migrate_s
    migrate_bytes_per_s: Rate = 32e6  # at which, at most, experts come that have another home meanwhile; 0: no limit
    share_experts: bool = True  # false: boxes pass whole requests on, and compute nothing for each other
    role: Phases = "both"  # prefill: requests go on at a box that decodes; decode: prompts go to one that does not
    route: Route = "pull"  # which engine a request goes to
    calls_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # of the channel for expert calls; 0: any free one
    bulk_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # of the channel for experts themselves
    check_share: Share = 0.01  # of other boxes' answers, and of the time, for computing answers again; 0: no checks
    call_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 5.0  # after which a call to another box has failed
    stages: Text = ""  # BOX:FIRST-LAST of boxes that hold the dense weights of these layers, in order; "": each has all
    stage_timeout_s: Annotated[float, Meta(gt=0, le=150)] = (
        60.0  # after which a step in another box's layers has failed
    )


ALONE = ClusterSettings()


class Settings(SettingsSection, frozen=True, kw_only=True):
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    device: Annotated[tuple[DeviceSettings, ...], Meta(min_length=1, max_length=64)] = (DeviceSettings(),)
    engine: EngineSettings = EngineSettings()
    cache: CacheSettings = CacheSettings()
    api: ApiSettings = ApiSettings()
    log: LogSettings = LogSettings()
    record: RecordSettings = RecordSettings()
    service: ServiceSettings = ServiceSettings()
    cluster: ClusterSettings = ClusterSettings()
    models: Annotated[dict[ServedName, NamedModelSettings], Meta(max_length=MOST_MODELS)] = {}


def faults(settings: Settings, *, is_named_later: bool = False) -> Iterator[str]:
    """Yields every combination of settings that cannot work, with its remedy.

    With `is_named_later`, a command or an invitation will give this box a name in a cluster.
    """
    kinds = [device.kind for device in settings.device]
    for index, device in enumerate(settings.device):
        yield from _device_faults(f"device.{index}", device, kinds)
    yield from _name_faults(settings)
    api, record = settings.api, settings.record
    yield from _listener_faults(api)
    for name, wanted in (("hints", record.hints), ("hidden", record.hidden)):
        if wanted and not record.dir:
            yield f"record.{name} is set, but record.dir is not: name the folder to record to, or drop it"
    if settings.cluster.node or not is_named_later:
        yield from _cluster_faults(settings.cluster)
    if settings.cluster.stages and settings.cluster.node:
        yield from _stage_faults(settings)
    if settings.cluster.role != "both" and not settings.engine.prefix_cache:
        yield f'cluster.role is "{settings.cluster.role}": hand-overs need engine.prefix_cache'


def _name_faults(settings: Settings) -> Iterator[str]:
    """Yields names of models that clients could not tell apart: case does not count."""
    others = {name.lower() for name in (settings.model.name, *settings.api.aliases) if name}
    if settings.cluster.node and settings.models and not settings.model.path:
        yield "cluster.node is set, and [models], but not model.path: name the model that the boxes share there"
    seen: dict[str, str] = {}
    for name in settings.models:
        if name.lower() in others:
            yield f"models.{name} is a name of the model in [model], too (model.name, api.aliases): choose another"
        elif (other := seen.setdefault(name.lower(), name)) != name:
            yield f"models.{name} and models.{other} differ in upper and lower case only: choose another name"


def _listener_faults(api: ApiSettings) -> Iterator[str]:
    for name, value, address, example in (
        ("api.tcp", api.tcp, api.tcp, "127.0.0.1:8080"),
        ("api.ollama_tcp", api.ollama_tcp, api.ollama_address, "127.0.0.1:11434"),
    ):
        host, _, port = address.rpartition(":")
        if value and not (host and is_port(port)):
            yield f'{name} is {value!r}; write HOST:PORT, as in "{example}"; a port is 1 to 65535'
    if api.ollama_keyless and not api.ollama_tcp:
        yield "api.ollama_keyless is set, but api.ollama_tcp is not: name the port, or drop it"
    elif api.ollama_keyless and not is_loopback(api.ollama_address.rpartition(":")[0]):
        yield (
            f"api.ollama_keyless is set, but api.ollama_tcp is {api.ollama_tcp!r}, which other machines "
            "can reach: without keys anybody there could use the model; listen on 127.0.0.1, or give clients a key"
        )


def _cluster_faults(cluster: ClusterSettings) -> Iterator[str]:
    if not cluster.node:
        if stray := [key for key, value in msgspec.structs.asdict(cluster).items() if value != getattr(ALONE, key)]:
            yield f"cluster.{stray[0]} is set, but cluster.node is not: name this box"
        return
    if not cluster.key_file:
        yield "cluster.node needs cluster.key_file; `edgemoe keygen FILE` writes one"
    for key in ("listen", "address"):
        value = getattr(cluster, key)
        host, _, port = value.rpartition(":")
        if (value or key == "listen") and not (host and is_port(port)):
            yield f'cluster.{key} is {value!r}; write HOST:PORT, as in "192.0.2.7:7540"; a port is 1 to 65535'
    if cluster.join and cluster.peers_file:
        yield "cluster.join stands in for cluster.peers_file: the other boxes tell the list; drop one"
    if cluster.coordination == "etcd" and not cluster.etcd:
        yield 'cluster.coordination is "etcd"; name its addresses in cluster.etcd'
    for url in filter(None, cluster.etcd.split(",")):
        if not re.fullmatch(
            r"https?://[^/:@\s]+(:[0-9]{1,5})?/?|https?://\[[0-9a-fA-F:]+\](:[0-9]{1,5})?/?", url.strip()
        ):
            yield f'cluster.etcd names {url.strip()!r}; write URLs, as in "http://192.0.2.7:2379"'
    if cluster.role != "both" and not cluster.share_experts:
        yield f'cluster.role is "{cluster.role}": engines hand requests over, set cluster.share_experts'
    if cluster.leader and cluster.coordination != "single":
        yield f'cluster.leader is for coordination = "single"; {cluster.coordination} elects one'


def _stage_faults(settings: Settings) -> Iterator[str]:
    """Yields settings that cannot work where the model's layers are divided over boxes."""
    cluster = settings.cluster
    try:
        stages = parse_stages(cluster.stages)
    except ValueError as error:
        yield f'cluster.stages: {error}; write "box-a:0-23 box-b:24-47"'
        return
    if cluster.node not in [stage.node for stage in stages]:
        yield f"cluster.stages does not name this box, {cluster.node}: give it a range of layers"
    for is_wrong, remedy in (
        (not cluster.share_experts, "cluster.share_experts=true"),
        (cluster.role != "both", 'cluster.role="both"'),
        (settings.engine.preemption != "recompute", 'engine.preemption="recompute"'),
        (settings.memory.kv_disk_bytes, "memory.kv_disk_bytes=0"),
        (settings.record.dir, 'record.dir=""'),
        (settings.cache.scoutgate, 'cache.scoutgate=""'),
    ):
        if is_wrong:
            yield f"cluster.stages: boxes with a part of the layers cannot do this yet; set {remedy}"
    if settings.models:
        yield "cluster.stages: a box with a part of the layers serves no further models yet; drop [models]"


def _device_faults(name: str, device: DeviceSettings, kinds: list[str]) -> Iterator[str]:
    if device.kind == "emulated":
        for field in ("expert_bytes", "link_bytes_per_s"):
            if not getattr(device, field):
                yield f"{name} is emulated and needs {name}.{field}, as there is nothing to measure"
    for field in ("link_bytes_per_s", "memory_bytes_per_s") if device.kind != "emulated" else ():
        if getattr(device, field):
            yield f"{name}.{field} is for emulated devices; drop it, {device.kind} has its own speed"
    if device.limit_bytes and device.kind in ("cpu", "emulated"):
        yield f"{name}.limit_bytes is for GPUs; {device.kind} uses RAM: set memory.limit_bytes instead"
    if device.kind == "cpu" and device.expert_bytes:
        yield f"{name} is the cpu, whose experts lie in RAM: set memory.ram_bytes instead"
    if device.kind != "emulated" and kinds.count(device.kind) > 1:
        yield f"{name}: {device.kind} is listed twice"
    if len(kinds) > 1 and device.kind in ("auto", "cpu"):
        yield f"{name} is {device.kind}, which must be the only device; name each one (cuda:N)"
