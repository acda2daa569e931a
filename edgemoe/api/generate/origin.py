"""Where in a client's body the parts of a Chat came from, so that a refusal names the field that the client wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from edgemoe.errors import InvalidRequest

_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")
_TOOL = re.compile(r"^(tools\[\d+\])\.function\b")  # both other APIs have their tools flat


@dataclass(slots=True)
class Origin:
    """`fields` are other names of Chat's fields; `messages` where each of its messages stood."""

    fields: Mapping[str, str]
    messages: list[str] = field(default_factory=list)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Has the InvalidRequest that the block raises speak of the client's fields."""
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
