"""What writes tokens to clients: native code or Python, and why native code takes no further stream.

Nothing is counted for a token on its own: native code reports up to 32 tokens of a stream together
(`router.fleet.native_streams`), and Python has written all the others.
"""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.metrics.instruments import SingleValue


class StreamRoomCounts(Protocol):
    """The counts of a `router.fleet.native_streams.StreamRoom`."""

    most: int
    num_open: int
    num_full: int
    num_without_descriptor: int


class NoStreamRoom:
    """The counts of a router that has no native code."""

    most = num_open = num_full = num_without_descriptor = 0


class StreamWriterMetrics(Collector):
    def __init__(self, generation_tokens: SingleValue) -> None:
        """`generation_tokens`: counts all tokens sent to clients."""
        self.num_native = 0
        """Those of them that native code wrote."""
        self.room: StreamRoomCounts = NoStreamRoom()
        self._generation_tokens = generation_tokens

    def collect(self) -> Iterable[Metric]:
        text = "Tokens sent to clients, by what wrote them: native code (plain streams) or Python (all else)"
        written = CounterMetricFamily("tandem_written_tokens", text, labels=("writer",))
        written.add_metric(("native",), self.num_native)
        written.add_metric(("python",), self._generation_tokens.value - self.num_native)
        yield written
        text = "Tokens that Python wrote because native code took no further stream, by what was lacking"
        missed = CounterMetricFamily("tandem_native_streams_missed_tokens", text, labels=("lacks",))
        missed.add_metric(("room",), self.room.num_full)
        missed.add_metric(("descriptor",), self.room.num_without_descriptor)
        yield missed
        text = "Streams that native code is writing now"
        yield GaugeMetricFamily("tandem_native_streams", text, value=self.room.num_open)
        text = "Most streams that native code may write at once; 0 where it is not available"
        yield GaugeMetricFamily("tandem_native_streams_limit", text, value=self.room.most)
