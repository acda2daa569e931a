"""The house's rules of size and names, read from the sources."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from support.prose import nodes_of, text_of, tree_of

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("edgemoe", "scoutgate") for path in (ROOT / folder).rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 500, 60
KERNELS = {  # of GPUs, one launch each, whose parameters take a line each
    *(f"edgemoe/kernels/gpu/decode_attention.py::{name}" for name in ("attend", "decode_attention")),
    *(f"edgemoe/kernels/gpu/decode_dense.py::{name}" for name in ("product", "place", "choose")),
}


def classes(file: Path) -> Iterator[str]:
    """Yields the public classes of a module's top level."""
    yield from (node.name for node in tree_of(file).body if isinstance(node, ast.ClassDef) and node.name[0] != "_")


def functions(file: Path) -> Iterator[tuple[str, int]]:
    """Yields each function's name and lines, with decorators and docstring."""
    for node in nodes_of(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or first) - first + 1


def too_long() -> Iterator[str]:
    for file in FILES:
        name = str(file.relative_to(ROOT))
        if len(text_of(file).splitlines()) > FILE_LINES:
            yield name
        yield from (
            f"{name}::{function}"
            for function, lines in functions(file)
            if lines > FUNCTION_LINES and f"{name}::{function}" not in KERNELS
        )


def test_no_file_or_function_is_too_long() -> None:
    assert not list(too_long())


MOST_PARAMETERS = 7  # without self; parameters that belong together form a dataclass


def parameters(file: Path) -> Iterator[tuple[str, int]]:
    """Yields functions and their numbers of parameters, without compiled ones, which take plain arrays."""
    for node in nodes_of(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(ast.unparse(decorator).startswith("njit") for decorator in node.decorator_list):
                continue
            names = [each.arg for each in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
            yield f"{node.name}, line {node.lineno}", len(names) - (names[:1] in (["self"], ["cls"]))


def test_functions_have_few_parameters() -> None:
    many = {
        f"{file.relative_to(ROOT)}::{name}"
        for file in FILES
        if not {"jit", "kernels"} & set(file.parts)
        for name, number in parameters(file)
        if number > MOST_PARAMETERS
    }
    assert not many


SHARED = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples, private by name only


def privates_inside(made: ast.ClassDef) -> Iterator[ast.Attribute]:
    """Yields attributes of the class itself: its objects may use them on each other."""
    inside = [node for node in ast.walk(made) if isinstance(node, ast.Attribute)]
    names = {node.attr for node in inside if ast.unparse(node.value) == "self"}
    names |= {node.name for node in made.body if isinstance(node, ast.FunctionDef)}
    yield from (node for node in inside if node.attr in names)


def reached_into(file: Path) -> Iterator[str]:
    """Yields private attributes of objects of other files' classes; modules of the standard library may have them."""
    nodes = nodes_of(file)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    mine = {"self", "cls", "super()", *(modules & sys.stdlib_module_names), *(node.name for node in classes)}
    own = {each for node in classes for each in privates_inside(node)}
    private = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr[0] == "_")
    for node in private:
        if (
            node.attr[:2] != "__"
            and node not in own
            and node.attr not in SHARED
            and ast.unparse(node.value) not in mine
        ):
            yield f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_nobody_reaches_into_another_object() -> None:
    files = [*FILES, *sorted((ROOT / "tools").rglob("*.py"))]
    assert not [place for file in files for place in reached_into(file)]


def decoded_by_locale(file: Path) -> Iterator[str]:
    """Yields calls that decode text as the locale says, which need not be UTF-8."""
    for node in nodes_of(file):
        if isinstance(node, ast.Call):
            named = {keyword.arg for keyword in node.keywords}
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            runs = ast.unparse(node.func).startswith("subprocess.") and named & {"text", "universal_newlines"}
            if "encoding" not in named and (runs or (called == "read_text" and not node.args)):
                yield f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_text_is_read_as_utf_8_in_every_locale() -> None:
    assert not [place for file in FILES for place in decoded_by_locale(file)]


def test_a_public_class_has_a_name_of_its_own() -> None:
    places = defaultdict[str, list[str]](list)
    for file in FILES:
        for name in classes(file):
            places[name].append(str(file.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}
