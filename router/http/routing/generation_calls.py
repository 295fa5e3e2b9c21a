"""What routes that generate in other shapes than OpenAI's do alike: bound the body, run and measure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from router.api.frontend import Frontend
from router.api.request.client_request import PreparedRequest
from router.api.request_meter import RequestMeter
from router.api.text_stream import TextSink, read_text
from router.http.body.json_body import BodyBounds, read_object
from router.metrics.router_metrics import RouterMetrics
from router.types.requests import Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationContext:
    """The parts of the router that answer; every generating route shares them."""

    frontend: Frontend
    generator: Generator
    metrics: RouterMetrics
    bounds: BodyBounds

    @classmethod
    def create(
        cls, frontend: Frontend, generator: Generator, metrics: RouterMetrics, *, max_body_bytes: int
    ) -> "GenerationContext":
        """With the bounds that follow from the model."""
        bounds = BodyBounds.for_model(max_body_bytes, frontend.model.max_model_len)
        return cls(frontend=frontend, generator=generator, metrics=metrics, bounds=bounds)

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The body. Raises as `json_body.read_object`."""
        return await read_object(request, self.bounds)

    async def read_text(self, prepared: Sequence[PreparedRequest], show: TextSink) -> None:
        """Run the requests of one call; `show` takes their text. Raises the errors of Generator."""
        await read_text(self.generator, prepared, self.frontend.tokenizer, self._meter, show)

    def _meter(self, one: PreparedRequest) -> RequestMeter:
        return RequestMeter.for_request(one.request, self.metrics, self.frontend.clock)
