"""Listens on rank 0 for the ranks of other nodes, until all have joined.

Each connection has a thread of its own and a few seconds to authenticate, and one address may have as many
connections as ranks are expected meanwhile, so no caller delays the others.
A rank that connects again while others are awaited is a new process, which replaces the previous one.
"""

import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from engine.distributed.links.channel import RankChannel
from engine.distributed.links.handshake import (
    MOST_BYTES,
    JoiningRank,
    Purpose,
    handshake_as_leader,
    installed_version,
    permanent_refusal,
    send_welcome,
    temporary_refusal,
)
from engine.distributed.links.lost import RankLost
from engine.distributed.links.node_group import NodeGroup
from tandem.rpc.hosts import join, keep_alive
from tandem.rpc.mutual_tls import peer_fingerprint, tls_reason

_log = logging.getLogger(__name__)
_HANDSHAKE_S = 10.0
_MAX_CALLERS = 128
"""Most connections being authenticated at once; a group has at most 64 ranks, which open one after the other."""
_LOG_EVERY_S = 30.0
_ACCEPT_PAUSE_S = 0.1


class _TimeLimit:
    """Context that hangs up after `_HANDSHAKE_S`, however much was received; leaving it then raises RankLost."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._is_settled = False
        self._is_over = False
        self._timer = threading.Timer(_HANDSHAKE_S, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_settled = True
        self._timer.cancel()
        if self._is_over:
            raise RankLost(f"not authenticated within {_HANDSHAKE_S:g} s")

    def _end(self) -> None:
        with self._lock:
            if not self._is_settled:
                self._is_over = True
                self._channel.hang_up()


@dataclass(slots=True, kw_only=True)
class _JoiningProcess:
    """Token and first connections of a rank whose last connection is awaited."""

    token: str
    steps: RankChannel
    region: RankChannel | None = None

    def close(self) -> None:
        self.steps.close()
        if self.region is not None:
            self.region.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRank:
    """Connections to a rank of another node, to be closed by whoever has them."""

    steps: RankChannel
    region: RankChannel
    """For orders about the rank's part of the KV; see Purpose."""


class NodeListener:
    """Accepts connections from construction on."""

    def __init__(self, group: NodeGroup, on_pulse: Callable[[RankChannel], None]) -> None:
        """`on_pulse` gets each rank's last connection, on any thread. Raises OSError, ConfigError."""
        self._group = group
        self._on_pulse = on_pulse
        self._tls = group.open_tls()
        self._setting = "" if group.tls is None else group.tls.setting
        family = socket.AF_INET6 if ":" in group.host else socket.AF_INET
        self._server = socket.create_server((group.host, group.port), family=family, backlog=_MAX_CALLERS)
        self.host = str(self._server.getsockname()[0])
        """Address of this node, which the ranks' collectives use as well."""
        self.port = int(self._server.getsockname()[1])
        self._changed = threading.Condition()
        self._callers: Counter[str] = Counter()
        """Number of connections being authenticated, by address."""
        self._joining: dict[int, _JoiningProcess] = {}
        self._joined: dict[int, JoinedRank] = {}
        self._failure: RankLost | None = None
        self._is_closing = False
        threading.Thread(target=self._accept, name="tandem-rank-listener", daemon=True).start()

    def gather(self) -> dict[int, JoinedRank]:
        """Wait until every rank of other nodes has joined. Returns their connections by rank, to be closed by the
        caller. Raises RankLost when they do not come in time, or after `fail`.
        """
        wanted = set(self._group.elsewhere)
        left_s = self._group.join_s
        with self._changed:
            while (missing := wanted - self._joined.keys()) and self._failure is None:
                if left_s <= 0.0:
                    raise RankLost(f"ranks {_listed(missing)} have not joined within {self._group.join_s:.0f} s")
                _log.info("waiting at %s for ranks %s of other nodes", join(self.host, self.port), _listed(missing))
                self._changed.wait_for(self._is_settled, min(left_s, _LOG_EVERY_S))
                left_s -= _LOG_EVERY_S
            if self._failure is not None:
                raise self._failure
            # Nothing would serve a rank that connects from now on.
            self._is_closing = True
            joined, self._joined = self._joined, {}
            return joined

    def fail(self, lost: RankLost) -> None:
        """Give up the wait, because a rank that had joined is lost. From any thread."""
        with self._changed:
            self._failure = self._failure or lost
            self._changed.notify_all()

    def close(self) -> None:
        """Stop listening; close the connections that `gather` has not returned."""
        with self._changed:
            self._is_closing = True
            left: list[RankChannel] = []
            for joined in self._joined.values():
                left += [joined.steps, joined.region]
            joining = list(self._joining.values())
            self._joined.clear()
            self._joining.clear()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for channel in left:
            channel.close()
        for process in joining:
            process.close()

    def _is_settled(self) -> bool:
        return self._failure is not None or not set(self._group.elsewhere) - self._joined.keys()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._server.accept()
            except OSError as error:
                if self._is_closing:
                    return
                # Out of descriptors or memory, which is temporary.
                _log.warning("cannot accept a rank: %s", error)
                with self._changed:
                    self._changed.wait(_ACCEPT_PAUSE_S)
                continue
            name = join(str(address[0]), int(address[1]))
            host = str(address[0])
            if not self._count_caller(host):
                _log.warning("rejected %s: too many connections are being authenticated", name)
                sock.close()
                continue
            try:
                args = (sock, host, name)
                threading.Thread(target=self._handshake, args=args, name="tandem-rank-caller", daemon=True).start()
            except RuntimeError as error:  # no more threads now
                _log.warning("rejected %s: %s", name, error)
                sock.close()
                self._dismiss_caller(host)

    def _count_caller(self, host: str) -> bool:
        with self._changed:
            # A rank opens one connection after the other.
            if self._callers.total() >= _MAX_CALLERS or self._callers[host] >= len(self._group.elsewhere):
                return False
            self._callers[host] += 1
            return True

    def _dismiss_caller(self, host: str) -> None:
        with self._changed:
            self._callers[host] -= 1
            if not self._callers[host]:
                del self._callers[host]

    def _handshake(self, sock: socket.socket, host: str, name: str) -> None:
        try:
            try:
                caller, token, channel = self._authenticate(sock, name)
            finally:
                # Before the welcome: a rank then opens its next connection at once.
                self._dismiss_caller(host)
            try:
                self._record(caller, token, channel)
            except BaseException:
                channel.close()
                raise
        except ssl.SSLError as error:
            _log.warning("rejected %s: %s", name, tls_reason(error, self._setting))
            sock.close()
        except (OSError, RankLost, RuntimeError) as error:  # the last: no thread for a time limit
            _log.warning("rejected %s: %s", name, error)
            sock.close()

    def _authenticate(self, sock: socket.socket, name: str) -> tuple[JoiningRank, str, RankChannel]:
        """Return who has called, the token to send it, and its connection."""
        keep_alive(sock)
        sock.settimeout(_HANDSHAKE_S)
        encrypted, bond = None, b""
        if self._tls is not None:
            sock = encrypted = self._tls.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        channel = RankChannel(sock, name, carries_descriptors=False, most_bytes=MOST_BYTES)
        try:
            with _TimeLimit(channel):
                if self._tls is not None and encrypted is not None:
                    encrypted.do_handshake()
                    bond = self._tls.fingerprint + peer_fingerprint(encrypted)
                caller, token = handshake_as_leader(channel, self._group.secret, self._refusal, bond)
            # The address shows an operator which node it is.
            return caller, token, RankChannel(sock, f"rank {caller.rank} at {name}", carries_descriptors=False)
        except BaseException:
            sock.close()
            raise

    def _refusal(self, caller: JoiningRank) -> str | None:
        reason = temporary_refusal(caller, revision=self._group.revision, software=installed_version())
        if reason is not None:
            raise RankLost(reason)  # not a final refusal, whatever else differs
        return permanent_refusal(caller, size=self._group.size, num_nodes=self._group.num_nodes)

    def _record(self, caller: JoiningRank, token: str, channel: RankChannel) -> None:
        """Record an authenticated connection; with the last one, the rank has joined."""
        with self._changed:
            if self._is_closing:
                raise RankLost("the group has started already")
            if caller.purpose is Purpose.STEPS:
                before = self._joining.pop(caller.rank, None)
                if before is not None:
                    before.close()
                send_welcome(channel, token)
                self._joining[caller.rank] = _JoiningProcess(token=token, steps=channel)
                return
            joining = self._joining.get(caller.rank)
            if joining is None or joining.token != caller.token:
                raise RankLost(f"{channel.peer} is not the process that opened the first connection")
            if caller.rank in self._joined:
                raise RankLost(f"{channel.peer} has joined already")
            if caller.purpose is Purpose.REGION:
                if joining.region is not None:
                    raise RankLost(f"{channel.peer} has opened this connection already")
                send_welcome(channel, token)
                joining.region = channel
                return
            if joining.region is None:
                raise RankLost(f"{channel.peer} has not opened its connection for KV")
            send_welcome(channel, token)
            del self._joining[caller.rank]
            self._joined[caller.rank] = JoinedRank(steps=joining.steps, region=joining.region)
            self._changed.notify_all()
        _log.info("%s has joined", channel.peer)
        self._on_pulse(channel)


def _listed(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
