"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters that come and go while it runs."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from router.api.frontend import Frontend
from router.http.body.json_body import JsonBody
from router.http.body.strict_body import StrictBody
from router.http.routing.access import ClientAccess
from tandem.adapters.files import checked_adapter_name
from tandem.cluster_state.entries import MAX_ADAPTER_PATH_BYTES
from tandem.errors import ConfigError, InvalidRequest, NotAllowed


class LoadAdapterBody(StrictBody):
    lora_name: str
    """The name that clients use as `model`."""
    lora_path: str
    """Directory below `model.adapter_folder`, absolute or relative to it."""
    load_inplace: bool = False
    """Replace an adapter that is served under this name."""


class UnloadAdapterBody(StrictBody):
    lora_name: str
    lora_int_id: int | None = None
    """Accepted as vLLM does, and ignored."""


class AdapterRoutes:
    """Path operations on the served adapters, for operators."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._reading = asyncio.Lock()

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access), Depends(_check_operator)])
        for path, change in (("/v1/load_lora_adapter", self.load), ("/v1/unload_lora_adapter", self.unload)):
            router.add_api_route(path, change, methods=["POST"], response_class=PlainTextResponse)
        return router

    async def load(self, body: Annotated[LoadAdapterBody, Depends(JsonBody(LoadAdapterBody))]) -> PlainTextResponse:
        """Serve an adapter under a name, here and at all routers. Workers load it with the first request for it."""
        served, name = self._frontend.adapters, body.lora_name
        path = served.resolve(body.lora_path)
        try:
            checked_adapter_name(name)
        except ValueError as error:
            raise InvalidRequest(f"lora_name: {error}", param="lora_name") from None
        if len(str(path).encode()) > MAX_ADAPTER_PATH_BYTES:
            raise InvalidRequest(f"lora_path: at most {MAX_ADAPTER_PATH_BYTES} bytes", param="lora_path")
        served.check_new(name, replaces=body.load_inplace)
        try:
            async with self._reading:  # hashing is bound by the disk, and takes a thread
                adapter = await asyncio.to_thread(served.read, name, path)
        except ConfigError as error:
            raise InvalidRequest(f"lora_path: {error}", param="lora_path") from None
        served.add(adapter, replaces=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(
        self, body: Annotated[UnloadAdapterBody, Depends(JsonBody(UnloadAdapterBody))]
    ) -> PlainTextResponse:
        """Serve no adapter under a name any more, here and at all routers. Requests under way continue."""
        self._frontend.adapters.remove(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _check_operator(request: Request) -> None:
    if not request.state.sees_all:
        raise NotAllowed("adapters are loaded and unloaded with an operator's key: they are served to all tenants")
