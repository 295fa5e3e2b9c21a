"""Turns a client's request into a `RoutedRequest`: the one validator that the HTTP and the gRPC server share.

A server turns its wire format into a prompt and `ClientRequest`; here every bound is checked, cheapest first, so that
nothing is tokenized for a request that will be refused. The bounds of sampling live in `tandem.values.sampling`, those
of stop strings in `router.text.stop_strings`.
"""

import asyncio
import dataclasses
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

from msgspec.structs import replace

from router.admission.queue_limits import PreparationLimit
from router.api.adapters import ServedAdapters
from router.api.answer.stream_ids import StreamIds
from router.api.pooled_inputs import PooledInput
from router.api.prompts import PromptReader
from router.api.request.beam_search_options import with_beams
from router.api.request.client_request import ClientRequest, ModelInfo, PreparedRequest
from router.api.request.named_caches import CachedPrompts
from router.api.request.prompt_logprobs_options import check_call_tokens, check_prompt_scoring_size
from router.api.request.request_ids import name_request
from router.sandbox.grammar_check import GrammarChecker
from router.text.chat_template import Message
from router.text.grammars.structured_output import StructuredOutput
from router.text.grammars.thinking import ThinkingSupport
from router.text.grammars.tool_calling import ToolCallSupport
from router.text.reasoning import Reasoning
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer
from router.text.tool_parsers.request_calls import ToolCallReading
from router.text.tools import ToolUse
from router.types.requests import MAX_PRIORITY, ResumePoint, RoutedRequest
from tandem.adapters.files import Adapter
from tandem.config.cluster import RouterConfig
from tandem.errors import ContextLengthExceeded, InvalidRequest
from tandem.pooling_model import PoolingTask
from tandem.telemetry.tracing import NoTracer, Tracer
from tandem.values.block_hash import root_hash
from tandem.values.ids import BlockHash
from tandem.values.random_pool import RANDOM
from tandem.values.sampling import BOUNDS, MAX_BAD_WORDS, SamplingParams

MAX_SALT_CHARS = 1024
MAX_BAD_WORD_CHARS = 64
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a plain prompt when absent (OpenAI); a conversation gets the rest of the context."""
_MOST_TOKENS = 2**31 - 1
_MAX_ROOTS = 1024
_MOST_AT_ONCE_S = 0.002
"""For so long the short prompts of one call, which may be thousands, keep the event loop from all else."""
_NO_STOPS = StopStrings(())


class Frontend:
    """Validates, tokenizes and names requests. One per router; every server shares it."""

    def __init__(
        self,
        *,
        model: ModelInfo,
        tokenizer: Tokenizer,
        config: RouterConfig,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
        mint_seed: Callable[[], int] = partial(RANDOM.randbits, 63),  # noqa: B008  # the process's one pool
        tracer: Tracer | None = None,
        max_concurrent: Callable[[str], int | None] = lambda _tenant: None,
    ) -> None:
        """`secret` keys block names, so it must be the cluster's. `max_concurrent`: see `PreparationLimit`."""
        self.model = model
        self.tokenizer = tokenizer
        self.clock = clock
        self._config = config
        self._secret = secret
        self._mint_seed = mint_seed
        self.stream_ids = StreamIds(secret, most_s=config.request_timeout_s)
        self._tracer = tracer or NoTracer()
        self.grammars: GrammarChecker | None = None
        """Set before the servers open; without it structured outputs are refused."""
        self.kept: CachedPrompts | None = None
        """Set before the servers open; without it there are no named caches."""
        self.adapters = ServedAdapters(model.name)
        """The adapters that may be named in place of the model; replaced before the servers open."""
        self.max_call_tokens = config.queue.max_tokens
        """Bound on the tokens of a call's prompts together, where their states are pooled or judged."""
        self._limit = PreparationLimit(config.max_inflight_requests, max_concurrent)
        self.thinking = ThinkingSupport(tokenizer, config.reasoning_parser)
        marks = self.thinking.marks
        self.tooling = ToolCallSupport(tokenizer, config.tool_parser, None if marks is None else marks.begin)
        self.prompts = PromptReader(
            model=model,
            tokenizer=tokenizer,
            max_prompts=config.max_prompts,
            cache_bytes=config.tokenizer_cache_bytes,
        )
        self._hash_root = lru_cache(maxsize=_MAX_ROOTS)(self._new_hash_root)

    @contextmanager
    def preparing(self, tenant: str) -> Iterator[PromptReader]:
        """Count a request while inside, where its texts may be tokenized. Raises Overloaded on entering."""
        with self._limit.preparing(tenant):
            yield self.prompts.for_tenant(tenant)

    async def prepare_chat(self, messages: Sequence[Message], fields: ClientRequest) -> PreparedRequest:
        """Prepare a conversation. Raises InvalidRequest, ContextLengthExceeded or ModelNotFound."""
        started_s, calling = self.clock(), None
        if fields.structure is not None:
            fields = self._closed(fields, fields.structure)
        if fields.tools is not None:
            fields, calling = self._calling(fields, fields.tools)
        fields = self._with_defaults(fields)
        self.check_fields(fields)
        expected = None
        with self.preparing(fields.tenant) as texts:
            if fields.structure is not None or fields.bad_words:
                fields = await self._structured(fields)
            if fields.prediction is not None:
                expected = await texts.encode_prediction(fields.prediction)
            ids = await texts.encode_chat(
                messages,
                add_generation_prompt=fields.add_generation_prompt,
                tools=fields.tools,
                options=fields.template,
                scope=self._salt(fields),
            )
        reasoning = self.thinking.reasoning(ids, begins_turn=fields.add_generation_prompt)
        if (grammar := fields.sampling.grammar) is not None:
            # It applies only after the reasoning.
            grammar = self.thinking.before(grammar, reasoning)
            fields = replace(fields, sampling=fields.sampling._replace(grammar=grammar))
        one = self._finish(
            ids,
            fields,
            default_max_tokens=self.model.defaults.max_tokens,
            param="messages",
            operation="chat",
            started_s=started_s,
            calling=calling,
            reasoning=reasoning,
        )
        if fields.beams is not None:
            one = with_beams(one, fields, most_beams=self._config.max_choices)
        if fields.scoring is not None:
            check_prompt_scoring_size([one], self._config.max_answer_values)
        if expected:
            one = replace(one, request=replace(one.request, prediction=expected))
        return self._traced(one, fields)

    async def prepare_prompts(
        self,
        prompts: Sequence[str | tuple[int, ...] | PooledInput],
        fields: ClientRequest,
        *,
        tokens_before: int = 0,
    ) -> list[PreparedRequest]:
        """Prepare plain prompts, each text, token ids, or an input of a pooling model. Raises as `prepare_chat`.

        `tokens_before`: tokens of the same call's prompts that have been prepared before these.
        """
        if fields.structure is not None:
            fields = self._closed(fields, fields.structure)
        fields = self._with_defaults(fields)
        self.check_fields(fields)
        prepared: list[PreparedRequest] = []
        is_small = fields.scoring is not None and fields.scoring.is_small
        num_tokens, yielded_s = tokens_before, self.clock()
        with self.preparing(fields.tenant) as texts:
            fields = await self._structured(fields)
            for prompt in prompts:
                started_s = self.clock()
                text = prompt if isinstance(prompt, str) else None
                ids = await self._prompt_ids(texts, prompt, fields)
                one = self._finish(
                    ids,
                    fields,
                    default_max_tokens=DEFAULT_COMPLETION_TOKENS,
                    param="prompt",
                    num_prompts=len(prompts),
                    operation=fields.operation,
                    started_s=started_s,
                    prompt_text=text,
                )
                one = with_beams(one, fields, most_beams=self._config.max_choices)
                if is_small:
                    num_tokens += len(one.request.prompt_token_ids)
                    check_call_tokens(num_tokens, self.max_call_tokens)
                prepared.append(self._traced(one, fields))
                if self.clock() - yielded_s > _MOST_AT_ONCE_S:
                    await asyncio.sleep(0)
                    yielded_s = self.clock()
        check_prompt_scoring_size(prepared, self._config.max_answer_values)
        return prepared

    async def _prompt_ids(
        self, texts: PromptReader, prompt: str | tuple[int, ...] | PooledInput, fields: ClientRequest
    ) -> Sequence[int]:
        if not isinstance(prompt, (str, tuple)):
            return await prompt.token_ids(texts)
        if fields.suffix is not None:
            return await texts.encode_around(prompt, fields.suffix, fields.add_special_tokens)
        if isinstance(prompt, tuple):
            return prompt
        return await texts.encode(prompt, fields.add_special_tokens)

    def check_model(self, name: str | None, tenant: str) -> None:
        """Raise ModelNotFound unless `name` is the served model, one of its adapters that the tenant may use, or
        absent."""
        if name is not None and name != self.model.name:
            self.adapters.get(name, tenant)

    def check_base_model(self, name: str | None, tenant: str) -> None:
        """Raise as `check_model`, and InvalidRequest for an adapter."""
        if name is not None and name != self.model.name:
            adapter = self.adapters.get(name, tenant)
            raise InvalidRequest(
                f"model: {adapter.name!r} is an adapter; only {self.model.name!r} itself can be used here",
                param="model",
            )

    def answering_model(self, request: RoutedRequest) -> str:
        """Return the name by which a request's model is shown in its answer."""
        return self.model.name if request.adapter is None else request.adapter.name

    def check_fields(self, fields: ClientRequest) -> None:
        """Check every bound that needs no tokenizing."""
        if fields.model != self.model.name:
            self.check_model(fields.model, fields.tenant)
        if self.model.pooling is not None and not (self.model.pooling.generates or fields.is_pooled):
            kind = "embeddings" if self.model.pooling.task is PoolingTask.EMBED else "relevance scores"
            raise InvalidRequest(f"model: it makes {kind} and generates no text", param="model")
        if not 1 <= fields.num_choices <= self._config.max_choices:
            name, bound = fields.choices_param, f"an integer in [1, {self._config.max_choices}]"
            raise InvalidRequest(f"{name} must be {bound}, got {fields.num_choices}", param=name)
        if not -MAX_PRIORITY <= fields.priority <= MAX_PRIORITY:
            raise InvalidRequest(f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]", param="priority")
        keep = fields.truncate_prompt_tokens
        if keep is not None and keep != -1 and not 1 <= keep < self.model.max_model_len:
            bound = f"-1 or an integer in [1, {self.model.max_model_len - 1}]"
            raise InvalidRequest(f"truncate_prompt_tokens must be {bound}", param="truncate_prompt_tokens")
        if fields.cache_salt is not None and not 1 <= len(fields.cache_salt) <= MAX_SALT_CHARS:
            raise InvalidRequest(f"cache_salt must have 1 to {MAX_SALT_CHARS} characters", param="cache_salt")
        most = fields.max_tokens if fields.max_tokens is not None else _MOST_TOKENS
        limit = BOUNDS["max_tokens"]
        if not limit.low <= most <= limit.high:
            limit.check(fields.max_tokens_param, most)
        sampling = fields.sampling
        if fields.structure is not None:
            sampling = sampling._replace(grammar=fields.structure.grammar())
        sampling.validate(vocab_size=self.model.vocab_size, max_tokens=most, seed=fields.seed or 0)
        if fields.stop:
            StopStrings(fields.stop)

    def _closed(self, fields: ClientRequest, structure: StructuredOutput) -> ClientRequest:
        """Close JSON schemas that leave `additionalProperties` open, as the operator configured."""
        if not self._config.grammars.disable_additional_properties:
            return fields
        return replace(fields, structure=dataclasses.replace(structure, disables_additional_properties=True))

    def _with_defaults(self, fields: ClientRequest) -> ClientRequest:
        """Fill in the model's default sampling where the client stated none; a beam search does not sample."""
        if fields.stated_sampling is None or fields.beams is not None:
            return fields
        sampling = self.model.defaults.fill(fields.sampling, fields.stated_sampling)
        return fields if sampling is fields.sampling else replace(fields, sampling=sampling)

    def _calling(self, fields: ClientRequest, tools: ToolUse) -> tuple[ClientRequest, ToolCallReading | None]:
        """Add the structure that constrains tool calls as requested, and return how calls are parsed."""
        tools.check()
        structure = self.tooling.structure(tools, fields.structure)
        calling = self.tooling.calling(tools, is_forced=structure is not None)
        return replace(fields, structure=structure), calling

    async def _structured(self, fields: ClientRequest) -> ClientRequest:
        """Add what workers enforce: the checked grammar, and bad words as tokens."""
        structure = fields.structure
        if fields.bad_words:
            banned = (*fields.sampling.bad_words, *self._bad_words(fields.bad_words))
            fields = replace(fields, sampling=fields.sampling._replace(bad_words=banned))
            fields.sampling.validate(vocab_size=self.model.vocab_size)
        if structure is None:
            return fields
        if self.grammars is None:
            raise InvalidRequest(f"{structure.param}: not supported here", param=structure.param)
        grammar = await self.grammars.checked(structure.grammar(), structure.param, fields.tenant)
        return replace(fields, sampling=fields.sampling._replace(grammar=grammar))

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words: at most {MAX_BAD_WORDS}", param="bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word or len(word) > MAX_BAD_WORD_CHARS:
                raise InvalidRequest(f"bad_words: 1 to {MAX_BAD_WORD_CHARS} characters each", param="bad_words")
            for text in (word, f" {word.lstrip(' ')}"):
                found[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        return tuple(found)

    def _finish(
        self,
        ids: Sequence[int],
        fields: ClientRequest,
        *,
        default_max_tokens: int | None,
        param: str,
        operation: str,
        started_s: float,
        num_prompts: int = 1,
        calling: ToolCallReading | None = None,
        reasoning: Reasoning | None = None,
        prompt_text: str | None = None,
    ) -> PreparedRequest:
        """`param`: the field that `ids` came from."""
        if not ids:
            raise InvalidRequest("prompt: empty", param="prompt")
        if fields.truncate_prompt_tokens is not None:
            ids = ids[-self._num_kept(fields, fields.truncate_prompt_tokens) :]
        room = self._check_context(len(ids), fields, param)
        wanted = fields.max_tokens if fields.max_tokens is not None else default_max_tokens
        fitting = room if wanted is None else max(1, min(wanted, room))
        most = self._max_tokens(fields, fitting, num_prompts, stated=fields.max_tokens is not None)
        sampling = self._sampling(fields, most)
        seen, adapter = fields.last_seen, self._adapter(fields)
        request = RoutedRequest(
            request_id=name_request(seen.head.request_id if seen else None),
            # A call may have thousands of prompts that are scored only.
            prompt_token_ids=array("i", ids) if fields.scoring and fields.scoring.is_small else tuple(ids),
            sampling=sampling,
            grammar_param=None if fields.structure is None else fields.structure.param,
            hash_root=self._root(fields, adapter),
            tenant=fields.tenant,
            operation=operation,
            arrived_s=started_s,
            num_choices=fields.num_choices,
            # Text that may end the answer must be read as it arrives.
            reads_along=fields.reads_along or bool(fields.stop),
            priority=fields.priority,
            scoring=fields.scoring,
            deadline_s=self.deadline_s(fields),
            resume=tuple(ResumePoint(worker=c.worker, num_tokens=c.num_tokens) for c in seen.choices) if seen else (),
            resumptions=seen.head.resumptions + 1 if seen else 0,
            adapter=adapter,
        )
        ends = frozenset() if sampling.ignore_eos else self.model.eos_token_ids
        return PreparedRequest(
            request=request,
            stops=StopStrings(fields.stop) if fields.stop else _NO_STOPS,
            stop_token_ids=ends | frozenset(sampling.stop_token_ids),
            include_stop=fields.include_stop,
            skip_special_tokens=fields.skip_special_tokens,
            has=seen.choices if seen else (),
            calling=calling,
            reasoning=reasoning,
            prompt_text=prompt_text,
        )

    def _sampling(self, fields: ClientRequest, most_tokens: int) -> SamplingParams:
        top_k = max(0, fields.sampling.top_k)  # -1 keeps every token, too
        sampling = fields.sampling._replace(max_tokens=most_tokens, seed=self._seed(fields), top_k=top_k)
        if fields.max_tokens is None:
            # Otherwise `check_fields` has checked it: what became smaller is still within the bounds.
            sampling.validate(vocab_size=self.model.vocab_size)
        return sampling

    def _adapter(self, fields: ClientRequest) -> Adapter | None:
        if fields.model is None or fields.model == self.model.name:
            return None
        return self.adapters.get(fields.model, fields.tenant)

    def _root(self, fields: ClientRequest, adapter: Adapter | None) -> BlockHash:
        salt = self._salt(fields)
        return self._hash_root(salt) if adapter is None else self._hash_root(salt, adapter.digest)

    def _num_kept(self, fields: ClientRequest, num_tokens: int) -> int:
        """Prompt tokens kept when truncating to the last `num_tokens`; -1: as many as the context leaves beside the
        answer."""
        context = self.model.max_model_len
        return max(1, context - (fields.max_tokens or 1)) if num_tokens == -1 else num_tokens

    def _check_context(self, num_prompt_tokens: int, fields: ClientRequest, param: str) -> int:
        """Return the tokens that the context leaves beside the prompt. Raises ContextLengthExceeded where too few are
        left."""
        context = self.model.max_model_len
        room = context - num_prompt_tokens
        if room < fields.least_tokens:
            raise self.prompts.too_long_error(num_prompt_tokens, param, fields.least_tokens)
        least, most, largest = fields.sampling.min_tokens, fields.max_tokens, max(1, room)
        if least <= largest and (most is None or most <= largest):
            return room
        for name, wanted in (("min_tokens", least), (fields.max_tokens_param, most)):
            if wanted is not None and wanted > largest:
                raise ContextLengthExceeded(
                    f"{name} must be at most {room}, got {wanted}: the prompt has {num_prompt_tokens} tokens, the "
                    f"model's context {context}",
                    param=name,
                )
        return room

    def deadline_s(self, fields: ClientRequest) -> float:
        """Return when a request that arrives now has to have ended."""
        # A continued stream has only what is left of its original time.
        seen = fields.last_seen
        time_left_s = self._config.request_timeout_s - (seen.age_s if seen else 0.0)
        if fields.time_left_s is not None:
            time_left_s = min(time_left_s, fields.time_left_s)
        return self.clock() + time_left_s

    def _max_tokens(self, fields: ClientRequest, wanted: int, num_prompts: int, *, stated: bool) -> int:
        """Bound an unstreamed answer, which is held in memory whole before the client receives any of it."""
        if fields.reads_along:
            return wanted
        per_token = num_prompts * fields.num_choices * (1 + (fields.sampling.num_logprobs or 0))
        most = self._config.max_answer_values // per_token
        if wanted <= most:
            return wanted
        if stated or most < max(1, fields.sampling.min_tokens):
            largest = self._config.max_answer_values
            raise InvalidRequest(
                f"prompts x n x {fields.max_tokens_param} x (1 + [top_]logprobs) is {per_token * wanted}: an answer "
                f"that is not streamed has at most {largest}; ask for less, or for a stream",
                param=fields.max_tokens_param,
            )
        return most

    def _seed(self, fields: ClientRequest) -> int:
        if fields.seed is not None:
            return fields.seed
        return self._mint_seed() if fields.last_seen is None else fields.last_seen.head.seed

    def _traced(self, one: PreparedRequest, fields: ClientRequest) -> PreparedRequest:
        """Begin the request's span if it is sampled; names follow OpenTelemetry's GenAI conventions."""
        request = one.request
        operation, started_s = request.operation, request.arrived_s or self.clock()
        model = self.answering_model(request)
        name = f"{operation} {model}"
        span = self._tracer.request(name, fields.trace, started_s, by_operator=fields.by_operator)
        if span is None:
            return one
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "tandem",
                "gen_ai.request.model": model,
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
                "gen_ai.request.choice.count": request.num_choices,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.request.top_p": request.sampling.top_p,
                "gen_ai.response.id": request.request_id,
                "gen_ai.response.model": model,
                "tandem.request.id": request.request_id,
            }
        )
        span.interval("tandem.preprocess", started_s, self.clock())
        return replace(one, request=replace(request, span=span))

    def _salt(self, fields: ClientRequest) -> str:
        """Build the salt with the tenant's length first, so that no salt of one tenant can spell another tenant's."""
        owner = "" if self._config.prompt_cache.shared_by_tenants else fields.tenant
        return f"{len(owner)}:{owner}{fields.cache_salt or ''}"

    def hash_root(self, salt: str) -> BlockHash:
        """Return the root of the block names of everything under one salt. Clients' salts begin with a number."""
        return self._hash_root(salt)

    def _new_hash_root(self, salt: str, adapter: str = "") -> BlockHash:
        """`adapter`: digest of the adapter whose KV it is."""
        return root_hash(secret=self._secret, model_fingerprint=self.model.fingerprint, adapter=adapter, salt=salt)
