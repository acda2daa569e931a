"""Models are downloaded from a hub on this machine: packed on arrival, continued after a death, verified, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file
from support.front_kit import byte_level_tokenizer
from support.gguf_files import gguf_checkpoint, write_gguf
from support.hub import LocalHub, Repository, local_hub
from support.waiting import wait_until

from edgemoe.errors import HubError, StoreInUse
from edgemoe.store import hub as hub_module
from edgemoe.store.catalog import find_stores, remove, verify
from edgemoe.store.hub import Hub, RepositoryListing, check_names
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import JOURNAL, SHARDS, Manifest
from edgemoe.store.packer import AS_IT_IS, pack
from tools.attacking.hostile_hub import REPLIES, hostile_hub

Make = Callable[..., Path]
NAME = "makers/tiny-moe"
CHUNK_BYTES = 10 << 20  # written at once by the hub's library
SHAPE = {"hidden_size": 256, "moe_intermediate_size": 448, "num_hidden_layers": 2, "num_experts": 8}
# Runs several command lines in one process, each with settings of the environment of its own.
RUNS = """
import contextlib, io, json, os, sys
from edgemoe.cli import main
for env, words in json.loads(sys.stdin.read()):
    os.environ.update(env)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


class Done(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


class Puller:
    """A box that downloads from the hub."""

    def __init__(self, hub: LocalHub, directory: Path) -> None:
        self.hub, self.stores = hub, directory / "stores"
        home = directory / "home"
        home.mkdir()
        self.env = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HOME": str(home), "HF_TOKEN": ""}

    def words(self, *words: str) -> list[str]:
        return ["pull", *words, "--set", f"model.store_dir={self.stores}"]

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "edgemoe", *self.words(*words)]
        return subprocess.Popen(command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *lines: tuple[str, ...], tokens: tuple[str, ...] = ()) -> list[Done]:
        """Runs downloads one after the other, each with its token."""
        tokens = tokens or ("",) * len(lines)
        given = json.dumps(
            [[{"HF_TOKEN": token}, self.words(*line)] for line, token in zip(lines, tokens, strict=True)]
        )
        command = [sys.executable, "-c", RUNS]
        done = subprocess.run(command, input=given, env=self.env, text=True, capture_output=True, timeout=90)
        assert done.returncode == 0, done.stderr
        return [Done(*json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as found:
        yield found


@pytest.fixture
def puller(hub: LocalHub, tmp_path: Path) -> Puller:
    return Puller(hub, tmp_path)


@pytest.fixture(scope="session")
def published(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three shards, two of them longer than one write, and files that no model needs."""
    whole, folder = checkpoint(**SHAPE), tmp_path_factory.mktemp("published") / "tiny"
    shutil.copytree(whole, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    layers = [{n: t for n, t in tensors.items() if f"layers.{k}." in n} for k in (0, 1)]
    rest = {n: t for n, t in tensors.items() if ".layers." not in n}
    weight_map = {}
    for number, part in enumerate((*layers, rest), start=1):
        name = f"model-0000{number}-of-00003.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "modeling_tiny.py").write_text("raise SystemExit('this was run')")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"another layout")
    assert (folder / "model-00001-of-00003.safetensors").stat().st_size > CHUNK_BYTES
    return folder


def digest_of(folder: Path, directory: Path, wanted: WantedEncodings = AS_IT_IS) -> str:
    return pack(folder, directory / "expected", wanted=wanted).digest


def test_a_repository_is_packed_as_it_comes_and_nothing_else_of_it_is_fetched(
    hub: LocalHub, puller: Puller, published: Path, tmp_path: Path
) -> None:
    hub.repositories[NAME] = repository = Repository(published, private=True)
    repository.more = [{"rfilename": name, "size": 3, "blobId": "0" * 40} for name in ("../../evil.safetensors", "/a")]
    words = (NAME, "--experts", "int4")
    (first,) = puller.run(words, tokens=(hub.token,))
    assert first.code == 0, first.err
    store = Path(first.out.strip())
    (store / SHARDS).mkdir()  # as if the first was killed right after the manifest
    (store / JOURNAL).write_text("{}")
    (again,) = puller.run(words, tokens=(hub.token,))
    assert again.code == 0, again.err
    assert not [path for path in (store / SHARDS, store / JOURNAL) if path.exists()]
    assert again.out == first.out
    assert store.name.startswith("tiny-moe-int4-v2-")
    assert find_stores(puller.stores) == [store]
    assert verify(store) == []
    assert Manifest.load(store).digest == digest_of(published, tmp_path, WantedEncodings.parse("int4", "keep"))
    fetched = [each.path.split("/")[-1] for each in hub.asked if "/resolve/" in each.path]
    assert {name for name in fetched if fetched.count(name) > 2} == set(), (
        "twice: at the hub, and where it redirects to"
    )
    assert not {"modeling_tiny.py", "pytorch_model.bin", "evil.safetensors", "a"} & set(fetched)
    assert "tokenizer.json" in fetched
    assert not [each for each in hub.asked if each.path.startswith("/cdn/") and each.token], "the token stays here"
    assert not [path for path in (puller.stores / ".hub").rglob("*") if path.is_file()]
    assert not (tmp_path / "evil.safetensors").exists()


def test_a_pull_killed_in_the_middle_of_a_shard_goes_on_there(
    hub: LocalHub, puller: Puller, published: Path, tmp_path: Path
) -> None:
    hub.repositories[NAME] = Repository(published)
    shard = "model-00002-of-00003.safetensors"
    hub.stop_after[shard] = CHUNK_BYTES
    with puller.start(NAME) as process:
        wait_until(hub.stopped.is_set)
        parts = puller.stores / ".hub"
        wait_until(lambda: [part.stat().st_size for part in parts.rglob(f"{shard}.*.part")] == [CHUNK_BYTES])
        wait_until(lambda: any(puller.stores.glob("tiny-moe-v2-*/shards/model-00001*.json")))
        wait_until(lambda: not any(parts.rglob("model-00001-of-00003.safetensors")))
        process.send_signal(signal.SIGKILL)
    hub.stop_after.clear()
    hub.go_on.set()
    (done,) = puller.run((NAME,))
    assert done.code == 0, done.err
    assert [each.start for each in hub.fetched(shard) if each.path.startswith("/cdn/")] == [0, CHUNK_BYTES]
    first = [each for each in hub.fetched("model-00001-of-00003.safetensors") if each.path.startswith("/cdn/")]
    assert len(first) == 1, "what was packed is not fetched again"
    assert Manifest.load(Path(done.out.strip())).digest == digest_of(published, tmp_path)


def test_a_store_that_is_pulled_cannot_be_removed_and_one_that_is_gone_is_told(
    hub: LocalHub, puller: Puller, published: Path
) -> None:
    hub.repositories[NAME] = Repository(published)
    hub.stop_after["model-00002-of-00003.safetensors"] = CHUNK_BYTES
    with puller.start(NAME) as process:
        wait_until(hub.stopped.is_set)
        wait_until(lambda: any(puller.stores.glob("tiny-moe-v2-*/shards/model-00001*.json")))
        wait_until(lambda: not any((puller.stores / ".hub").rglob("model-00001-of-00003.safetensors")))
        (store,) = find_stores(puller.stores)
        with pytest.raises(StoreInUse):
            remove(store)
        shutil.rmtree(store)
        hub.go_on.set()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert not out
    assert f"{store} was removed while it was pulled" in err


def test_damaged_files_are_fetched_again_and_refused_if_they_stay_damaged(
    hub: LocalHub, puller: Puller, published: Path, tmp_path: Path
) -> None:
    shard = "model-00003-of-00003.safetensors"
    hub.repositories[NAME] = repository = Repository(published, damaged={shard: 2, "config.json": 1})
    (refused,) = puller.run((NAME,))
    assert refused.code == 1
    assert f"{shard} came damaged twice" in refused.err
    assert not [store for store in find_stores(puller.stores) if (store / "manifest.json").exists()]
    repository.damaged[shard] = 1
    (done,) = puller.run((NAME,))
    assert done.code == 0, done.err
    assert Manifest.load(Path(done.out.strip())).digest == digest_of(published, tmp_path)


def test_unavailable_or_unsupported_models_are_refused_before_any_weights_are_fetched(
    hub: LocalHub, puller: Puller, published: Path, tmp_path: Path
) -> None:
    unknown = shutil.copytree(published, tmp_path / "unknown")
    (unknown / "config.json").write_text('{"model_type": "mamba9", "architectures": ["Mamba9ForCausalLM"]}')
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"a pickle")
    too_large = {"rfilename": "model.safetensors", "lfs": {"sha256": "0" * 64, "size": 1 << 49}}
    hub.repositories |= {
        "a/gated": Repository(published, gated=True),
        "a/private": Repository(published, private=True),
        "a/unknown": Repository(unknown),
        "a/pickled": Repository(pickled),
        "a/huge": Repository(published, more=[too_large]),
        NAME: Repository(published),
    }
    cases = (
        (("a/gated",), "", "agreed to its terms"),
        (("a/private",), "", "HF_TOKEN"),
        (("a/nowhere",), "hf_right", "a/nowhere is not at"),
        ((NAME,), "hf_wrong", "refuses the token"),
        ((NAME, "--revision", "v9"), "", "no such branch, tag or commit"),
        (("a/unknown",), "", "Mamba9ForCausalLM"),
        (("a/pickled",), "", "pickled weights are not fetched"),
        (("a/huge",), "", "TiB) more than the disk has"),
        ((NAME, "--experts", "int4,7=int8"), "", "there is no layer 7"),
        (("../../etc",), "", "no repository of the hub"),
    )
    found = puller.run(*(words for words, _, _ in cases), tokens=tuple(token for _, token, _ in cases))
    for done, (words, _, told) in zip(found, cases, strict=True):
        assert done.code in (1, 2), words
        assert told in done.err, (words, done.err)
        assert done.err.count("\n") < 4, done.err
    assert not hub.fetched(".safetensors")
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'{"sha": "main", "siblings": []}',
        b'{"sha": "%s", "siblings": [{"rfilename": "model.safetensors", "size": 5}]}' % (b"a" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "config.json", "size": 99999999999999999999}]}' % (b"a" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "config.json", "size": 99999999999, "blobId": "%s"}]}'
        % (b"a" * 40, b"b" * 40),
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_listing_that_makes_no_sense_is_refused(text: bytes) -> None:
    with pytest.raises(HubError):
        RepositoryListing.read("a/b", text)


@pytest.mark.parametrize("name", ["", "/a", "a/../b", "a/b/c", "a b", "a--b/c", "a/b\n", "a/" + "b" * 97])
def test_names_that_could_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(HubError):
        check_names(name, "main")
    with pytest.raises(HubError):
        check_names("a/b", f"../{name}")


def test_one_gguf_of_a_repository_is_fetched_and_packed(hub: LocalHub, puller: Puller, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    (folder / "BF16").mkdir(parents=True)
    checkpoint = gguf_checkpoint("qwen3_moe", tmp_path / "checkpoint", 300)
    for kind in ("Q8_0", "BF16"):
        name = f"Tiny-{kind}.gguf" if kind == "Q8_0" else f"BF16/Tiny-{kind}-00001-of-00001.gguf"
        write_gguf("qwen3_moe", checkpoint, folder / name, kind)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    hub.repositories[NAME] = Repository(folder)
    (several, unknown) = puller.run((NAME,)), puller.run((NAME, "--quant", "Q4_K_M"))
    assert "2 GGUF models; name one with --quant: BF16 (" in several[0].err
    assert "no GGUF called 'Q4_K_M'; it has BF16 (" in unknown[0].err
    for quant in ("q8_0", "BF16"):
        (done,) = puller.run((NAME, "--quant", quant))
        assert done.code == 0, done.err
        store = Path(done.out.strip())
        assert store.name.startswith(f"Tiny-{quant.upper()}-v2-")
        assert verify(store) == []
        (again,) = puller.run((NAME, "--quant", quant))
        assert again.out == done.out
    assert len(hub.fetched("Tiny-Q8_0.gguf")) == 2, "at the hub, and where it redirects to"
    assert not [path for path in (puller.stores / ".hub").rglob("*") if path.is_file()]


def test_a_repository_without_ggufs_has_no_quantisation_to_name(hub: LocalHub, puller: Puller, published: Path) -> None:
    hub.repositories[NAME] = Repository(published)
    (done,) = puller.run((NAME, "--quant", "Q4_K_M"))
    assert "has no GGUF files; leave --quant out" in done.err


REFUSED = (
    *("endless listing", "endless refusal", "endless failure", "redirect to a file", "escape sequences in a refusal"),
    *("deep listing", "listing with a long number", "many files", "impossible sizes"),
)  # without the ones that take seconds, which tests/tools has


@pytest.mark.parametrize("reply", REFUSED)
def test_endless_and_lying_answers_of_a_hub_are_refused_by_a_short_error(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "FIRST_PAUSE_S", 0.0)
    with hostile_hub(REPLIES[reply]) as address:
        monkeypatch.setattr(hub_module.constants, "ENDPOINT", address)
        with pytest.raises(HubError) as refused:
            Hub().list_repository("makers/model", "main")
    assert len(str(refused.value)) < 1000
    assert "\x1b" not in str(refused.value)
