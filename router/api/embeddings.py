"""Embeddings: a text's last hidden states behind the final norm, as one vector.

A model whose files say how it pools is served as sentence-transformers defines it (`tandem.pooling_model`). Of any
other the vector is the mean of the states, scaled to length one, which says little of what a text means: the model
was not trained for it, and answers say so.

Workers pool the prompts (`router.dispatch.prompt_logprobs`), in groups so that one call does not occupy every slot of
the router.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from router.api.answer.choice_text import TextCollector
from router.api.answer.usage import CallUsage
from router.api.frontend import Frontend
from router.api.pooled_inputs import (
    MAX_PROMPT_CHARS,
    LengthBound,
    PooledIds,
    PooledInput,
    PooledText,
    length_bound,
)
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.api.request_meter import RequestMeter
from router.api.text_stream import read_text
from router.types.prompt_logprobs import PromptScoringRequest, ScoredPrompt
from router.types.requests import Generator
from tandem.errors import InternalError, InvalidRequest
from tandem.pooling_model import PoolingModel, PoolingTask
from tandem.values.pooling import PoolingMode

MAX_INPUTS = 2048
"""Inputs per call; OpenAI's bound."""
_TOGETHER = 64
"""Inputs of one call that run at once."""
EMBEDDING_SCORING = PromptScoringRequest(num_top=None, only=True)
NewMeter = Callable[[PreparedRequest], RequestMeter]
EmbeddingInput = str | tuple[int, ...]
T = TypeVar("T")


class EmbeddingOptions(Struct, frozen=True, kw_only=True):
    """What a client may say of its vectors."""

    dimensions: int | None = None
    """Cut vectors to their first numbers."""
    prompt_name: str | None = None
    """Which of the model's prompts stands in front of each text; None: its default."""
    prompt: str | None = None
    """A prompt of the client's own."""
    normalize: bool | None = None
    """Scale vectors to length one; None: as the model's files say."""
    fallbacks: tuple[str, ...] = ()
    """Prompts of the model, the first of which that exists stands in for an absent `prompt_name`."""


_DEFAULTS = EmbeddingOptions()


class PoolingReport(Struct, frozen=True, kw_only=True):
    """How vectors are made, for answers."""

    method: str
    """Ways of pooling, by sentence-transformers' names, joined by `+`."""
    is_trained: bool
    """Whether the model's files say that it was made for embeddings."""


def in_groups(inputs: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split the inputs of one call into those that run at once."""
    for begin in range(0, len(inputs), _TOGETHER):
        yield inputs[begin : begin + _TOGETHER]


async def score_group(
    frontend: Frontend, generator: Generator, group: Sequence[PreparedRequest], new_meter: NewMeter
) -> list[ScoredPrompt]:
    """Score prepared prompts at once. Raises what `Generator.run` raises."""
    found = TextCollector()
    await read_text(generator, group, frontend.tokenizer, new_meter, found)
    return [found.scored_prompts[index] for index in range(len(group))]


class Embedder:
    """Embeds texts; one per router, which the HTTP and the gRPC server share."""

    def __init__(self, frontend: Frontend, generator: Generator, *, most_values: int) -> None:
        """`most_values`: bound on the numbers in one answer."""
        self._frontend = frontend
        self._generator = generator
        self._most_values = most_values

    @property
    def report(self) -> PoolingReport:
        """How this model's vectors are made."""
        pooling = self._frontend.model.pooling
        modes = (PoolingMode.MEAN,) if pooling is None else pooling.modes
        return PoolingReport(method="+".join(mode.value for mode in modes), is_trained=pooling is not None)

    async def prepare(
        self, inputs: Sequence[EmbeddingInput], fields: ClientRequest, options: EmbeddingOptions = _DEFAULTS
    ) -> list[PreparedRequest]:
        """Prepare the inputs. Raises InvalidRequest, ContextLengthExceeded or ModelNotFound."""
        if not inputs or len(inputs) > MAX_INPUTS:
            raise InvalidRequest(f"input must have 1 to {MAX_INPUTS} elements", param="input")
        self._frontend.check_base_model(fields.model, fields.tenant)
        fields = replace(fields, max_tokens=1, num_choices=1, reads_along=False, scoring=EMBEDDING_SCORING)
        pooling = self._frontend.model.pooling
        prompts: Sequence[EmbeddingInput | PooledInput] = inputs
        if pooling is None:
            _check_untrained(options)
        else:
            prompts, fields = self._pooled(pooling, inputs, fields, options)
        try:
            return await self._frontend.prepare_prompts(prompts, fields)
        except InvalidRequest as error:
            raise as_input_error(error) from error

    async def embed(
        self,
        prepared: Sequence[PreparedRequest],
        new_meter: NewMeter,
        options: EmbeddingOptions = _DEFAULTS,
        *,
        are_shown: bool = True,
    ) -> tuple[list["array[float]"], CallUsage]:
        """Return one float32 vector for each input, in order, and their usage. `are_shown`: whether the answer has
        them. Raises what `Generator.run` raises.
        """
        vectors: list[array[float]] = []
        for group in in_groups(prepared):
            scored = await score_group(self._frontend, self._generator, group, new_meter)
            vectors += [self._finished(one.mean, options) for one in scored]
            if are_shown and len(prepared) * len(vectors[0]) > self._most_values:
                most = self._most_values // len(vectors[0])
                raise InvalidRequest(f"input: at most {most} vectors with {len(vectors[0])} numbers", param="input")
        return vectors, CallUsage(prepared)

    def _pooled(
        self, pooling: PoolingModel, inputs: Sequence[EmbeddingInput], fields: ClientRequest, options: EmbeddingOptions
    ) -> tuple[list[PooledInput], ClientRequest]:
        """Put the prompt in front of texts; say how workers pool."""
        if pooling.task is not PoolingTask.EMBED:
            raise InvalidRequest("model: it is a reranker: use /v1/rerank or /v1/score", param="model")
        _check_dimensions(pooling, options.dimensions)
        prompt = _prompt_of(pooling, options)
        is_text = isinstance(inputs[0], str)
        if not is_text and (options.prompt_name or options.prompt):
            name = "prompt_name" if options.prompt_name else "prompt"
            raise InvalidRequest(f"{name}: for texts only, not for token ids", param=name)
        bound = length_bound(pooling, self._frontend.model.max_model_len, fields.truncate_prompt_tokens, "input")
        num_skipped = 0
        if prompt and is_text and not pooling.includes_prompt:
            num_skipped = self._num_prompt_tokens(prompt, fields.add_special_tokens)
            _check_skipped(num_skipped, bound, fields.truncate_prompt_tokens)
        found: list[PooledInput] = []
        for one in inputs:
            if not isinstance(one, str):
                found.append(PooledIds(ids=one, bound=bound))
            elif not one:
                raise InvalidRequest("input: empty", param="input")
            else:
                text = PooledText(
                    text=prompt + one,
                    add_special_tokens=fields.add_special_tokens,
                    bound=bound,
                    num_skipped=num_skipped,
                )
                found.append(text)
        scoring = replace(
            EMBEDDING_SCORING,
            pooling=pooling.modes,
            through_head=pooling.has_head,
            num_skipped=num_skipped,
        )
        return found, replace(fields, scoring=scoring, truncate_prompt_tokens=None)

    def _num_prompt_tokens(self, prompt: str, add_special_tokens: bool) -> int:
        """Tokens of the prompt at the beginning of a text, as sentence-transformers counts them."""
        tokenizer = self._frontend.tokenizer
        ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return len(ids) - (ids[-1] in tokenizer.special_ids)

    def _finished(self, values: Sequence[float], options: EmbeddingOptions) -> "array[float]":
        pooling = self._frontend.model.pooling
        normalizes = options.normalize
        if normalizes is None:
            normalizes = pooling is None or pooling.normalizes
        return finished(values[: options.dimensions], normalizes=normalizes)


def finished(values: Sequence[float], *, normalizes: bool) -> "array[float]":
    """Make a float32 vector, scaled to length one if wanted. Raises InternalError for one that is not finite, or zero
    where it has to be scaled.
    """
    length = math.hypot(*values)
    if not math.isfinite(length) or (normalizes and not length):
        raise InternalError("the model produced unusable hidden states")
    return array("f", (value / length for value in values) if normalizes else values)


def as_input_error(error: InvalidRequest, name: str = "input", former: str = "prompt") -> InvalidRequest:
    """Return the same error for `name`, the client's name of what is called `former` further in."""
    if error.param != former:
        return error
    return type(error)(error.message.replace(former, name, 1), param=name, retry_after_s=error.retry_after_s)


def _check_untrained(options: EmbeddingOptions) -> None:
    if options.dimensions is not None:
        raise InvalidRequest("dimensions is not supported: this model's vectors have one size", param="dimensions")
    for name, value in (("prompt_name", options.prompt_name), ("prompt", options.prompt)):
        if value is not None:
            raise InvalidRequest(f"{name}: this model's files define no prompts", param=name)


def _check_skipped(num_skipped: int, bound: LengthBound, truncate_prompt_tokens: int | None) -> None:
    """Check that texts may be longer than the prompt in front, whose tokens are not pooled. Raises InvalidRequest."""
    if num_skipped >= bound.most:
        name = "prompt" if truncate_prompt_tokens in (None, -1) else "truncate_prompt_tokens"
        left = f"{bound.most} tokens leave no room for a text"
        raise InvalidRequest(f"{name}: {left} behind the prompt's {num_skipped}, which are not pooled", param=name)


def _check_dimensions(pooling: PoolingModel, dimensions: int | None) -> None:
    if dimensions is None:
        return
    if not 1 <= dimensions <= pooling.size:
        raise InvalidRequest(f"dimensions must be an integer in [1, {pooling.size}]", param="dimensions")
    if pooling.dimensions and dimensions not in (*pooling.dimensions, pooling.size):
        trained = ", ".join(map(str, pooling.dimensions))
        raise InvalidRequest(f"dimensions must be one of the model's: {trained}", param="dimensions")


def _prompt_of(pooling: PoolingModel, options: EmbeddingOptions) -> str:
    if options.prompt is not None:
        if options.prompt_name is not None:
            raise InvalidRequest("send prompt or prompt_name, not both", param="prompt")
        if len(options.prompt) > MAX_PROMPT_CHARS:
            raise InvalidRequest(f"prompt must have at most {MAX_PROMPT_CHARS} characters", param="prompt")
        return options.prompt
    try:
        return pooling.prompt(options.prompt_name, *options.fallbacks)
    except KeyError:
        known = ", ".join(map(repr, pooling.prompts)) or "none"
        raise InvalidRequest(f"prompt_name must be one of this model's: {known}", param="prompt_name") from None
