"""The handshake on a connection between nodes: both ends prove that they know the cluster's secret.

TLS has already shown that both are workers of one authority; on the loopback device, where there may be no TLS, this
alone keeps another user's process out. The secret is never sent: each end answers the other's random number with a
keyed hash over all messages so far and the certificates that both ends have seen, so a man in the middle who has a
certificate of his own and relays the messages is refused. (On loopback without TLS he would not be noticed.) Nothing
large is read from a peer before it is authenticated, and its refusals are not taken as final.
"""

import hmac
import importlib.metadata
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.links.lost import RankLost
from tandem.errors import ConfigError

MOST_BYTES = 4096
"""Largest payload of a message of the handshake."""
_VERSION = 4
_NONCE_BYTES = 32


class Purpose(StrEnum):
    """Purpose of one of a rank's connections, in the order in which it opens them."""

    STEPS = "steps"
    """Commands and requests of rank 0; see ChannelKind."""
    REGION = "region"
    """Orders about the rank's part of the KV, if it has that for itself; see kv_transfer.regions."""
    PULSE = "pulse"
    """Requests of the rank: heartbeats to rank 0, and reads of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoiningRank:
    """Claims of a rank that joins a group."""

    rank: int
    size: int
    num_nodes: int
    purpose: Purpose
    token: str = ""
    """With others than STEPS: the token received on that connection, which shows that all are of one process."""
    version: int = _VERSION
    revision: str = ""
    """See NodeGroup."""
    software: str = ""
    """See `installed_version`."""


def installed_version() -> str:
    """Version of the installed Tandem package; empty when it is not installed, as in a checkout."""
    try:
        return importlib.metadata.version("tandem-serve")
    except importlib.metadata.PackageNotFoundError:
        return ""


def handshake_as_follower(channel: RankChannel, caller: JoiningRank, secret: bytes, bond: bytes = b"") -> str:
    """Perform the follower's side of a handshake. Returns the leader's token.

    `bond`: fingerprints of the leader's and of the follower's certificate. Raises RankLost, also when the peer is not
    the leader; ConfigError when the leader refuses.
    """
    hello = json.dumps(asdict(caller) | {"nonce": secrets.token_hex(_NONCE_BYTES)}).encode()
    channel.send(ChannelKind.HELLO, hello)
    challenge = _json_object(_receive_unauthenticated(channel, ChannelKind.CHALLENGE))
    said = hello + _text_bytes(challenge.get("nonce")) + bond
    if not hmac.compare_digest(_text_bytes(challenge.get("proof")), _proof(secret, "leader", said)):
        raise RankLost(f"{channel.peer} does not know this cluster's secret, or the connection is intercepted")
    channel.send(ChannelKind.PROOF, _proof(secret, "follower", said))
    return bytes(channel.expect(ChannelKind.WELCOME)[0]).decode(errors="replace")


def handshake_as_leader(
    channel: RankChannel, secret: bytes, refusal: Callable[[JoiningRank], str | None], bond: bytes = b""
) -> tuple[JoiningRank, str]:
    """Perform the leader's side of a handshake, all but `send_welcome`. Returns the rank and the token to send it.

    `refusal`: reason for which a rank that knows the secret is refused for good, or None; it raises RankLost for a rank
    that may try again. `bond`: see `handshake_as_follower`. Raises RankLost.
    """
    hello = bytes(_receive_unauthenticated(channel, ChannelKind.HELLO))
    caller = _parse_hello(hello)
    nonce = secrets.token_hex(_NONCE_BYTES)
    said = hello + nonce.encode() + bond
    challenge = {"nonce": nonce, "proof": _proof(secret, "leader", said).decode()}
    channel.send(ChannelKind.CHALLENGE, json.dumps(challenge).encode())
    answer = bytes(_receive_unauthenticated(channel, ChannelKind.PROOF))
    if not hmac.compare_digest(answer, _proof(secret, "follower", said)):
        raise RankLost(f"{channel.peer} does not know this cluster's secret")
    if (reason := refusal(caller)) is not None:
        channel.send(ChannelKind.REFUSED, reason.encode())
        raise RankLost(f"{channel.peer} was rejected: {reason}")
    return caller, caller.token or secrets.token_hex(_NONCE_BYTES)


def send_welcome(channel: RankChannel, token: str) -> None:
    """Send the last message of a handshake. Raises RankLost."""
    channel.send(ChannelKind.WELCOME, token.encode())


def temporary_refusal(caller: JoiningRank, *, revision: str, software: str) -> str | None:
    """Reason for which a caller cannot join now, though it or a successor may later; None when it can.

    Versions are compared only where both sides state them.
    """
    if caller.revision and revision and caller.revision != revision:
        return f"its revision is {caller.revision}, this one's {revision}"
    if caller.software and software and caller.software != software:
        return f"it runs Tandem {caller.software}, rank 0 {software}: install the same on all nodes"
    return None


def permanent_refusal(caller: JoiningRank, *, size: int, num_nodes: int) -> str | None:
    """Reason for which a caller does not belong to a group like this; None when it does."""
    if caller.version != _VERSION:
        return f"it speaks version {caller.version} of this link, rank 0 version {_VERSION}"
    if (caller.size, caller.num_nodes) != (size, num_nodes):
        return (
            f"it is of {caller.size} ranks over {caller.num_nodes} nodes, "
            f"rank 0 of {size} over {num_nodes}: tensor_parallel_size and nodes must be the same on all nodes"
        )
    if not size // num_nodes <= caller.rank < size:
        return f"rank {caller.rank} is of rank 0's own node"
    return None


def _parse_hello(hello: bytes) -> JoiningRank:
    values = _json_object(memoryview(hello))
    try:
        rank, size, num_nodes, version = (int(values[name]) for name in ("rank", "size", "num_nodes", "version"))
        purpose, token = Purpose(values["purpose"]), str(values["token"])
        revision, software = (str(values.get(name, "")) for name in ("revision", "software"))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise RankLost("the peer is not a rank") from None
    return JoiningRank(
        rank=rank,
        size=size,
        num_nodes=num_nodes,
        purpose=purpose,
        token=token,
        version=version,
        revision=revision,
        software=software,
    )


def _json_object(payload: memoryview) -> dict[str, Any]:
    try:
        values = json.loads(bytes(payload))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RankLost("malformed handshake message")
    return values


def _receive_unauthenticated(channel: RankChannel, kind: ChannelKind) -> memoryview:
    """Receive a message from a peer that is not authenticated: a refusal is not final. Raises RankLost."""
    try:
        return channel.expect(kind)[0]
    except ConfigError as refusal:
        raise RankLost(f"rejected by an unauthenticated peer: {refusal}") from None


def _text_bytes(value: object) -> bytes:
    """Bytes of a JSON value as text, lone surrogates replaced."""
    return str(value).encode(errors="replace")


def _proof(secret: bytes, who: str, said: bytes) -> bytes:
    return hmac.new(secret, b"tandem ranks/" + who.encode() + b"/" + said, "sha256").hexdigest().encode()
