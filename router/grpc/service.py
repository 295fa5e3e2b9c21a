"""tandem.v1.Inference: each call decodes, delegates to the frontend that HTTP uses, and encodes."""

from collections.abc import Sequence
from typing import Any

import orjson

from router.asked import ClientFields, Prepared
from router.auth import ApiKeys
from router.embedding import MAX_INPUTS, Embedder
from router.frontend import Frontend
from router.grpc.answer_writer import AnswerWriter
from router.grpc.client_request import (
    client_fields,
    messages_of,
    model_of,
    trace_of,
    wants_bos,
    wants_generation_prompt,
)
from router.grpc.errors import caller_of
from router.grpc.prompt_scores import prompt_responses
from router.metrics import RequestMeter, RouterMetrics
from router.requests import Generator
from router.slow_reader import WRITE_TIMEOUT_S
from router.stream_cursor import StreamCursor
from router.stream_ids import StreamPosition
from router.text_stream import TextDelta, read_text
from router.timing_report import SERVER_TIMING, TIMING, server_timing, timing_object
from router.usage import Usage
from tandem import wire
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceServicer

_MOST_NUMBERS = 1 << 19
"""In one answer with vectors: half of what gRPC's clients take as one message."""
_LAST_ID = "last_stream_id"


class InferenceService(InferenceServicer):
    """The calls."""

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
        self._embedder = Embedder(frontend, generator, most_values=_MOST_NUMBERS)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Stream an answer; a client that cancels, or does not read, ends the request."""
        seen = self._seen(request)
        prepared = await self._prepare(
            request, client_fields(request, context, tenant=self._tenant(context), seen=seen)
        )
        ids = self._frontend.stream_ids if request.stream_ids or seen is not None else None
        cursor = StreamCursor([prepared], ids, seen, param=_LAST_ID)
        if cursor.has_all:
            return
        async with AnswerWriter(context.write, write_timeout_s=self._write_timeout_s) as writer:
            usage = Usage([prepared], self._frontend.clock, self._metrics.usage.prices)
            answer = _AnswerStream(prepared, cursor, writer, usage, name=request.request_id)
            await read_text(self._generator, [prepared], self._frontend.tokenizer, self._meter, answer)
            await writer.flush()
        context.set_trailing_metadata(_trailers(usage))

    def _meter(self, one: Prepared) -> RequestMeter:
        return RequestMeter.of(one.request, self._metrics, self._frontend.clock)

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        """One vector for each input."""
        fields = ClientFields(
            model=model_of(request),
            priority=request.priority,
            cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
            tenant=self._tenant(context),
            trace=trace_of(context),
            time_left_s=context.time_remaining(),
        )
        prepared = await self._embedder.prepare(self._inputs(request.inputs), fields)
        vectors, usage = await self._embedder.embed(prepared, self._meter)
        return pb.EmbedResponse(
            embeddings=[pb.Embedding(values=vector) for vector in vectors],
            usage=pb.Usage(prompt_tokens=usage.prompt_tokens),
        )

    def _inputs(self, inputs: Sequence[pb.EmbedInput]) -> list[str | tuple[int, ...]]:
        if len(inputs) > MAX_INPUTS:
            raise InvalidRequest(f"inputs: at most {MAX_INPUTS}", param="inputs")
        found: list[str | tuple[int, ...]] = []
        for one in inputs:
            if (kind := one.WhichOneof("input")) is None:
                raise InvalidRequest("inputs: send text or token_ids", param="inputs")
            ids = one.token_ids.ids
            found.append(one.text if kind == "text" else self._frontend.prompts.parse_ids(ids, "token_ids"))
        return found

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Token ids of a text or a conversation."""
        self._tenant(context)
        self._frontend.check_model(model_of(request))
        prompts, kind = self._frontend.prompts, request.WhichOneof("input")
        if kind == "chat":
            begins_turn = wants_generation_prompt(request)
            ids = await prompts.encode_chat(messages_of(request.chat), add_generation_prompt=begins_turn)
        elif kind == "text":
            ids = await prompts.encode(request.text, wants_bos(request))
        else:
            raise InvalidRequest("input is missing: send text or chat", param="input")
        shown = [self._frontend.tokenizer.bytes_of(i) for i in ids] if request.return_token_bytes else []
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._frontend.model.max_model_len, token_bytes=shown)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Text of token ids, special tokens included."""
        self._tenant(context)
        self._frontend.check_model(model_of(request))
        ids = self._frontend.prompts.parse_ids(request.token_ids, "token_ids") if request.token_ids else ()
        return pb.DetokenizeResponse(text=self._frontend.tokenizer.decode(ids, skip_special_tokens=False))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """The one model."""
        self._tenant(context)
        model = self._frontend.model
        card = pb.Model(id=model.name, max_model_len=model.max_model_len, created_s=model.created_s)
        return pb.ListModelsResponse(models=[card])

    def _tenant(self, context: Any) -> str:
        return caller_of(context, self._keys).tenant

    def _seen(self, request: pb.GenerateRequest) -> StreamPosition | None:
        """Where a stream that this call continues broke."""
        sent = request.last_stream_id
        return self._frontend.stream_ids.read(sent, param=_LAST_ID) if sent else None

    async def _prepare(self, request: pb.GenerateRequest, fields: ClientFields) -> Prepared:
        kind = request.WhichOneof("input")
        if kind == "chat":
            return await self._frontend.prepare_chat(messages_of(request.chat), fields)
        if kind == "prompt":
            return (await self._frontend.prepare_prompts([request.prompt], fields))[0]
        if kind == "prompt_token_ids":
            ids = self._frontend.prompts.parse_ids(request.prompt_token_ids.ids, "prompt_token_ids")
            return (await self._frontend.prepare_prompts([ids], fields))[0]
        raise InvalidRequest("input is missing: send prompt, prompt_token_ids or chat", param="input")


class _AnswerStream:
    """A `TextReader` that writes messages."""

    def __init__(
        self, prepared: Prepared, cursor: StreamCursor, writer: AnswerWriter, usage: Usage, *, name: str
    ) -> None:
        """`name`: the client's own of the answer; empty: the request's id."""
        self._request = prepared.request
        self._name = name or self._request.request_id
        self._cursor = cursor
        self._usage = usage
        self._writer = writer
        self.ready = writer.flush

    def take(self, delta: TextDelta) -> bool:
        if delta.reading is not None:
            parts = prompt_responses(self._name, self._request.prompt_token_ids, delta.reading)
            return any([self._writer.put(part) for part in parts])
        self._usage.add(delta)
        response = _response(self._name, delta, self._usage, self._cursor)
        return response is not None and self._writer.put(response)


def _trailers(usage: Usage) -> tuple[tuple[str, str], ...]:
    """Where the time went; what HTTP tells those who ask for it."""
    return ((SERVER_TIMING, server_timing(usage)), (TIMING, orjson.dumps(timing_object(usage)).decode()))


def _response(name: str, delta: TextDelta, usage: Usage, cursor: StreamCursor) -> pb.GenerateResponse | None:
    """None when the client has all of it: a stream that is continued comes again from its beginning."""
    if cursor.is_continued:
        if cursor.has_ended(delta.choice_index):
            delta = TextDelta(choice_index=delta.choice_index)
        if not (delta.text or delta.tokens or delta.finish or usage.complete):
            return None
    cursor.moved(delta)
    ended = () if delta.finish is None else (delta.choice_index,)
    response = pb.GenerateResponse(
        id=name,
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
