"""Receiving ends that are reached through a relay, and that remember what they granted."""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.memory.landing import Landing
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.interface import KVReceiver, QuietListener
from kv_transfer.transports.one_sided import wire as one_sided_wire
from tests.proofs.faults.network.injector import Injector
from tests.proofs.faults.network.line import Surroundings
from tests.proofs.faults.network.relay import Relay


class RelayedReceiver:
    """A KVReceiver around another one, which it owns."""

    def __init__(self, inner: KVReceiver, injector: Injector, around: Surroundings | None) -> None:
        """`around`: of the relay; None where no bytes travel through sockets."""
        self.name = inner.name
        self.drain_proves_quiet = inner.drain_proves_quiet
        self._inner, self._injector = inner, injector
        self._lock = threading.Lock()
        self._landings: dict[TransferKey, Landing] = {}
        self._revoked: set[TransferKey] = set()
        self._quiet: set[TransferKey] = set()
        self._offer = inner.offer()
        self._relay = None if around is None else self._relayed(around)

    def offer(self) -> TransportOffer:
        return self._offer

    def open_grant(self, key: TransferKey, landing: Landing) -> bytes:
        grant = self._inner.open_grant(key, landing)
        self._injector.granted(grant[:TOKEN_BYTES], key.transfer_id)
        with self._lock:
            self._landings[key] = landing
        return grant

    def verify(self, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        return self._inner.verify(key, cells, checksum)

    def revoke(self, key: TransferKey) -> bool:
        with self._lock:
            self._landings.pop(key, None)
            self._revoked.add(key)
        proven = self._inner.revoke(key)
        if proven:
            self._quiet.add(key)
        return proven

    def listen_quiet(self, listener: QuietListener) -> None:

        def on_quiet(key: TransferKey) -> None:
            # A writer that gives a claim up by itself may claim again, until the grant has ended.
            if key in self._revoked:
                self._quiet.add(key)
            listener(key)

        self._inner.listen_quiet(on_quiet)

    def close(self) -> None:
        self._inner.close()
        if self._relay is not None:
            self._relay.close()

    def is_quiet(self, key: TransferKey) -> bool:
        """Whether no byte of it may land any more."""
        return key in self._quiet

    def while_granted(self, key: TransferKey, harm: Callable[[Landing], None]) -> None:
        """Do this to an attempt's destinations unless they are its own no longer."""
        with self._lock:
            landing = self._landings.get(key)
            if landing is not None:
                harm(landing)

    def _relayed(self, around: Surroundings) -> Relay:
        advert = self._offer.advert
        if self.name == "shm":
            address, inside = advert[TOKEN_BYTES:].decode(), one_sided_wire.random_name()
            server = socket.socket(socket.AF_UNIX)
            server.bind(inside)
            server.listen()
            self._offer = replace(self._offer, advert=advert[:TOKEN_BYTES] + inside.encode())
            return Relay(server, lambda: _reach_unix(address), around)
        fields = json.loads(advert)
        target = fields["host"], fields["port"]
        server = socket.create_server(("127.0.0.1", 0), backlog=64)
        fields["port"] = server.getsockname()[1]
        self._offer = replace(self._offer, advert=json.dumps(fields).encode())
        return Relay(server, lambda: socket.create_connection(target), around)


def _reach_unix(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(address)
    except OSError:
        with suppress(OSError):
            sock.close()
        raise
    return sock
