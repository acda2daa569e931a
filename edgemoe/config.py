"""The settings of a daemon, one frozen struct per section of the TOML file. Imports nothing of ours but errors.

Sizes are bytes and may be written "12GiB" or "1.5 GB" in TOML; rates are bytes per second ("8GB/s").
0 means "decide from what the machine has" where a field says so.
"""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, and an unknown key is an error."""


class ModelSettings(Section):
    path: str = ""  # a packed store or a Hugging Face checkpoint directory; "" is the demo model
    name: str = ""  # what clients call it; "" is the directory's name
    store_dir: str = ""  # where packed stores lie; "" is $XDG_CACHE_HOME/edgemoe (or the service's state directory)


class MemorySettings(Section):
    ram_bytes: int = 0  # expert bytes kept in RAM; 0: free memory minus headroom
    kv_bytes: int = 0  # keys and values; 0: enough for max_sequences of typical length, bounded by what is free
    headroom_bytes: int = 1 << 30  # left free on the host when budgets are worked out
    vram_headroom_bytes: int = 1 << 30  # left free on each GPU


class DeviceSettings(Section):
    kind: str = "auto"  # auto | cuda:N | cpu | emulated
    expert_bytes: int = 0  # slab for experts; 0: what is free minus headroom (cuda); required for emulated
    link_bytes_per_s: float = 0.0  # emulated only: speed of the RAM -> device link


class EngineSettings(Section):
    max_sequences: int = 64  # running at once
    step_tokens: int = 512  # token budget of one step, decode and chunked prefill together
    max_queue: int = 256  # waiting requests; beyond it 429
    context_tokens: int = 0  # 0: the model's own
    scheduler: str = "linear"  # linear | gimbal | fcfs
    aging_tokens_per_s: float = 1500.0  # linear aging: tokens of prefill that a second of waiting makes up for
    aging_threshold_s: float = 5.0  # gimbal: age at which a request goes first
    output_reserve: float = 0.25  # share of the expected remaining output reserved in KV per running request
    preemption: str = "recompute"  # recompute | park
    prefix_cache: bool = True
    threads: int = 0  # compute threads; 0: all cores that the process may use


class CacheSettings(Section):
    policy: str = "lru"  # lru | lfu | lfru | ewma | paper | full
    containment: bool = True  # what is in VRAM is in RAM too
    prefetch: bool = True
    hysteresis: float = 0.1
    state_file: str = ""  # learned state kept across restarts; "" is beside the store


class ApiSettings(Section):
    socket: str = ""  # "" is $XDG_RUNTIME_DIR/edgemoe.sock, or /run/edgemoe/edgemoe.sock as a service
    socket_group: str = ""  # group that may use the socket; "" leaves the process's own
    tcp: str = ""  # HOST:PORT of an optional TCP listener; needs api_key_file
    api_key_file: str = ""
    max_body_bytes: int = 8 << 20
    request_timeout_s: float = 600.0


class LogSettings(Section):
    level: str = "info"  # debug | info | warning | error
    format: str = "text"  # text | json


class RecordSettings(Section):
    dir: str = ""  # "" records nothing
    max_bytes: int = 1 << 30  # oldest files go first
    file_bytes: int = 64 << 20


class ServiceSettings(Section):
    runtime_dir: str = ""  # 0700, holds the ipc sockets; "" is beside the API socket
    drain_s: float = 30.0  # SIGTERM: how long running requests may take to finish
    max_restarts: int = 5  # engine crashes within restart_window_s before giving up
    restart_window_s: float = 300.0


class Settings(Section):
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    device: tuple[DeviceSettings, ...] = (DeviceSettings(),)
    engine: EngineSettings = EngineSettings()
    cache: CacheSettings = CacheSettings()
    api: ApiSettings = ApiSettings()
    log: LogSettings = LogSettings()
    record: RecordSettings = RecordSettings()
    service: ServiceSettings = ServiceSettings()
