"""This box's TLS key and certificate for etcd, made by openssl, and the checks of other boxes' certificates.

Each member trusts the certificates of the others one by one, and no authority. The control channel brings them, where
the box's own key vouches for them.
"""

from __future__ import annotations

import re
import ssl
import subprocess
from pathlib import Path

from edgemoe.durable import replace_file
from edgemoe.errors import CoordUnavailable

MAX_CERTIFICATE_BYTES = 2048
DAYS = 36500
OPENSSL_S = 20.0
IP = re.compile(r"[0-9.]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")
PEM = re.compile(r"(-----BEGIN ([A-Z ]+)-----\n.*?-----END \2-----\n)", re.DOTALL)
NEW_KEY = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make_certificate(folder: Path, node: str, host: str) -> str:
    """Writes a new key and a certificate of this host. Returns the certificate. Raises CoordUnavailable."""
    name = f"{'IP' if IP.fullmatch(host) else 'DNS'}:{host}"
    words = [
        *("openssl", *NEW_KEY, "-keyout", "/dev/stdout", "-days", str(DAYS), "-subj", f"/O=edgemoe/OU={node}"),
        *("-addext", f"subjectAltName={name}", "-addext", "basicConstraints=critical,CA:FALSE"),
    ]
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=OPENSSL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CoordUnavailable(f"no vote: install openssl, which makes this box's certificate: {error}") from error
    found: dict[str, str] = {kind: text for text, kind in PEM.findall(done.stdout)}
    if done.returncode or found.keys() != {"PRIVATE KEY", "CERTIFICATE"}:
        raise CoordUnavailable(f"no vote: openssl made no certificate for {host}: {done.stderr.strip()[-300:]}")
    try:
        replace_file(folder / "key.pem", found["PRIVATE KEY"].encode())
        replace_file(folder / "certificate.pem", found["CERTIFICATE"].encode())
    except OSError as error:
        raise CoordUnavailable(f"no vote: {folder} cannot be written: {error.strerror}") from error
    return found["CERTIFICATE"]


def is_certificate(text: str) -> bool:
    """Returns whether `text` is one certificate in PEM."""
    if len(text) > MAX_CERTIFICATE_BYTES or text.count("BEGIN CERTIFICATE") != 1:
        return False
    try:
        ssl.create_default_context(cadata=text)
    except (ssl.SSLError, ValueError):
        return False
    return True
