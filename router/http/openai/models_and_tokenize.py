"""Models, tokenize, detokenize: what needs the model's names and tokenizer only."""

from typing import Any

from starlette.requests import Request

from router.api.frontend import Frontend
from router.http.body.json_body import BodyBounds, read_object
from router.http.openai.chat_messages import conversation
from router.http.openai.schemas import DetokenizeBody, TokenizeBody, validate
from router.http.openai.tool_schemas import tool_use


class TextRoutes:
    """The handlers."""

    def __init__(self, frontend: Frontend, *, max_body_bytes: int) -> None:
        self._frontend = frontend
        self._bounds = BodyBounds.for_model(max_body_bytes, frontend.model.max_model_len)

    async def models(self, _request: Request) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [self._card()]}

    async def model(self, request: Request) -> dict[str, Any]:
        """The same, by name."""
        self._frontend.check_model(request.scope["path"].removeprefix("/v1/models/"))
        return self._card()

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Token ids of a prompt or a conversation."""
        body = validate(TokenizeBody, await self._read(request))
        self._frontend.check_model(body.model)
        if body.messages is not None:
            messages = conversation(body.messages)
            generation_prompt = body.add_generation_prompt is not False
            tools = tool_use(body.tools, None, None)
            ids = await self._frontend.prompts.encode_chat(
                messages, add_generation_prompt=generation_prompt, tools=tools
            )
        else:
            ids = await self._frontend.prompts.encode(body.prompt or "", body.add_special_tokens is not False)
        texts = None
        if body.return_token_strs:
            texts = [self._frontend.tokenizer.bytes_of(i).decode(errors="replace") for i in ids]
        return {
            "count": len(ids),
            "max_model_len": self._frontend.model.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """Text of token ids, special tokens included."""
        body = validate(DetokenizeBody, await self._read(request))
        self._frontend.check_model(body.model)
        ids = self._frontend.prompts.parse_ids(body.tokens, "tokens") if body.tokens else ()
        return {"prompt": self._frontend.tokenizer.decode(ids, skip_special_tokens=False)}

    async def _read(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self._bounds)

    def _card(self) -> dict[str, Any]:
        model = self._frontend.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "tandem",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
            "has_chat_template": model.has_chat_template,
            "default_sampling_params": model.defaults.shown(),
        }
