"""One request in the words of both servers, and what each says of it: the real validators, without sockets."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from router.access.api_keys import ApiKeyStore
from router.api.request.named_caches import NAME_PREFIX, CachedPrompts, NamedCache, NamedCaches
from router.grpc.service import InferenceService
from router.text.conversation import Message
from router.workers.prefix_pins import PinRegistry
from tandem.config.cluster import RouterConfig
from tandem.errors import ServingError
from tandem.v1 import inference_pb2 as pb
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, PLAIN, client_of

_SCALARS = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos", "seed"),
)
_TOP = (
    *("model", "n", "priority", "cache_salt", "truncate_prompt_tokens", "include_stop_str_in_output", "request_id"),
    *("skip_special_tokens", "add_special_tokens", "add_generation_prompt", "continue_final_message", "cached_content"),
    *("prompt_logprobs", "best_of", "vote", "vote_pattern", "use_beam_search", "length_penalty", "parallel_tool_calls"),
)
_EARLY = {False: pb.EARLY_STOPPING_FALSE, True: pb.EARLY_STOPPING_TRUE, "never": pb.EARLY_STOPPING_NEVER}
VARIABLE = "think"
_TEMPLATE = fakes.TEMPLATE + f"{{% if {VARIABLE} %}}{{{{ {VARIABLE} }}}}{{% endif %}}"
CACHE = f"{NAME_PREFIX}fox"
"""There is one of that name."""
_SAME = {"logprobs": "top_logprobs", "structured_outputs": "structured_output", "prompt_token_ids": "prompt"}
"""One thing's names at the two servers."""


class Inexpressible(Exception):
    """gRPC's types have no such value."""


@dataclass(frozen=True)
class Verdict:
    """What one server says: nothing of a request that it accepts."""

    status: int = 200
    param: str | None = None


class Call:
    """A call's context, and what was written to it."""

    def __init__(self) -> None:
        self.sent: list[pb.GenerateResponse] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    def set_trailing_metadata(self, _: object) -> None:
        pass

    async def write(self, message: pb.GenerateResponse) -> None:
        self.sent.append(message)


def service_of(parts: fakes.Servers) -> InferenceService:
    """The gRPC server without sockets."""
    return InferenceService(parts.frontend, parts.generator, ApiKeyStore(()), parts.metrics)


async def answers_of(service: InferenceService, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """All responses of one call, which came over the wire."""
    call = Call()
    await service.Generate(pb.GenerateRequest.FromString(request.SerializeToString()), call)
    return [pb.GenerateResponse.FromString(one.SerializeToString()) for one in call.sent]


def grpc_request(body: dict[str, Any]) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    try:
        for name, value in body.items():
            _put(request, name, value)
    except (TypeError, ValueError, UnicodeError) as error:
        raise Inexpressible(str(error)) from None
    return pb.GenerateRequest.FromString(request.SerializeToString())


def _put(request: pb.GenerateRequest, name: str, value: Any) -> None:
    if name in _SCALARS or name in _TOP:
        _put_scalar(request.sampling if name in _SCALARS else request, name, value)
    else:
        _WRITERS[name](request, name, value)


def _put_scalar(message: Any, name: str, value: Any) -> None:
    kind = message.DESCRIPTOR.fields_by_name[name]
    if isinstance(value, bool) != (kind.type == kind.TYPE_BOOL):
        raise Inexpressible(name)
    setattr(message, name, value)


def _put_ids(request: pb.GenerateRequest, name: str, value: Any) -> None:
    if not value:
        raise Inexpressible("an empty list is an absent one")
    getattr(request.sampling, name).extend(value)


def _put_texts(request: pb.GenerateRequest, name: str, value: Any) -> None:
    getattr(request, name).extend(value)


def _put_bias(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    for key, bias in value.items():
        request.sampling.logit_bias[int(key)] = bias


def _put_logprobs(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    """Chat says whether, and how many in a field of its own."""
    if not isinstance(value, bool):
        request.sampling.num_logprobs = value
    elif value and not request.sampling.HasField("num_logprobs"):
        request.sampling.num_logprobs = 0


def _put_prompt(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    if isinstance(value, str):
        request.prompt = value
    else:
        request.prompt_token_ids.SetInParent()
        request.prompt_token_ids.ids.extend(value)


def _put_messages(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    request.chat.SetInParent()
    for turn in value:
        fields = dict(turn)
        calls = fields.pop("tool_calls", None) or ()
        message = request.chat.messages.add(**fields)
        for call in calls:
            _only(call, "id", "type", "function")
            _only(call["function"], "name", "arguments")
            message.tool_calls.add(id=call["id"], **call["function"])


def _put_structure(request: pb.GenerateRequest, _name: str, outputs: Any) -> None:
    output = request.structured_output
    ((kind, value),) = outputs.items()
    if kind == "json":
        output.json_schema = value
    elif kind == "choice":
        output.choice.SetInParent()
        output.choice.texts.extend(value)
    else:
        setattr(output, kind, value)


def _put_stream(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    """What HTTP streams can be continued."""
    request.stream_ids = value


def _put_early(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    request.early_stopping = _EARLY[value]


def _put_variables(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    if not value:
        raise Inexpressible("an empty object is an absent one")
    kinds = {bool: "flag", int: "integer", float: "number", str: "text"}
    for name, one in value.items():
        variable = request.chat_template_kwargs[name]
        if one is not None:
            setattr(variable, _known(kinds, type(one)), one)


def _put_tools(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    if not value:
        raise Inexpressible("an empty list is an absent one")
    for tool in value:
        _only(tool, "type", "function")
        function = dict(tool["function"])
        _only(function, "name", "description", "parameters", "strict")
        if "parameters" in function:
            function["parameters"] = json.dumps(function["parameters"], ensure_ascii=False)
        request.tools.add(**function)


def _put_choice(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    choice = request.tool_choice
    if isinstance(value, str):
        choice.mode = value
    elif value["type"] == "function":
        choice.function = value["function"]["name"]
    else:
        allowed = value["allowed_tools"]
        if not allowed["tools"]:
            raise Inexpressible("an empty list is an absent one")
        choice.mode = allowed["mode"]
        choice.allowed.extend(tool["function"]["name"] for tool in allowed["tools"])


def _only(value: dict[str, Any], *names: str) -> None:
    """Raises Inexpressible for anything else: gRPC's types have no such field, and no other kind of tool."""
    if not value.keys() <= set(names) or value.get("type", "function") != "function":
        raise Inexpressible(str(value)[:100])


def _known(kinds: dict[type, str], kind: type) -> str:
    if kind not in kinds:
        raise Inexpressible(str(kind))
    return kinds[kind]


def _put_prediction(request: pb.GenerateRequest, _name: str, value: Any) -> None:
    """Parts are HTTP's only."""
    if value["type"] != "content":
        raise Inexpressible(str(value)[:100])
    content = value["content"]
    request.prediction = content if isinstance(content, str) else "".join(part["text"] for part in content)


_WRITERS = {
    "prediction": _put_prediction,
    "stream": _put_stream,
    "early_stopping": _put_early,
    "chat_template_kwargs": _put_variables,
    "tools": _put_tools,
    "tool_choice": _put_choice,
    "stop_token_ids": _put_ids,
    "allowed_token_ids": _put_ids,
    "stop": _put_texts,
    "bad_words": _put_texts,
    "logit_bias": _put_bias,
    "logprobs": _put_logprobs,
    "top_logprobs": _put_logprobs,
    "prompt": _put_prompt,
    "messages": _put_messages,
    "structured_outputs": _put_structure,
}


def _kept() -> CachedPrompts:
    caches = NamedCaches(clock=lambda: 0.0, most=1, max_ttl_s=1.0)
    beginning = (Message(role="system", content="be brief"),)
    made = NamedCache(name=CACHE, messages=beginning, token_ids=(0,), created_s=0.0, updated_s=0.0, expires_s=1.0)
    caches.add("", made)
    return CachedPrompts(pins=PinRegistry(find=lambda _: None, clock=lambda: 0.0), caches=caches)


class BothServers:
    """HTTP and gRPC servers of one router."""

    def __init__(self) -> None:
        parts = fakes.make_servers(fakes.make_tokenizer(_TEMPLATE), RouterConfig(), grammars=fakes.AnyGrammar())
        parts.frontend.kept = _kept()
        parts.say("hi")
        self._http: httpx.AsyncClient = client_of(parts)
        self._grpc = service_of(parts)

    async def over_http(self, body: dict[str, Any]) -> Verdict:
        route = CHAT if "messages" in body else PLAIN
        answer = await self._http.post(route, json=body)
        if answer.status_code == 200:
            assert '"error"' not in answer.text
            return Verdict()
        param = json.loads(answer.content)["error"]["param"]
        return Verdict(answer.status_code, _SAME.get(param, param))

    async def over_grpc(self, request: pb.GenerateRequest) -> Verdict:
        try:
            await self._grpc.Generate(request, Call())
        except ServingError as error:
            param = _SAME.get(error.param or "", error.param)
            return Verdict(error.http_status, param)
        return Verdict()
