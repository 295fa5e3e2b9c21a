"""A socket in place of an encrypted connection: the same bytes both ways, and the end of either is the end of both."""

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from engine.distributed.links.decrypted import decrypted
from tandem.rpc.mutual_tls import MutualTls
from tests.support.certificates import Authority

NUM_BYTES = 3 << 20


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[ssl.SSLSocket, socket.socket]]:
    """An encrypted end, and the socket in place of the other one."""
    files = Authority().issue(tmp_path)
    tls = MutualTls(files)
    client, server = socket.socketpair()
    accepted: list[ssl.SSLSocket] = []
    accepting = threading.Thread(target=lambda: accepted.append(tls.server.wrap_socket(server, server_side=True)))
    accepting.start()
    encrypted = tls.client.wrap_socket(client)
    accepting.join()
    plain = decrypted(accepted[0])
    encrypted.settimeout(30.0)
    plain.settimeout(30.0)
    yield encrypted, plain
    encrypted.close()
    plain.close()


def received(sock: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes and (part := sock.recv(1 << 16)):
        parts += part
    return bytes(parts)


def test_decrypted_carries_much_both_ways_at_once(ends: tuple[ssl.SSLSocket, socket.socket]) -> None:
    encrypted, plain = ends
    rng = Random(3)
    there, back = rng.randbytes(NUM_BYTES), rng.randbytes(NUM_BYTES)
    got: list[bytes] = []

    def exchange() -> None:
        # Much more than the kernel's buffers hold, while nobody reads the other direction yet.
        sending = threading.Thread(target=plain.sendall, args=(back,))
        sending.start()
        got.append(received(plain, NUM_BYTES))
        sending.join()

    exchanging = threading.Thread(target=exchange)
    exchanging.start()
    encrypted.sendall(there[: NUM_BYTES // 2])
    first = received(encrypted, NUM_BYTES // 2)
    encrypted.sendall(there[NUM_BYTES // 2 :])
    assert first + received(encrypted, NUM_BYTES - len(first)) == back
    exchanging.join(30.0)
    assert got == [there]


def test_decrypted_keeps_messages_prompt(ends: tuple[ssl.SSLSocket, socket.socket]) -> None:
    encrypted, plain = ends
    for i in range(100):
        message = bytes([i]) * (i + 1)
        encrypted.sendall(message)
        assert received(plain, len(message)) == message
        plain.sendall(message)
        assert received(encrypted, len(message)) == message


@pytest.mark.parametrize("which", ["encrypted", "plain"])
def test_decrypted_end_of_one_ends_both(ends: tuple[ssl.SSLSocket, socket.socket], which: str) -> None:
    encrypted, plain = ends
    gone, left = (encrypted, plain) if which == "encrypted" else (plain, encrypted)
    gone.close()
    assert left.recv(1) == b""


def test_decrypted_ends_although_the_peer_reads_nothing(ends: tuple[ssl.SSLSocket, socket.socket]) -> None:
    _encrypted, plain = ends
    before = {one for one in threading.enumerate() if one.name == "tandem-decrypt"}
    plain.settimeout(0.2)
    with pytest.raises(TimeoutError):
        plain.sendall(bytes(64 << 20))
    plain.close()
    for carrier in before:
        carrier.join(30.0)
        assert not carrier.is_alive()
