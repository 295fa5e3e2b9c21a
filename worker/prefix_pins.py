"""Answers routers' orders about pinned prefixes. On the event loop's thread."""

from collections.abc import Iterable
from functools import partial

from tandem.protocol.pin_wire import order_from_pb, result_to_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.prefix_pin import PinKey, PinOutcome, PinResult
from worker.engine_host import EngineHost
from worker.session_port import SessionPort


class PinService:
    """Passes orders to the engine; the ordering router gets the outcome, and every router the pins released later."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._ports: set[SessionPort] = set()

    def opened(self, port: SessionPort) -> None:
        self._ports.add(port)

    def closed(self, port: SessionPort) -> None:
        """Forget a router; its pins stay until they expire."""
        self._ports.discard(port)

    def order(self, port: SessionPort, message: pb.RouterMessage) -> None:
        """Handle `message` if it is about a pin."""
        if message.HasField("pin"):
            self._host.pin(order_from_pb(message.pin), partial(_send_outcome, port))
        elif message.HasField("unpin"):
            key = PinKey(message.unpin.tenant, message.unpin.name)
            self._host.post(lambda scheduler: scheduler.pins.unpin(key))

    def lost(self, keys: Iterable[PinKey]) -> None:
        """Report pins that were released to every router."""
        for key in keys:
            for port in self._ports:
                _send_outcome(port, PinResult(key=key, outcome=PinOutcome.GAVE_WAY))


def _send_outcome(port: SessionPort, result: PinResult) -> None:
    port.send(pb.WorkerMessage(pin_result=result_to_pb(result)))
