"""A loaded library of compiled code, and typed entry points into it.

A C function is bound once, when an object that uses it is made; calling the result with plain integers takes about a
microsecond and releases the GIL.
"""

import ctypes
from pathlib import Path
from typing import Any

from tandem.native.build import NativeUnavailable

_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


class NativeLibrary:
    """A shared library; loading it twice returns the same code. Raises NativeUnavailable when it does not load."""

    __slots__ = ("_library", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"{path} does not load: {error}") from error

    def bind(self, name: str, signature: str, returns: str = "") -> Any:
        """Bind a C function by name; `signature` has one letter per argument.

        p: pointer, as an int, ctypes reference or None; i: int64_t; f: float; d: double. Raises AttributeError for a
        name that the library lacks.
        """
        kind = ctypes.CFUNCTYPE(_TYPES[returns] if returns else None, *(_TYPES[letter] for letter in signature))
        return kind((name, self._library))


def address_of(function: Any) -> int:
    """Address of a bound function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
