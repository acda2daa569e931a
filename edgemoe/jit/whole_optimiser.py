"""Optimises functions that Numba has translated to LLVM code, all at once and for one processor.

Numba optimises each inner function by itself, and translates it to machine code that nothing calls, before it inlines
the function and optimises again. Here it does neither, which saves a third of the time (`docs/design/kernels.md`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from typing import Any

import llvmlite.binding as llvm
import numba.core.codegen
import numba.core.compiler_lock
from numba.core.registry import cpu_target

_codegen: Any = numba.core.codegen
_lock: Any = numba.core.compiler_lock.global_compiler_lock


class _Library(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """A function and the functions that it calls, as LLVM code only."""

    def _optimize_functions(self, _: Any) -> None:
        """Leaves them as they are: the whole is optimised later."""

    def finalize(self) -> None:
        """Adds the functions that it calls, and translates nothing to machine code."""
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """Returns its LLVM code, for the libraries that call it."""
        return super()._get_module_for_linking()

    def get_pointer_to_function(self, name: str) -> int:
        """Returns 0: there is no machine code, and `object_cache.link` gives addresses.

        Raises TypeError for the wrapper with which Python would call the function.
        """
        self._ensure_finalized()
        if not name.startswith("cfunc.") and any(function.name == name for function in self.get_defined_functions()):
            raise TypeError(f"{self.name} is called by kernels, so Python cannot call it: make a `Code` of it")
        return 0


class _Codegen(_codegen.JITCPUCodegen):  # type: ignore[misc]
    """Numba's code generator with libraries that hold LLVM code only."""

    _library_class = _Library

    def set_env(self, _: str, __: Any) -> None:
        """Does nothing: the functions use no Python objects, so they need no environment."""


@contextlib.contextmanager
def unoptimised() -> Iterator[None]:
    """Has Numba write LLVM code alone, without optimising it, for functions that are compiled in this context."""
    context = cpu_target.target_context
    with _lock:
        usual = context.codegen()
        if isinstance(usual, _Codegen):  # one function's address is taken while another is compiled
            yield
            return
        plain = copy.copy(usual)  # shares the usual one's engine and description of the machine
        plain.__class__ = _Codegen
        context.codegen = lambda: plain
        try:
            yield
        finally:
            del context.codegen


def machine_code(modules: Collection[Any], symbols: Collection[str], machine: llvm.TargetMachine) -> bytes:
    """Returns one object file of these LLVM modules, optimised together. Others may call `symbols` in it."""
    whole = llvm.parse_assembly("")
    for module in modules:
        whole.link_in(module)
    kept = frozenset(symbols)
    for function in whole.functions:
        if not function.is_declaration and function.name not in kept:
            function.linkage = "internal"
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False  # as Numba
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(whole, builder)
    return bytes(machine.emit_object(whole))
