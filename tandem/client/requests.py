"""Converts prompts and options to request messages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from tandem.client.options import Options, Structure, TemplateValue, Tool, ToolChoice, Turn
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb

Prompt = str | Sequence[int]

_SAMPLING = frozenset(common.SamplingParams.DESCRIPTOR.fields_by_name)
_NO_FIELDS = frozenset({"timeout_s", "structure", "tools", "tool_choice", "chat_template_kwargs", "early_stopping"})
_KINDS = {bool: "flag", int: "integer", float: "number", str: "text"}
_EARLY = {False: pb.EARLY_STOPPING_FALSE, True: pb.EARLY_STOPPING_TRUE, "never": pb.EARLY_STOPPING_NEVER}


def generate_request(prompt: Prompt | Sequence[Turn], options: Options) -> pb.GenerateRequest:
    """Build a request for a text, token ids, or a conversation; its pieces have ids if it can be resumed.

    Raises InvalidRequest for a value that its field cannot hold.
    """
    request = pb.GenerateRequest(stream_ids=options.can_be_continued)
    if isinstance(prompt, str):
        request.prompt = prompt
    elif any(isinstance(one, Turn) for one in prompt):
        request.chat.CopyFrom(chat_of([one for one in prompt if isinstance(one, Turn)]))
    else:
        ids = [one for one in prompt if isinstance(one, int)]
        request.prompt_token_ids.CopyFrom(pb.TokenIds(ids=ids))
    for name in (field.name for field in fields(options) if field.name not in _NO_FIELDS):
        value = getattr(options, name)
        with _named(name):
            _put(request, name, value)
    if options.structure is not None:
        request.structured_output.CopyFrom(_structure(options.structure))
    with _named("tools"):
        request.tools.extend(_tool(tool) for tool in options.tools)
    with _named("tool_choice"):
        if options.tool_choice is not None:
            request.tool_choice.CopyFrom(_choice(options.tool_choice))
    with _named("chat_template_kwargs"):
        _put_variables(request, options.chat_template_kwargs)
    with _named("early_stopping"):
        if options.early_stopping is not None:
            request.early_stopping = _EARLY[options.early_stopping]
    return request


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Context that converts errors to InvalidRequest for the field `name`."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidRequest(f"{name}: {error}", param=name) from None


def _put(request: pb.GenerateRequest, name: str, value: Any) -> None:
    """Set one field. Raises TypeError and ValueError for a value that it cannot hold."""
    message = request.sampling if name in _SAMPLING and name != "bad_words" else request
    if name == "logit_bias":
        request.sampling.logit_bias.update(value)
    elif isinstance(value, (list, tuple)):
        getattr(message, name).extend(value)
    elif value is not None:
        setattr(message, name, value)


def chat_of(turns: Sequence[Turn]) -> pb.Chat:
    return pb.Chat(messages=[_message(turn) for turn in turns])


def _message(turn: Turn) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=turn.role,
        content=turn.content,
        name=turn.name,
        tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in turn.tool_calls],
        tool_call_id=turn.tool_call_id,
        reasoning_content=turn.reasoning_content,
        cache_control=None if turn.cached_for is None else pb.CacheControl(ttl=turn.cached_for),
    )


def _tool(tool: Tool) -> pb.Tool:
    return pb.Tool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _choice(choice: ToolChoice) -> pb.ToolChoice:
    return pb.ToolChoice(mode=choice.mode, function=choice.function, allowed=choice.allowed)


def _put_variables(request: pb.GenerateRequest, variables: Mapping[str, TemplateValue]) -> None:
    for name, value in variables.items():
        variable = request.chat_template_kwargs[name]
        if value is not None:
            setattr(variable, _KINDS[type(value)], value)


def embed_request(
    inputs: Sequence[Prompt],
    model: str | None,
    cache_salt: str | None,
    prompt_name: str | None = None,
    dimensions: int | None = None,
) -> pb.EmbedRequest:
    """Build a request from texts or lists of token ids."""
    shown = [
        pb.EmbedInput(text=one) if isinstance(one, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=one))
        for one in inputs
    ]
    return pb.EmbedRequest(
        model=model, inputs=shown, cache_salt=cache_salt, prompt_name=prompt_name, dimensions=dimensions
    )


def score_request(
    queries: str | Sequence[str], documents: Sequence[str], model: str | None, cache_salt: str | None
) -> pb.ScoreRequest:
    """Build a request from one query for all documents, or one for each."""
    shown = [queries] if isinstance(queries, str) else queries
    return pb.ScoreRequest(model=model, queries=shown, documents=documents, cache_salt=cache_salt)


def tokenize_request(
    text: str | Sequence[Turn], model: str | None, add_special_tokens: bool, tools: Sequence[Tool]
) -> pb.TokenizeRequest:
    """Build a request from a text or a conversation."""
    if isinstance(text, str):
        request = pb.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
    else:
        request = pb.TokenizeRequest(model=model, chat=chat_of(text), add_special_tokens=add_special_tokens)
    request.tools.extend(_tool(tool) for tool in tools)
    return request


def _structure(structure: Structure) -> pb.StructuredOutput:
    output = pb.StructuredOutput()
    if structure.json_schema is not None:
        output.json_schema = structure.json_schema
    if structure.json_object:
        output.json_object = True
    if structure.regex is not None:
        output.regex = structure.regex
    if structure.choice:
        output.choice.CopyFrom(pb.StructuredOutput.Choices(texts=structure.choice))
    if structure.grammar is not None:
        output.grammar = structure.grammar
    return output
