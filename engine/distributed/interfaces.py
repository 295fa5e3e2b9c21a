"""The names of this machine's network interfaces, by the addresses that they have."""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from engine.distributed.links.lost import RankLost

_SIOCGIFADDR = 0x8915
_INET6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str:
    """The interface with this IP address. Raises RankLost when none has it."""
    wanted = ipaddress.ip_address(address)
    for name, found in (_of_ipv4() if wanted.version == 4 else _of_ipv6()).items():
        if wanted in found:
            return name
    raise RankLost(f"no network interface here has the address {address}")


def _of_ipv4() -> dict[str, set[ipaddress.IPv4Address]]:
    found: dict[str, set[ipaddress.IPv4Address]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _index, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found.setdefault(name, set()).add(ipaddress.IPv4Address(answer[20:24]))
    return found


def _of_ipv6() -> dict[str, set[ipaddress.IPv6Address]]:
    found: dict[str, set[ipaddress.IPv6Address]] = {}
    for line in _INET6.read_text(encoding="ascii").splitlines() if _INET6.exists() else ():
        digits, *_rest, name = line.split()
        found.setdefault(name, set()).add(ipaddress.IPv6Address(int(digits, 16)))
    return found
