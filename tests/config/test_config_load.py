from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from edgemoe.cli.show_config import as_toml
from edgemoe.config.loading import RENAMED, flatten, load
from edgemoe.config.paths import default_keys, default_socket, fill_paths, search_path
from edgemoe.config.settings import NamedModelSettings, Settings
from edgemoe.errors import ConfigError

BOX = "[cluster]\nnode = 'box'\nkey_file = 'k'\nlisten = '192.0.2.7:7540'\n"
ENV = {"HOME": "/home/ada", "XDG_RUNTIME_DIR": "/run/user/1000"}


def settings_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "edgemoe.toml"
    file.write_text(text)
    return file


def settings_of(tmp_path: Path, text: str = "", *sets: str) -> Settings:
    return load(settings_file(tmp_path, text), sets, env=ENV).settings


def refusal(tmp_path: Path, text: str = "", *sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings_of(tmp_path, text, *sets)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_sizes_and_rates_are_written_with_units(tmp_path: Path) -> None:
    device = '[[device]]\nkind = "emulated"\nexpert_bytes = "1.5 GB"\nlink_bytes_per_s = "8GB/s"\n'
    found = settings_of(tmp_path, f'{device}[memory]\nram_bytes = "12GiB"\n')
    assert found.memory.ram_bytes == 12 << 30
    assert found.device[0].expert_bytes == 1_500_000_000
    assert found.device[0].link_bytes_per_s == 8e9


def test_set_wins_over_the_file_and_every_origin_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "edgemoe.toml"
    file.write_text('# mine\n[engine]\nthreads = 3\n\n[cache]\npolicy = "lru"\n')
    loaded = load(file, ["engine.threads=5", "memory.kv_bytes=64MiB", "model.name=3"], env=ENV)
    assert loaded.settings.engine.threads == 5
    assert loaded.settings.memory.kv_bytes == 64 << 20
    assert loaded.settings.model.name == "3"
    assert loaded.origins["engine.threads"] == "--set"
    assert loaded.origins["cache.policy"] == f"{file}:6"
    assert loaded.origins["api.socket"] == "default"


def test_the_users_file_wins_over_the_machines(tmp_path: Path) -> None:
    machines = (
        '[engine]\nthreads = 1\n[[device]]\nkind = "cuda:1"\n[[device]]\nkind = "cuda:7"\n[cache]\nprefetch = false\n'
    )
    users = '[engine]\nthreads = 2\n[[device]]\nkind = "cuda:2"\n'
    for folder, text in (("etc/edgemoe", machines), ("home/edgemoe", users)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "edgemoe.toml").write_text(text)
    loaded = load(env=ENV | {"XDG_CONFIG_HOME": str(tmp_path / "home")}, root=tmp_path)
    assert loaded.settings.engine.threads == 2
    assert not loaded.settings.cache.prefetch
    assert [device.kind for device in loaded.settings.device] == ["cuda:2"]
    assert len(loaded.files) == 2


def test_devices_are_set_one_by_one(tmp_path: Path) -> None:
    sets = ["device.0.kind=cuda:0", "device.1.kind=cuda:1"]
    assert [device.kind for device in settings_of(tmp_path, "", *sets).device] == ["cuda:0", "cuda:1"]
    assert "counted from 0" in refusal(tmp_path, "", "device.2.kind=cpu")


def test_a_single_device_table_is_a_device(tmp_path: Path) -> None:
    assert settings_of(tmp_path, '[device]\nkind = "cpu"\n').device[0].kind == "cpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nthread = 3", "edgemoe.toml:2: unknown setting 'engine.thread'; did you mean 'engine.threads'?"),
        ("[engine]\nsocket = 'x'", "edgemoe.toml:2: unknown setting 'engine.socket'; did you mean 'api.socket'?"),
        ("threads = 3", "edgemoe.toml:1: unknown setting 'threads'; did you mean 'engine.threads'?"),
        ("[enigne]\nthreads = 3", "edgemoe.toml:2: unknown setting 'enigne.threads'; did you mean 'engine.threads'?"),
        ("[[device]]\nkidn = 'cpu'", "edgemoe.toml:2: unknown setting 'device.0.kidn'; did you mean 'device.0.kind'?"),
        ("device = [1]", "edgemoe.toml:1: unknown setting 'device'"),
        ("[zoo]\nzebra = 1", "edgemoe.toml:2: unknown setting 'zoo.zebra'; see `edgemoe config`"),
        ("[engine]\nthreads = -1", "edgemoe.toml:2: engine.threads = -1: Expected `int` >= 0"),
        ("[engine]\nthreads = 'x'", "edgemoe.toml:2: engine.threads = 'x': Expected `int`, got `str`"),
        ("[memory]\nram_bytes = '12Gb'", "edgemoe.toml:2: memory.ram_bytes = '12Gb': '12Gb' is not a size"),
        (
            "[cache]\npolicy = 'lruu'",
            "edgemoe.toml:2: cache.policy = 'lruu': Invalid enum value 'lruu'; one of learned, two-tier, lru",
        ),
        ("[engine\n", "edgemoe.toml is not TOML"),
        ("[api]\ntcp = '80'\napi_key_file = 'x'", "write HOST:PORT"),
        ("[api]\ntcp = '127.0.0.1:http'\napi_key_file = 'x'", "write HOST:PORT"),
        ("[api]\ntcp = '127.0.0.1:65536'\napi_key_file = 'x'", "a port is 1 to 65535"),
        ("[[device]]\nkind = 'emulated'\nexpert_bytes = 1000", "needs device.0.link_bytes_per_s"),
        ("[[device]]\nkind = 'emulated'\nlink_bytes_per_s = 1000", "needs device.0.expert_bytes"),
        ("[[device]]\nkind = 'cuda:0'\nlink_bytes_per_s = 1000", "link_bytes_per_s is for emulated"),
        ("[[device]]\nkind = 'cpu'\nmemory_bytes_per_s = 1000", "memory_bytes_per_s is for emulated"),
        ("[[device]]\nkind = 'cpu'\nexpert_bytes = 1000", "set memory.ram_bytes instead"),
        ("[[device]]\nkind = 'cuda:0'\n[[device]]\nkind = 'cuda:0'", "listed twice"),
        ("[[device]]\nkind = 'cuda:0'\n[[device]]\nkind = 'cpu'", "must be the only device"),
        ("[record]\nhints = true", "record.dir is not"),
        ("[record]\nhidden = true", "record.hidden is set, but record.dir is not"),
    ],
)
def test_unusable_settings_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_addresses_that_can_be_are_taken(tmp_path: Path) -> None:
    text = "[api]\ntcp = '127.0.0.1:65535'\napi_key_file = 'x'\n"
    assert settings_of(tmp_path, text).api.tcp == "127.0.0.1:65535"
    for listen in ("192.0.2.7:1", "[2001:db8::7]:65535"):
        assert settings_of(tmp_path, BOX, f"cluster.listen={listen}").cluster.listen == listen
    etcd = settings_of(tmp_path, f"{BOX}coordination = 'etcd'\netcd = 'http://192.0.2.9:2379'\n").cluster.etcd
    assert etcd == "http://192.0.2.9:2379"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("coordination = 'etcd'", "name its addresses in cluster.etcd"),
        ("coordination = 'etcd'\netcd = 'http://a:2379,http://b:2379x'", "names 'http://b:2379x'; write URLs"),
        ("coordination = 'etcd'\netcd = 'a:2379'", "names 'a:2379'; write URLs"),
        ("coordination = 'raft'\nleader = 'box'", "raft elects one"),
        ("role = 'decode'\nshare_experts = false", "set cluster.share_experts"),
        ("join = 'a,192.0.2.1:1,x'\npeers_file = 'y'", "drop one"),
        ("address = '192.0.2.7:0'", "cluster.address is '192.0.2.7:0'; write HOST:PORT"),
        ("address = '192.0.2.7:65536'", "write HOST:PORT"),
        ("address = '192.0.2.7:x'", "write HOST:PORT"),
        ("address = ':7540'", "write HOST:PORT"),
    ],
)
def test_a_box_that_cannot_be_one_of_a_cluster_is_refused_by_name(tmp_path: Path, lines: str, message: str) -> None:
    assert message in refusal(tmp_path, BOX + lines)


def test_a_box_of_a_cluster_has_a_name_a_key_and_an_address(tmp_path: Path) -> None:
    for stray in ("key_file = 'k'", "join = 'a,192.0.2.1:7540,key'", "coordination = 'raft'", "role = 'prefill'"):
        name = stray.partition(" ")[0]
        assert f"cluster.{name} is set, but cluster.node is not: name this box" in refusal(
            tmp_path, f"[cluster]\n{stray}"
        )
    urls = "etcd = 'http://a:2379, https://[2001:db8::1]:2379/'"
    assert settings_of(tmp_path, f"{BOX}coordination = 'etcd'\n{urls}").cluster.etcd.startswith("http://a")
    assert "needs cluster.key_file" in refusal(tmp_path, "[cluster]\nnode = 'box'")
    assert "cluster.listen is ''; write HOST:PORT" in refusal(tmp_path, "[cluster]\nnode = 'box'\nkey_file = 'k'")


@pytest.mark.parametrize(
    ("lines", "needs"),
    [
        ("", False),
        ("tcp = '127.0.0.1:80'", True),
        ("ollama_tcp = '11434'", True),
        ("ollama_tcp = '11434'\nollama_keyless = true", False),
        ("tcp = '127.0.0.1:80'\nollama_tcp = '11434'\nollama_keyless = true", True),
    ],
)
def test_every_listener_but_a_keyless_one_needs_keys(tmp_path: Path, lines: str, needs: bool) -> None:
    assert settings_of(tmp_path, f"[api]\napi_key_file = 'x'\n{lines}").api.needs_keys is needs


@pytest.mark.parametrize("key", ["api.cors_origins", "api.aliases"])
def test_lists_can_be_set_on_the_command_line(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    found = settings_of(tmp_path, "", f'{key}=["https://a.example", "b"]')
    assert getattr(getattr(found, section), name) == ("https://a.example", "b")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings in /nowhere\.toml"):
        load(Path("/nowhere.toml"), env=ENV)


def test_set_without_a_value_says_how() -> None:
    with pytest.raises(ConfigError, match=r"write --set section\.key=value"):
        load(sets=["engine.threads"], env=ENV, root=Path("/nowhere"))


def test_paths_follow_the_user_or_the_service() -> None:
    mine = fill_paths(Settings(), ENV)
    assert mine.api.socket == "/run/user/1000/edgemoe.sock"
    assert mine.model.store_dir == "/home/ada/.cache/edgemoe/stores"
    assert mine.service.runtime_dir == "/run/user/1000/edgemoe.run"
    service = ENV | {"RUNTIME_DIRECTORY": "/run/edgemoe", "STATE_DIRECTORY": "/var/lib/edgemoe"}
    served = fill_paths(Settings(), service)
    assert served.api.socket == "/run/edgemoe/edgemoe.sock"
    assert served.model.store_dir == "/var/lib/edgemoe/stores"
    assert default_socket({"XDG_RUNTIME_DIR": "/r"}) == Path("/r/edgemoe.sock")
    assert default_keys(service) == Path("/var/lib/edgemoe/api-keys")
    assert default_keys(ENV) == Path("/home/ada/.config/edgemoe/api-keys")


@pytest.mark.parametrize("home", [{}, {"HOME": ""}])
def test_without_a_home_in_the_environment_the_users_own_is_taken(home: dict[str, str], tmp_path: Path) -> None:
    own = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    assert Path(fill_paths(Settings(), home, tmp_path).model.store_dir) == own / ".cache/edgemoe/stores"
    assert search_path(home)[-1] == own / ".config/edgemoe/edgemoe.toml"


@pytest.mark.skipif(os.geteuid() != 0, reason="root's commands only")
def test_root_looks_where_an_installed_service_does(tmp_path: Path) -> None:
    assert load(env=ENV, root=tmp_path).settings.model.store_dir == "/home/ada/.cache/edgemoe/stores"
    unit = tmp_path / "etc/systemd/system/edgemoe.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    found = load(env=ENV, root=tmp_path).settings
    assert found.model.store_dir == str(tmp_path / "var/lib/edgemoe/stores")
    assert found.api.api_key_file == str(tmp_path / "var/lib/edgemoe/api-keys")


def test_a_path_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    file = tmp_path / "edgemoe.toml"
    file.write_text('[model]\nstore_dir = "~/stores"\nname = "~"\n[record]\ndir = "~/routes"\n')
    found = load(file, ["api.socket=~/a.sock"], env=ENV).settings
    assert (found.model.store_dir, found.record.dir) == ("/home/ada/stores", "/home/ada/routes")
    assert (found.api.socket, found.model.name) == ("/home/ada/a.sock", "~")


def test_every_setting_has_a_flat_name_and_an_origin(tmp_path: Path) -> None:
    loaded = load(env=ENV, root=tmp_path)
    assert set(loaded.origins) == set(flatten(loaded.settings))
    assert flatten(loaded.settings)["device.0.kind"] == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nthreads = " + "[" * 5000, "is not TOML"),
        ("[engine]\nthreads = " + "9" * 5000, "is not TOML"),
        ("[engine]\nthreads = 0x" + "f" * 5000, "engine.threads = an endless int"),
        ("[memory]\nram_bytes = '" + "9" * 400 + "TB'", "is not a size"),
        ("[[device]]\nexpert_bytes = 1\n" * 65, "these settings cannot be"),
        ('[api]\nsocket = "a\\u0000b"', "api.socket"),
        ('[model]\nname = "' + "x" * 5000 + '"', "model.name"),
        ('[cluster]\nnode = "a\\n"', "cluster.node"),
        ('[[device]]\nkind = "cuda:0\\n"', "device.0.kind"),
        ("[api]\nrequest_timeout_s = nan", "api.request_timeout_s"),
        ("[engine]\nmax_queue = inf", "engine.max_queue"),
        ("#" * ((1 << 20) + 1), "too large"),
    ],
)
def test_hostile_files_are_refused_in_a_short_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "edgemoe.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(file, env={})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text", ["device.².kind=cpu", "model.name=\udcff", "api.socket=\0", "engine.threads=" + "9" * 9999]
)
def test_hostile_command_lines_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load(None, [text], env={}, root=tmp_path)


@pytest.mark.parametrize(("key", "most"), [("memory.ram_bytes", 1 << 50), ("engine.max_queue", 1 << 20)])
def test_bounds_hold_at_the_bound(tmp_path: Path, key: str, most: int) -> None:
    assert flatten(load(None, [f"{key}={most}"], env={}, root=tmp_path).settings)[key] == most
    with pytest.raises(ConfigError, match=key):
        load(None, [f"{key}={most + 1}"], env={}, root=tmp_path)


@pytest.mark.parametrize(("key", "former"), [(key, former) for key, names in RENAMED.items() for former in names])
def test_a_former_value_is_refused_with_its_present_name(tmp_path: Path, key: str, former: str) -> None:
    section, _, name = key.partition(".")
    file = tmp_path / "edgemoe.toml"
    file.write_text(f'[{section}]\n{name} = "{former}"\n')
    with pytest.raises(ConfigError, match=f"{file}:2.*what was '{former}' is '{RENAMED[key][former]}'"):
        load(file, env=ENV)
    box = ["cluster.node=a", "cluster.key_file=/k", "cluster.listen=127.0.0.1:7540"]
    load(None, [*box, f"{key}={RENAMED[key][former]}"], env={}, root=tmp_path)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "edgemoe.toml"
    file.write_text(
        '[engine]\nthreads = "many"\n\n[memroy]\nram_bytes = 1\n\n[device]\nkind = "cpu"\nexpert_bytes = "1GiB"\n'
    )
    sets = ["engine.max_sequences=-1", "nonsense", "cache.polcy=lru", "record.hints=true", "api.tcp=here"]
    with pytest.raises(ConfigError) as caught:
        load(file, sets, env=ENV)
    told = str(caught.value).splitlines()
    assert told[0] == "8 settings are wrong:"
    for part in (
        f"{file}:2: engine.threads = 'many'",
        "unknown setting 'memroy.ram_bytes'; did you mean 'memory.ram_bytes'?",
        "--set: engine.max_sequences = -1",
        "--set nonsense: write --set section.key=value",
        "unknown setting 'cache.polcy'; did you mean 'cache.policy'?",
        "record.hints is set, but record.dir is not",
        "device.0 is the cpu, whose experts lie in RAM",
        "api.tcp is 'here'",
    ):
        assert sum(part in line for line in told) == 1, (part, told)


def test_consequences_of_a_wrong_setting_are_not_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        load(sets=["cluster.node=''", "cluster.nod=a", "cluster.role=boht"], env=ENV, root=Path("/nowhere"))
    assert "cluster.role is" not in str(caught.value)


def test_many_faults_are_cut() -> None:
    with pytest.raises(ConfigError, match="500 settings are wrong") as caught:
        load(sets=[f"engine.x{n}=1" for n in range(500)], env=ENV, root=Path("/nowhere"))
    assert "and 480 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 30


MODELS = """[models."qwen3:30b"]
path = "~/q"
pin = true
memory_bytes = "12GiB"

[models.olmoe-1b]
idle_s = 0

[models.plain]
"""


def test_named_models_are_tables_of_their_names(tmp_path: Path) -> None:
    found = settings_of(tmp_path, MODELS, "models.qwen2.5.idle_s=7").models
    assert list(found) == ["qwen3:30b", "olmoe-1b", "plain", "qwen2.5"]
    assert found["qwen3:30b"].pin
    assert found["qwen3:30b"].memory_bytes == 12 << 30
    assert not found["qwen3:30b"].path.startswith("~")
    assert (found["olmoe-1b"].idle_s, found["qwen2.5"].idle_s) == (0, 7)
    assert found["plain"] == NamedModelSettings()


def test_named_models_are_shown_as_they_can_be_read_again(tmp_path: Path) -> None:
    loaded = load(settings_file(tmp_path, MODELS), env=ENV)
    assert loaded.origins["models.qwen3:30b.pin"].endswith(":3")
    again = load(settings_file(tmp_path, "\n".join(as_toml(flatten(loaded.settings), loaded.origins))), env=ENV)
    assert again.settings == loaded.settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models]\npath = 'x'\n", "unknown setting 'models.path'; did you mean 'model.path'"),
        ("[models.a]\npinned = true\n", "unknown setting 'models.a.pinned'; did you mean 'models.NAME.pin'"),
        ("[models.a]\npin = 3\n", "models.a.pin = 3"),
        ("[models.'a b']\npin = true\n", "'a b' is no name"),
        ("[models.a]\n[models.A]\n", "upper and lower case"),
        ("[model]\nname = 'a'\n[models.A]\n", "choose another"),
        ("[api]\naliases = ['a']\n[models.A]\n", "choose another"),
        ("".join(f"[models.m{at}]\n" for at in range(65)), "length"),
    ],
)
def test_wrong_named_models_are_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("stages = 'box:0-3 other:5-7'", "'other:5-7' begins with layer 5, not 4"),
        ("stages = 'other:1-3 box:4-7'", "'other:1-3' begins with layer 1, not 0"),
        ("stages = 'box:0-3 other:3-7'", "'other:3-7' begins with layer 3, not 4"),
        ("stages = 'box:0-3 other:4-2'", "'other:4-2' ends before it begins"),
        ("stages = 'box:0-3 box:4-7'", "box is named twice"),
        ("stages = 'box:0-7'", "it takes two boxes"),
        ("stages = 'box:0-3 other'", "'other' is no BOX:FIRST-LAST"),
        ("stages = 'a:0-3 b:4-7'", "does not name this box, box"),
        ("stages = 'box:0-3 b:4-7'\nshare_experts = false", "set cluster.share_experts=true"),
        ("stages = 'box:0-3 b:4-7'\nrole = 'decode'", 'set cluster.role="both"'),
        ("stages = 'box:0-3 b:4-7'\n[engine]\npreemption = 'park'", 'set engine.preemption="recompute"'),
        ("stages = 'box:0-3 b:4-7'\n[memory]\nkv_disk_bytes = 1", "set memory.kv_disk_bytes=0"),
        ("stages = 'box:0-3 b:4-7'\n[record]\ndir = 'r'", 'set record.dir=""'),
        ("stages = 'box:0-3 b:4-7'\n[cache]\nscoutgate = 's'", 'set cache.scoutgate=""'),
        ("stages = 'box:0-3 b:4-7'\n[model]\npath = 'p'\n[models.other]", "drop [models]"),
    ],
)
def test_stages_that_cannot_work_are_refused(tmp_path: Path, lines: str, words: str) -> None:
    assert words in refusal(tmp_path, f"{BOX}{lines}\n")


@pytest.mark.parametrize(
    ("stated", "form"),
    [
        ('device.0.kind="gpu"', "auto, cpu, emulated or cuda:N"),
        ('cluster.node="A_B"', "1 to 63 small letters, digits and dashes"),
        ('models.-x.path="p"', "1 to 128 letters"),
        ("model.path=a\tb", "text in UTF-8 without control characters"),
        ("model.path=b\udce4d", "text in UTF-8 without control characters"),
    ],
)
def test_the_form_of_a_text_is_told_in_words(tmp_path: Path, stated: str, form: str) -> None:
    said = refusal(tmp_path, "", stated)
    assert form in said
    assert "regex" not in said


@pytest.mark.parametrize(("name", "key"), [("HOME", "model.store_dir"), ("XDG_RUNTIME_DIR", "api.socket")])
def test_a_default_path_that_is_no_text_is_refused_with_its_setting(tmp_path: Path, name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} is by default '/home/b.udce4d/"):
        load(settings_file(tmp_path, ""), env=ENV | {name: "/home/b\udce4d"})
