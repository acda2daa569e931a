"""Maps the fields of a Chat back to the client's body, so that errors name the field that the client wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from edgemoe.errors import InvalidRequest

_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")
_TOOL = re.compile(r"^(tools\[\d+\])\.function\b")  # in both other APIs tools are flat objects


@dataclass(slots=True)
class Origin:
    """Maps Chat's fields to the client's names, and each message to its path in the client's body."""

    fields: Mapping[str, str]
    messages: list[str] = field(default_factory=list)

    @contextmanager
    def named(self) -> Iterator[None]:
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
        path = _TOOL.sub(r"\1", _MESSAGE.sub(self._place, path))
        for name, own in self.fields.items():
            if path == name or path.startswith((f"{name}.", f"{name}[")):
                return own + path.removeprefix(name)
        return path

    def _place(self, match: re.Match[str]) -> str:
        at = int(match[1])
        return self.messages[at] if at < len(self.messages) else match[0]
