"""Offers the tools of POST /v1/responses to the model as functions, and finds whose tool a call means.

Functions in a namespace get flat names that no other tool has; their calls come back with namespace and name apart.
A custom tool is a function of one string. Tools that only OpenAI's servers run are left out of the offer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from edgemoe.api.custom_tools import custom_function
from edgemoe.api.peer_fields import TOOL_CHOICES
from edgemoe.api.schema import MAX_TOOLS
from edgemoe.errors import InvalidRequest
from edgemoe.types.json_object import Json

ToolCallItem = Literal["function_call", "custom_tool_call", "tool_search_call"]
SEARCH = "tool_search"
NAME_CHARS = 256  # longest name of a function


@dataclass(frozen=True, slots=True)
class ClientTool:
    """Names one tool of the client and the kind of item that its calls are."""

    item: ToolCallItem
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class ToolOffer:
    """Holds the functions that the model is offered, and the client's tools behind them by their flat names."""

    functions: list[Json] = field(default_factory=list)  # as in POST /v1/chat/completions
    places: list[str] = field(default_factory=list)  # path of each function in the client's body
    _tools: dict[str, ClientTool] = field(default_factory=dict)

    def add(self, tools: Iterable[Any], where: str, namespace: Json | None = None) -> None:
        """Adds tools in the client's form; those already known are skipped. Raises InvalidRequest.

        `where` is the path of the list, `namespace` the tool that holds it.
        """
        for at, tool in enumerate(tools):
            place = f"{where}[{at}]"
            if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
                raise InvalidRequest(f"{place}.type: a tool has a type", param=f"{place}.type")
            match tool["type"]:
                case "namespace" if namespace is None and isinstance(tool.get("tools"), list):
                    self.add(tool["tools"], f"{place}.tools", tool)
                case "function":
                    given = tool["function"] if isinstance(tool.get("function"), dict) else tool
                    function = {key: given.get(key) for key in ("name", "description", "parameters", "strict")}
                    self._offer("function_call", function, place, namespace)
                case "custom":
                    self._offer("custom_tool_call", custom_function(tool), place, namespace)
                case "tool_search" if tool.get("execution") == "client":
                    function = {key: tool.get(key) for key in ("description", "parameters")}
                    self._offer("tool_search_call", {"name": SEARCH, **function}, place, None)

    def tool(self, name: str) -> ClientTool:
        """Returns the client's tool that the model knows by this name."""
        return self._tools.get(name) or ClientTool("function_call", name)

    def name(self, name: Any, namespace: Any = None) -> Any:
        """Returns the name by which the model knows a tool, whether it is offered or not."""
        for flat, tool in self._tools.items():
            if (tool.name, tool.namespace) == (name, namespace):
                return flat
        return _joined(namespace, name) if isinstance(namespace, str) and isinstance(name, str) else name

    def choose(self, choice: Any) -> Any:
        """Returns a tool choice in the form of chat completions; withdraws the tools that it does not allow.

        Raises InvalidRequest for one that demands a tool which is not offered.
        """
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if isinstance(kind, str) and kind in TOOL_CHOICES:
            return TOOL_CHOICES[kind]
        if isinstance(choice, str):
            return {"function": {"name": self._named({"name": choice})}}
        if not isinstance(choice, dict):
            return choice
        if kind == "allowed_tools":
            allowed = choice["allowed_tools"] if isinstance(choice.get("allowed_tools"), dict) else choice
            self._keep({self._named(tool) for tool in allowed.get("tools") or () if isinstance(tool, dict)})
            return allowed.get("mode", "auto")
        if kind not in ("function", "custom", "tool", SEARCH):
            message = f"tool_choice: tools of type {str(kind)[:40]!r} are not run here; only the client's can be called"
            raise InvalidRequest(message, param="tool_choice")
        return {"function": {"name": self._named(choice)}}

    def _offer(self, item: ToolCallItem, function: Json, place: str, namespace: Json | None) -> None:
        own, within = function["name"], namespace.get("name") if namespace else None
        if not isinstance(own, str) or not own or (namespace is not None and not isinstance(within, str)):
            raise InvalidRequest(f"{place}.name: a tool has a name", param=f"{place}.name")
        tool = ClientTool(item, own, within)
        if tool in self._tools.values():
            return
        if len(self.functions) >= MAX_TOOLS:
            raise InvalidRequest(f"{place}: more than {MAX_TOOLS} tools are offered", param=place)
        flat = wanted = _joined(within, own) if within else own
        count = 1
        while flat in self._tools:
            count += 1
            flat = f"{wanted[: NAME_CHARS - 8]}_{count}"
        if namespace and not any(one.namespace == within for one in self._tools.values()):
            about = f"{within}: {namespace['description']}" if namespace.get("description") else ""
            function = function | {"description": "\n\n".join(filter(None, (function.get("description"), about)))}
        self._tools[flat] = tool
        self.functions.append({"function": function | {"name": flat}})
        self.places.append(place)

    def _named(self, choice: Json) -> Any:
        """Returns the model's name of the tool that a choice names; one in a namespace may be named without it."""
        inner = choice.get(str(choice.get("type")))  # as in chat completions
        name = (inner if isinstance(inner, dict) else choice).get("name", choice.get("type"))
        within = choice.get("namespace")
        found = self.name(name, within)
        if found in self._tools:
            return found
        return next((flat for flat, tool in self._tools.items() if within is None and tool.name == name), found)

    def _keep(self, names: set[Any]) -> None:
        kept = [at for at, one in enumerate(self.functions) if one["function"]["name"] in names]
        self.functions, self.places = [self.functions[at] for at in kept], [self.places[at] for at in kept]


def _joined(namespace: str, name: str) -> str:
    joined = f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
    return joined if len(joined) <= NAME_CHARS else name
