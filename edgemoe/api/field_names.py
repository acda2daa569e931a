"""Names the fields at fault in a refusal as the client wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from edgemoe.errors import InvalidRequest

_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")
_TOOL = re.compile(r"^(tools\[(\d+)\])(?:\.function\b)?")  # in both other APIs tools are flat objects


@dataclass(slots=True)
class FieldNames:
    """Maps Chat's fields to the client's names, and each message and tool to its path in the client's body."""

    fields: Mapping[str, str]
    messages: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)  # empty: the client's tools are Chat's, one by one
    flat_tools: bool = True  # the client's tools are no objects with a `function`

    @contextmanager
    def renamed(self) -> Iterator[None]:
        """Renames the fields in an InvalidRequest that the `with` block raises."""
        try:
            yield
        except InvalidRequest as error:
            param = self._own(error.param) if error.param else None
            message = str(error)
            if error.param and param and message.startswith(error.param):
                message = param + message.removeprefix(error.param)
            else:
                message = _MESSAGE.sub(self._place, message)
            renamed = type(error)(message, param=param, code=error.code)
            raise renamed from error

    def _own(self, path: str) -> str:
        path = _MESSAGE.sub(self._place, path)
        path = _TOOL.sub(self._tool_place, path) if self.flat_tools else path
        for name, own in self.fields.items():
            if path == name or path.startswith((f"{name}.", f"{name}[")):
                return own + path.removeprefix(name)
        return path

    def _place(self, match: re.Match[str]) -> str:
        at = int(match[1])
        return self.messages[at] if at < len(self.messages) else match[0]

    def _tool_place(self, match: re.Match[str]) -> str:
        at = int(match[2])
        return self.tools[at] if at < len(self.tools) else match[1]
