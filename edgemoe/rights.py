"""Gives up root's rights before the files of a less trusted user are touched."""

from __future__ import annotations

import os
import pwd
from collections.abc import MutableMapping
from pathlib import Path

from edgemoe.durable import owner_above
from edgemoe.errors import ConfigError

OF_A_USER = ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")


def become_owner(*paths: Path, env: MutableMapping[str, str] | None = None) -> None:
    """Gives up root's rights for the rights of the user who owns the folders of `paths`, unless that is root.

    A link or a file that this user has planted there then leads root nowhere. `env` gets the user's home directory.
    Raises ConfigError where the paths are of several users.
    """
    if os.geteuid() != 0:
        return
    owners = {path: owner for path in paths if (owner := owner_above(path.expanduser())) is not None}
    if not owners:
        return
    if len({uid for uid, _ in owners.values()}) > 1:
        listed = ", ".join(f"{path} ({_name(uid)})" for path, (uid, _) in owners.items())
        raise ConfigError(f"root works in the files of one user at a time, and these are of several: {listed}")
    uid, gid = next(iter(owners.values()))
    user = _user(uid)
    if user is None:
        os.setgroups([gid])
    else:
        gid = user.pw_gid
        os.initgroups(user.pw_name, gid)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if env is not None:
        env["HOME"] = user.pw_dir if user else "/"
        for name in OF_A_USER:
            env.pop(name, None)


def _user(uid: int) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return None


def _name(uid: int) -> str:
    user = _user(uid)
    return user.pw_name if user else f"uid {uid}"
