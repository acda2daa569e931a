"""A 64-bit Arm Debian with edgemoe's locked libraries, whose programs QEMU runs in namespaces of their own."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

from support.kept import STORES

ROOT = Path(__file__).parents[2]
KEPT = STORES.with_name("arm")  # six GB, kept between runs
LIBRARIES, WHEEL, HOME = "opt/libraries", "opt/wheel", "root"  # in the system
PACKAGES = "python3,libgomp1,libstdc++6,ca-certificates"
NEEDED = ("debootstrap", "dpkg-deb", "qemu-aarch64-static", "unshare", "uv")
SUITE, MAKE_S = "bookworm", 3600.0
CORES = 2
PROCESSOR = """\
processor\t: {core}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 1

"""  # a Cortex-A76
MIDR = "0x00000000414fd0b1\n"
MAGIC = r":arm64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
ENTER = """\
root="$1" wheel="$2" home="$3" emulator="$4"
shift 4
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf %s "$EMULATED:$emulator:F" > /proc/sys/fs/binfmt_misc/register
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$root/etc/processors" "$root/proc/cpuinfo"
mount --bind "$wheel" "$root/opt/wheel"
mount --bind "$home" "$root/root"
exec chroot "$root" /usr/bin/env -i PATH=/usr/bin HOME=/root XDG_RUNTIME_DIR=/root \
    PYTHONPATH=/opt/wheel:/opt/libraries /usr/bin/python3.11 "$@"
"""


def missing() -> str:
    """Returns the reason why no Arm system can be emulated here; "" where one can."""
    if platform.machine() != "x86_64":
        return "for x86-64"
    if tools := [tool for tool in NEEDED if shutil.which(tool) is None]:
        return f"{', '.join(tools)} is not installed"
    mounts = "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc"
    tried = subprocess.run(["unshare", "-Urm", "sh", "-c", mounts], capture_output=True, check=False)
    return "namespaces have no binfmt_misc of their own here (Linux 6.7)" if tried.returncode else ""


def made() -> Path:
    """Returns the files of the system, which are fetched from Debian and PyPI once."""
    system = KEPT / "system"
    if not (system / "etc/processors").is_file():
        shutil.rmtree(KEPT, ignore_errors=True)
        KEPT.mkdir(parents=True)
        _run("debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", f"--include={PACKAGES}", SUITE, system)
        _unpack(system)
        options = ("--python-platform", "aarch64-manylinux_2_36", "--python-version", "3.11", "--only-binary", ":all:")
        lock = ("--require-hashes", "--requirement", ROOT / "requirements.lock")
        _run("uv", "pip", "install", "--quiet", "--no-cache", "--target", system / LIBRARIES, *options, *lock)
        _describe(system)
    return system


def arm_python(wheel: Path, home: Path, *words: str) -> list[str]:
    """Returns the command that runs Python in the system, with an unpacked wheel and a home of this machine."""
    emulator = shutil.which("qemu-aarch64-static")
    enter = ["env", f"EMULATED={MAGIC}{MASK}", "unshare", "-Urm", "sh", "-ec", ENTER, "sh"]
    return [*enter, *map(str, (made(), wheel, home, emulator)), *words]


def _run(*words: str | Path) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=MAKE_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def _unpack(system: Path) -> None:
    """Unpacks all packages that debootstrap fetched. Nothing of them is run."""
    archives = system / "var/cache/apt/archives"
    for package in archives.glob("*.deb"):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as listing:
            _untar(listing, system)
    shutil.rmtree(archives)


def _untar(listing: subprocess.Popen[bytes], system: Path) -> None:
    """Unpacks an archive, following links of the system from /lib to /usr/lib and the like."""
    tar = ["tar", "--extract", "--keep-directory-symlink", "--no-same-owner", "--directory", str(system)]
    subprocess.run(tar, stdin=listing.stdout, check=True, timeout=MAKE_S)
    assert listing.wait(MAKE_S) == 0


def _describe(system: Path) -> None:
    """Writes the files in which torch reads about the processor; the kernel describes this machine in them."""
    (system / "proc").unlink(missing_ok=True)  # a link to this machine's
    for folder in ("proc", WHEEL, HOME):
        (system / folder).mkdir(parents=True, exist_ok=True)
    cpus = system / "sys/devices/system/cpu"
    for core in range(CORES):
        registers = cpus / f"cpu{core}/regs/identification"
        registers.mkdir(parents=True)
        (registers / "midr_el1").write_text(MIDR)
    for name in ("possible", "present", "online"):
        (cpus / name).write_text(f"0-{CORES - 1}\n")
    (system / "etc/processors").write_text("".join(PROCESSOR.format(core=core) for core in range(CORES)))
