"""tandem.v1.Inference: each call decodes, delegates to the frontend that HTTP uses, and encodes."""

from collections.abc import Sequence
from typing import Any

import orjson

from router.asked import ClientFields, Prepared
from router.auth import ApiKeys
from router.chat_template import Message
from router.frontend import Frontend
from router.grpc.answer_writer import AnswerWriter
from router.grpc.prompt_scores import prompt_responses
from router.metrics import RequestMeter, RouterMetrics
from router.reading import ReadAsk
from router.reading_asked import read_ask
from router.requests import Generator
from router.slow_reader import WRITE_TIMEOUT_S
from router.stream_cursor import StreamCursor
from router.stream_ids import StreamPosition
from router.structure import Shape, Structure
from router.text_stream import TextDelta, read_text
from router.timing_report import SERVER_TIMING, TIMING, server_timing, timing_object
from router.usage import Usage
from tandem import wire
from tandem.errors import InvalidRequest
from tandem.tracing import TraceContext, context_from_headers
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceServicer

_LAST_ID = "last_stream_id"
_STRUCTURE = "structured_output"


class InferenceService(InferenceServicer):
    """The four calls."""

    def __init__(
        self,
        frontend: Frontend,
        generator: Generator,
        keys: ApiKeys,
        metrics: RouterMetrics,
        *,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self._frontend = frontend
        self._generator = generator
        self._keys = keys
        self._metrics = metrics
        self._write_timeout_s = write_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Stream an answer; a client that cancels, or does not read, ends the request."""
        seen = self._seen(request)
        prepared = await self._prepare(request, self._fields(request, context, seen))
        ids = self._frontend.stream_ids if request.stream_ids or seen is not None else None
        cursor = StreamCursor([prepared], ids, seen, param=_LAST_ID)
        if cursor.has_all:
            return
        async with AnswerWriter(context.write, write_timeout_s=self._write_timeout_s) as writer:
            usage = Usage([prepared], self._frontend.clock, self._metrics.usage.prices)
            answer = _AnswerStream(prepared, cursor, writer, usage)
            await read_text(self._generator, [prepared], self._frontend.tokenizer, self._meter, answer)
            await writer.flush()
        context.set_trailing_metadata(_trailers(usage))

    def _meter(self, one: Prepared) -> RequestMeter:
        return RequestMeter.of(one.request, self._metrics, self._frontend.clock)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Token ids of a text or a conversation."""
        self._tenant(context)
        self._frontend.check_model(request.model or None)
        kind = request.WhichOneof("input")
        if kind == "chat":
            ids = await self._frontend.prompts.encode_chat(_messages(request.chat), add_generation_prompt=True)
        elif kind == "text":
            add = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await self._frontend.prompts.encode(request.text, add)
        else:
            raise InvalidRequest("input is missing: send text or chat", param="input")
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._frontend.model.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Text of token ids, special tokens included."""
        self._tenant(context)
        self._frontend.check_model(request.model or None)
        ids = self._frontend.prompts.parse_ids(request.token_ids, "token_ids") if request.token_ids else ()
        return pb.DetokenizeResponse(text=self._frontend.tokenizer.decode(ids, skip_special_tokens=False))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """The one model."""
        self._tenant(context)
        model = self._frontend.model
        return pb.ListModelsResponse(models=[pb.Model(id=model.name, max_model_len=model.max_model_len)])

    def _tenant(self, context: Any) -> str:
        sent = (value for key, value in context.invocation_metadata() or () if key == "authorization")
        return self._keys.tenant(next(sent, None))

    def _seen(self, request: pb.GenerateRequest) -> StreamPosition | None:
        """Where a stream that this call continues broke."""
        sent = request.last_stream_id
        return self._frontend.stream_ids.read(sent, param=_LAST_ID) if sent else None

    def _fields(self, request: pb.GenerateRequest, context: Any, seen: StreamPosition | None) -> ClientFields:
        sampling = request.sampling
        max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
        reads = _reads(request, max_tokens)
        return ClientFields(
            sampling=wire.sampling_from_pb(sampling),
            max_tokens=1 if reads is not None and reads.only else max_tokens,
            seed=sampling.seed if sampling.HasField("seed") else None,
            model=request.model or None,
            num_choices=request.n if request.HasField("n") else 1,
            stop=tuple(request.stop),
            priority=request.priority,
            cache_salt=request.cache_salt or None,
            tenant=self._tenant(context),
            trace=_trace(context),
            time_left_s=context.time_remaining(),
            last_seen=seen,
            structure=_structure(request),
            reads=reads,
        )

    async def _prepare(self, request: pb.GenerateRequest, fields: ClientFields) -> Prepared:
        kind = request.WhichOneof("input")
        if kind == "chat":
            return await self._frontend.prepare_chat(_messages(request.chat), fields)
        if kind == "prompt":
            return (await self._frontend.prepare_prompts([request.prompt], fields))[0]
        if kind == "prompt_token_ids":
            ids = self._frontend.prompts.parse_ids(request.prompt_token_ids.ids, "prompt_token_ids")
            return (await self._frontend.prepare_prompts([ids], fields))[0]
        raise InvalidRequest("input is missing: send prompt, prompt_token_ids or chat", param="input")


class _AnswerStream:
    """A `TextReader` that writes messages."""

    def __init__(self, prepared: Prepared, cursor: StreamCursor, writer: AnswerWriter, usage: Usage) -> None:
        self._prepared = prepared
        self._cursor = cursor
        self._usage = usage
        self._writer = writer
        self.ready = writer.flush

    def take(self, delta: TextDelta) -> bool:
        if delta.reading is not None:
            request = self._prepared.request
            parts = prompt_responses(request.request_id, request.prompt_token_ids, delta.reading)
            return any([self._writer.put(part) for part in parts])
        self._usage.add(delta)
        response = _response(self._prepared, delta, self._usage, self._cursor)
        return response is not None and self._writer.put(response)


def _reads(request: pb.GenerateRequest, max_tokens: int | None) -> ReadAsk | None:
    if not request.HasField("prompt_logprobs"):
        return None
    if request.stream_ids or request.last_stream_id:
        raise InvalidRequest("prompt_logprobs: not of a stream that can be continued", param="prompt_logprobs")
    return read_ask(prompt_logprobs=request.prompt_logprobs, streams=False, max_tokens=max_tokens, echo=False)


def _structure(request: pb.GenerateRequest) -> Structure | None:
    if request.sampling.HasField("grammar"):
        raise InvalidRequest("sampling.grammar is the cluster's own: send structured_output", param="sampling.grammar")
    if not request.HasField("structured_output"):
        return None
    asked, kind = request.structured_output, request.structured_output.WhichOneof("kind")
    if kind is None or (kind == Shape.JSON_OBJECT.value and not asked.json_object):
        raise InvalidRequest(f"{_STRUCTURE}: say what answers must be", param=_STRUCTURE)
    value = tuple(asked.choice.texts) if kind == Shape.CHOICE.value else getattr(asked, kind)
    return Structure(shape=Shape(kind), value=value, param=_STRUCTURE)


def _trailers(usage: Usage) -> tuple[tuple[str, str], ...]:
    """Where the time went; what HTTP tells those who ask for it."""
    return ((SERVER_TIMING, server_timing(usage)), (TIMING, orjson.dumps(timing_object(usage)).decode()))


def _trace(context: Any) -> TraceContext | None:
    sent = context.invocation_metadata() or ()
    parents = [value for key, value in sent if key == "traceparent"]
    return context_from_headers(parents, [value for key, value in sent if key == "tracestate"])


def _messages(chat: pb.Chat) -> Sequence[Message]:
    return [Message(role=m.role, content=m.content) for m in chat.messages]


def _response(prepared: Prepared, delta: TextDelta, usage: Usage, cursor: StreamCursor) -> pb.GenerateResponse | None:
    """None when the client has all of it: a stream that is continued comes again from its beginning."""
    if cursor.is_continued:
        if cursor.has_ended(delta.choice_index):
            delta = TextDelta(choice_index=delta.choice_index)
        if not (delta.text or delta.tokens or delta.finish or usage.complete):
            return None
    cursor.moved(delta)
    ended = () if delta.finish is None else (delta.choice_index,)
    response = pb.GenerateResponse(
        id=prepared.request.request_id,
        choice_index=delta.choice_index,
        text=delta.text,
        token_ids=[token.token_id for token in delta.tokens],
        logprobs=[found for token in delta.tokens if (found := wire.logprobs_to_pb(token)) is not None],
        stream_id=(cursor.id_of(ended=ended, usage_sent=usage.complete) or b"").decode(),
    )
    if delta.finish is not None:
        response.finish_reason = wire.finish_reason_to_pb(delta.finish.reason)
    if usage.complete:
        response.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                times=wire.times_to_pb(usage.times()),
            )
        )
    return response
