"""Reads the one string that a custom tool takes from the JSON arguments that the model writes for it."""

from __future__ import annotations

import json
import re

import msgspec

from edgemoe.api.custom_tools import CUSTOM_INPUT

_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_UNIT = r"u[0-9a-fA-F]{4}"  # of UTF-16, behind a backslash; the first of a pair waits for the second
_CHARACTERS = re.compile(
    rf'(?:[^"\\]+|\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{{2}}\\{_UNIT}|(?!u[dD][89abAB]){_UNIT}))*'
)


def custom_input(arguments: str) -> str:
    """Returns the input in whole arguments: the named string, else the only string, else the arguments themselves."""
    try:
        given = msgspec.json.decode(arguments)
    except msgspec.MsgspecError:
        return arguments
    if isinstance(given, dict):
        texts = [value for value in given.values() if isinstance(value, str)]
        given = given.get(CUSTOM_INPUT, texts[0] if len(texts) == 1 else None)
    return given if isinstance(given, str) else arguments


class CustomInput:
    """Reads the input while its arguments are being written."""

    def __init__(self) -> None:
        self.text = ""  # of the input so far
        self._unread = ""
        self._begun = False

    def feed(self, text: str) -> str:
        """Returns the characters of the input that this part of the arguments completes."""
        self._unread += text
        if not self._begun:
            begin = _BEGIN.match(self._unread)
            if begin is None:
                return ""
            self._begun, self._unread = True, self._unread[begin.end() :]
        whole = _CHARACTERS.match(self._unread)
        assert whole is not None, "it matches nothing, too"
        self._unread = self._unread[whole.end() :]
        new = str(json.loads(f'"{whole[0]}"', strict=False)).encode("utf-8", "replace").decode()
        self.text += new
        return new
