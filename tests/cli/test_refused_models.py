"""An unreadable model is refused before expensive work, alike by plan, pack and serve."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from edgemoe.api.api_keys import new_key
from edgemoe.cli import main
from edgemoe.front.listen import sole_owner, tcp_socket, unix_socket
from edgemoe.ipc.engine_socket import private_directory
from edgemoe.store.checkpoint import CONFIG, LFS_POINTER, SINGLE

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


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_names_the_model_and_the_remedy(
    kind: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    make, said = REFUSED[kind]
    model = make(tmp_path)
    assert main([*command, str(model), "--set", f"model.store_dir={tmp_path}/stores"]) != 0
    error = capfd.readouterr().err
    missing = [part for part in said if part not in error]
    assert not missing, error
    assert "Traceback" not in error
    assert not (tmp_path / "stores").exists()


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
