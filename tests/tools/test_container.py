"""The container file, checked and executed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.containerfile import Image, build, instructions
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tools/container/Containerfile"
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
BUILD_S, READY_S = 1500, 1500  # kernels are compiled, on a machine that may be busy


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not here")
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([str(HADOLINT), "--failure-threshold=style", str(FILE)], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_only_copied_files_pass_the_ignore_file() -> None:
    copied = {
        word for key, rest in instructions(FILE) if key == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    }
    lines = FILE.with_name("Containerfile.dockerignore").read_text().split()
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounts file systems, which takes root")
    folder = Path(f"/var/tmp/edgemoe-image-{os.getpid()}")  # the image's user has no access to pytest's folders
    folder.mkdir(mode=0o755)
    try:
        yield build(FILE, ROOT, folder, BUILD_S)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def container(image: Image) -> Iterator[int]:
    """The process of the image's command; it must end cleanly when it is stopped."""
    words = image.json("ENTRYPOINT") + image.json("CMD")
    process = subprocess.Popen(image.command(*words))
    try:
        yield process.pid
        process.send_signal(getattr(signal, image.said["STOPSIGNAL"]))
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_its_steps_make_a_daemon_that_is_healthy_answers_and_writes_only_to_its_volumes(
    image: Image, container: int
) -> None:
    def inside(*words: str) -> subprocess.CompletedProcess[str]:
        words = ("nsenter", "--mount", f"--target={container}", *entered(image, *words))
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    before = set(image.upper.rglob("*"))
    wait_until(lambda: inside(*image.json("HEALTHCHECK")).returncode == 0, READY_S)
    assert "Paris" in inside("edgemoe", "chat", "What is the capital of France?").stdout
    assert inside("id", "--user").stdout.strip() not in ("", "0")
    assert inside("edgemoe", "key", "new", "laptop").returncode == 0
    assert (image.upper / "var/lib/edgemoe/api-keys").exists()
    volumes = tuple(f"{image.upper}{path}" for path in (*image.json("VOLUME"), "/tmp"))
    assert [str(path) for path in set(image.upper.rglob("*")) - before if not str(path).startswith(volumes)] == []


def entered(image: Image, *words: str) -> list[str]:
    """Returns the command that runs `words` in the mounted image."""
    command = image.command(*words)
    return command[command.index("chroot") :]
