"""The store by which ranks meet: in rank 0's memory, and how other ranks reach it."""

import json
import threading
from collections.abc import Mapping
from typing import Any

from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.links.lost import RankLost

MOST_WAIT_S = 600.0
"""Longest wait for a key that rank 0 accepts."""


class RendezvousStore:
    """Keys in memory (see engine.distributed.link_store)."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._is_closed = False

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """See Keys; returns None at once when the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._is_closed, min(timeout_s, MOST_WAIT_S))
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            count = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(count).encode()
            self._changed.notify_all()
            return count

    def has(self, key: str) -> bool:
        with self._changed:
            return key in self._values

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        with self._changed:
            return len(self._values)

    def close(self) -> None:
        """Close the store: all waits end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer another rank's request. Raises RankLost for a malformed one."""
        try:
            match question["op"]:
                case "pulse":
                    return {}
                case "set":
                    self.set(str(question["key"]), bytes.fromhex(question["value"]))
                    return {}
                case "get":
                    value = self.get(str(question["key"]), float(question["timeout_s"]))
                    return {"value": None if value is None else value.hex()}
                case "add":
                    return {"count": self.add(str(question["key"]), int(question["amount"]))}
                case "has":
                    return {"has": self.has(str(question["key"]))}
                case "delete":
                    return {"was": self.delete(str(question["key"]))}
                case "num":
                    return {"num": self.count()}
        except (KeyError, TypeError, ValueError):
            pass
        raise RankLost("malformed rendezvous request")


class RemoteKeys:
    """Keys as reached from other ranks: one request at a time over the rank's last connection."""

    def __init__(self, channel: RankChannel, *, silence_s: float) -> None:
        """`silence_s`: longest silence of rank 0 in answer to a request that does not wait."""
        self._channel = channel
        self._silence_s = silence_s
        self._lock = threading.Lock()

    def pulse(self) -> None:
        """Check that rank 0 is alive. Raises RankLost, like all methods here."""
        self._ask({"op": "pulse"})

    def set(self, key: str, value: bytes) -> None:
        self._ask({"op": "set", "key": key, "value": value.hex()})

    def get(self, key: str, timeout_s: float) -> bytes | None:
        value = self._ask({"op": "get", "key": key, "timeout_s": timeout_s}, waits_s=timeout_s)["value"]
        return None if value is None else bytes.fromhex(value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask({"op": "add", "key": key, "amount": amount})["count"])

    def has(self, key: str) -> bool:
        return bool(self._ask({"op": "has", "key": key})["has"])

    def delete(self, key: str) -> bool:
        return bool(self._ask({"op": "delete", "key": key})["was"])

    def count(self) -> int:
        return int(self._ask({"op": "num"})["num"])

    def _ask(self, question: Mapping[str, Any], *, waits_s: float = 0.0) -> dict[str, Any]:
        with self._lock:
            self._channel.set_timeout(self._silence_s + min(waits_s, MOST_WAIT_S))
            self._channel.send(ChannelKind.ASK, json.dumps(question).encode())
            payload, _ = self._channel.expect(ChannelKind.ANSWER)
            try:
                answer: dict[str, Any] = json.loads(bytes(payload))
            except ValueError:
                raise RankLost(f"{self._channel.peer} sent a malformed rendezvous answer") from None
            return answer
