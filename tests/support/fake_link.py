"""Links between members in one process, with partitions at will."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations


class FakeNet:
    """Joins `FakeLink`s; `cut` and `heal` act on one direction, so that one-way partitions can be made too."""

    def __init__(self, names: list[str]) -> None:
        self.links = {name: FakeLink(self, name) for name in names}
        self.open: set[tuple[str, str]] = set(permutations(names, 2))
        self.listening: set[str] = set()

    def cut(self, source: str, target: str) -> None:
        self.open.discard((source, target))
        self.links[target].down(source)

    def heal(self, source: str, target: str) -> None:
        self.open.add((source, target))
        if source in self.listening:
            self.links[target].up(source)

    def isolate(self, name: str) -> None:
        for other in self.links.keys() - {name}:
            self.cut(name, other)
            self.cut(other, name)

    def rejoin(self, name: str) -> None:
        for other in self.links.keys() - {name}:
            self.heal(name, other)
            self.heal(other, name)


class FakeLink:
    """A RaftLink of a FakeNet."""

    def __init__(self, transport: FakeNet, name: str) -> None:
        self.transport, self.name = transport, name
        self.message: Callable[[str, bytes], None] = lambda _n, _p: None
        self.up: Callable[[str], None] = lambda _n: None
        self.down: Callable[[str], None] = lambda _n: None

    def send(self, node: str, payload: bytes) -> bool:
        if (self.name, node) not in self.transport.open:
            return False
        self.transport.links[node].message(self.name, payload)
        return True

    def listen(
        self,
        on_message: Callable[[str, bytes], None],
        on_up: Callable[[str], None],
        on_down: Callable[[str], None],
    ) -> None:
        self.message, self.up, self.down = on_message, on_up, on_down
        self.transport.listening.add(self.name)
        for other in self.transport.listening - {self.name}:
            on_up(other)
            self.transport.links[other].up(self.name)
