"""Root's commands in a less trusted user's folders: files planted there get no contents or ownership from root."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.turns import by_turns
from test_layering import FILES, ROOT

from edgemoe import durable, rights
from edgemoe.api.api_keys import new_key
from edgemoe.cli import service_command as systemd_units
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.etcd_tls import make_certificate
from edgemoe.cluster.rpc.keys import generate
from edgemoe.config.settings import RecordSettings
from edgemoe.errors import ConfigError, EdgemoeError
from edgemoe.front.listen import sole_owner, unix_socket
from edgemoe.ipc.engine_socket import private_directory
from edgemoe.store.files import lock_holder, lock_store, note_use
from edgemoe.store.hub import HubFile, PartialFile
from edgemoe.store.manifest import clear
from edgemoe.telemetry.recorder import Recorder
from edgemoe.telemetry.routing_recording import RecordingHeader
from tools.fuzzing.trials import in_time

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="plants as another user, which takes root")
SUFFIXES = ("", ".tmp", ".new", ".json.tmp", ".part", ".aside")

# --- one module writes -------------------------------------------------------------------------------------------

WRITES = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "chmod", "fchmod", "lchmod", "chown", "fchown", "lchown"),
    *("symlink", "symlink_to", "hardlink_to", "rename", "renames", "unlink", "rmdir", "rmtree"),
    *("mkfifo", "mknod", "copyfile", "copytree", "copy2", "save_file", "savefig_to", "NamedTemporaryFile"),
    *("write_history_file", "tofile", "removedirs"),
}
ALLOWED = {  # module -> its permitted operations, with reasons
    "edgemoe/durable.py": None,  # the module that writes
    "edgemoe/cluster/data/data_plane.py": {"replace"},  # of a list
    "edgemoe/cluster/rpc/keys.py": {"replace"},
    "edgemoe/worker/__main__.py": {"write_text"},  # of /proc
    "edgemoe/outputs.py": {"O_WRONLY"},  # of /dev/null
    "edgemoe/helper/child_process.py": {"O_WRONLY"},  # /dev/null
    "edgemoe/cli/plan/measure.py": {"save_file"},  # in a new folder of its own in /tmp
    "edgemoe/store/writer.py": {"O_WRONLY"},  # a second descriptor of a file that durable has opened
    "scoutgate/refresh.py": {"rmtree"},  # of a new folder of its own in /tmp
    "scoutgate/data.py": {"tofile"},  # to a file that durable has opened
}


def writes_of(file: Path) -> Iterator[str]:
    """Yields the operations on files that a module does itself."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("O_CREAT", "O_TRUNC", "O_WRONLY", "O_RDWR"):
            yield node.attr
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = (*node.args, *(word.value for word in node.keywords))
        words = [each.value for each in given if isinstance(each, ast.Constant)]
        of_os = ast.unparse(node.func).startswith("os.")
        if name in WRITES or (name == "link" and of_os) or (name == "touch" and not node.args):
            yield name
        elif name == "open" and any(isinstance(word, str) and _writes(word) for word in words):
            yield "open"
        elif name == "replace" and (of_os or (len(node.args) == 1 and not node.keywords)):
            yield "replace"


def _writes(mode: str) -> bool:
    return len(mode) <= 3 and bool(set(mode) & set("wax+")) and set(mode) <= set("rwaxbt+")


def test_only_one_module_writes_files() -> None:
    found = {}
    for file in FILES:
        name = str(file.relative_to(ROOT))
        allowed = ALLOWED.get(name, set())
        if allowed is not None and (odd := set(writes_of(file)) - allowed):
            found[name] = odd
    assert not found, "write by edgemoe/durable.py"


# --- planted files -----------------------------------------------------------------------------------------------


@pytest.fixture
def others() -> Iterator[Path]:
    """A folder open to others, with root's file and folder, and one of nobody's."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        (base / "secret").write_text("root:SECRET\n")
        (base / "secret").chmod(0o600)
        (base / "folder").mkdir(mode=0o700)
        (base / "folder" / "kept").write_text("kept")
        yield base


def state_in(base: Path, name: str = "state") -> Path:
    folder = base / name
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    return folder


def roots(base: Path) -> object:
    """Returns contents, owners, rights and times of root's file and folder."""
    secret, folder = base / "secret", base / "folder"
    about = [(one.st_uid, one.st_gid, one.st_mode, one.st_mtime_ns) for one in (secret.stat(), folder.stat())]
    return about, secret.read_text(), sorted(path.name for path in folder.rglob("*"))


def link(path: Path, base: Path) -> None:
    path.symlink_to(base / "secret")


def link_to_nothing(path: Path, base: Path) -> None:
    path.symlink_to(base / "folder" / "new")


def hard_link(path: Path, base: Path) -> None:
    os.link(base / "secret", path)


def link_to_folder(path: Path, base: Path) -> None:
    path.symlink_to(base / "folder")


def pipe(path: Path, base: Path) -> None:
    os.mkfifo(path)


def device(path: Path, base: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


TRAPS = (link, link_to_nothing, hard_link, link_to_folder, pipe, device)


def _certificate(folder: Path) -> None:
    make_certificate(folder, "a", "192.0.2.7")


def _partial(folder: Path) -> None:
    with PartialFile(HubFile("model.safetensors", 3, "a" * 64), folder, lambda _: None) as partial:
        partial.write(b"abc")
        partial.finish()


def _locks(folder: Path) -> None:
    with lock_store(folder, exclusive=True):
        lock_holder(folder)
    note_use(folder)
    with lock_store(folder, exclusive=False):
        pass


def _record(folder: Path) -> None:
    Recorder(RecordSettings(dir=str(folder), max_bytes=4096), RecordingHeader("digest", 3, 16, 2), 4096).close()


def _clear(folder: Path) -> None:
    durable.make_folder(folder / "shards")
    durable.replace_file(folder / "packing.json", b"{}")
    clear(folder)


def _in_use(folder: Path) -> None:
    with sole_owner(private_directory(folder / "run"), "stop it"), unix_socket(folder / "api.sock", "root"):
        pass


def _units(folder: Path) -> None:
    systemd_units.install(systemd_units.InstallOptions(root=folder, start=False))
    systemd_units.uninstall(systemd_units.InstallOptions(root=folder))


def _export(folder: Path) -> None:
    import torch

    from edgemoe.experts.predict.scoutgate_model import write_tensors

    write_tensors(
        folder / "out" / "scoutgate.safetensors", folder / "out" / "scoutgate.json", {"a": torch.zeros(2)}, {}
    )


def _data(folder: Path) -> None:
    from scoutgate.data import Meta, write

    write(folder / "data", Meta("m", (2,), 1), [])


def _pulled(folder: Path) -> None:
    durable.make_folder(folder / "experts")
    with durable.NewFile(folder / "experts" / "layer_000.safetensors") as file:
        os.ftruncate(file.fd, 4096)
        file.put_in_place()
    fd = durable.open_kept(folder / "dense.safetensors.part")
    os.close(fd)
    durable.rename_file(folder / "dense.safetensors.part", "dense.safetensors")


WRITERS: dict[str, Callable[[Path], object]] = {
    "a key of the API": lambda folder: new_key(folder / "api-keys", "x"),
    "a box's key": lambda folder: generate(folder / "box.key"),
    "an epoch": lambda folder: EpochFence(folder / "epoch").admit(3),
    "the agreement": _certificate,
    "a file of the hub": _partial,
    "locks of a store": _locks,
    "a recording": _record,
    "what a packer leaves": _clear,
    "runtime folder and socket": _in_use,
    "unit files": _units,
    "an export": _export,
    "training data": _data,
    "a pulled store": _pulled,
}


@as_root
@pytest.mark.parametrize(("trap", "writer"), by_turns(TRAPS, WRITERS), ids=lambda each: getattr(each, "__name__", each))
def test_planted_links_do_not_divert_a_writer(others: Path, writer: str, trap: Callable[..., None]) -> None:
    write, clean = WRITERS[writer], state_in(others, "clean")
    made = set[str]()
    for _ in range(2):  # the second time over the files of the first
        with contextlib.suppress(EdgemoeError):
            write(clean)
        made |= {str(path.relative_to(clean)) for path in clean.rglob("*")}
    names = {"lock", "packing.json", "shards", "manifest.json", *made}
    before = roots(others)
    for number, name in enumerate(sorted(f"{name}{suffix}" for name in names for suffix in SUFFIXES)):
        folder = state_in(others, f"state-{number}")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for above in (folder / name).parents:
            if above.is_relative_to(folder):
                os.chown(above, NOBODY, NOBODY)
        trap(folder / name, others)
        if (folder / name).is_symlink():
            os.chown(folder / name, NOBODY, NOBODY, follow_symlinks=False)
        with in_time(20), contextlib.suppress(OSError, EdgemoeError):
            write(folder)
        assert roots(others) == before, (writer, name)


@as_root
@pytest.mark.parametrize("writer", WRITERS)
def test_a_state_folder_that_is_a_link_of_another_user_is_not_written_through(others: Path, writer: str) -> None:
    mine = state_in(others)
    for name, target in (("swapped", others / "folder"), ("relative", Path("../folder"))):
        (mine / name).symlink_to(target)
        os.chown(mine / name, NOBODY, NOBODY, follow_symlinks=False)
        before = roots(others)
        with in_time(20), pytest.raises((OSError, EdgemoeError)):
            WRITERS[writer](mine / name)
        assert roots(others) == before


@as_root
def test_root_s_links_are_followed_and_its_new_files_belong_to_the_folders_owner(others: Path) -> None:
    mine = state_in(others)
    (others / "here").symlink_to(mine)
    durable.make_folder(others / "here" / "a" / "b")
    durable.replace_file(others / "here" / "a" / "file", b"x")
    os.close(durable.create_file(others / "here" / "new"))
    os.close(durable.open_kept(others / "here" / "lock"))
    made = list(mine.rglob("*"))
    assert len(made) == 5
    assert {path.lstat().st_uid for path in made} == {NOBODY}
    durable.replace_file(others / "mine", b"x")
    assert (others / "mine").stat().st_uid == 0


@as_root
def test_removing_a_folder_spares_the_targets_of_its_links(others: Path) -> None:
    mine, before = state_in(others), roots(others)
    (mine / "store" / "experts").mkdir(parents=True)
    (mine / "store" / "link").symlink_to(others / "folder")
    durable.remove_tree(mine / "store")
    (mine / "other").symlink_to(others / "folder")
    with pytest.raises(OSError):
        durable.remove_tree(mine / "other")
    assert roots(others) == before


def test_temporary_files_of_a_killed_process_are_swept_once_old(tmp_path: Path) -> None:
    for name, age_s in (("file.0011.tmp", 7200), ("file.0022.tmp", 0), ("other.0011.tmp", 7200)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (os.stat(tmp_path / name).st_atime - age_s,) * 2)
    durable.replace_file(tmp_path / "file", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file.0022.tmp", "other.0011.tmp"]


# --- rights ------------------------------------------------------------------------------------------------------

ASK = """
import os, sys
from pathlib import Path
from edgemoe.rights import become_owner
env = {"HOME": "/root", "XDG_CACHE_HOME": "/root/cache"}
become_owner(*map(Path, sys.argv[1:]), env=env)
print(os.getresuid(), os.getresgid(), env["HOME"], "XDG_CACHE_HOME" in env)
try:
    os.setresuid(0, 0, 0)
    print("root again")
except PermissionError:
    print("never again")
"""


def told(*paths: Path) -> str:
    done = subprocess.run([sys.executable, "-c", ASK, *map(str, paths)], capture_output=True, text=True, check=True)
    return done.stdout


@as_root
def test_root_gives_up_its_rights_for_the_user_who_controls_the_path(others: Path) -> None:
    mine = state_in(others)
    (mine / "roots").mkdir()  # in nobody's folder; nobody may rename it
    (mine / "link").symlink_to(others / "folder")
    os.chown(mine / "link", NOBODY, NOBODY, follow_symlinks=False)
    (others / "way").symlink_to(mine / "roots")
    for path in (
        mine,
        mine / "missing" / "too",
        mine / "roots",
        mine / "link",
        others / "way",
        mine / "link" / ".." / "x",
    ):
        assert "never again" in told(path), path
        assert f"({NOBODY}, {NOBODY}, {NOBODY})" in told(path)
    assert "(0, 0, 0)" in told(others / "folder", others / "missing")


@as_root
def test_paths_of_several_users_are_refused(others: Path) -> None:
    mine, other = state_in(others), others / "other"
    other.mkdir()
    os.chown(other, NOBODY - 1, NOBODY - 1)
    with pytest.raises(ConfigError, match="of several"):
        rights.become_owner(mine, other)


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    called = [sys.executable, "-m", "edgemoe", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(called, capture_output=True, text=True, env=env, check=False)


@as_root
def test_roots_commands_read_and_write_a_service_users_files_as_that_user(others: Path) -> None:
    mine = state_in(others)
    keys = f"api.api_key_file={mine / 'api-keys'}"
    made = command("key", "new", "x", "--set", keys)
    assert made.returncode == 0, made.stderr
    assert (mine / "api-keys").stat().st_uid == NOBODY
    (mine / "api-keys").unlink()
    (mine / "api-keys").symlink_to(others / "secret")
    before = roots(others)
    for action in (("new", "x"), ("remove", "x"), ("list",), ("show",)):
        done = command("key", *action, "--set", keys)
        assert done.returncode, action
        assert "SECRET" not in done.stdout + done.stderr
    (mine / "box.key").symlink_to(others / "folder" / "new")
    assert command("keygen", mine / "box.key").returncode
    assert command("keygen", mine / "other.key").returncode == 0
    assert (mine / "other.key").stat().st_uid == NOBODY
    (mine / "stores").symlink_to(others / "folder")
    for words in (("models", "list"), ("pack", others / "missing"), ("models", "remove", "kept", "--yes")):
        command(*words, "--set", f"model.store_dir={mine / 'stores'}")
    assert roots(others) == before


def test_a_socket_given_to_a_group_is_a_socket_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="no socket"):
        durable.give_group(tmp_path / "file", os.getegid())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
        durable.give_group(tmp_path / "sock", os.getegid())


HISTORY = """
import readline, sys
from pathlib import Path
from edgemoe.cli.conversation import _line_editing

with _line_editing():
    print([readline.get_history_item(at + 1) for at in range(readline.get_current_history_length())])
    readline.add_history("asked by root")
"""


@as_root
def test_root_reads_and_writes_no_chat_history_of_another_user(others: Path) -> None:
    pytest.importorskip("readline")
    home = state_in(others)
    folder = home / "edgemoe"
    folder.mkdir()
    (folder / "chat-history").symlink_to(others / "secret")
    os.chown(folder, NOBODY, NOBODY)
    before = roots(others)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", HISTORY], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "[]\n"
    assert (folder / "chat-history").is_symlink()
    assert roots(others) == before


@as_root
def test_doctor_looks_at_a_service_users_store_as_that_user(others: Path) -> None:
    store = state_in(others) / "stores"
    store.mkdir()
    os.chown(store, NOBODY, NOBODY)
    (store / "odd-v2-0123456789ab").symlink_to(others / "folder")
    before = roots(others)
    done = command("doctor", "--json", "--set", f"model.store_dir={store}")
    assert json.loads(done.stdout), done.stderr
    assert "SECRET" not in done.stdout + done.stderr
    assert roots(others) == before


@as_root
def test_training_checkpoints_follow_no_planted_link(others: Path) -> None:
    from scoutgate.train import WholeCheckpoints

    mine, before = state_in(others), roots(others)
    (mine / "last.ckpt").symlink_to(others / "secret")
    checkpoints = WholeCheckpoints()
    checkpoints.save_checkpoint({"step": 3}, mine / "last.ckpt")
    assert not (mine / "last.ckpt").is_symlink()
    assert checkpoints.load_checkpoint(mine / "last.ckpt") == {"step": 3}
    checkpoints.remove_checkpoint(mine / "last.ckpt")
    assert not (mine / "last.ckpt").exists()
    assert roots(others) == before
