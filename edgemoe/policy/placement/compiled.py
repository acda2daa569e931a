"""How the solvers are compiled. It takes seconds once a process, and is kept nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])
_ENTRY: Any = {"nogil": True, "error_model": "numpy"}
_INNER: Any = _ENTRY | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def entry(function: Function) -> Function:
    """Returns a function compiled for Python to call."""
    compiled: Function = numba.njit(**_ENTRY)(function)
    return compiled


def inner(function: Function) -> Function:
    """Returns a function compiled for compiled ones to call, which takes half the time to compile."""
    compiled: Function = numba.njit(**_INNER)(function)
    return compiled
