"""/v1/files and /v1/batches, as OpenAI's API defines them. Errors name the field."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Query
from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from router.batches.files.store import BatchStore
from router.batches.files.types import WINDOW_S, Endpoint, ObjectNotFound, StoredBatch, StoredFile
from router.http.body.json_body import BodyBounds, JsonBody
from router.http.body.query_parameters import QueryParameters
from router.http.body.strict_body import StrictBody, at_most
from router.http.body.upload import read_upload
from router.http.openai.batch_objects import (
    BATCH_LINKS,
    FILE_LINKS,
    BatchList,
    BatchObject,
    DeletedFileObject,
    FileList,
    FileObject,
)
from router.http.routing.access import ClientAccess
from tandem.config.batches import BatchesConfig
from tandem.errors import InvalidRequest, Unavailable

FILES, BATCHES = "/v1/files", "/v1/batches"
_PURPOSES = ("batch",)
_MAX_LISTED = 1000
_BOUNDS = BodyBounds(max_bytes=64 << 10, max_values=1 << 12)
_JSONL = "application/jsonl"
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "additionalProperties": False,
}
_UPLOAD_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}}
# Lines, each of them JSON.
_LINES = {"content": {_JSONL: {"schema": {"type": "string", "contentMediaType": _JSONL}}}}
_Id = Annotated[str, AfterValidator(unquote)]
_FULL_S = 30.0
"""Retry-After when the disk is full: an operator or a sweep makes room."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T", StoredBatch, StoredFile)


class BatchWaker(Protocol):
    """The part of the batch runner that routes use."""

    def wake(self) -> None:
        """Check for new batches now."""
        ...


class ListQuery(QueryParameters):
    """OpenAI's parameters of lists."""

    after: str | None = None
    """The id after which the page begins."""
    limit: Annotated[int, Field(ge=1, le=_MAX_LISTED)] = 20


class FileQuery(ListQuery):
    purpose: str | None = None
    order: Literal["asc", "desc"] = "desc"


class BatchBody(StrictBody):
    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str] | None, at_most(16)] = None
    output_expires_after: None = None
    """Results are kept as long as all files are."""


class BatchRoutes:
    """Path operations on a tenant's files and batches."""

    def __init__(self, store: BatchStore, runner: BatchWaker, config: BatchesConfig, now: Callable[[], float]) -> None:
        self._store = store
        self._runner = runner
        self._config = config
        self._now = now

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        file, batch = f"{FILES}/{{file_id}}", f"{BATCHES}/{{batch_id}}"
        add = router.add_api_route
        add(
            FILES,
            self.upload,
            methods=["POST"],
            response_model=FileObject,
            responses={200: FILE_LINKS},
            openapi_extra=_UPLOAD_BODY,
        )
        add(FILES, self.list_files, methods=["GET"], response_model=FileList)
        add(file, self.get_file, methods=["GET"], response_model=FileObject)
        add(file, self.delete_file, methods=["DELETE"], response_model=DeletedFileObject)
        add(f"{file}/content", self.get_content, methods=["GET"], response_class=Response, responses={200: _LINES})
        add(BATCHES, self.create, methods=["POST"], response_model=BatchObject, responses={200: BATCH_LINKS})
        add(BATCHES, self.list_batches, methods=["GET"], response_model=BatchList)
        add(batch, self.get_batch, methods=["GET"], response_model=BatchObject, responses={200: BATCH_LINKS})
        add(f"{batch}/cancel", self.cancel, methods=["POST"], response_model=BatchObject)
        return router

    async def upload(self, request: Request) -> dict[str, Any]:
        """Upload a file of requests."""
        tenant = request.state.tenant
        async with _writing():
            with await asyncio.to_thread(self._store.begin_upload, tenant):
                return await self._receive(request, tenant)

    async def _receive(self, request: Request, tenant: str) -> dict[str, Any]:
        content = self._store.incoming()
        try:
            upload = await read_upload(request, content, max_bytes=self._config.max_file_bytes)
            purpose = upload.fields.get("purpose")
            if purpose not in _PURPOSES:
                raise InvalidRequest("purpose must be batch", param="purpose")
            if unknown := upload.fields.keys() - {"purpose"}:
                raise InvalidRequest(f"{min(unknown)[:100]} is not supported", param=min(unknown)[:100])

            def add() -> StoredFile:
                now_s = self._now()
                return self._store.add_file(tenant, content, filename=upload.filename, purpose="batch", now_s=now_s)

            return (await asyncio.to_thread(add)).api_object()
        finally:
            await asyncio.to_thread(content.unlink, missing_ok=True)

    async def list_files(self, request: Request, query: Annotated[FileQuery, Query()]) -> dict[str, Any]:
        """List the tenant's files."""
        found = await asyncio.to_thread(self._store.files, request.state.tenant)
        wanted = [file for file in found if query.purpose in (None, file.purpose)]
        return _page(query, wanted if query.order == "desc" else wanted[::-1], StoredFile.api_object)

    async def get_file(self, request: Request, file_id: _Id) -> dict[str, Any]:
        """Describe one of the tenant's files."""
        return (await asyncio.to_thread(self._store.file, request.state.tenant, file_id)).api_object()

    async def get_content(self, request: Request, file_id: _Id) -> Response:
        """Return the content of a file."""
        path = await asyncio.to_thread(self._store.content, request.state.tenant, file_id)
        return FileResponse(path, media_type=_JSONL)

    async def delete_file(self, request: Request, file_id: _Id) -> dict[str, Any]:
        """Delete a file that no batch needs any more."""
        async with _writing():
            tenant = request.state.tenant
            batches = await asyncio.to_thread(self._store.batches, tenant)
            if any(batch.input_file_id == file_id and not batch.status.is_final for batch in batches):
                raise InvalidRequest("the file is the input of a batch that has not ended", param="file_id")
            await asyncio.to_thread(self._store.delete_file, tenant, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    async def create(
        self, request: Request, body: Annotated[BatchBody, Depends(JsonBody(BatchBody, _BOUNDS))]
    ) -> dict[str, Any]:
        """Create a batch of the requests in a file."""
        async with _writing():
            return await self._create(request.state.tenant, body)

    async def _create(self, tenant: str, body: BatchBody) -> dict[str, Any]:
        file = await asyncio.to_thread(self._store.file, tenant, body.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequest("input_file_id must be a file of purpose batch", param="input_file_id")
        now_s = self._now()
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=tenant,
            endpoint=body.endpoint,
            input_file_id=file.id,
            created_s=int(now_s),
            expires_s=int(now_s + WINDOW_S),
            metadata=body.metadata or {},
        )
        await asyncio.to_thread(self._store.add_batch, batch, most=self._config.max_batches)
        self._runner.wake()
        return batch.api_object(is_cancelled=False)

    async def list_batches(self, request: Request, query: Annotated[ListQuery, Query()]) -> dict[str, Any]:
        """List the tenant's batches."""
        return _page(query, await asyncio.to_thread(self._store.batches, request.state.tenant), self._shown)

    async def get_batch(self, request: Request, batch_id: _Id) -> dict[str, Any]:
        """Describe one of the tenant's batches."""
        return self._shown(await asyncio.to_thread(self._store.batch, request.state.tenant, batch_id))

    async def cancel(self, request: Request, batch_id: _Id) -> dict[str, Any]:
        """Cancel a batch: no more of its requests begin; existing answers stay."""
        async with _writing():
            batch = await asyncio.to_thread(self._store.batch, request.state.tenant, batch_id)
            if batch.status.is_final:
                raise InvalidRequest(f"the batch has already ended: {batch.status.value}", param="batch_id")
            await asyncio.to_thread(self._store.cancel, batch)
            self._runner.wake()
            return self._shown(batch)

    def _shown(self, batch: StoredBatch) -> dict[str, Any]:
        return batch.api_object(is_cancelled=not batch.status.is_final and self._store.is_cancelled(batch))


@contextlib.asynccontextmanager
async def _writing() -> AsyncIterator[None]:
    """Answer with Retry-After where files cannot be written, as on a full disk."""
    try:
        yield
    except OSError as error:
        _log.error("files and batches cannot be written: %s", error.strerror)  # no stack trace: not a bug of ours
        raise Unavailable("files cannot be stored now", retry_after_s=_FULL_S) from None


def _page(query: ListQuery, found: Sequence[_T], describe: Callable[[_T], dict[str, Any]]) -> dict[str, Any]:
    """Return one page of `found`. Raises ObjectNotFound."""
    rest = list(found)
    if query.after is not None:
        names = [one.id for one in rest]
        if query.after not in names:
            raise ObjectNotFound("after: no such id in this list", param="after")
        rest = rest[names.index(query.after) + 1 :]
    page = rest[: query.limit]
    return {
        "object": "list",
        "data": [describe(one) for one in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(rest) > len(page),
    }
