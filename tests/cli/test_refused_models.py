"""An unreadable model is refused before expensive work, alike by plan, pack and serve."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import tiny_checkpoint
from support.front_kit import byte_level_tokenizer, write_model
from support.gguf_files import gguf_checkpoint, write_gguf

from edgemoe.api.api_keys import new_key
from edgemoe.cli import main
from edgemoe.front.listen import sole_owner, tcp_socket, unix_socket
from edgemoe.ipc.engine_socket import private_directory
from edgemoe.store.checkpoint import CONFIG, LFS_POINTER, SINGLE, TOKENIZER

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
MOE = {**DENSE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
MLX = {"group_size": 64, "bits": 4}
MXFP4 = {**MLX, "mode": "mxfp4"}
COMMANDS = (["plan"], ["pack"], ["serve", "--model"])


def gguf(architecture: str) -> bytes:
    """Returns the head of a GGUF file, version 3, of 0 tensors and one key."""
    text = [len(part).to_bytes(8, "little") + part for part in (b"general.architecture", architecture.encode())]
    counts = (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    return b"GGUF" + counts + text[0] + (8).to_bytes(4, "little") + text[1]


def file_of(data: bytes, name: str) -> Any:
    def make(path: Path) -> Path:
        (path / name).write_bytes(data)
        return path / name

    return make


def folder_of(config: dict[str, Any] | None, **files: bytes) -> Any:
    def make(path: Path) -> Path:
        for name, data in files.items():
            (path / name.replace("_", ".")).write_bytes(data)
        if config is not None:
            (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def pipe(folder: Path, name: str = "model") -> Path:
    os.mkfifo(folder / name)
    return folder / name


def link(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


REFUSED = {
    "a GGUF file": (file_of(gguf("mamba"), "x.gguf"), ("GGUF of mamba", "supported are", "qwen3moe")),
    "a GGUF file that was cut": (file_of(b"GGUF\3", "x.gguf"), ("x.gguf is cut short", "fetch it again")),
    "a page in place of a GGUF file": (file_of(b"<html>", "x.gguf"), ("x.gguf is a web page", "fetch it again")),
    "a pointer in place of a GGUF file": (file_of(LFS_POINTER, "x.gguf"), ("x.gguf is a Git LFS pointer", "lfs pull")),
    "a pointer in a folder": (folder_of(None, x_gguf=LFS_POINTER), ("x.gguf is a Git LFS pointer", "lfs pull")),
    "another file with a GGUF's name": (file_of(b"PK\3\4", "x.gguf"), ("x.gguf is no GGUF file", "fetch it again")),
    "a folder of a GGUF": (folder_of(None, x_gguf=gguf("llama4")), ("GGUF of llama4", "supported are")),
    "a folder of GGUFs": (folder_of(None, x_gguf=gguf("a"), y_gguf=gguf("b")), ("2 models", "x.gguf, y.gguf")),
    "an MLX folder": (
        folder_of({**MOE, "architectures": ["GptOssForCausalLM"], "quantization": MLX}),
        ("MLX of GptOss", "edgemoe pull"),
    ),
    "an MLX folder of a mode": (folder_of({**MOE, "quantization_config": MXFP4}), ("MLX in the mode mxfp4",)),
    "a dense model": (folder_of(DENSE), ("LlamaForCausalLM is a dense model", "Qwen3MoeForCausalLM")),
    "an unknown architecture": (
        folder_of({**MOE, "architectures": ["NobodysMoeForCausalLM"]}),
        ("not supported: NobodysMoeForCausalLM", "Qwen3MoeForCausalLM"),
    ),
    "a refused architecture": (
        folder_of({**MOE, "architectures": ["MiniMaxM3VLForCausalLM"]}),
        ("sparse attention",),
    ),
    "an empty folder": (folder_of(None), ("no config.json",)),
    "a file of weights": (file_of(bytes(100), SINGLE), ("is a file, and no GGUF", "name the folder")),
    "a pipe": (pipe, ("neither a folder nor a file",)),
    "a device": (lambda path: Path("/dev/zero"), ("neither a folder nor a file",)),
    "a folder whose configuration is a pipe": (lambda path: pipe(path, CONFIG).parent, (f"no {CONFIG}",)),
    "a link to nothing": (lambda path: link(path / "link", "gone"), ("a link to gone, which is missing",)),
    "a link to itself": (lambda path: link(path / "link", "link"), ("a link to link, which is missing",)),
    "no folder": (lambda path: path / "there" / "model", ("there is missing", "mounted")),
}


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has commands write into the test's own folder."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_names_the_model_and_the_remedy(
    kind: str,
    command: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make, said = REFUSED[kind]
    model = make(tmp_path)
    assert main([*command, str(model), "--set", f"model.store_dir={tmp_path}/stores"]) != 0
    error = capfd.readouterr().err
    missing = [part for part in said if part not in error]
    assert not missing, error
    assert "Traceback" not in error
    assert not (tmp_path / "stores").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template."""
    folder: Path = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "tiny")
    config = (folder / CONFIG).read_text()
    write_model(folder)
    (folder / CONFIG).write_text(config)
    return folder


def with_vocabulary(number: object) -> str:
    """Returns a tokenizer.json whose first token has an impossible number."""
    whole = json.loads(byte_level_tokenizer().to_str())
    whole["model"]["vocab"][next(iter(whole["model"]["vocab"]))] = number
    return json.dumps(whole)


TEXTS: dict[str, tuple[str, bytes | str, str]] = {
    "no tokenizer in its file": (TOKENIZER, "{}", "Model missing"),
    "a token of a negative number": (TOKENIZER, with_vocabulary(-1), "expected u32"),
    "a token of a number of 64 bits": (TOKENIZER, with_vocabulary(2**63), "expected u32"),
    "a template that was cut": ("chat_template.jinja", "{{ messages", "unexpected end of template"),
    "a template with a tag of its own": ("chat_template.jinja", "{% frob %}", "unknown tag"),
    "a template that is no text": ("chat_template.jinja", b"\xff\xfe", "can't decode"),
    "a template in a list": ("chat_template.json", "[]", "must hold a JSON object"),
    "templates without names": ("tokenizer_config.json", '{"chat_template": [{"template": ""}]}', "'name'"),
    "a template that is a number": ("tokenizer_config.json", '{"chat_template": 7}', "not iterable"),
}


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("command", ["pack", "serve", "run"])
@pytest.mark.parametrize("kind", TEXTS)
def test_texts_that_cannot_be_read_are_told_before_anything_is_written(
    kind: str,
    command: str,
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, content, said = TEXTS[kind]
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    words = {"serve": ["serve", "--model", str(model)]}.get(command, [command, str(model)])
    assert main([*words, "--set", f"model.store_dir={tmp_path}/stores"]) == 1
    error = capfd.readouterr().err
    assert str(model) in error
    assert said in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("stores/*"))


def test_a_template_in_a_gguf_that_cannot_be_read_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = gguf_checkpoint("qwen3_moe", tmp_path / "hf", byte_level_tokenizer().get_vocab_size())
    config = (folder / CONFIG).read_text()
    write_model(folder)
    (folder / CONFIG).write_text(config)
    (folder / "chat_template.jinja").write_text("{% if messages %}")
    path = write_gguf("qwen3_moe", folder, tmp_path / "tiny.gguf")
    assert main(["pack", str(path), str(tmp_path / "store")]) == 1
    error = capfd.readouterr().err
    assert f"{path}: the model's chat template cannot be read: Unexpected end of template" in error
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("command", [["plan", "Qwen3"], ["serve", "--model", "Qwen3"], ["models", "verify", "Qwen3"]])
def test_a_name_is_told_from_a_mount_that_is_missing(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    stores = tmp_path / "usb" / "stores"
    assert main([*command, "--set", f"model.store_dir={stores}"]) == 1
    assert f"no store of the name 'Qwen3': {tmp_path}/usb, where model.store_dir lies" in capfd.readouterr().err
    stores.mkdir(parents=True)
    assert main([*command, "--set", f"model.store_dir={stores}"]) == 1
    assert f"in {stores} there are: none" in capfd.readouterr().err


@pytest.mark.parametrize("long", ["socket", "directory"])
def test_serve_refuses_paths_too_long_for_sockets_before_it_packs(
    long: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    paths = {"socket": tmp_path / "door", "directory": tmp_path / "run"} | {long: tmp_path / ("a" * 120)}
    sets = [f"model.store_dir={tmp_path}/stores", f"service.runtime_dir={paths['directory']}"]
    options = [word for each in sets for word in ("--set", each)]
    assert main(["serve", "--socket", str(paths["socket"]), *options]) == 1
    assert "too long for a socket" in capfd.readouterr().err
    assert not (tmp_path / "stores").exists()


@pytest.mark.parametrize("taken", ["port", "socket", "directory"])
def test_serve_takes_its_addresses_before_it_packs(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    stores, runtime, door = tmp_path / "stores", private_directory(tmp_path / "run"), tmp_path / "door"
    sets = [f"model.store_dir={stores}", f"service.runtime_dir={runtime}", f"api.api_key_file={tmp_path}/keys"]
    new_key(tmp_path / "keys", "one")
    options = [word for each in sets for word in ("--set", each)]
    with contextlib.ExitStack() as held:
        port = held.enter_context(tcp_socket("127.0.0.1:0")) if taken == "port" else None
        number = port.getsockname()[1] if port else 0
        if taken == "socket":
            held.enter_context(unix_socket(door))
        if taken == "directory":
            held.enter_context(sole_owner(runtime, ""))
        given = ["--port", str(number)] if port else []
        assert main(["serve", "--socket", str(door), *given, *options]) == 1
    error = capfd.readouterr().err
    assert "packing" not in error
    assert {"port": "another program has this port", "socket": "another daemon listens", "directory": "runs here"}[
        taken
    ] in error
    assert not stores.exists()
