"""All of them, and what is understood of them."""

from collections.abc import Mapping
from typing import Any

from router.fleet import session_wire
from tandem.v1 import handoff_pb2, session_pb2
from tandem.values.ids import Incarnation

from .handoff import handoff_hello, handoff_samples, payload_samples
from .sample import Sample
from .session import report_samples, session_samples
from .shared import CODEC, board_samples, same_samples, stream_samples


def samples() -> dict[str, Sample]:
    """By name. What begins with `same/` must be the same bytes in both versions."""
    return {
        **session_samples(),
        **report_samples(),
        **handoff_samples(),
        **payload_samples(),
        **board_samples(),
        **stream_samples(),
        **same_samples(),
    }


def written() -> dict[str, bytes]:
    """Every sample as this code says it."""
    return {name: sample.write() for name, sample in samples().items()}


def spoken() -> dict[str, tuple[int, int]]:
    """Which versions of the protocols this code speaks, as its HELLOs say to peers."""
    session = session_wire.hello_to_pb(Incarnation(5)).hello
    link = handoff_pb2.HandoffMessage.FromString(handoff_hello()).hello
    return {
        protocol: (hello.protocol_version, getattr(hello, "newest_version", 0) or hello.protocol_version)
        for protocol, hello in (("session", session), ("handoff", link))
    }


def read(messages: Mapping[str, bytes]) -> dict[str, Any]:
    """What this code understands; of what it has no sample for, nothing. An error is understood as its text."""
    known = samples()
    return {name: _read_or_error(known[name], data) for name, data in messages.items() if name in known}


def _read_or_error(sample: Sample, data: bytes) -> Any:
    try:
        return sample.read(data)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side must hear of it
        return f"cannot be read: {type(error).__name__}: {error}"


_NEWS = bytes.fromhex("80e209 05".replace(" ", ""))
"""Field 20000, a number, as protobuf has it: of no message here."""


def with_news(name: str, data: bytes) -> bytes:
    """The same as a newer version may say it: with a field that nobody here knows, as deep as the receiver reads."""
    area, _, kind = name.partition("/")
    if area == "board":
        body = data[_MAC_BYTES:] + _NEWS
        return CODEC._mac(kind.encode(), body) + body
    if area not in _WITH_KINDS:
        return data + _NEWS if area in ("error", "finish", "report") else data
    message = _WITH_KINDS[area].FromString(data)
    getattr(message, message.WhichOneof("kind")).MergeFromString(_NEWS)
    return message.SerializeToString() + _NEWS


_MAC_BYTES = 32
_WITH_KINDS: dict[str, Any] = {
    "router": session_pb2.RouterMessage,
    "worker": session_pb2.WorkerMessage,
    "handoff": handoff_pb2.HandoffMessage,
}
