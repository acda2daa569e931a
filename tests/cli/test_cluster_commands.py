"""keygen, witness and the picture of a cluster."""

from __future__ import annotations

import io
import stat
import tomllib
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import edgemoe.cli
from edgemoe.cli.cluster_command import picture
from edgemoe.cli.status_command import boxes, help_of_others, lending
from edgemoe.cluster.control.admission import read_seeds
from edgemoe.cluster.rpc.keys import generate, load_peers, load_secret
from edgemoe.cluster.rpc.roster import KeptRoster
from edgemoe.config.loading import load
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import ConfigError, ServiceError
from edgemoe.front.peers_list import listed
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named


def test_a_key_is_private_and_its_entry_goes_into_the_list_as_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "etc" / "edgemoe" / "key"
    words = ["keygen", str(file), "--node", "kitchen", "--address", "192.0.2.7:7540"]
    assert edgemoe.cli.main(words) == 0
    printed = capsys.readouterr().out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (tmp_path / "peers.toml").write_text(printed)
    peers = load_peers(tmp_path / "peers.toml")
    assert peers["kitchen"].key == load_secret(file).public.decode()
    assert read_seeds(printed.split("'")[1]) == peers
    assert load_secret(file).secret.decode() not in printed
    assert edgemoe.cli.main(words) == 2
    assert "already" in capsys.readouterr().err


def test_keygen_without_a_name_leaves_it_to_be_filled_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert edgemoe.cli.main(["keygen", str(tmp_path / "key")]) == 0
    assert tomllib.loads(capsys.readouterr().out)["peer"][0]["node"] == "NODE"


@pytest.mark.parametrize("text", ["192.0.2.7:7540", "kitchen,192.0.2.7,KEY", "kitchen,192.0.2.7:7540,short"])
def test_joining_a_box_needs_its_name_address_and_key(text: str) -> None:
    with pytest.raises(ConfigError):
        read_seeds(text)


def test_a_joining_box_states_its_address() -> None:
    settings = ClusterSettings(node="d", listen="0.0.0.0:7540", join="a,192.0.2.7:7540," + "k" * 40)
    with pytest.raises(ConfigError, match=r"cluster\.address"):
        listed(settings)
    (seed,) = listed(msgspec.structs.replace(settings, address="192.0.2.9:7540")).values()
    assert (seed.node, seed.address) == ("a", "192.0.2.7:7540")


def test_a_box_may_have_either_of_its_two_keys_and_no_third(tmp_path: Path) -> None:
    made = [generate(tmp_path / f"key-{n}").public.decode() for n in range(3)]
    entry = f'[[peer]]\nnode = "d"\naddress = "192.0.2.9:7540"\nkey = "{made[0]}"\nnew_key = "{made[1]}"'
    (tmp_path / "peers.toml").write_text(entry)
    for n in range(2):
        settings = ClusterSettings(
            node="d", key_file=str(tmp_path / f"key-{n}"), peers_file=str(tmp_path / "peers.toml")
        )
        assert listed(settings)["d"].keys == (made[0], made[1])
    with pytest.raises(ConfigError, match="belongs to the key"):
        listed(msgspec.structs.replace(settings, key_file=str(tmp_path / "key-2")))


def test_a_witness_needs_an_agreement_to_vote_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "edgemoe.toml"
    config.write_text('[cluster]\nnode = "w"\nkey_file = "k"\nlisten = "127.0.0.1:7540"\n')
    assert edgemoe.cli.main(["witness", "--config", str(config)]) == 2
    assert "raft" in capsys.readouterr().err


def test_a_box_alone_becomes_the_first_of_a_cluster_that_its_settings_need_not_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = tmp_path / "edgemoe.toml"
    config.write_text(f'[model]\nstore_dir = "{tmp_path / "stores"}"\n[cluster]\nreplicas = 3\n')
    words = ["cluster", "init", "--config", str(config)]
    assert edgemoe.cli.main([*words, "--node", "A b", "--address", "192.0.2.7:7540"]) == 2
    assert "node name 'A b'" in capsys.readouterr().err
    assert edgemoe.cli.main([*words, "--node", "kitchen", "--address", "192.0.2.7:7541"]) == 0
    assert "kitchen at 192.0.2.7:7541" in capsys.readouterr().out
    cluster = load(config).settings.cluster
    assert (cluster.node, cluster.listen, cluster.address) == ("kitchen", "0.0.0.0:7541", "192.0.2.7:7541")
    assert (cluster.coordination, cluster.replicas) == ("raft", 3)
    roster = KeptRoster(Path(cluster.state_dir) / "members").roster
    assert roster is not None
    assert roster.voters == ["kitchen"]
    assert roster.boxes[0].key == load_secret(Path(cluster.key_file)).public.decode()
    assert stat.S_IMODE(Path(cluster.key_file).stat().st_mode) == 0o600
    (tmp_path / "cluster/this-box.json").write_text("{")
    with pytest.raises(ConfigError, match="remove it to serve alone"):
        load(config)


def test_settings_of_a_cluster_without_a_name_are_a_mistake_unless_a_command_gives_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.node is not"):
        load(sets=[f"model.store_dir={tmp_path}/stores", "cluster.replicas=3"])
    sets = [f"model.store_dir={tmp_path}/stores", "cluster.replicas=3"]
    assert load(sets=sets, is_named_later=True).settings.cluster.node == ""


def test_the_picture_of_members_has_their_votes_and_invitations() -> None:
    page = io.StringIO()
    box = {"node": "a", "address": "192.0.2.7:7540", "keys": ["k" * 40], "state": "this box", "vote": "yes"}
    found = {"cluster": "c1", "version": 4, "leader": "a", "has_majority": False, "trouble": "no etcd [/]"}
    invited = [{"node": "shed", "until_s": 0.0}]
    Console(width=100, file=page).print(picture(found | {"boxes": [box], "invited": invited}))
    text = page.getvalue()
    for part in ("cluster c1, change 4", "a leads", "no majority", "192.0.2.7:7540", "kkkkkkkk", "shed", "no etcd [/]"):
        assert part in text


def test_the_picture_names_boxes_leader_trouble_and_rates() -> None:
    member = {"homes": 6, "in_ram": 9, "on_disk": 18, "requests": 2, "engine": "boot", "role": "box"}
    member |= {"to_come": 0, "to_go": 0, "serves": "both"}
    health = {
        "cluster": {
            "node": "a",
            "leader": "b",
            "epoch": 7,
            "plan": {"version": 3, "epoch": 6, "digest": "abcdef0123456789"},
            "trouble": "600 bytes missing [/]",
            "members": [
                member | {"node": "a", "state": "here"},
                member
                | {"node": "b", "state": "here", "latency_s": 0.0123, "bytes_per_s": 62.5e6, "to_come": 5, "to_go": 2},
                member | {"node": "x" * 63, "state": "here", "engine": ""},
                member | {"node": "c", "state": "refused", "why": "c serves another model [/]"},
            ],
        }
    }
    calls, seconds = named(names.REMOTE_CALLS, peer="b"), named(names.REMOTE_SECONDS, peer="b")
    page = io.StringIO()
    console = Console(width=80, file=page)
    routed = {named(names.ROUTED, to="here", why="at once"): 7.0, names.OFFERS_OPEN: 3.0, names.OFFER_QUEUE: 5.0}
    routed |= {names.EXPERT_CLUSTERS: 3.0, names.EXPERT_CLUSTER_REQUESTS: 640.0}
    console.print(boxes(health, {calls: 10.0, seconds: 1.0}, {calls: 110.0, seconds: 1.5, **routed}, 2.0))
    text = page.getvalue()
    assert "…" not in text
    heads = ["Box", "State", "Homes", "Moving", "In", "RAM", "On", "disk", "Requests"]
    assert heads in map(str.split, text.splitlines())
    assert ["b", "here", "6", "+5", "-2", "9", "18", "2"] in map(str.split, text.splitlines())
    assert ["b", "12.3", "ms", "62.5", "MB/s", "50.0", "5.0", "ms"] in map(str.split, text.splitlines())
    for part in (
        "b leads in epoch 7",
        "plan 3 of epoch 6, abcdef012345, 5 experts on the way",
        "600 bytes missing",
        "another model",
        "12.3 ms",
        "50.0",
        "5.0",
        "7 here (at once)",
        "3 wait for the leader's word",
        "5 of all boxes",
    ):
        assert part in text
    assert "by expert clusters of 3 engines, fitted to 640 requests" in " ".join(text.split())


def test_a_box_on_its_own_has_no_picture() -> None:
    with pytest.raises(ServiceError, match="on its own"):
        boxes({}, {}, {}, 1.0)


@pytest.mark.parametrize(
    ("alone", "helped", "said"),
    [
        (0, 0, "none needed yet"),
        (7, 0, "none asked: this box alone was faster"),
        (1, 3, "in 75% of the layers that lacked experts, 1.6 times as fast as alone"),
    ],
)
def test_status_tells_how_often_others_helped_and_the_gain(alone: int, helped: int, said: str) -> None:
    plans = {
        named(names.REMOTE_PLANS, tokens="few", plan="alone"): float(alone),
        named(names.REMOTE_PLANS, tokens="few", plan="helped"): float(helped),
        named(names.REMOTE_PLANS, tokens="many", plan="helped"): 100.0,
    }
    assert help_of_others(plans | {named(names.REMOTE_GAIN, tokens="few"): 1.58}) == said


@pytest.mark.parametrize(("lent", "whose"), [(1.0, "the plan"), (0.0, "this box's own requests, which were faster so")])
def test_status_tells_whose_requests_the_memory_follows(lent: float, whose: str) -> None:
    said = lending({names.MEMORY_LENT: lent, names.MEMORY_RATIO: 0.876})
    assert said == f"follows {whose}; steps take 0.88 times as long as expected alone"
