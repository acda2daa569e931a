"""Machine code kept between starts."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir

from edgemoe.errors import UnsupportedProcessor
from edgemoe.jit import object_cache
from edgemoe.jit.compile_target import TARGET
from edgemoe.jit.intrinsics import INT, call_chunk, cgutils, give_way, i64_at, intrinsic, jit, types
from edgemoe.jit.object_cache import Code, address_of, chunk, code, link
from edgemoe.kernels import cpu as kernels

RUN = (
    "import sys\n"
    "from pathlib import Path\n"
    "from test_object_cache import make, result\n"
    "from edgemoe.jit.object_cache import link\n"
    "codes = make()\n"
    "link(codes, Path(sys.argv[1]))\n"
    "print(result(codes[1]), 'compiled' in codes[1].__dict__)\n"
)


def make() -> tuple[Code, Code]:
    """Makes two functions, of which the second calls the first by its address."""

    @chunk
    def add(job: int, number: int) -> None:
        i64_at(job)[0] += number

    adding = address_of(add)

    @code(INT)
    def add_both(job: int) -> None:
        call_chunk(adding(), job, 20)
        call_chunk(adding(), job, 22)
        give_way()

    return add, add_both


def result(code: Code) -> int:
    cell = np.zeros(1, np.int64)
    code.call(cell.ctypes.data)
    return int(cell[0])


def in_a_new_process(directory: Path) -> str:
    return in_new_processes(directory, 1)[0]


def in_new_processes(directory: Path, count: int) -> list[str]:
    """Starts `count` processes at once. Returns their output."""
    command = [sys.executable, "-c", RUN, str(directory)]
    pipe, place = subprocess.PIPE, Path(__file__).parent
    started = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=place) for _ in range(count)]
    told = [process.communicate(timeout=100) for process in started]
    assert not any(process.returncode for process in started), told
    return [said.strip() for said, _ in told]


def test_the_second_process_does_not_compile(tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    assert in_a_new_process(directory) == "42 True"
    assert in_a_new_process(directory) == "42 False"
    assert directory.stat().st_mode & 0o777 == 0o700
    (kept,) = directory.glob("*.o")
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    assert in_a_new_process(directory) == "42 True", "damaged code was used"
    assert in_a_new_process(directory) == "42 False"


def test_of_processes_that_start_at_once_one_compiles(tmp_path: Path) -> None:
    assert sorted(in_new_processes(tmp_path / "kernels", 4)) == ["42 False"] * 3 + ["42 True"]


def test_a_directory_that_others_can_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    codes = make()
    link(codes, tmp_path)
    assert result(codes[1]) == 42
    assert not list(tmp_path.iterdir())
    assert "compiled at each start" in caplog.text


def test_a_call_that_keeps_the_gil_returns_the_function_s_result() -> None:
    @code(INT, INT, result=INT)
    def product(a: int, b: int) -> int:
        return a * b

    assert product.call_briefly(6, 7) == product.call(6, 7) == 42


def test_code_is_recompiled_when_a_source_beside_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, directory = tmp_path / "sources", tmp_path / "kernels"
    sources.mkdir()
    monkeypatch.setattr(Code, "folder", sources)
    for text in ("first", "first", "second"):
        (sources / "helper.py").write_text(text)
        link(make(), directory)
    assert len(list(directory.glob("*.o"))) == 2


def test_without_a_directory_it_is_compiled() -> None:
    codes = make()
    link(codes, None)
    assert result(codes[1]) == 42


ABSENT = "__routine_that_no_library_has"


@intrinsic
def _call_a_routine_that_nobody_links(typing: Any) -> Any:
    def emit(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, ABSENT), [])

    return types.int64(), emit


@jit
def _inside() -> int:
    return _call_a_routine_that_nobody_links()  # type: ignore[no-any-return]


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("call", [_call_a_routine_that_nobody_links, _inside], ids=["directly", "inside"])
def test_code_with_unlinked_symbols_fails_naming_them_and_the_processor(call: Any, keep: bool, tmp_path: Path) -> None:
    @code(INT)
    def lacking(at: int) -> None:
        i64_at(at)[0] = call()

    message = f"processor {TARGET.name} calls {ABSENT}, which is not here: [^,]*lacking; please"
    with pytest.raises(UnsupportedProcessor, match=message):
        link((*make(), lacking), tmp_path / "kernels" if keep else None)
    with pytest.raises(UnsupportedProcessor, match=message):
        lacking.call(0)


def test_python_cannot_be_given_a_function_that_kernels_compiled_first() -> None:
    @numba.njit
    def both(at: int) -> int:
        return at + 1

    @code(INT)
    def calling(at: int) -> None:
        i64_at(at)[0] = both(at)

    with pytest.raises(TypeError, match="make a `Code` of it"):
        calling.call(0)


def test_code_is_compiled_while_code_that_takes_its_address_is() -> None:
    @chunk
    def called(job: int, _: int) -> None:
        i64_at(job)[0] = 42

    address = address_of(called)

    @jit
    def after(job: int) -> None:
        i64_at(job)[1] = 43

    @code(INT)
    def calling(job: int) -> None:
        call_chunk(address(), job, 0)
        after(job)

    link((calling, called), None)
    found = np.zeros(2, np.int64)
    calling.call(found.ctypes.data)
    assert found.tolist() == [42, 43]


def test_functions_for_python_are_compiled_as_usual_after_kernels() -> None:
    link(make(), None)

    @numba.njit
    def plain(a: int) -> int:
        return a * 2

    assert plain(21) == 42


def test_kept_code_is_found_by_every_text_that_may_be_in_it() -> None:
    read = {file.resolve() for file in object_cache.sources(make())}
    folders = Path(object_cache.__file__).parent, Path(kernels.__file__).parent
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("edgemoe."):
                names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
                found = [importlib.util.find_spec(name) for name in names if _is_module(name)]
                assert {Path(str(spec.origin)).resolve() for spec in found if spec} <= read, f"{file}: {node.module}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_a_full_disk_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: int, __: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fill)
    object_cache._write(tmp_path / "x.o", {}, b"code")
    assert list(tmp_path.iterdir()) == []


def test_partial_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    for name, age_s in (("old", 1e6), ("new", 0.0)):
        left = tmp_path / f"{name}{object_cache.TEMPORARY}"
        left.write_bytes(b"part")
        os.utime(left, times=(time.time() - age_s,) * 2)
    object_cache._write(tmp_path / "x.o", {}, b"code")
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"new{object_cache.TEMPORARY}", "x.o"]


def test_code_that_came_with_the_wheel_is_linked_and_nothing_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_cache.build(make(), tmp_path)
    monkeypatch.setattr(object_cache, "BUILT", tmp_path)
    codes = make()
    link(codes, None)
    assert result(codes[1]) == 42
    assert "compiled" not in codes[1].__dict__
    assert object_cache.is_ready(codes, tmp_path / "empty")


def test_code_compiled_ahead_is_linked_and_nothing_compiled(tmp_path: Path) -> None:
    codes = make()
    assert not object_cache.is_ready(codes, tmp_path)
    object_cache.compile_ahead(make(), tmp_path)
    assert object_cache.is_ready(codes, tmp_path)
    link(codes, tmp_path)
    assert result(codes[1]) == 42
    assert "compiled" not in codes[1].__dict__
    assert not list(tmp_path.glob("*.lock"))


def test_a_folder_that_cannot_be_used_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    for folder in (tmp_path / "file", tmp_path / "open"):
        for codes in (make(), make()):
            link(codes, folder)
            assert result(codes[1]) == 42
    found = [vars(record)["why"] for record in caplog.records if record.message == "kernels are compiled at each start"]
    assert found == [f"Not a directory: {tmp_path / 'file'}", f"others can write {tmp_path / 'open'}"]
