"""Kernel calls recorded once and repeated by one call into the library (csrc/program.cpp).

A program holds addresses and sizes, not values: it is valid as long as everything that it points to keeps its address
and its meaning.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from engine.kernels.cpu.library import KernelCall, KernelLibrary

_MOST_SLOTS = 9  # csrc/program.cpp: kMostSlots


class CannotRecord(Exception):
    """A call of a kind that programs cannot make."""


class _Slot(ctypes.Union):
    _fields_ = (("pointer", ctypes.c_void_p), ("integer", ctypes.c_int64), ("real", ctypes.c_float))


class _Command(ctypes.Structure):
    """The struct `Command` of csrc/program.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("invoker", ctypes.c_void_p), ("slots", _Slot * _MOST_SLOTS))


_FIELDS = {"p": "pointer", "i": "integer", "f": "real"}


class KernelProgram:
    """A sequence of recorded calls."""

    __slots__ = ("_address", "_commands", "_run")

    def __init__(
        self, library: KernelLibrary, calls: Sequence[KernelCall], moved: Mapping[int, int] | None = None
    ) -> None:
        """`moved`: addresses to use in place of recorded ones. Raises CannotRecord."""
        self._commands = (_Command * len(calls))()
        self._address = ctypes.addressof(self._commands)
        self._run = library.function("tandem_run_program", "pi")
        find = library.function("tandem_invoker", "p", "p")
        invokers: dict[str, int | None] = {}
        for command, call in zip(self._commands, calls, strict=True):
            signature = call.signature
            if signature not in invokers:
                invokers[signature] = find(signature.encode()) if len(signature) <= _MOST_SLOTS else None
            if invokers[signature] is None:
                raise CannotRecord(f"programs make no calls of signature {signature}")
            command.kernel = call.address
            command.invoker = invokers[signature]
            for i, (letter, value) in enumerate(zip(signature, call.arguments, strict=True)):
                setattr(command.slots[i], _FIELDS[letter], _argument(letter, value, moved or {}))

    def __len__(self) -> int:
        return len(self._commands)

    def run(self) -> None:
        """Make all calls, in order, on the calling thread."""
        self._run(self._address, len(self._commands))


def _argument(letter: str, value: Any, moved: Mapping[int, int]) -> int | float | None:
    if letter != "p":
        number: int | float = value
        return number
    if value is not None and not isinstance(value, int):
        raise CannotRecord(f"a pointer given as {type(value).__name__} may not outlive its call")
    return value if value is None else moved.get(value, value)
