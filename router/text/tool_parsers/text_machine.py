"""The base of all families' parsers: text up to a marker, undecided text that is held back, white space."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from router.text.stop_strings import StopStrings
from router.text.tool_parsers.events import EventList, ToolEvent
from router.text.tool_parsers.json_call import WHITE, JsonCall, JsonCallState, JsonSpan
from router.text.tools import ToolDefinition

MAX_HEAD_CHARS = 512
"""Characters between a marker and the arguments: names, and what families write around them."""
_HALF = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which a model's escapes may produce: it can be neither shown nor sent."""

Step = Callable[[Any, str, int], int]
"""Reads, for a machine, text from a position on; returns the position after what it read. A plain function, not bound
to the machine, which keeps it: otherwise each answer would leave a cycle for Python's collector."""
_compiled = lru_cache(maxsize=32)(StopStrings)  # few sets of markers, each compiled once


class TextMachine(ABC):
    """A `ToolParser` that handles text and markers; a subclass handles what follows a marker.

    White space before a call is dropped with the call's own marks, so it is held until what follows is known.
    """

    def __init__(self, tools: Sequence[ToolDefinition], markers: Sequence[str], closers: Sequence[str] = ()) -> None:
        """`closers`: markers that mean nothing after a call and are text before the first."""
        self.tools = {tool.name: tool for tool in tools}
        self.num_calls = 0
        self.is_open = False
        self._out = EventList()
        self._closers = frozenset(closers)
        self._markers = _compiled((*markers, *closers))
        firsts = "".join(sorted({marker[0] for marker in self._markers.strings}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")
        self._node = 0
        self._pending = ""
        """Text that may still become a marker."""
        self._spaces: list[str] = []
        self._after_call = False
        self._held: list[str] = []
        """Text that may still become a call."""
        self._step: Step = TextMachine.text

    def feed(self, text: str) -> list[ToolEvent]:
        at = 0
        while at < len(text):
            at = self._step(self, text, at)
        return self._out.drain()

    def flush(self) -> list[ToolEvent]:
        if self._held:
            self.no_call()
        pending, self._pending, self._node = self._pending, "", 0
        # If an answer was cut within the mark that ends a call, nothing of that mark is shown.
        if not (self._after_call and any(closer.startswith(pending) for closer in self._closers)):
            self._say(pending)
        self._drop_spaces()
        self._out.content("".join(self._spaces))
        self._spaces.clear()
        return self._out.drain()

    def go(self, step: Step) -> None:
        """Set the step that reads from here on."""
        self._step = step

    def text(self, text: str, at: int) -> int:
        """Read text outside of calls."""
        if not self._node:
            found = self._first.search(text, at)
            start = len(text) if found is None else found.start()
            if start > at:
                self._say(text[at:start])
                return start
        self._pending += text[at]
        self._node = self._markers.step(self._node, text[at])
        if length := self._markers.matched(self._node):
            before, marker = self._pending[:-length], self._pending[-length:]
            self._pending, self._node = "", 0
            self._say(before)
            if marker not in self._closers:
                self.hold(marker)
                self.marked(marker)
            elif self.num_calls:
                self._drop_spaces()
            else:
                self._say(marker)
        else:
            keep = len(self._pending) - self._markers.held(self._node)
            self._say(self._pending[:keep])
            self._pending = self._pending[keep:]
        return at + 1

    @abstractmethod
    def marked(self, marker: str) -> None:
        """Handle a marker, which is held back; sets the step for what follows it."""

    def hold(self, text: str) -> None:
        """Keep text that may become a call."""
        self._held.append(text)

    def no_call(self) -> None:
        """Release what is held as text: it is no call."""
        held = "".join(self._held)
        self._held.clear()
        self._step = TextMachine.text
        self._say(held)

    def began(self, name: str) -> None:
        """Begin a call with what is held."""
        self._held.clear()
        self._spaces.clear()
        self._out.began(self.num_calls, name)
        self.num_calls += 1
        self.is_open = True

    def arguments(self, text: str) -> None:
        """Report more of the call's arguments."""
        self._out.arguments(self.num_calls - 1, _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text))

    def ended(self, then: Step | None = None) -> None:
        """End the call; text follows unless `then` is given."""
        self.is_open = False
        self._after_call = True
        self._step = then or TextMachine.text

    def expect(self, tag: str, then: Callable[[Any], None]) -> None:
        """Expect white space and this tag, otherwise there is no call; then call `then` with the machine, to choose the
        next step."""
        matched = ""

        def step(self: TextMachine, text: str, at: int) -> int:
            nonlocal matched
            char = text[at]
            if char == tag[len(matched)]:
                matched += char
            elif matched or char not in WHITE:
                # The tag's beginning may also begin a marker.
                del self._held[len(self._held) - len(matched) :]
                self.no_call()
                self._again(matched)
                return at
            self.hold(char)
            if matched == tag:
                then(self)
            return at + 1

        self.go(step)

    def read_json_call(self, then: Step | None = None) -> None:
        """Read an object that calls a tool; `then` follows if it does."""
        call = JsonCall(self.tools)

        def step(self: TextMachine, text: str, at: int) -> int:
            reading, end = call.feed(text, at)
            if call.begun is not None and not self.is_open:
                self.began(call.begun)
            self.arguments(call.drain())
            if reading is JsonCallState.ON:
                if not self.is_open:
                    self.hold(text[at:end])
            elif call.begun is not None:
                self.ended(then)
            else:
                self.hold(text[at:end])
                self.no_call()
            return end

        self.go(step)

    def read_head(self, pattern: re.Pattern[str], then: Step | None = None) -> None:
        """Read up to a brace; all of it must match `pattern`, a group of which is the tool's name. Then read the
        arguments."""
        head = ""

        def step(self: TextMachine, text: str, at: int) -> int:
            nonlocal head
            stop = at + 1 + MAX_HEAD_CHARS - len(head)
            brace = text.find("{", at, stop)
            end = min(len(text), stop) if brace < 0 else brace
            head += text[at:end]
            self.hold(text[at:end])
            if len(head) > MAX_HEAD_CHARS:
                self.no_call()
            elif end == brace:
                found = pattern.fullmatch(head)
                name = next(filter(None, found.groups()), "") if found is not None else ""
                if name in self.tools:
                    self.began(name)
                    self.read_arguments(then)
                else:
                    self.no_call()
            return end

        self.go(step)

    def read_arguments(self, then: Step | None = None) -> None:
        """Read the object that begins here."""
        span: JsonSpan | None = None

        def step(self: TextMachine, text: str, at: int) -> int:
            nonlocal span
            start = at
            if span is None:
                span, at = JsonSpan("{"), at + 1
            end = span.feed(text, at)
            self.arguments(text[start:end])
            if span.ended:
                self.ended(then)
            return end

        self.go(step)

    def _drop_spaces(self) -> None:
        """Drop white space between a call's end and its marks, or the answer's end."""
        if self._after_call:
            self._spaces.clear()

    def _again(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self._step(self, text, at)

    def _say(self, text: str) -> None:
        said = text.rstrip(WHITE)
        if said:
            self._out.content("".join(self._spaces) + said)
            self._spaces.clear()
            self._after_call = False
        if len(said) < len(text):
            self._spaces.append(text[len(said) :])
