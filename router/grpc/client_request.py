"""What a gRPC client asked for, as the frontend takes it. Whatever is absent means what it means over HTTP."""

from collections.abc import Sequence
from typing import Any

from router.asked import ClientFields
from router.chat_template import Message
from router.reading import ReadAsk
from router.reading_asked import read_ask
from router.request_names import check_request_id
from router.stream_ids import StreamPosition
from router.structure import Shape, Structure
from tandem import wire
from tandem.errors import InvalidRequest
from tandem.tracing import TraceContext, context_from_headers
from tandem.v1 import inference_pb2 as pb

_STRUCTURE = "structured_output"


def client_fields(
    request: pb.GenerateRequest, context: Any, *, tenant: str, seen: StreamPosition | None
) -> ClientFields:
    """All but the prompt. Raises InvalidRequest."""
    sampling = request.sampling
    if request.HasField("request_id"):
        check_request_id(request.request_id, "request_id")
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
    reads = _reads(request, max_tokens)
    return ClientFields(
        sampling=wire.sampling_from_pb(sampling),
        max_tokens=1 if reads is not None and reads.only else max_tokens,
        seed=sampling.seed if sampling.HasField("seed") else None,
        model=model_of(request),
        num_choices=request.n if request.HasField("n") else 1,
        stop=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=_or_true(request, "skip_special_tokens"),
        add_special_tokens=_or_true(request, "add_special_tokens"),
        add_generation_prompt=_or_true(request, "add_generation_prompt"),
        priority=request.priority,
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        tenant=tenant,
        trace=trace_of(context),
        time_left_s=context.time_remaining(),
        last_seen=seen,
        structure=_structure(request),
        truncate_prompt_tokens=(request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None),
        bad_words=tuple(request.bad_words),
        reads=reads,
    )


def model_of(request: pb.GenerateRequest | pb.EmbedRequest | pb.TokenizeRequest | pb.DetokenizeRequest) -> str | None:
    """The model that is asked for, if one is."""
    return request.model if request.HasField("model") else None


def messages_of(chat: pb.Chat) -> Sequence[Message]:
    """A conversation. Raises InvalidRequest."""
    return [_message(turn) for turn in chat.messages]


def wants_bos(request: pb.TokenizeRequest) -> bool:
    """Whether the tokenizer puts its own tokens around the text."""
    return _or_true(request, "add_special_tokens")


def wants_generation_prompt(request: pb.TokenizeRequest) -> bool:
    """Whether a conversation ends where an assistant's turn begins."""
    return _or_true(request, "add_generation_prompt")


def _message(turn: pb.ChatMessage) -> Message:
    if not turn.HasField("content") and turn.role != "assistant":
        raise InvalidRequest("messages: content is missing", param="messages")
    return Message(role=turn.role, content=turn.content, name=turn.name if turn.HasField("name") else None)


def _reads(request: pb.GenerateRequest, max_tokens: int | None) -> ReadAsk | None:
    if not request.HasField("prompt_logprobs"):
        return None
    if request.stream_ids or request.last_stream_id:
        raise InvalidRequest("prompt_logprobs: not of a stream that can be continued", param="prompt_logprobs")
    return read_ask(prompt_logprobs=request.prompt_logprobs, streams=False, max_tokens=max_tokens, echo=False)


def _or_true(request: pb.GenerateRequest | pb.TokenizeRequest, name: str) -> bool:
    return bool(getattr(request, name)) or not request.HasField(name)


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


def trace_of(context: Any) -> TraceContext | None:
    """The client's own trace, from its metadata."""
    sent = context.invocation_metadata() or ()
    parents = [value for key, value in sent if key == "traceparent"]
    return context_from_headers(parents, [value for key, value in sent if key == "tracestate"])
