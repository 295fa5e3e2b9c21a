"""tandem.v1.Inference: each call decodes, delegates to the frontend that HTTP uses, and encodes."""

from collections.abc import Sequence
from typing import Any

import orjson

from router.access.api_keys import ApiCaller, ApiKeyStore
from router.api.answer.choice_text import TextSink
from router.api.answer.stream_cursor import StreamCursor
from router.api.answer.timing_report import SERVER_TIMING, TIMING, server_timing, timing_object
from router.api.answer.usage import CallUsage
from router.api.cache_breakpoints import prepare_with_breakpoints
from router.api.embeddings import MAX_INPUTS, Embedder, EmbeddingOptions
from router.api.frontend import Frontend
from router.api.named_cache_prompts import NamedCacheService, prepare_named
from router.api.relevance import RelevanceQuestion, RelevanceScorer
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.api.request_meter import RequestMeter
from router.api.selected_choices import check_selection
from router.api.slow_client import WRITE_TIMEOUT_S
from router.api.text_stream import read_text
from router.grpc.answer_messages import AnswerMessages, CollectedAnswer, GrpcAnswerStream
from router.grpc.answer_writer import AnswerWriter
from router.grpc.cached_contents import CachedContentCalls
from router.grpc.call_guard import caller_of
from router.grpc.client_request import (
    check_known,
    client_fields,
    model_of,
    selection_of,
    trace_of,
    wants_bos,
    wants_generation_prompt,
)
from router.grpc.conversation import breakpoints_of, check_no_breakpoints, messages_of, tools_of
from router.metrics.router_metrics import RouterMetrics
from router.sandbox.pattern_search import PatternSearch
from router.text.tools import use_of
from router.types.requests import Generator
from router.types.stream_position import StreamPosition
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceServicer

_MOST_NUMBERS = 1 << 19
"""Numbers in one answer with vectors: half of gRPC clients' default message limit."""
_LAST_ID = "last_stream_id"


class InferenceService(InferenceServicer):
    def __init__(
        self,
        frontend: Frontend,
        generator: Generator,
        keys: ApiKeyStore,
        metrics: RouterMetrics,
        *,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self._frontend = frontend
        self._generator = generator
        self._keys = keys
        self._metrics = metrics
        self._write_timeout_s = write_timeout_s
        self._named = NamedCacheService.from_frontend(frontend)
        self._patterns = PatternSearch()
        self._cached = CachedContentCalls(frontend, self._named, self._read)
        self._embedder = Embedder(frontend, generator, most_values=_MOST_NUMBERS)
        self._scorer = RelevanceScorer(frontend, generator, self._embedder)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Stream an answer; a client that cancels, or does not read, ends the request."""
        caller = self._caller(request, context)
        seen, ask = self._seen(request), selection_of(request)
        fields = client_fields(request, context, caller=caller, seen=seen, selection=ask)
        prepared = await self._prepare(request, fields)
        await check_selection(ask, [prepared], self._patterns)
        ids = self._frontend.stream_ids if request.stream_ids or seen is not None else None
        cursor = StreamCursor([prepared], ids, seen, param=_LAST_ID)
        if cursor.has_all:
            return
        async with AnswerWriter(context.write, write_timeout_s=self._write_timeout_s) as writer:
            usage = CallUsage([prepared], self._frontend.clock, self._metrics.usage.prices)
            if fields.reads_along:
                messages = AnswerMessages(prepared, name=request.request_id)
                await self._read(prepared, GrpcAnswerStream(messages, cursor, writer, usage))
            else:
                await self._read(prepared, whole := CollectedAnswer())
                await whole.write(prepared, request.request_id, ask, self._patterns, writer, usage)
            await writer.flush()
        context.set_trailing_metadata(_trailers(usage))

    async def _read(self, prepared: PreparedRequest, show: TextSink) -> None:
        await read_text(self._generator, [prepared], self._frontend.tokenizer, self._meter, show)

    def _meter(self, one: PreparedRequest) -> RequestMeter:
        return RequestMeter.for_request(one.request, self._metrics, self._frontend.clock)

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        """Return one vector for each input."""
        fields = self._pooling_fields(request, context)
        options = EmbeddingOptions(
            dimensions=request.dimensions if request.HasField("dimensions") else None,
            prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
            prompt=request.prompt if request.HasField("prompt") else None,
            normalize=request.normalize if request.HasField("normalize") else None,
        )
        prepared = await self._embedder.prepare(self._inputs(request.inputs), fields, options)
        vectors, usage = await self._embedder.embed(prepared, self._meter, options)
        report = self._embedder.report
        return pb.EmbedResponse(
            embeddings=[pb.Embedding(values=vector) for vector in vectors],
            usage=pb.Usage(prompt_tokens=usage.prompt_tokens),
            pooling=report.method,
            trained_for_embeddings=report.is_trained,
        )

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        """Return one score for each pair of texts."""
        question = RelevanceQuestion(
            queries=tuple(request.queries),
            documents=tuple(request.documents),
            query_param="queries",
            document_param="documents",
            instruction=request.instruction if request.HasField("instruction") else None,
        )
        scores, num_tokens = await self._scorer.score(question, self._pooling_fields(request, context), self._meter)
        return pb.ScoreResponse(scores=scores, usage=pb.Usage(prompt_tokens=num_tokens))

    def _pooling_fields(self, request: pb.EmbedRequest | pb.ScoreRequest, context: Any) -> ClientRequest:
        """Authenticate the call, and convert the fields that such calls share."""
        caller = self._caller(request, context)
        return ClientRequest(
            model=model_of(request),
            priority=request.priority,
            cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
            tenant=caller.tenant,
            trace=trace_of(context),
            by_operator=caller.operator,
            time_left_s=context.time_remaining(),
            truncate_prompt_tokens=request.truncate_prompt_tokens
            if request.HasField("truncate_prompt_tokens")
            else None,
        )

    def _inputs(self, inputs: Sequence[pb.EmbedInput]) -> list[str | tuple[int, ...]]:
        if len(inputs) > MAX_INPUTS:
            raise InvalidRequest(f"inputs must have at most {MAX_INPUTS} elements", param="inputs")
        found: list[str | tuple[int, ...]] = []
        for one in inputs:
            if (kind := one.WhichOneof("input")) is None:
                raise InvalidRequest("inputs: send text or token_ids", param="inputs")
            ids = one.token_ids.ids
            found.append(one.text if kind == "text" else self._frontend.prompts.parse_ids(ids, "token_ids"))
        return found

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Tokenize a text or a conversation."""
        tenant, kind = self._admit(request, context), request.WhichOneof("input")
        self._frontend.check_model(model_of(request), tenant)
        if kind == "chat":
            check_no_breakpoints(request.chat)
            tools = use_of(tools_of(request.tools), "auto", None, True)
            begins_turn, messages = wants_generation_prompt(request), messages_of(request.chat)
            with self._frontend.preparing(tenant) as prompts:
                ids = await prompts.encode_chat(messages, add_generation_prompt=begins_turn, tools=tools)
        elif request.tools:
            raise InvalidRequest("tools are allowed in a conversation only", param="tools")
        elif kind == "text":
            with self._frontend.preparing(tenant) as prompts:
                ids = await prompts.encode(request.text, wants_bos(request))
        else:
            raise InvalidRequest("input is missing: send text or chat", param="input")
        shown = [self._frontend.tokenizer.bytes_of(i) for i in ids] if request.return_token_bytes else []
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._frontend.model.max_model_len, token_bytes=shown)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Return the text of token ids, special tokens included."""
        self._frontend.check_model(model_of(request), self._admit(request, context))
        ids = self._frontend.prompts.parse_ids(request.token_ids, "token_ids") if request.token_ids else ()
        return pb.DetokenizeResponse(text=self._frontend.tokenizer.decode(ids, skip_special_tokens=False))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """Describe the served model, and the adapters that the key's tenant may use."""
        adapters = self._frontend.adapters.available(self._admit(request, context))
        model = self._frontend.model
        card = pb.Model(id=model.name, max_model_len=model.max_model_len, created_s=model.created_s)
        cards = [
            pb.Model(id=one.name, max_model_len=model.max_model_len, created_s=model.created_s, parent=model.name)
            for one in adapters
        ]
        return pb.ListModelsResponse(models=[card, *cards])

    async def CreateCachedContent(self, request: pb.CreateCachedContentRequest, context: Any) -> pb.CachedContent:
        """Create a named cache; answers when the prefix is computed and kept."""
        return await self._cached.create(self._admit(request, context), request)

    async def GetCachedContent(self, request: pb.GetCachedContentRequest, context: Any) -> pb.CachedContent:
        """Describe one of the tenant's named caches."""
        return self._cached.get(self._admit(request, context), request)

    async def ListCachedContents(
        self, request: pb.ListCachedContentsRequest, context: Any
    ) -> pb.ListCachedContentsResponse:
        """List the tenant's named caches."""
        return self._cached.list_all(self._admit(request, context))

    async def UpdateCachedContent(self, request: pb.UpdateCachedContentRequest, context: Any) -> pb.CachedContent:
        """Change when a named cache expires."""
        return await self._cached.update(self._admit(request, context), request)

    async def DeleteCachedContent(
        self, request: pb.DeleteCachedContentRequest, context: Any
    ) -> pb.DeleteCachedContentResponse:
        """Delete a named cache."""
        return await self._cached.delete(self._admit(request, context), request)

    def _admit(self, request: Any, context: Any) -> str:
        """Authenticate the call and return the caller's tenant. Raises as `_caller`."""
        return self._caller(request, context).tenant

    def _caller(self, request: Any, context: Any) -> ApiCaller:
        """Authenticate the call and return its caller. Raises InvalidRequest for fields that this version does not
        know."""
        caller = caller_of(context, self._keys)
        check_known(request)
        return caller

    def _seen(self, request: pb.GenerateRequest) -> StreamPosition | None:
        """Return the position at which a stream that this call continues broke off."""
        sent = request.last_stream_id
        return self._frontend.stream_ids.read(sent, param=_LAST_ID) if sent else None

    async def _prepare(self, request: pb.GenerateRequest, fields: ClientRequest) -> PreparedRequest:
        kind = request.WhichOneof("input")
        if kind == "chat":
            messages, marks = messages_of(request.chat), breakpoints_of(request)
            if marks:
                return await prepare_with_breakpoints(self._frontend, messages, marks, fields)
            name = request.cached_content if request.HasField("cached_content") else None
            return await prepare_named(self._frontend, self._named, name, messages, fields)
        if kind == "prompt":
            return (await self._frontend.prepare_prompts([request.prompt], fields))[0]
        if kind == "prompt_token_ids":
            ids = self._frontend.prompts.parse_ids(request.prompt_token_ids.ids, "prompt_token_ids")
            return (await self._frontend.prepare_prompts([ids], fields))[0]
        raise InvalidRequest("input is missing: send prompt, prompt_token_ids or chat", param="input")


def _trailers(usage: CallUsage) -> tuple[tuple[str, str], ...]:
    """Make trailers with the timing report, which HTTP sends on request."""
    return ((SERVER_TIMING, server_timing(usage)), (TIMING, orjson.dumps(timing_object(usage)).decode()))
