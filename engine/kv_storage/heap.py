"""malloc keeps what was freed; a process that measures itself, or has just dropped much, wants it given back."""

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Give freed heap pages back to the system. Does nothing with another C library than glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
