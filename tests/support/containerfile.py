"""Carries out a container file on this machine: its steps run in copies of the machine's files that end with them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

OVER = """\
mount -t overlay overlay -o lowerdir=/,upperdir="$1/upper",workdir="$1/work" "$1/root"
mount --rbind /dev "$1/root/dev"
mount --rbind /proc "$1/root/proc"
cd /
shift
exec "$@"
"""
BASE_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


def instructions(file: Path) -> Iterator[tuple[str, str]]:
    """Yields each instruction's keyword and the rest, with continued lines joined."""
    lines = (line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            keyword, _, rest = line.strip().partition(" ")
            yield keyword, " ".join(rest.split())


@dataclass
class Image:
    """The result of a stage: a folder over the machine's own files, and the way to start its programs."""

    folder: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": BASE_PATH})
    workdir: str = "/"
    user: str = "0:0"
    said: dict[str, str] = field(default_factory=dict)  # by keyword: HEALTHCHECK, ENTRYPOINT, CMD, VOLUME ...

    @property
    def upper(self) -> Path:
        return self.folder / "upper"

    def command(self, *words: str) -> list[str]:
        """Returns the command that runs `words` in this image: its user, its environment, temporary mounts."""
        env = ["env", "-i", *(f"{key}={value}" for key, value in self.env.items())]
        inside = ["chroot", f"--userspec={self.user}", "--groups=", str(self.folder / "root"), *env]
        moved = ["sh", "-ec", 'cd "$0"; exec "$@"', self.workdir, *words]
        return ["unshare", "--mount", "sh", "-ec", OVER, "sh", str(self.folder), *inside, *moved]

    def json(self, keyword: str) -> list[str]:
        """Parses the words of an instruction in exec form."""
        return list(json.loads(self.said[keyword][self.said[keyword].index("[") :]))


def opened(folder: Path) -> Image:
    """Makes the base image: this machine, with Python at the official image's path."""
    for part in ("upper/usr/local/bin", "work", "root"):
        (folder / part).mkdir(parents=True)
    (folder / "upper/usr/local/bin/python").symlink_to("/usr/bin/python3")
    for part in ("", "upper", "upper/usr", "upper/usr/local", "upper/usr/local/bin"):
        (folder / part).chmod(0o755)
    return Image(folder)


def build(file: Path, context: Path, folder: Path, within_s: float) -> Image:
    """Carries the file out, stage by stage, and returns the last."""
    stages: dict[str, Image] = {}
    image = Image(folder)
    for keyword, rest in instructions(file):
        words = shlex.split(rest)
        if keyword == "FROM":
            name = words[2] if len(words) == 3 else "last"
            image = stages[name] = opened(folder / name)
        elif keyword == "RUN":
            subprocess.run(image.command("sh", "-c", rest), check=True, timeout=within_s, stdout=sys.stderr)
        elif keyword == "COPY":
            source = stages[words.pop(0).partition("=")[2]].upper if rest.startswith("--from") else context
            copy(image, source, words)
        elif keyword == "ENV":
            image.env |= dict(word.split("=", 1) for word in words)
        elif keyword == "WORKDIR":
            image.workdir = rest
            (image.upper / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif keyword == "USER":
            image.user = rest
        else:
            image.said[keyword] = rest
    return image


def copy(image: Image, source: Path, words: list[str]) -> None:
    """Executes COPY: files into a folder, or a folder's content."""
    target = image.upper / os.path.join(image.workdir, words[-1]).lstrip("/")
    ignored = shutil.ignore_patterns("__pycache__")
    for word in words[:-1]:
        path = source / word.lstrip("/")
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True, ignore=ignored)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
