"""Embeddings: the mean of a text's last hidden states behind the final norm, scaled to length one.

Workers score the prompts (`router.dispatch.prompt_logprobs`), in groups so that one call does not occupy every slot of
the router.
"""

import math
from array import array
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from router.api.answer.choice_text import TextCollector
from router.api.answer.usage import CallUsage
from router.api.frontend import Frontend
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.api.request_meter import RequestMeter
from router.api.text_stream import read_text
from router.types.prompt_logprobs import PromptScoringRequest
from router.types.requests import Generator
from tandem.errors import InternalError, InvalidRequest

MAX_INPUTS = 2048
"""Inputs per call; OpenAI's bound."""
_TOGETHER = 64
"""Inputs of one call that run at once."""
EMBEDDING_SCORING = PromptScoringRequest(num_top=None, only=True)


class Embedder:
    """Embeds texts; one per router, which the HTTP and the gRPC server share."""

    def __init__(self, frontend: Frontend, generator: Generator, *, most_values: int) -> None:
        """`most_values`: bound on the numbers in one answer."""
        self._frontend = frontend
        self._generator = generator
        self._most_values = most_values

    async def prepare(self, inputs: Sequence[str | tuple[int, ...]], fields: ClientRequest) -> list[PreparedRequest]:
        """Prepare the inputs. Raises InvalidRequest, ContextLengthExceeded or ModelNotFound."""
        if not inputs or len(inputs) > MAX_INPUTS:
            raise InvalidRequest(f"input must have 1 to {MAX_INPUTS} elements", param="input")
        fields = replace(fields, max_tokens=1, num_choices=1, reads_along=False, scoring=EMBEDDING_SCORING)
        try:
            return await self._frontend.prepare_prompts(inputs, fields)
        except InvalidRequest as error:
            raise as_input_error(error) from error

    async def embed(
        self, prepared: Sequence[PreparedRequest], new_meter: Callable[[PreparedRequest], RequestMeter]
    ) -> tuple[list["array[float]"], CallUsage]:
        """Return one float32 vector for each input, in order, and their usage. Raises what `Generator.run` raises."""
        vectors: list[array[float]] = []
        for begin in range(0, len(prepared), _TOGETHER):
            group, found = prepared[begin : begin + _TOGETHER], TextCollector()
            await read_text(self._generator, group, self._frontend.tokenizer, new_meter, found)
            vectors += [unit(found.scored_prompts[index].mean) for index in range(len(group))]
            if len(prepared) * len(vectors[0]) > self._most_values:
                most = self._most_values // len(vectors[0])
                raise InvalidRequest(f"input: at most {most} vectors with {len(vectors[0])} numbers", param="input")
        return vectors, CallUsage(prepared)


def unit(mean: Sequence[float]) -> "array[float]":
    """Scale to length one, in float32. Raises InternalError for a zero or non-finite vector."""
    length = math.hypot(*mean)
    if not math.isfinite(length) or not length:
        raise InternalError("the model produced unusable hidden states")
    return array("f", (value / length for value in mean))


def as_input_error(error: InvalidRequest) -> InvalidRequest:
    """Return the same error for `input`, the name of prompts in an embeddings request."""
    if error.param != "prompt":
        return error
    return type(error)(error.message.replace("prompt", "input", 1), param="input", retry_after_s=error.retry_after_s)
