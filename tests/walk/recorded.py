"""One process of a cluster whose ways are written down: `python -m tests.walk.recorded FOLDER MODULE …`.

SIGUSR1 begins it. Whatever begins a way puts a follower into its context, so that the tasks and callbacks that come of
it are followed and nothing else that the event loop does meanwhile.
"""

import array
import contextvars
import functools
import json
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import msgspec
from google.protobuf.message import Message
from pydantic import BaseModel

from tests.walk.ways import ALWAYS, WAYS, Call, Way

MARK = "quokka"
"""A word of the prompt that stands nowhere else."""
TEMPERATURE = 0.73125
"""The request's own."""
_LEAST_IDS = 32
"""So many of the prompt's token ids in a row are the prompt."""
_PACKAGES = frozenset({"decode_worker", "engine", "kv_transfer", "prefill_worker", "router", "tandem", "worker"})
_ROOT = f"{Path(__file__).resolve().parents[2]}/"
_BEGINNINGS = {way.begins: way for way in WAYS}
_following: contextvars.ContextVar["_Follower | None"] = contextvars.ContextVar("following", default=None)


_MAKING = ("__init__", "__post_init__")


class NotedStruct(msgspec.Struct):
    """The base of all structs in a process that is followed: C code makes them, and calls this."""

    def __post_init__(self) -> None: ...


class _Follower:
    """Writes down one way, once."""

    def __init__(self, way: Way, frame: FrameType) -> None:
        """`frame`: of the way's first function. Its callers were entered before: they are no part of the way."""
        self._way = way
        self._first: list[Call] = []
        self._calls: dict[FrameType, Call] = {}
        self._before: set[FrameType] = set()
        caller = frame.f_back
        while caller is not None:
            self._before.add(caller)
            caller = caller.f_back
        self._made: dict[int, tuple[object, Call]] = {}
        self.is_over = False

    def on_call(self, frame: FrameType) -> None:
        """A frame begins, or a coroutine goes on."""
        if frame in self._calls or frame in self._before:
            return
        name = frame.f_code.co_name
        if frame.f_code.co_filename.startswith("<") or frame.f_code is NotedStruct.__post_init__.__code__:
            # What dataclasses make, and structs.
            if name in _MAKING and (caller := self._caller(frame)) is not None:
                self._note(frame.f_locals.get("self"), caller)
            return
        if (file := _file(frame)) is None:
            return
        call = self._calls[frame] = Call(file=file, function=frame.f_code.co_qualname)
        call.bounds = (file, name) == self._way.begins
        caller = self._caller(frame)
        (self._first if caller is None else caller.calls).append(call)
        if name in _MAKING:
            self._note(frame.f_locals.get("self"), call)

    def on_return(self, frame: FrameType, value: object) -> None:
        """A frame ends, or waits."""
        if isinstance(value, tuple) and hasattr(value, "_fields") and (caller := self._caller(frame)) is not None:
            self._note(value, caller)
        if (call := self._calls.get(frame)) is None:
            return
        if isinstance(value, (BaseModel, Message)):
            # These are made by C code: by whom it was called, or by who passes on what such a one has made.
            known = self._made.get(id(value))
            if known is not None and any(known[1] is inner for inner in call.calls):
                del self._made[id(value)]
            self._note(value, call)
        if (call.file, frame.f_code.co_name) == self._way.ends:
            call.bounds = self.is_over = True

    def _caller(self, frame: FrameType) -> Call | None:
        caller = frame.f_back
        while caller is not None and caller not in self._calls:
            caller = caller.f_back
        return None if caller is None else self._calls[caller]

    def _note(self, value: object, call: Call) -> None:
        if type(value).__module__.partition(".")[0] in _PACKAGES:
            self._made.setdefault(id(value), (value, call))

    def write(self, folder: Path) -> None:
        """What was followed, in place of what was before."""
        for value, call in self._made.values():
            kind = type(value).__name__
            if kind in ALWAYS or self._carries(value, set()):
                call.made.append(kind)
        part = folder / f"{self._way.name}.part"
        part.write_text(json.dumps([asdict(call) for call in self._first]), encoding="utf-8")
        part.rename(part.with_suffix(".json"))

    def _carries(self, value: object, seen: set[int]) -> bool:
        """Whether the request can be read from it, through things that were made on the way alone.

        A bound method is an address, such as of whom to call with a token, and is not followed.
        """
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, str):
            return MARK in value
        if isinstance(value, float):
            return abs(value - TEMPERATURE) < 1e-6  # a float32 on the wire
        return any(self._carries(part, seen) for part in self._parts(value))

    def _parts(self, value: object) -> Iterator[object]:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple, array.array)):
            yield from value[:_LEAST_IDS] if len(value) <= _LEAST_IDS or not isinstance(value[0], int) else (MARK,)
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, FunctionType):
            yield from (cell.cell_contents for cell in value.__closure__ or ())
        elif isinstance(value, Message):
            yield from (part for _, part in value.ListFields())
        elif id(value) in self._made:
            yield from getattr(value, "__dict__", {}).values()
            for kind in type(value).__mro__:
                slots = kind.__dict__.get("__slots__", ())
                for slot in (slots,) if isinstance(slots, str) else slots:
                    name = f"_{kind.__name__.lstrip('_')}{slot}" if slot.startswith("__") else slot
                    yield getattr(value, name, None)


def _file(frame: FrameType) -> str | None:
    """Within the checkout, of the product."""
    name = frame.f_code.co_filename
    file = name.removeprefix(_ROOT)
    return file if file != name and file.partition("/")[0] in _PACKAGES else None


def _profile(folder: Path) -> Callable[[FrameType, str, Any], None]:
    def on_event(frame: FrameType, event: str, value: object) -> None:
        follower = _following.get()
        if event == "call":
            if follower is None or follower.is_over:
                way = _BEGINNINGS.get((_file(frame) or "", frame.f_code.co_name))
                if way is None:
                    return
                follower = _Follower(way, frame)
                _following.set(follower)
            follower.on_call(frame)
        elif event == "return" and follower is not None and not follower.is_over:
            follower.on_return(frame, value)
            if follower.is_over:
                follower.write(folder)

    return on_event


def main() -> None:
    """Become the module named on the command line."""
    folder, module = Path(sys.argv[1]), sys.argv[2]
    msgspec.Struct = NotedStruct  # before the product is imported
    sys.argv = [module, *sys.argv[3:]]
    signal.signal(signal.SIGUSR1, lambda *_: sys.setprofile(_profile(folder)))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
