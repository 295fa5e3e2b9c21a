"""Parses gRPC requests for the frontend. Absent fields mean the same as over HTTP."""

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from router.access.api_keys import ApiCaller
from router.api.request.beam_search_options import parse_beam_search
from router.api.request.choice_selection import ChoiceSelection
from router.api.request.client_request import ClientRequest
from router.api.request.prompt_logprobs_options import parse_prompt_scoring
from router.api.request.request_ids import check_request_id
from router.api.selected_choices import logprobs_needed, parse_selection
from router.grpc.conversation import check_input_kind, template_options, tool_use
from router.text.grammars.structured_output import Shape, StructuredOutput
from router.types.prompt_logprobs import PromptScoringRequest
from router.types.requests import BeamSearchParams
from router.types.stream_position import StreamPosition
from tandem.errors import InvalidRequest
from tandem.protocol import wire
from tandem.telemetry.tracing import TraceContext, context_from_headers
from tandem.v1 import inference_pb2 as pb

_STRUCTURE = "structured_output"
_EARLY: dict[int, bool | Literal["never"]] = {
    pb.EARLY_STOPPING_UNSPECIFIED: False,
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}


def client_fields(
    request: pb.GenerateRequest,
    context: Any,
    *,
    caller: ApiCaller,
    seen: StreamPosition | None,
    selection: ChoiceSelection | None = None,
) -> ClientRequest:
    """Parse all fields but the prompt. Raises InvalidRequest."""
    sampling = request.sampling
    if request.HasField("request_id"):
        check_request_id(request.request_id, "request_id")
    check_input_kind(request)
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
    scoring, beams, stated = _scoring(request, max_tokens), _beams(request), wire.sampling_from_pb(sampling)
    return ClientRequest(
        sampling=stated._replace(num_logprobs=logprobs_needed(selection, stated.num_logprobs)),
        stated_sampling=frozenset(field.name for field, _ in sampling.ListFields()),
        max_tokens=1 if scoring is not None and scoring.only else max_tokens,
        seed=sampling.seed if sampling.HasField("seed") else None,
        model=model_of(request),
        num_choices=_num(request, "n", 1) if selection is None else selection.candidates,
        choices_param="n" if selection is None else selection.param,
        reads_along=selection is None and beams is None,
        stop=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=_or_true(request, "skip_special_tokens"),
        add_special_tokens=_or_true(request, "add_special_tokens"),
        add_generation_prompt=_or_true(request, "add_generation_prompt") and not request.continue_final_message,
        template=template_options(request),
        tools=tool_use(request),
        prediction=request.prediction if request.HasField("prediction") else None,
        priority=request.priority,
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        tenant=caller.tenant,
        trace=trace_of(context),
        by_operator=caller.operator,
        time_left_s=context.time_remaining(),
        last_seen=seen,
        structure=_structure(request),
        truncate_prompt_tokens=(request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None),
        bad_words=tuple(request.bad_words),
        scoring=scoring,
        beams=beams,
    )


def selection_of(request: pb.GenerateRequest) -> ChoiceSelection | None:
    """Parse which choices are shown, if more are generated; a beam search selects its own. Raises InvalidRequest."""
    if request.use_beam_search:
        return None
    return parse_selection(
        n=_num(request, "n"),
        best_of=_num(request, "best_of"),
        vote=request.vote,
        vote_pattern=request.vote_pattern if request.HasField("vote_pattern") else None,
        streams=_can_be_continued(request),
        shows_logprobs=request.sampling.HasField("num_logprobs"),
    )


def _beams(request: pb.GenerateRequest) -> BeamSearchParams | None:
    if request.early_stopping not in _EARLY:
        raise InvalidRequest("early_stopping must be false, true or never", param="early_stopping")
    return parse_beam_search(
        wanted=request.use_beam_search,
        width=_num(request, "best_of", request.n or 1),
        length_penalty=request.length_penalty if request.HasField("length_penalty") else None,
        early_stopping=_EARLY[request.early_stopping],
        streams=_can_be_continued(request),
        votes=request.vote or request.HasField("vote_pattern"),
    )


def _can_be_continued(request: pb.GenerateRequest) -> bool:
    """Whether the client wants responses to carry stream positions, as HTTP streams do, so that it can continue."""
    return request.stream_ids or bool(request.last_stream_id)


def _num(request: pb.GenerateRequest, name: str, default: Any = None) -> Any:
    return getattr(request, name) if request.HasField(name) else default


_WithModel: TypeAlias = (
    pb.GenerateRequest
    | pb.EmbedRequest
    | pb.ScoreRequest
    | pb.TokenizeRequest
    | pb.DetokenizeRequest
    | pb.CreateCachedContentRequest
)


def model_of(request: _WithModel) -> str | None:
    """The requested model, if any."""
    return request.model if request.HasField("model") else None


def wants_bos(request: pb.TokenizeRequest) -> bool:
    """Whether the tokenizer adds its own tokens, such as BOS, to the text."""
    return _or_true(request, "add_special_tokens")


def wants_generation_prompt(request: pb.TokenizeRequest) -> bool:
    """Whether a conversation ends where an assistant's turn begins."""
    return _or_true(request, "add_generation_prompt")


def _scoring(request: pb.GenerateRequest, max_tokens: int | None) -> PromptScoringRequest | None:
    if not request.HasField("prompt_logprobs"):
        return None
    if _can_be_continued(request):
        raise InvalidRequest(
            "prompt_logprobs: not supported for a stream that can be continued", param="prompt_logprobs"
        )
    return parse_prompt_scoring(
        prompt_logprobs=request.prompt_logprobs, streams=False, max_tokens=max_tokens, echo=False
    )


def _or_true(request: pb.GenerateRequest | pb.TokenizeRequest, name: str) -> bool:
    return bool(getattr(request, name)) or not request.HasField(name)


def _structure(request: pb.GenerateRequest) -> StructuredOutput | None:
    if request.sampling.HasField("grammar"):
        raise InvalidRequest("sampling.grammar is internal: send structured_output", param="sampling.grammar")
    if not request.HasField("structured_output"):
        return None
    structured, kind = request.structured_output, request.structured_output.WhichOneof("kind")
    if kind is None or (kind == Shape.JSON_OBJECT.value and not structured.json_object):
        raise InvalidRequest(f"{_STRUCTURE}: a format is required", param=_STRUCTURE)
    value = tuple(structured.choice.texts) if kind == Shape.CHOICE.value else getattr(structured, kind)
    return StructuredOutput(shape=Shape(kind), value=value, param=_STRUCTURE)


def trace_of(context: Any) -> TraceContext | None:
    """Return the client's trace context, from its metadata."""
    sent = context.invocation_metadata() or ()
    parents = [value for key, value in sent if key == "traceparent"]
    return context_from_headers(parents, [value for key, value in sent if key == "tracestate"])


def check_known(request: Message) -> None:
    """Check for unknown fields. Raises InvalidRequest that names the first one."""
    # In one serialization, without a Python loop: a conversation has thousands of messages.
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    if known.ByteSize() == request.ByteSize():
        return
    place = next(_unknown(request, ()))
    raise InvalidRequest(f"{'.'.join(place)}: unknown field", param=place[0])


def _unknown(message: Message, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    unknown: Any = UnknownFieldSet(message)  # its stubs do not say that it is a sequence
    for found in unknown:
        yield *place, str(found.field_number)
    for field, value in message.ListFields():
        for inner in _messages(field, value):
            yield from _unknown(inner, (*place, field.name))


def _messages(field: Any, value: Any) -> list[Any]:
    if field.type != field.TYPE_MESSAGE:
        return []
    if isinstance(value, Message):
        return [value]
    found = value.values() if hasattr(value, "values") else value
    return [one for one in found if isinstance(one, Message)]
