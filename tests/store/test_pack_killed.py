"""A packer killed with SIGKILL anywhere: packing again gives the store that an undisturbed one gives."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.killed import killed, script_of
from support.waiting import wait_until

from edgemoe.errors import StoreError, StoreInUse
from edgemoe.store import packer as packer_module
from edgemoe.store.files import lock_store
from edgemoe.store.manifest import JOURNAL, MANIFEST, SHARDS, Manifest, verify_copies
from edgemoe.store.packer import ensure_store, pack

Make = Callable[..., Path]

CALL = "from edgemoe.store.packer import pack; pack(sys.argv[1], sys.argv[2], step)"


def run(source: Path, target: Path, steps: int) -> subprocess.CompletedProcess[str]:
    """Packs in a process that kills itself at the given step; 0 lets it finish, and it prints its steps."""
    return killed(CALL, source, target, steps)


def files_of(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in store.glob("**/*") if file.is_file()}


@pytest.fixture
def source(checkpoint: Make) -> Path:
    return checkpoint(sharded=True)


def check(source: Path, target: Path, whole: dict[str, bytes], steps: int) -> None:
    died = run(source, target, steps)
    assert died.returncode == -signal.SIGKILL, died.stderr
    if (target / MANIFEST).exists():
        Manifest.load(target)
    kept = {file: file.stat().st_mtime_ns for file in target.glob("**/*.safetensors")}
    pack(source, target)
    assert files_of(target) == whole
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())  # finished files were not redone


def test_a_packer_killed_at_any_point_is_finished_by_the_next(source: Path, tmp_path: Path) -> None:
    total = int(run(source, tmp_path / "whole", 0).stdout)
    whole = files_of(tmp_path / "whole")
    assert total > 60
    for number, steps in enumerate(random.Random(5).sample(range(1, total), 9)):
        check(source, tmp_path / str(number), whole, steps)


@pytest.mark.slow
def test_a_packer_killed_at_every_single_point_is_finished_by_the_next(source: Path, tmp_path: Path) -> None:
    total = int(run(source, tmp_path / "whole", 0).stdout)
    whole = files_of(tmp_path / "whole")
    for steps in range(1, total):
        check(source, tmp_path / str(steps), whole, steps)


def test_a_packer_killed_right_after_the_manifest_leaves_a_store_that_is_served(source: Path, tmp_path: Path) -> None:
    store = ensure_store(source, tmp_path)
    whole = files_of(store)
    for path in (store, source):  # named as a store, and as the checkpoint that it was packed from
        (store / JOURNAL).write_text("{}")
        (store / SHARDS).mkdir()
        (store / SHARDS / "kept").touch()
        verify_copies(store, Manifest.load(store))
        with lock_store(store, exclusive=False):
            assert ensure_store(path, tmp_path) == store
            assert (store / JOURNAL).exists(), "who holds it may need that"
        assert ensure_store(path, tmp_path) == store
        assert files_of(store) == whole
        assert not (store / SHARDS).exists()


def test_a_packer_killed_again_and_again_gets_there(source: Path, tmp_path: Path) -> None:
    total = int(run(source, tmp_path / "whole", 0).stdout)
    draw = random.Random(7)
    for _ in range(4):
        run(source, tmp_path / "store", draw.randrange(total // 4, total // 2))
    pack(source, tmp_path / "store")
    assert files_of(tmp_path / "store") == files_of(tmp_path / "whole")


def test_an_unfinished_store_is_never_taken_for_a_finished_one(source: Path, tmp_path: Path) -> None:
    total = int(run(source, tmp_path / "whole", 0).stdout)
    run(source, tmp_path / "store", total // 2)
    assert (tmp_path / "store" / JOURNAL).exists()
    with pytest.raises(StoreError, match="is this a packed store"):
        Manifest.load(tmp_path / "store")


def test_waiting_for_a_stopped_packer_names_it_and_the_remedy(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ensure_store(source, tmp_path / "whole")
    stopped = tmp_path / "stores" / store.name
    stopped.parent.mkdir()
    script, half = script_of(CALL).replace("SIGKILL", "SIGSTOP"), int(run(source, tmp_path / "counted", 0).stdout) // 2
    packer = subprocess.Popen([sys.executable, "-c", script, str(source), str(stopped), str(half)])
    try:
        wait_until(lambda: Path(f"/proc/{packer.pid}/stat").read_text().split()[2] == "T")
        monkeypatch.setattr(packer_module, "STALLED_S", 0.5)
        with pytest.raises(StoreInUse, match=f"packed by process {packer.pid}, .*kill -9 {packer.pid}"):
            ensure_store(source, tmp_path / "stores")
    finally:
        packer.kill()
        packer.wait()
    assert files_of(ensure_store(source, tmp_path / "stores")) == files_of(store)


def test_a_packer_is_waited_for_as_long_as_it_writes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now_s = ensure_store(source, tmp_path), [0.0]
    (store / MANIFEST).rename(tmp_path / "aside")

    def sleep(_: float) -> None:
        now_s[0] += 400.0
        (store / "dense.safetensors.tmp").write_bytes(bytes(int(now_s[0])))
        if now_s[0] > 5000.0:
            (tmp_path / "aside").rename(store / MANIFEST)

    with lock_store(store, exclusive=True):
        monkeypatch.setattr(packer_module, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
        assert ensure_store(source, tmp_path) == store


def test_serving_a_checkpoint_finishes_a_killed_packer_s_store(source: Path, tmp_path: Path) -> None:
    store = ensure_store(source, tmp_path / "stores")
    whole = files_of(store)
    total = int(run(source, tmp_path / "whole", 0).stdout)
    half = tmp_path / "other" / store.name
    half.parent.mkdir()
    run(source, half, total // 2)
    assert ensure_store(source, tmp_path / "other") == half
    assert files_of(half) == whole
