"""A worker's answers to routers about pinned prefixes. On the event loop's thread."""

from collections.abc import Iterable
from functools import partial

from tandem.protocol.pin_wire import order_from_pb, told_to_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.prefix_pin import PinKey, PinOutcome, PinTold
from worker.engine_host import EngineHost
from worker.session_port import SessionPort


class PinService:
    """Takes orders to the engine; whoever asked hears what became of it, every router what gives way later."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._ports: set[SessionPort] = set()

    def opened(self, port: SessionPort) -> None:
        """Tell a new router what is pinned."""
        self._ports.add(port)

    def closed(self, port: SessionPort) -> None:
        """A router left: what it pinned ends by time."""
        self._ports.discard(port)

    def order(self, port: SessionPort, message: pb.RouterMessage) -> None:
        """If it is about a pin."""
        if message.HasField("pin"):
            self._host.pin(order_from_pb(message.pin), partial(_tell, port))
        elif message.HasField("unpin"):
            key = PinKey(message.unpin.tenant, message.unpin.name)
            self._host.post(lambda scheduler: scheduler.pins.unpin(key))

    def lost(self, keys: Iterable[PinKey]) -> None:
        """These gave way in the engine."""
        for key in keys:
            for port in self._ports:
                _tell(port, PinTold(key=key, outcome=PinOutcome.GAVE_WAY))


def _tell(port: SessionPort, told: PinTold) -> None:
    port.send(pb.WorkerMessage(pin_told=told_to_pb(told)))
