"""/v1/files and /v1/batches, as OpenAI's clients ask for them. What is wrong is refused by the name of its field."""

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from router.batches.files.store import BatchStore
from router.batches.files.types import WINDOW_S, Endpoint, ObjectNotFound, StoredBatch, StoredFile
from router.http.body.json_body import BodyBounds, read_object
from router.http.body.multipart import read_upload
from router.http.body.strict_body import StrictBody, at_most
from router.http.openai.schemas import validate
from router.http.routing.access_guard import Handler, public
from router.http.routing.route_table import Routes
from tandem.config.batches import BatchesConfig
from tandem.errors import InvalidRequest, Unavailable

FILES, BATCHES = "/v1/files", "/v1/batches"
_CONTENT, _CANCEL = "/content", "/cancel"
_PURPOSES = ("batch",)
MOST_LISTED = 1000
_BOUNDS = BodyBounds(max_bytes=64 << 10, max_values=1 << 12)
_FULL_S = 30.0
"""A full disk is looked after by somebody, or by time."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T", StoredBatch, StoredFile)


class BatchWaker(Protocol):
    """Who runs batches."""

    def wake(self) -> None:
        """There is something new."""
        ...


class BatchBody(StrictBody):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str] | None, at_most(16)] = None
    output_expires_after: None = None
    """Results are kept as long as all files are."""


class BatchRoutes:
    """The handlers of both."""

    def __init__(self, store: BatchStore, runner: BatchWaker, config: BatchesConfig, now: Callable[[], float]) -> None:
        self._store = store
        self._runner = runner
        self._config = config
        self._now = now

    def add_to(self, routes: Routes) -> None:
        """For whoever has a key."""
        routes.add("POST", FILES, public(_writing(self.upload)))
        routes.add("GET", FILES, public(self.files))
        routes.add("GET", f"{FILES}/*", public(self.file))
        routes.add("DELETE", f"{FILES}/*", public(_writing(self.delete)))
        routes.add("GET", f"{FILES}/*{_CONTENT}", public(self.content))
        routes.add("POST", BATCHES, public(_writing(self.create)))
        routes.add("GET", BATCHES, public(self.batches))
        routes.add("GET", f"{BATCHES}/*", public(self.batch))
        routes.add("POST", f"{BATCHES}/*{_CANCEL}", public(_writing(self.cancel)))

    async def upload(self, request: Request) -> dict[str, Any]:
        """A file, for later."""
        tenant = request.state.tenant
        with await asyncio.to_thread(self._store.begin_upload, tenant):
            return await self._receive(request, tenant)

    async def _receive(self, request: Request, tenant: str) -> dict[str, Any]:
        raw, content = self._store.incoming(), self._store.incoming()
        try:
            upload = await read_upload(request, raw, content, max_bytes=self._config.max_file_bytes)
            purpose = upload.fields.get("purpose")
            if purpose not in _PURPOSES:
                raise InvalidRequest("purpose must be batch", param="purpose")
            if unknown := upload.fields.keys() - {"purpose"}:
                raise InvalidRequest(f"{min(unknown)[:100]} is not supported", param=min(unknown)[:100])

            def add() -> StoredFile:
                now_s = self._now()
                return self._store.add_file(tenant, content, filename=upload.filename, purpose="batch", now_s=now_s)

            return (await asyncio.to_thread(add)).shown()
        finally:
            await asyncio.to_thread(content.unlink, missing_ok=True)

    async def files(self, request: Request) -> dict[str, Any]:
        """Those of the tenant."""
        purpose = request.query_params.get("purpose")
        found = await asyncio.to_thread(self._store.files, request.state.tenant)
        wanted = [file for file in found if purpose in (None, file.purpose)]
        return _page(request, wanted, ("purpose", "order"), StoredFile.shown)

    async def file(self, request: Request) -> dict[str, Any]:
        """What is known of one."""
        name = request.scope["path"].removeprefix(f"{FILES}/")
        return (await asyncio.to_thread(self._store.file, request.state.tenant, name)).shown()

    async def content(self, request: Request) -> Response:
        """What is in one."""
        name = request.scope["path"].removeprefix(f"{FILES}/").removesuffix(_CONTENT)
        path = await asyncio.to_thread(self._store.content, request.state.tenant, name)
        return FileResponse(path, media_type="application/jsonl")

    async def delete(self, request: Request) -> dict[str, Any]:
        """One that no batch needs any more."""
        tenant, name = request.state.tenant, request.scope["path"].removeprefix(f"{FILES}/")
        batches = await asyncio.to_thread(self._store.batches, tenant)
        if any(batch.input_file_id == name and not batch.status.is_final for batch in batches):
            raise InvalidRequest("a batch that has not ended reads this file", param="file_id")
        await asyncio.to_thread(self._store.delete_file, tenant, name)
        return {"id": name, "object": "file", "deleted": True}

    async def create(self, request: Request) -> dict[str, Any]:
        """A batch of a file that is here."""
        body = validate(BatchBody, await read_object(request, _BOUNDS))
        tenant = request.state.tenant
        file = await asyncio.to_thread(self._store.file, tenant, body.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequest("input_file_id: a file of purpose batch", param="input_file_id")
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
        return batch.shown(is_cancelled=False)

    async def batches(self, request: Request) -> dict[str, Any]:
        """Those of the tenant."""
        return _page(request, await asyncio.to_thread(self._store.batches, request.state.tenant), (), self._shown)

    async def batch(self, request: Request) -> dict[str, Any]:
        """One."""
        name = request.scope["path"].removeprefix(f"{BATCHES}/")
        return self._shown(await asyncio.to_thread(self._store.batch, request.state.tenant, name))

    async def cancel(self, request: Request) -> dict[str, Any]:
        """Nothing more of it is begun; what was answered stays."""
        name = request.scope["path"].removeprefix(f"{BATCHES}/").removesuffix(_CANCEL)
        batch = await asyncio.to_thread(self._store.batch, request.state.tenant, name)
        if batch.status.is_final:
            raise InvalidRequest(f"the batch has ended: {batch.status.value}", param="batch_id")
        await asyncio.to_thread(self._store.cancel, batch)
        self._runner.wake()
        return self._shown(batch)

    def _shown(self, batch: StoredBatch) -> dict[str, Any]:
        return batch.shown(is_cancelled=not batch.status.is_final and self._store.is_cancelled(batch))


def _writing(handler: Handler) -> Handler:
    """Where nothing can be written, as on a full disk, its client may come again."""

    @functools.wraps(handler)
    async def written(request: Request) -> Response | dict[str, Any]:
        try:
            return await handler(request)
        except OSError as error:
            _log.error("files and batches cannot be written: %s", error.strerror)  # no trace: no bug of ours
            raise Unavailable("files cannot be kept now", retry_after_s=_FULL_S) from None

    return written


def _page(
    request: Request, found: Sequence[_T], others: Sequence[str], shown: Callable[[_T], dict[str, Any]]
) -> dict[str, Any]:
    """OpenAI's lists: `after` an id, at most `limit`. Raises InvalidRequest or ObjectNotFound."""
    query = request.query_params
    if unknown := query.keys() - {"after", "limit", *others}:
        raise InvalidRequest(f"{min(unknown)[:40]!r} is no parameter of this list", param=min(unknown)[:40])
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    limit, after = query.get("limit", "20"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= MOST_LISTED):
        raise InvalidRequest(f"limit must be an integer in [1, {MOST_LISTED}]", param="limit")
    rest = list(found) if order == "desc" else list(found)[::-1]
    if after is not None:
        names = [one.id for one in rest]
        if after not in names:
            raise ObjectNotFound("after: no such id in this list", param="after")
        rest = rest[names.index(after) + 1 :]
    page = rest[: int(limit)]
    return {
        "object": "list",
        "data": [shown(one) for one in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(rest) > len(page),
    }
