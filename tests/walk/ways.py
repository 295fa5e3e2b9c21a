"""The ways through a live cluster that are followed, and what is counted of them. Pure.

A way is the tree of calls between a first and a last function, in all tasks that the first one leads to. A call belongs
to the way proper if the last function is reached from it, or if an object is made in it that carries the request: one
from whose fields the prompt (its text or its token ids) or the sampling parameters can be read. All other calls ask
something and go on with the answer; they are listed as asides and counted apart.

Stays: the files in the order in which the way enters them, the same file twice in a row being one stay. To come back
to a function that still runs is not to enter. Objects: those that carry the request, copies included, and the
placement (`ALWAYS`). Their parts (`PARTS`), such as the sampling parameters, are listed and not counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

MOST_STAYS, MOST_OBJECTS = 12, 10
"""Of the request, from its body to the `Submit` that is written into the session."""
PARTS = frozenset({"SamplingParams", "Message", "ChatTurn"})
ALWAYS = frozenset({"Assignment"})
"""The placement, which carries no prompt. What it was decided from is an answer to a question, as all asides are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """From the first call of a function to the return of another."""

    name: str
    title: str
    begins: tuple[str, str]
    """File and function."""
    ends: tuple[str, str]


REQUEST = Way(
    name="request",
    title="A chat request, from its body to the Submit",
    begins=("router/http/body/json_body.py", "read_object"),
    ends=("router/fleet/worker_session.py", "submit"),
)
DECODE_SIDE = Way(
    name="handoff-decode",
    title="Its hand-off on the decode worker, from the Submit to the PREFILL that asks for it",
    begins=("decode_worker/worker.py", "order"),
    ends=("kv_transfer/session/receiver_hub.py", "start"),
)
PREFILL_SIDE = Way(
    name="handoff-prefill",
    title="Its hand-off on the prefill worker, from the PREFILL to the engine's queue",
    begins=("kv_transfer/session/sender_hub.py", "_prefill"),
    ends=("prefill_worker/worker.py", "submit"),
)
WAYS = (REQUEST, DECODE_SIDE, PREFILL_SIDE)


@dataclass(slots=True, kw_only=True)
class Call:
    """A function of the product that was called, with what it called and made."""

    file: str
    function: str
    calls: list["Call"] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    """Classes of what was made in it and carries the request."""
    bounds: bool = False
    """The way began or ended in it."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**{**data, "calls": [cls.from_json(call) for call in data["calls"]]})

    @property
    def is_on_way(self) -> bool:
        return self.bounds or any(kind not in PARTS for kind in self.made) or any(call.is_on_way for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """One time in one file."""

    file: str
    functions: list[str]
    made: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A way that was gone."""

    stays: list[Stay]
    objects: Counter[str]
    parts: Counter[str]
    asides: Counter[str]
    """Calls from the way into files, that came back with an answer."""

    @property
    def num_objects(self) -> int:
        return self.objects.total()


def walk(calls: Iterable[Call]) -> Walk:
    """Count the stays and objects of one way."""
    found = Walk(stays=[], objects=Counter(), parts=Counter(), asides=Counter())
    for call in calls:
        _visit(call, None, found)
    return found


def _visit(call: Call, stay: Stay | None, found: Walk) -> None:
    if not call.is_on_way:
        found.parts.update(kind for inner in _all(call) for kind in inner.made)
        if stay is None or call.file != stay.file:
            found.asides[call.file] += 1
        else:
            for inner in call.calls:
                _visit(inner, stay, found)
        return
    if not found.stays or call.file not in (found.stays[-1].file, None if stay is None else stay.file):
        found.stays.append(Stay(file=call.file, functions=[], made=[]))
    if stay is None or call.file != stay.file:
        stay = found.stays[-1]
    stay.functions.append(call.function)
    for kind in call.made:
        (found.parts if kind in PARTS else found.objects)[kind] += 1
        if kind not in PARTS:
            stay.made.append(kind)
    for inner in call.calls:
        _visit(inner, stay, found)


def _all(call: Call) -> Iterator[Call]:
    yield call
    for inner in call.calls:
        yield from _all(inner)
