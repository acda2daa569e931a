"""The demo model's corpus: text files of a Debian machine with Python, and generated text.

Every domain is a list of documents. The manifest names each file with its hash, so that a later run can check that it
reads the same text.
"""

from __future__ import annotations

import gettext
import gzip
import hashlib
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.demo_model import arithmetic, chat

LANGUAGES = ("de", "fr", "es", "it", "ru")
FILE_CHARS = 60_000  # no single file dominates its domain
GENERATED = {"arithmetic": arithmetic.document, "chat": chat.document, "drill": chat.drill}


@dataclass
class Corpus:
    documents: dict[str, list[str]] = field(default_factory=dict)  # domain -> texts
    files: list[dict[str, str | int]] = field(default_factory=list)  # the manifest


def read(path: Path) -> str:
    """Returns the file's text, decompressed; "" if it is not text."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return ""


def python_sources() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = ("test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings", "__pycache__")
    for path in sorted(root.rglob("*.py")):
        if not set(skip) & set(path.relative_to(root).parts):
            yield path


def documentation() -> Iterator[Path]:
    for pattern in ("*.txt", "*.md", "*.rst", "*.txt.gz", "README*", "copyright"):
        yield from sorted(Path("/usr/share/doc").rglob(pattern))
    yield from sorted(Path("/usr/share/common-licenses").glob("*"))


def manual_pages() -> Iterator[Path]:
    for section in (1, 2, 3, 5, 7, 8):
        pages = sorted(Path(f"/usr/share/man/man{section}").glob("*.gz"))
        yield from (p for p in pages if not p.name.startswith(("gcloud", "git-", "perl", "gsutil", "bq")))


def catalogues(language: str) -> Iterator[Path]:
    roots = [Path("/usr/share/locale"), Path(sysconfig.get_paths()["stdlib"])]
    for root in roots:
        found = sorted(root.glob(f"**/{language}/LC_MESSAGES/*.mo"))
        yield from (path for path in found if not path.name.startswith("iso_"))  # lists of names


def manual_text(source: str) -> str:
    """Returns a manual page without most of its troff macros."""
    lines = []
    for line in source.splitlines():
        line = re.sub(r"\\f[A-Z]|\\f\([A-Z]{2}|\\&|\\s[-+]?\d|\\m\[[^]]*\]", "", line)
        line = line.replace("\\-", "-").replace("\\(aq", "'").replace("\\(bu", "*").replace("\\e", "\\")
        if line.startswith((".SH", ".SS", ".Sh")):
            lines += ["", line[3:].strip().strip('"'), ""]
        elif re.match(r"\.(B|I|BR|IR|BI|IB|RB|RI) ", line):
            lines.append(line.split(" ", 1)[1].replace('"', ""))
        elif not line.startswith((".", "'")):
            lines.append(line)
        elif line.startswith((".PP", ".TP", ".IP", ".LP")):
            lines.append("")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


class Catalogue(gettext.GNUTranslations):
    """The messages of a file of translations."""

    def messages(self) -> Mapping[str, str]:
        """Returns the translations by their originals."""
        return self._catalog  # type: ignore[attr-defined]


def catalogue_text(path: Path) -> str:
    """Returns the translated messages of one catalogue, a line each."""
    try:
        with path.open("rb") as file:
            messages = Catalogue(file).messages()
    except (OSError, UnicodeDecodeError, ValueError):
        return ""
    texts = [v.strip() for k, v in messages.items() if k and isinstance(v, str) and len(v) > 20]
    return "\n".join(texts)


def gather(seed: int, max_chars: int, generated: int) -> Corpus:
    """Reads and generates every domain: at most `max_chars` of files per domain, `generated` documents each."""
    corpus, rng = Corpus(), random.Random(seed)
    plain: Callable[[Path], str] = read
    sources = {
        "code": (python_sources(), plain),
        "docs": (documentation(), plain),
        "manual": (manual_pages(), lambda path: manual_text(read(path))),
        **{language: (catalogues(language), catalogue_text) for language in LANGUAGES},
    }
    for domain, (paths, reader) in sources.items():
        corpus.documents[domain] = _read_domain(corpus, domain, list(paths), reader, rng, max_chars)
    for domain, make in GENERATED.items():
        corpus.documents[domain] = [make(rng) for _ in range(generated)]
    return corpus


def _read_domain(
    corpus: Corpus, domain: str, paths: list[Path], reader: Callable[[Path], str], rng: random.Random, limit: int
) -> list[str]:
    rng.shuffle(paths)
    texts, chars, seen = [], 0, set()
    for path in paths:
        text = reader(path)[:FILE_CHARS]
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(text) < 200 or digest in seen:
            continue
        seen.add(digest)
        texts.append(text)
        corpus.files.append({"domain": domain, "path": str(path), "chars": len(text), "sha256": digest[:16]})
        chars += len(text)
        if chars >= limit:
            break
    return texts
