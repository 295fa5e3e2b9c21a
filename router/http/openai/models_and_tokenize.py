"""Models, tokenize, detokenize: routes that need only the model's name and tokenizer."""

from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Depends
from pydantic import AfterValidator
from starlette.requests import Request

from router.api.frontend import Frontend
from router.http.body.json_body import JsonBody
from router.http.openai.chat_messages import conversation
from router.http.openai.objects import ModelList, ModelObject, TextObject, TokensObject
from router.http.openai.schemas import DetokenizeBody, TokenizeBody
from router.http.openai.tool_schemas import tool_use
from router.http.routing.access import ClientAccess
from tandem.adapters.files import Adapter


class TextRoutes:
    """Path operations on the served model's name and tokenizer."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        router.add_api_route("/v1/models", self.list_models, methods=["GET"], response_model=ModelList)
        router.add_api_route("/v1/models/{model:path}", self.get_model, methods=["GET"], response_model=ModelObject)
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], response_model=TokensObject)
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"], response_model=TextObject)
        return router

    async def list_models(self, request: Request) -> dict[str, Any]:
        """List the served model, and the adapters that the key's tenant may use."""
        adapters = self._frontend.adapters.available(request.state.tenant)
        return {"object": "list", "data": [self._card(), *map(self._adapter_card, adapters)]}

    async def get_model(self, request: Request, model: Annotated[str, AfterValidator(unquote)]) -> dict[str, Any]:
        """Describe the served model or an adapter, by its name."""
        if model == self._frontend.model.name:
            return self._card()
        return self._adapter_card(self._frontend.adapters.get(model, request.state.tenant))

    async def tokenize(
        self, request: Request, body: Annotated[TokenizeBody, Depends(JsonBody(TokenizeBody))]
    ) -> dict[str, Any]:
        """Return the token ids of a prompt or a conversation."""
        self._frontend.check_model(body.model, request.state.tenant)
        with self._frontend.preparing(request.state.tenant) as prompts:
            if body.messages is not None:
                messages = conversation(body.messages)
                generation_prompt = body.add_generation_prompt is not False
                tools = tool_use(body.tools, None, None)
                ids = await prompts.encode_chat(messages, add_generation_prompt=generation_prompt, tools=tools)
            else:
                ids = await prompts.encode(body.prompt or "", body.add_special_tokens is not False)
        texts = None
        if body.return_token_strs:
            texts = [self._frontend.tokenizer.bytes_of(i).decode(errors="replace") for i in ids]
        return {
            "count": len(ids),
            "max_model_len": self._frontend.model.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }

    async def detokenize(
        self, request: Request, body: Annotated[DetokenizeBody, Depends(JsonBody(DetokenizeBody))]
    ) -> dict[str, Any]:
        """Return the text of token ids, special tokens included."""
        self._frontend.check_model(body.model, request.state.tenant)
        ids = self._frontend.prompts.parse_ids(body.tokens, "tokens") if body.tokens else ()
        return {"prompt": self._frontend.tokenizer.decode(ids, skip_special_tokens=False)}

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
            "default_sampling_params": model.defaults.to_json(),
        }

    def _adapter_card(self, adapter: Adapter) -> dict[str, Any]:
        return self._card() | {
            "id": adapter.name,
            "root": str(adapter.path),
            "parent": self._frontend.model.name,
        }
