"""From prompts and options to messages."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tandem.client.options import Options, Structure, Turn
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb

Prompt = str | Sequence[int]

_SAMPLING = frozenset(common.SamplingParams.DESCRIPTOR.fields_by_name)
_NO_FIELDS = frozenset({"timeout_s", "structure"})


def generate_request(prompt: Prompt | Sequence[Turn], options: Options) -> pb.GenerateRequest:
    """A text, token ids, or a conversation. Its pieces bear ids, so that it can go on after a break.

    Raises InvalidRequest for a value that its field cannot hold.
    """
    request = pb.GenerateRequest(stream_ids=True)
    if isinstance(prompt, str):
        request.prompt = prompt
    elif any(isinstance(one, Turn) for one in prompt):
        request.chat.CopyFrom(chat_of([one for one in prompt if isinstance(one, Turn)]))
    else:
        ids = [one for one in prompt if isinstance(one, int)]
        request.prompt_token_ids.CopyFrom(pb.TokenIds(ids=ids))
    for name in (field.name for field in fields(options) if field.name not in _NO_FIELDS):
        value = getattr(options, name)
        try:
            _put(request, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name}: {error}", param=name) from None
    if options.structure is not None:
        request.structured_output.CopyFrom(_structure(options.structure))
    return request


def _put(request: pb.GenerateRequest, name: str, value: Any) -> None:
    """Raises TypeError and ValueError for what its field cannot hold."""
    message = request.sampling if name in _SAMPLING and name != "bad_words" else request
    if name == "logit_bias":
        request.sampling.logit_bias.update(value)
    elif isinstance(value, (list, tuple)):
        getattr(message, name).extend(value)
    elif value is not None:
        setattr(message, name, value)


def chat_of(turns: Sequence[Turn]) -> pb.Chat:
    """A conversation."""
    return pb.Chat(messages=[pb.ChatMessage(role=t.role, content=t.content, name=t.name) for t in turns])


def embed_request(inputs: Sequence[Prompt], model: str | None, cache_salt: str | None) -> pb.EmbedRequest:
    """Texts, or lists of token ids."""
    shown = [
        pb.EmbedInput(text=one) if isinstance(one, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=one))
        for one in inputs
    ]
    return pb.EmbedRequest(model=model, inputs=shown, cache_salt=cache_salt)


def tokenize_request(text: str | Sequence[Turn], model: str | None, add_special_tokens: bool) -> pb.TokenizeRequest:
    """A text or a conversation."""
    if isinstance(text, str):
        return pb.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
    return pb.TokenizeRequest(model=model, chat=chat_of(text), add_special_tokens=add_special_tokens)


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
