from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgemoe.cli import service_command as service
from edgemoe.cli.service_command import InstallOptions, install, planned_files, status, templates, uninstall
from edgemoe.errors import ServiceError

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' own folders are temporary."""
    monkeypatch.setattr(service, "_PRIVATE_TO_UNIT", ("/nowhere",))


def model_dir(tmp_path: Path) -> Path:
    model = tmp_path / "my $model 100%"
    model.mkdir()
    return model


def test_install_puts_every_file_in_place_and_uninstall_leaves_settings_only(tmp_path: Path) -> None:
    done = install(InstallOptions(root=tmp_path))
    assert all(line.startswith("write ") for line in done)
    assert {state for _, state in status(tmp_path)} == {"installed"}
    uninstall(InstallOptions(root=tmp_path))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"etc/edgemoe/edgemoe.toml"}
    assert {state for _, state in status(tmp_path)} == {"missing"}


def test_a_settings_file_that_is_there_is_never_touched(tmp_path: Path) -> None:
    mine = tmp_path / "etc/edgemoe/edgemoe.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text("[engine]\nthreads = 3\n")
    assert f"keep {mine}" in install(InstallOptions(root=tmp_path))
    assert "threads = 3" in mine.read_text()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    assert install(InstallOptions(root=tmp_path, dry_run=True))
    assert not list(tmp_path.iterdir())


def test_the_unit_runs_this_installation_on_the_given_model_and_settings(tmp_path: Path) -> None:
    options = InstallOptions(model=str(model_dir(tmp_path)), config=Path("/etc/edgemoe/other.toml"), socket_group="llm")
    texts = {file.path.name: file.text for file in planned_files(options)}
    command = re.findall(r"(?m)^ExecStart=(.*)$", texts["edgemoe.service"])[0]
    program = Path(sys.executable).with_name("edgemoe")
    assert command == f'{program} serve --config /etc/edgemoe/other.toml --model "{tmp_path}/my $$model 100%%"'
    reload = f"{program} reload --socket {service.SOCKET}"
    assert f"\nExecReload={reload}\n" in texts["edgemoe.service"]
    assert f"\nExecStartPost=-{reload}\n" in texts["edgemoe-scoutgate.service"]
    learn = re.findall(r"(?m)^ExecStart=(.*)$", texts["edgemoe-scoutgate.service"])[0]
    assert learn.endswith(
        f'-m scoutgate.refresh --config /etc/edgemoe/other.toml --max-minutes 30 --model "{tmp_path}/my $$model 100%%"'
    )
    assert "SocketGroup=llm\n" in texts["edgemoe.socket"]


def test_paths_under_home_are_bound_into_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_HIDDEN_BY_UNIT", (str(tmp_path),))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/weights").touch()
    model = model_dir(tmp_path)
    (model / "model.safetensors").symlink_to("../blobs/weights")
    paths = next(
        file.text for file in planned_files(InstallOptions(model=str(model))) if file.path.name == "paths.conf"
    )
    assert f'BindReadOnlyPaths="{tmp_path}/my $model 100%%"\n' in paths
    assert f"BindReadOnlyPaths={tmp_path}/blobs\n" in paths


@pytest.mark.parametrize("what", ["the model", "this installation", "--config"])
def test_paths_among_temporary_files_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(service, "_PRIVATE_TO_UNIT", (str(tmp_path),))
    options = InstallOptions(root=tmp_path / "root")
    if what == "the model":
        options = replace(options, model=str(model_dir(tmp_path)))
    elif what == "--config":
        options = replace(options, config=tmp_path / "edgemoe.toml")
    else:
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    with pytest.raises(ServiceError, match=f"{what}.* lies in {tmp_path}.*which a service does not see"):
        install(options)
    assert not (tmp_path / "root").exists()


def test_settings_under_home_are_bound_into_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    options = InstallOptions(config=Path("/home/alice/edgemoe.toml"))
    paths = next(file.text for file in planned_files(options) if file.path.name == "paths.conf")
    assert "BindReadOnlyPaths=/home/alice/edgemoe.toml\n" in paths


def test_folders_of_all_models_under_home_are_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_HIDDEN_BY_UNIT", (str(tmp_path / "home"),))
    monkeypatch.setattr(service, "_PRIVATE_TO_UNIT", ())
    folders = [tmp_path / f"home/{name}" for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir(parents=True)
    file = tmp_path / "etc/edgemoe/edgemoe.toml"
    file.parent.mkdir(parents=True)
    file.write_text(
        f'[model]\npath = "{folders[0]}"\n[models."a.b"]\npath = "{folders[1]}"\n[models.c]\npath = "{folders[2]}"\n'
        "[models.by-name]\n"
    )
    install(InstallOptions(root=tmp_path))
    text = (tmp_path / "etc/systemd/system/edgemoe.service.d/paths.conf").read_text()
    assert [f"BindReadOnlyPaths={folder}" in text for folder in folders] == [True] * 3


def test_folders_that_the_settings_have_it_write_to_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again with each installation, and no longer where they are not named any more."""
    monkeypatch.setattr(service, "_HIDDEN_BY_UNIT", ("/home",))
    options = InstallOptions(root=tmp_path)
    file = tmp_path / "etc/edgemoe/edgemoe.toml"
    file.parent.mkdir(parents=True)
    file.write_text(
        '[model]\nstore_dir = "/srv/my stores"\n[record]\ndir = "/home/alice/routes"\n'
        '[cache]\nstate_file = "/mnt/learned/state"\nscoutgate = "/srv/forecaster"\n'
        '[cluster]\nstate_dir = "/var/lib/edgemoe/mine"\n'
        'node = "box"\nkey_file = "/etc/edgemoe/box.key"\nlisten = "192.0.2.7:7540"\n'
    )
    install(options)
    for unit in ("edgemoe.service", "edgemoe-scoutgate.service"):
        text = (tmp_path / f"etc/systemd/system/{unit}.d/paths.conf").read_text()
        assert 'ReadWritePaths="-/srv/my stores"\n' in text
        assert "BindPaths=-/home/alice/routes\n" in text
        assert "ReadWritePaths=-/mnt/learned\n" in text
        assert "ReadWritePaths=-/srv/forecaster\n" in text
        assert "/var/lib" not in text.partition("[Service]")[2]
    file.write_text("")
    removed = [line for line in install(options) if line.startswith("remove ")]
    assert len(removed) == 2
    assert not list(tmp_path.rglob("paths.conf"))


def test_settings_paths_under_home_are_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may come later. A file in a writable folder is visible with it, and not made read-only."""
    monkeypatch.setattr(service, "_HIDDEN_BY_UNIT", ("/home", str(tmp_path / "home")))
    (tmp_path / "home/model").mkdir(parents=True)
    (tmp_path / "edgemoe.toml").write_text(
        f'[model]\npath = "{tmp_path}/home/model"\n[api]\napi_key_file = "/home/alice/api-keys"\n'
        '[cache]\nscoutgate = "/home/alice/forecaster"\n[record]\ndir = "routes"\n'
        '[cluster]\nnode = "box"\nlisten = "192.0.2.7:7540"\nkey_file = "/home/alice/box.key"\n'
        'peers_file = "/etc/edgemoe/peers.toml"\netcd_ca = "/home/alice/forecaster/ca.pem"\n'
    )
    options = InstallOptions(config=tmp_path / "edgemoe.toml")
    paths = next(file.text for file in planned_files(options) if file.path.name == "paths.conf")
    assert [line for line in paths.splitlines() if line.startswith("Bind")] == [
        f"BindReadOnlyPaths={tmp_path}/home/model",
        "BindReadOnlyPaths=-/home/alice/api-keys",
        "BindReadOnlyPaths=-/home/alice/box.key",
        "BindPaths=-/home/alice/forecaster",
    ]
    assert "ReadWritePaths" not in paths


@pytest.mark.parametrize(
    ("setting", "what"),
    [('model.path = "{}/model"', "the model"), ('api.api_key_file = "{}/keys"', "api.api_key_file")],
)
def test_settings_paths_among_temporary_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, what: str
) -> None:
    monkeypatch.setattr(service, "_PRIVATE_TO_UNIT", (str(tmp_path / "tmp"),))
    (tmp_path / "tmp/model").mkdir(parents=True)
    (tmp_path / "edgemoe.toml").write_text(setting.format(tmp_path / "tmp"))
    with pytest.raises(ServiceError, match=f"{what} lies in {tmp_path}/tmp/.*which a service does not see"):
        planned_files(InstallOptions(config=tmp_path / "edgemoe.toml"))


def test_nightly_training_goes_by_the_settings_that_are_named(tmp_path: Path) -> None:
    texts = {file.path.name: file.text for file in planned_files(InstallOptions(config=Path("/srv/e.toml")))}
    assert "ConditionPathExists=/srv/e.toml\n" in texts["edgemoe-scoutgate.service"]


def test_an_installed_service_restarts_with_new_settings() -> None:
    done = install(InstallOptions(dry_run=True))
    assert "run systemctl restart --no-block edgemoe.socket edgemoe.service" in done


def test_a_model_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="is not a directory"):
        install(InstallOptions(root=tmp_path, model="/nowhere"))
    assert not list(tmp_path.iterdir())


@needs_systemd
def test_the_units_pass_systemds_own_verification(tmp_path: Path) -> None:
    install(InstallOptions(root=tmp_path, model=str(model_dir(tmp_path))))
    installed = [str(path) for path in (tmp_path / "etc/systemd/system").glob("edgemoe*") if path.is_file()]
    for units in (installed, [str(templates() / unit) for unit in (*service.UNITS, *service.LEARNING)]):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_service_stays_well_hardened() -> None:
    unit = str(templates() / "edgemoe.service")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-300:]
