"""Finds riddles in docstrings, comments, error messages and pages, and names that cannot be grepped.

`RULES` lists the patterns, each with its advice. `tests/test_prose.py` has an example of each, bad and good.
A room may have as many faults as tools/prose_debt.toml allows it; rooms that are not listed there have none.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEBT = ROOT / "tools/prose_debt.toml"
SOURCES, PAGES = ("edgemoe", "scoutgate", "tools", "tests"), ("docs", "tools")
SENTENCE_WORDS = {"page": 30}  # the longest sentence of a page; of everything else it is the next line's
SOURCE_WORDS = 25
HEADER_LINES = 5
CONTENT_WORDS = {"function": 3, "noun": 2, "header": 3}
BARE_NAMES = {"look", "hear", "take", "tell", "settle"}
SHARED_FILE_NAMES = {"__init__.py", "__main__.py", "conftest.py", "metrics.py", "messages.py", "command.py"}
SHARED_FILE_NAMES |= {"decode_attention.py", "experts_decode.py"}  # of the kernels for CPUs and GPUs

# --- the rules ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A pattern that no sentence may match, and the advice that a match gets."""

    name: str
    advice: str
    pattern: re.Pattern[str]


def rule(name: str, advice: str, pattern: str) -> Rule:
    return Rule(name, advice, re.compile(pattern, re.IGNORECASE))


RULES = [
    rule("what", 'write the noun in place of "what"', r"\b(?:what|whatever)\b"),
    rule("who", "name the box, user, caller or process", r"\b(?:whom|whoever|whomever)\b"),
    rule(
        "who",
        "name the box, user, caller or process",
        r"(?:^|\b(?:of|to|by|for|from|with|than|and|or|but|as|is|are|was|knows?|says?|sees?|returns?|tells?|asks?|decides?)"
        r" )who\b",
    ),
    rule(
        "where",
        'write "the address", "the folder", "the device", ... in place of "where"',
        r"\b(?:returns?|yields?|says?|knows?|finds?|tells?|shows?|notes?|keeps?|asks?|decides?|of|to|from|than|is|are) "
        r"where\b|^where\b[^,]*$",
    ),
    rule(
        "those",
        'repeat the noun in place of "those"',
        r"\bthose (?:that|who|whose|which|of|with|here|there|it|in|to)\b|\bthat which\b|^those\b",
    ),
    rule("whose", 'make two sentences of "whose ..., and ..."', r"(?:^|, )whose\b[^,;]*, and\b|\bwhose\b.*\bwhose\b"),
    rule("is to", 'write "must", "should" or "will"', r"\b(?:is|are|was|were) (?:not )?to (?!the\b|an?\b)[a-z]+"),
    rule("so many", "state the number or the parameter", r"\bso (?:many|much|few)\b(?!.*\b(?:that|as)\b)"),
    rule("is told", "say what the function does with it", r"^(?:is|are) (?:told|asked|shown|heard)\b|^hears\b"),
    rule(
        "old word",
        "use the plain word of today",
        r"\b(?:anew|lest|whence|thence|whither|wherein|whereof|thereof|therein|foretell\w*|foretold|reckon\w*"
        r"|nought|naught|in vain|in whose hands|for all that)\b",
    ),
    rule("one owner", "say what the object owns, or on which thread it lives", r"^one owner\b"),
]
ANY_RULE = re.compile("|".join(f"(?:{each.pattern.pattern})" for each in RULES), re.IGNORECASE)
VERB = "begin with a verb in the third person: Returns, Builds, Counts, Whether ..."
LONG = "a sentence of {words} words, at most {most}"
SHORT = "too few words of content"

# First words that end in "s" and are no verbs. Others are told by the next word: "Experts of", "Rows that".
PLURALS = """
always as blocks bodies boxes bytes choices experts figures has inputs is its layer-steps layers lines logits medians
members messages milliseconds nodes numbers percentiles ports prefixes probabilities rounds rows seconds settings slots
sums tensors this tokens users values vectors versions was weights
"""
NOUNS = set(PLURALS.split()) - {"is", "has"}
PLURAL_FOLLOWED = re.compile(
    r"^(?!announces|checks|counts|marks|notes|returns)[a-z-]+s,? (?:of|that|which|per|whose|are|were|who|than)\b",
    re.IGNORECASE,
)
SMALL = """
a all also an and any as at be been but by did do does each every for from had has have here if in is it its just more
most no nor not of on one only or so some such than that the then there these this those to too until very was were
what when where which while who whom whose with
"""
SMALL_WORDS = set(SMALL.split())


def begins_with_verb(sentence: str) -> bool:
    first = re.match(r"[A-Za-z][\w-]*", sentence)
    if first is None:
        return False
    word = first[0].lower()
    if word == "whether" or re.match(r"(?i)true (?:if|once|when|while|until)\b", sentence):
        return True
    return word.endswith("s") and not word.endswith("ss") and word not in NOUNS and not PLURAL_FOLLOWED.match(sentence)


# --- text --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
    """A docstring, a comment, an error message or a paragraph of a page, with its place."""

    path: Path
    line: int
    kind: str  # "header", "function", "noun" (a class or property), "comment", "error", "page"
    text: str


@dataclass(frozen=True)
class Fault:
    path: Path
    line: int
    rule: str
    advice: str
    sentence: str

    def __str__(self) -> str:
        place = f"{self.path.relative_to(ROOT) if self.path.is_absolute() else self.path}:{self.line}"
        return f"{place}: {self.rule}: {self.advice}\n    {self.sentence}"


def plain(text: str) -> str:
    """Removes code blocks, shapes and addresses of links; a piece of code in backticks becomes one word."""
    text = re.sub(r"(?m)^ {4,}.*$", "", text)
    text = re.sub(r"``[^`]*``|`[^`]*`|\"[^\"\n]*\"", "CODE", text)
    text = re.sub(r"!?\[([^\]\n]*)\]\([^)\n]*\)", r"\1", text)
    return re.sub(r" ?\[[^\]\n]*\]", "", text)


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a text; paragraphs and list items end one as a full stop does."""
    for part in re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.) ", "\n" + plain(text).strip()):
        joined = " ".join(part.replace("**", "").split())
        joined = re.sub(r"^(?:[*-]|\d+\.) ", "", joined)
        for sentence in re.split(r"(?<=[.!?])\)? (?=[A-Z(\d])", joined):
            if sentence and not sentence.endswith("?"):
                yield sentence


def words(sentence: str) -> list[str]:
    return re.findall(r"[A-Za-z][\w'’-]*", sentence)


def is_noun(node: ast.AST) -> bool:
    """Whether a noun phrase may describe the node: a class, a property, a fixture or a test."""
    if isinstance(node, ast.ClassDef):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
        return node.name.startswith("test_") or any(word in decorators for word in ("property", "fixture", "setter"))
    return False


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the module and all its statements, without the expressions in them, which are most of a tree."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            if isinstance(inside := getattr(node, part, None), list):
                todo += inside


def docstrings(path: Path, tree: ast.Module, nodes: list[ast.AST]) -> Iterator[Passage]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            kind = "header" if node is tree else "noun" if is_noun(node) else "function"
            yield Passage(path, node.body[0].lineno, kind, text)


def comments(path: Path, source: str) -> Iterator[Passage]:
    """Yields blocks of comment lines, and comments after code; text within long strings is no comment."""
    inside: set[int] = set()
    for match in re.finditer(r'(?s)""".*?"""', source):
        first = source.count("\n", 0, match.start()) + 1
        inside.update(range(first, first + match[0].count("\n") + 1))
    block: list[str] = []
    begins = 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        alone = number not in inside and line.lstrip().startswith("# ")
        if alone:
            begins = begins if block else number
            block.append(line.lstrip()[2:])
            continue
        if block:
            yield Passage(path, begins, "comment", "\n".join(each.strip() for each in block))
            block = []
        if number not in inside and (after := re.search(r"(?<=\S)  # (.*)$", line)):
            yield Passage(path, number, "comment", after[1])


def errors(path: Path, nodes: list[ast.AST]) -> Iterator[Passage]:
    """Yields the texts that raised errors are made with; a value in an f-string becomes one word."""
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Passage(path, argument.lineno, "error", argument.value)
                elif isinstance(argument, ast.JoinedStr):
                    parts = [str(each.value) if isinstance(each, ast.Constant) else "CODE" for each in argument.values]
                    yield Passage(path, argument.lineno, "error", "".join(parts))


def paragraphs(path: Path) -> Iterator[Passage]:
    """Yields the paragraphs, list items and table cells of a page, without headings, table heads and code."""
    lines = path.read_text().splitlines()
    block: list[str] = []
    begins, fenced = 0, False

    def whole() -> Iterator[Passage]:
        if block:
            yield Passage(path, begins, "page", "\n".join(block))
            block.clear()

    for number, line in enumerate([*lines, ""], 1):
        mark = line.lstrip()
        if mark.startswith("```"):
            fenced = not fenced
        if fenced or not mark or mark.startswith(("#", "```", "|", "<")) or re.match(r"(?:[*-]|\d+\.) ", mark):
            yield from whole()
        if line.startswith("    ") and not block and not re.match(r"(?:[*-]|\d+\.) ", mark):
            continue  # indented code
        if mark.startswith("|") and not fenced and not "".join(lines[number : number + 1]).lstrip().startswith("|-"):
            for cell in re.split(r"(?<!\\)\|", mark):
                yield Passage(path, number, "page", cell.strip())
        elif not fenced and mark and not mark.startswith(("#", "```", "|", "<")):
            begins = begins if block else number
            block.append(mark)
    yield from whole()


# --- faults ------------------------------------------------------------------------------------------------------


def faults_of(passage: Passage) -> Iterator[Fault]:
    """Yields the faults of a passage's words."""

    def fault(name: str, advice: str, text: str) -> Fault:
        return Fault(passage.path, passage.line, name, advice, text)

    found = list(sentences(passage.text))
    most = SENTENCE_WORDS.get(passage.kind, SOURCE_WORDS)
    for sentence in found:
        for each in RULES if ANY_RULE.search(sentence) else ():
            if each.pattern.search(sentence):
                yield fault(each.name, each.advice, sentence)
        if (count := len(words(sentence))) > most:
            yield fault("long", LONG.format(words=count, most=most), sentence)
    if not found or passage.kind not in CONTENT_WORDS:
        return
    if passage.kind == "function" and not begins_with_verb(found[0]):
        yield fault("verb", VERB, found[0])
    content = [each for each in words(" ".join(found)) if each.lower() not in SMALL_WORDS]
    if len(content) < CONTENT_WORDS[passage.kind]:
        yield fault("short", SHORT, found[0])


def faults_in_source(path: Path, source: str) -> Iterator[Fault]:
    tree = ast.parse(source)
    nodes = list(statements(tree))
    for passage in [*docstrings(path, tree, nodes), *comments(path, source), *errors(path, nodes)]:
        yield from faults_of(passage)
    header = ast.get_docstring(tree) or ""
    if len(lines := [line for line in header.splitlines() if line.strip()]) > HEADER_LINES:
        yield Fault(path, 1, "header", f"{len(lines)} lines, at most {HEADER_LINES}; docs/ has room", lines[0])
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in BARE_NAMES:
            yield Fault(path, node.lineno, "name", "a verb that can be grepped, with its object", node.name)


def faults_in_page(path: Path) -> Iterator[Fault]:
    for passage in paragraphs(path):
        yield from faults_of(passage)


def same_names(paths: Iterable[Path]) -> Iterator[Fault]:
    """Yields a fault for each file whose name another file of the tree has."""
    places = defaultdict[str, list[Path]](list)
    for path in paths:
        if path.name not in SHARED_FILE_NAMES:
            places[path.name].append(path)
    for name, found in places.items():
        if len(found) > 1:
            for path in found:
                yield Fault(path, 1, "file name", f"{len(found)} files have it; the tree is searched by name", name)


def checked_files() -> tuple[list[Path], list[Path]]:
    """Returns the sources and the pages of the tree."""
    sources = sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    pages = [*sorted(ROOT.glob("*.md")), *sorted(path for folder in PAGES for path in (ROOT / folder).rglob("*.md"))]
    return sources, pages


def tree_faults(within: Iterable[Path] = (ROOT,)) -> Iterator[Fault]:
    """Yields the faults of the files in the folders given, or of these files."""
    folders = list(within)

    def asked(path: Path) -> bool:
        return any(path == each or each in path.parents for each in folders)

    sources, pages = checked_files()
    for path in filter(asked, sources):
        yield from faults_in_source(path, path.read_text())
    for path in filter(asked, pages):
        yield from faults_in_page(path)
    ours = (path for path in sources if ROOT / "tests" not in path.parents)
    yield from (fault for fault in same_names(ours) if asked(fault.path))


# --- allowances --------------------------------------------------------------------------------------------------


def room_of(path: Path) -> str:
    """Returns the room of a file: "edgemoe/policy", "tests/policy", "docs", or "." for files of the root."""
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[:2]) or "."


def allowances() -> dict[str, int]:
    return {room: each["faults"] for room, each in tomllib.loads(DEBT.read_text()).items()}


def lower(counts: Counter[str]) -> None:
    """Writes the counts of today into the allowances that are higher, and removes rooms without faults."""
    lines = [DEBT.read_text().partition("\n\n")[0]]
    for room, allowed in sorted(allowances().items()):
        if least := min(allowed, counts[room]):
            lines.append(f'["{room}"]\nfaults = {least}')
    DEBT.write_text("\n\n".join(lines) + "\n")


def over_allowance(faults: Iterable[Fault]) -> dict[str, list[Fault]]:
    """Returns the faults of each room that has more than its allowance; none while the whole tree has no more.

    So files may move from room to room.
    """
    rooms = defaultdict[str, list[Fault]](list)
    for fault in faults:
        rooms[room_of(fault.path)].append(fault)
    allowed = allowances()
    if sum(map(len, rooms.values())) <= sum(allowed.values()):
        return {}
    return {room: found for room, found in rooms.items() if len(found) > allowed.get(room, 0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="folders or files; all of the tree without any")
    parser.add_argument("--lower", action="store_true", help="lower the allowances to the counts of today")
    parser.add_argument("--rules", action="store_true", help="count the faults by rule")
    options = parser.parse_args()
    faults = list(tree_faults([Path(each).resolve() for each in options.paths] or [ROOT]))
    counts = Counter(room_of(fault.path) for fault in faults)
    if options.lower:
        lower(counts)
    elif options.rules:
        print("\n".join(f"{count:6} {name}" for name, count in Counter(fault.rule for fault in faults).most_common()))
    elif options.paths:
        print(*faults, f"{len(faults)} faults", sep="\n")
        return bool(faults)
    else:
        over = over_allowance(faults)
        allowed = allowances()
        for room, found in sorted(over.items()):
            print(f"{room}: {len(found)} faults, {allowed.get(room, 0)} allowed; `tools/prose {room}` lists them")
        print(f"{len(faults)} faults in {len(counts)} rooms")
        return bool(over)
    return 0


if __name__ == "__main__":
    sys.exit(main())
