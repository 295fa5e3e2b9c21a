"""Connects a rank on another node to rank 0: it tries until rank 0 accepts it, however long that takes."""

import logging
import socket
import ssl
import threading
from contextlib import ExitStack
from dataclasses import dataclass

from engine.distributed.links.channel import MOST_PAYLOAD_BYTES, RankChannel
from engine.distributed.links.handshake import (
    MOST_BYTES,
    JoiningRank,
    Purpose,
    handshake_as_follower,
    installed_version,
)
from engine.distributed.links.lost import RankLost
from engine.distributed.links.node_group import NodeGroup
from tandem.rpc.hosts import join, keep_alive
from tandem.rpc.mutual_tls import MutualTls, peer_fingerprint, tls_reason

_log = logging.getLogger(__name__)
REFUSED = 2
"""Exit code of a rank that can never belong to this group."""
_CONNECT_S = 10.0
_AGAIN_S = 1.0
_LOG_EVERY = 30
"""Failed attempts between two log lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLink:
    """A rank's connections to rank 0."""

    steps: RankChannel
    region: socket.socket | None = None
    """From another node: connection for orders about this rank's part of the KV."""
    pulse: RankChannel | None = None
    """Connection for heartbeats, in a group that spans nodes; else None."""
    host: str | None = None
    """Address of this node, at which rank 0 and the others reach it."""


def link_from_descriptors(control_fd: int, pulse_fd: int | None, host: str | None) -> RankLink:
    """Make the link of a rank on rank 0's own node from the descriptors of connected sockets."""
    steps = RankChannel(socket.socket(fileno=control_fd), "rank 0")
    pulse = None if pulse_fd is None else RankChannel(socket.socket(fileno=pulse_fd), "rank 0")
    return RankLink(steps=steps, pulse=pulse, host=host)


def connect_to_rank_0(group: NodeGroup, rank: int, source: str | None) -> RankLink:
    """Connect to rank 0, trying until it answers. `source`: this node's address to connect from; None: any.

    Raises ConfigError when rank 0 refuses this rank, or the files of certificates cannot be used.
    """
    tls, tries, said, never = group.open_tls(), 0, "", threading.Event()
    setting = "" if group.tls is None else group.tls.setting
    while True:
        try:
            return _open_link(group, rank, source, tls)
        except (OSError, RankLost, RuntimeError) as error:  # the last: no thread now
            why = tls_reason(error, setting) if isinstance(error, ssl.SSLError) else str(error)
            if why != said or tries % _LOG_EVERY == 0:
                _log.warning("cannot reach rank 0 at %s: %s", join(group.host, group.port), why)
            tries, said = tries + 1, why
            never.wait(_AGAIN_S)


def _open_link(group: NodeGroup, rank: int, source: str | None, tls: MutualTls | None) -> RankLink:
    with ExitStack() as undo:
        steps, token, host = _connect(group, rank, source, tls, Purpose.STEPS, "")
        undo.callback(steps.close)
        channel, _, _ = _connect(group, rank, source, tls, Purpose.REGION, token)
        undo.callback(channel.close)
        region = channel.into_socket()
        undo.callback(region.close)
        # With the last one, the rank has joined.
        pulse, _, _ = _connect(group, rank, source, tls, Purpose.PULSE, token)
        undo.pop_all()
    steps.set_timeout(None)
    return RankLink(steps=steps, region=region, pulse=pulse, host=host)


def _connect(
    group: NodeGroup, rank: int, source: str | None, tls: MutualTls | None, purpose: Purpose, token: str
) -> tuple[RankChannel, str, str]:
    """Open one connection. Returns it, rank 0's token, and this end's address."""
    from_where = None if source is None else (source, 0)
    sock = socket.create_connection((group.host, group.port), _CONNECT_S, source_address=from_where)
    try:
        keep_alive(sock)
        bond = b""
        if tls is not None:
            sock = encrypted = tls.client.wrap_socket(sock)
            bond = peer_fingerprint(encrypted) + tls.fingerprint
        channel = RankChannel(sock, "rank 0", carries_descriptors=False, most_bytes=MOST_BYTES)
        caller = JoiningRank(
            rank=rank,
            size=group.size,
            num_nodes=group.num_nodes,
            purpose=purpose,
            token=token,
            revision=group.revision,
            software=installed_version(),
        )
        given = handshake_as_follower(channel, caller, group.secret, bond)
        channel.most_bytes = MOST_PAYLOAD_BYTES
        return channel, given, str(sock.getsockname()[0])
    except BaseException:
        sock.close()
        raise
