"""The code that generating routes share, whatever their format: run and measure."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.api.answer.choice_text import TextSink
from router.api.frontend import Frontend
from router.api.request.client_request import PreparedRequest
from router.api.request_meter import RequestMeter
from router.api.text_stream import read_text
from router.metrics.router_metrics import RouterMetrics
from router.types.requests import Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationContext:
    """The parts of the router that answer; every generating route shares them."""

    frontend: Frontend
    generator: Generator
    metrics: RouterMetrics

    async def read_text(self, prepared: Sequence[PreparedRequest], sink: TextSink) -> None:
        """Run the requests of one call, sending their text to `sink`. Raises the errors of Generator."""
        await read_text(self.generator, prepared, self.frontend.tokenizer, self._meter, sink)

    def _meter(self, one: PreparedRequest) -> RequestMeter:
        return RequestMeter.for_request(one.request, self.metrics, self.frontend.clock)
