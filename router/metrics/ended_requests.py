"""What is observed of each request once it has ended, many requests at a time.

Nothing needs these figures before the next scrape. For each of many requests they take a fraction of the time: the code
and the instruments are in the processor's cache then.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.metrics.latency_slices import FirstTokens, RequestTraits
from router.types.requests import ChoiceFinish
from tandem.errors import Code

_COUNTED_TOGETHER = 32
"""Few enough that the event loop is not delayed noticeably."""


class EndedRequest(Struct, frozen=True, kw_only=True):
    """A request that has ended, however it did."""

    traits: RequestTraits
    times: FirstTokens | None
    """None: it got no token."""
    finishes: Sequence[ChoiceFinish]
    """Of the choices that ended by themselves."""
    sizes: Sequence[int]
    """Tokens of each of those."""
    num_tokens: int
    """Tokens of its longest choice."""
    code: Code | None
    """How it failed; None: it did not."""
    seconds: float
    """Time from its arrival to its end."""


class EndedRequests(Collector):
    """Requests that have ended and are not in the instruments yet.

    A collector without metrics of its own: registered before those of the instruments, it is asked first at a scrape.
    """

    def __init__(self, observe: Callable[[EndedRequest], None]) -> None:
        """`observe`: adds one request to the instruments."""
        self._observe = observe
        self._pending: list[EndedRequest] = []

    def add(self, request: EndedRequest) -> None:
        self._pending.append(request)
        if len(self._pending) >= _COUNTED_TOGETHER:
            self.count()

    def count(self) -> None:
        """Observe what is pending."""
        pending, self._pending = self._pending, []
        for request in pending:
            self._observe(request)

    def collect(self) -> Iterable[Metric]:
        self.count()
        return ()
