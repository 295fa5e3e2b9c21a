"""Makes the kernel give new connections to the later of two listeners on one port.

A BPF program of one instruction does that, attached to the group of sockets that share the port with SO_REUSEPORT. So
one of them can leave with an empty connection queue. On other systems than Linux, and where it is not permitted,
nothing changes: the kernel keeps dividing connections between them.
"""

import contextlib
import ctypes
import os
import socket
import struct
from pathlib import Path

_SO_ATTACH_REUSEPORT_CBPF = 51
_BPF_RET_K = 0x06
_LAST_OF_TWO = 1
_FOLDER = Path("/proc/self/fd")


class _Instruction(ctypes.Structure):
    """One instruction of a BPF program: `struct sock_filter`."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


def steer_to_last(port: int) -> bool:
    """Steer connections to the last listener on the port of this process; return whether that succeeded.

    Once a single listener is left, the kernel finds no second one, and uses that one.
    """
    program = (_Instruction * 1)(_Instruction(code=_BPF_RET_K, k=_LAST_OF_TWO))
    fprog = struct.pack("HL", len(program), ctypes.addressof(program))
    is_done = False
    for listener in _listeners(port):
        with listener, contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, fprog)
            is_done = True
    return is_done


def _listeners(port: int) -> list[socket.socket]:
    """Return the listeners of this process, including those of gRPC, which does not expose them."""
    found = []
    for path in _FOLDER.glob("*"):
        with contextlib.suppress(OSError):
            if not os.readlink(path).startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(path.name)))
            if _listens(one, port):
                found.append(one)
            else:
                one.close()
    return found


def _listens(one: socket.socket, port: int) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return False
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and one.getsockname()[1] == port
