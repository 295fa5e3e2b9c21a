"""Stop strings: text that ends a choice, found across token boundaries.

An Aho-Corasick automaton (Aho & Corasick 1975) is built once per request and shared by its choices. Its state after a
character is the longest suffix of the text that could still grow into a stop string: exactly the text that must be
held back, and nothing more. The result depends on the characters alone, never on how tokens cut them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256


@dataclass(slots=True)
class _Node:
    """A prefix of some stop string."""

    depth: int
    next: dict[str, int]
    fail: int = 0
    matched: int = 0
    """Length of the longest stop string that ends here; 0 for none."""


class StopStrings:
    """The stop strings of one request, compiled. Immutable once built."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Compile the strings. Raises InvalidRequest beyond the bounds above."""
        if len(strings) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop: at most {MAX_STOP_STRINGS} strings", param="stop")
        if not all(1 <= len(s) <= MAX_STOP_CHARS for s in strings):
            raise InvalidRequest(f"stop: each string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
        self.strings = tuple(strings)
        self._nodes = [_Node(0, {})]
        if strings:
            for string in strings:
                self._insert(string)
            self._link()

    def __bool__(self) -> bool:
        return len(self._nodes) > 1

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character; state 0 is the start."""
        nodes = self._nodes
        while state and char not in nodes[state].next:
            state = nodes[state].fail
        return nodes[state].next.get(char, 0)

    def held(self, state: int) -> int:
        """Count the last characters that may still become a stop string."""
        return self._nodes[state].depth

    def matched(self, state: int) -> int:
        """Return the length of the longest stop string that ends at this state; 0 for none."""
        return self._nodes[state].matched

    def _insert(self, string: str) -> None:
        at = 0
        for char in string:
            if char not in self._nodes[at].next:
                self._nodes.append(_Node(self._nodes[at].depth + 1, {}))
                self._nodes[at].next[char] = len(self._nodes) - 1
            at = self._nodes[at].next[char]
        self._nodes[at].matched = len(string)

    def _link(self) -> None:
        """Link breadth first, so that a node's failure target is complete before the node is."""
        queue = deque(self._nodes[0].next.values())
        while queue:
            at = queue.popleft()
            node = self._nodes[at]
            for char, child in node.next.items():
                self._nodes[child].fail = self.step(node.fail, char) if at else 0
                fallback = self._nodes[self._nodes[child].fail].matched
                self._nodes[child].matched = self._nodes[child].matched or fallback
                queue.append(child)


class StopMatcher:
    """The position of one choice in the automaton, and the text that it holds back."""

    def __init__(self, stops: StopStrings, *, include_match: bool) -> None:
        self._stops = stops
        self._include_match = include_match
        self._state = 0
        self._pending = ""
        self.match: str | None = None
        """The stop string that ended the choice."""

    def feed(self, text: str) -> str:
        """Return the text that may be shown now. After a match nothing more comes out."""
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        already = len(self._pending)
        self._pending += text
        for offset, char in enumerate(text, start=already + 1):
            self._state = self._stops.step(self._state, char)
            if length := self._stops.matched(self._state):
                self.match = self._pending[offset - length : offset]
                shown = self._pending[: offset if self._include_match else offset - length]
                self._pending = ""
                return shown
        keep = len(self._pending) - self._stops.held(self._state)
        shown, self._pending = self._pending[:keep], self._pending[keep:]
        return shown

    def flush(self) -> str:
        """Return what was held back: the choice ended otherwise, so it is ordinary text."""
        shown, self._pending = self._pending, ""
        return shown
