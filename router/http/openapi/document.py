"""GET /openapi.json: the HTTP door described, made of its table of routes and of the bodies that it validates.

What a schema cannot say (which fields exclude each other, what the served model bounds) is refused with 400 all the
same, in the same words as ever.
"""

from typing import Any

from starlette.requests import Request

from router.access.api_keys import ApiKeyStore
from router.api.request.client_request import ModelInfo
from router.batches.files.types import ENDPOINTS
from router.http.body.error_formats import anthropic_error, google_error
from router.http.body.errors import ErrorShape
from router.http.openapi.answers import SCHEMAS, answer_of
from router.http.openapi.json_schema import any_of, ref
from router.http.openapi.requests import body_of, body_schemas, parameters_of, shown_path
from router.http.routing.access_guard import Guard, Guarded
from router.http.routing.route_table import Routes

_VERSION = "3.2.0"
"""The first that can say what stands in a stream of events."""
_UNUSUAL_ERRORS: dict[ErrorShape, str] = {anthropic_error: "AnthropicError", google_error: "GoogleError"}
_REFUSALS = {
    "400": "A field, a header or the body is wrong; `param` names it",
    "401": "No API key, or a wrong one",
    "403": "A good key, and not for this",
    "404": "No such model or route",
    "408": "The body did not come in time",
    "409": "The client reads the stream elsewhere",
    "413": "The body, or the KV that it needs, is beyond a hard bound",
    "429": "A limit or a queue is full; Retry-After says when to come back",
    "431": "More headers, or longer ones, than are taken",
    "500": "A fault of the cluster's",
    "503": "No worker can take it now; Retry-After says when to come back",
    "504": "Its time ran out",
}
_RETRY = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}}


_ID = "$response.body#/id"


def _to(operation: str, **parameters: str) -> dict[str, Any]:
    return {"operationId": operation, "parameters": {f"path.{name}": value for name, value in parameters.items()}}


_BATCH = {
    "batch": _to("get_v1_batches_batch_id", batch_id=_ID),
    "cancel": _to("post_v1_batches_batch_id_cancel", batch_id=_ID),
}
LINKS: dict[str, dict[str, Any]] = {
    "POST /v1/files": {
        "file": _to("get_v1_files_file_id", file_id=_ID),
        "content": _to("get_v1_files_file_id_content", file_id=_ID),
        "delete": _to("delete_v1_files_file_id", file_id=_ID),
        "batches": {
            "operationId": "post_v1_batches",
            "requestBody": {"input_file_id": _ID, "endpoint": ENDPOINTS[0], "completion_window": "24h"},
        },
    },
    "POST /v1/batches": _BATCH | {"input": _to("get_v1_files_file_id", file_id="$response.body#/input_file_id")},
    "GET /v1/batches/{batch_id}": _BATCH,
}
"""By method and path, of an answer with status 200."""


class OpenApiRoute:
    """The handler."""

    def __init__(self, routes: Routes, guard: Guard, keys: ApiKeyStore, model: ModelInfo, version: str) -> None:
        """`routes`: all that there are when somebody asks."""
        self._routes = routes
        self._guard = guard
        self._keys = keys
        self._model = model
        self._version = version
        # Of bodies and answers, which never change: making them takes longer than many a request.
        self._schemas: dict[str, Any] | None = None

    async def get_document(self, _request: Request) -> dict[str, Any]:
        """The document."""
        paths: dict[str, dict[str, Any]] = {}
        for method, path, guarded, show_error in self._routes.described():
            shown = shown_path(path)
            paths.setdefault(shown, {})[method.lower()] = self._operation(method, shown, guarded, show_error)
        return {
            "openapi": _VERSION,
            "info": {"title": "Tandem", "version": self._version},
            "paths": dict(sorted(paths.items())),
            "components": {
                "schemas": self._described_bodies(),
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }

    def _described_bodies(self) -> dict[str, Any]:
        if self._schemas is None:
            self._schemas = body_schemas(self._model) | SCHEMAS
        return self._schemas

    def _operation(self, method: str, path: str, guarded: Guarded, show_error: ErrorShape) -> dict[str, Any]:
        told = (guarded.handler.__doc__ or path).strip().splitlines()[0]
        asks = self._keys.are_required and not (guarded.page is not None and self._guard.is_open(guarded.page))
        operation = f"{method} {path}"
        found: dict[str, Any] = {
            "operationId": _operation_id(method, path),
            "summary": told,
            "security": [{"key": []}] if asks else [],
            "responses": _responses(operation, show_error),
        }
        if parameters := parameters_of(operation):
            found["parameters"] = parameters
        if (body := body_of(operation)) is not None:
            found["requestBody"] = body
        return found


def _operation_id(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").replace(".", "/").split("/")
    return "_".join([method.lower(), *filter(None, words)]) if path != "/" else f"{method.lower()}_page"


def _responses(operation: str, show_error: ErrorShape) -> dict[str, Any]:
    given = answer_of(operation)
    found: dict[str, Any] = {"200": {"description": "The answer", **({"content": given} if given else {})}}
    if operation in LINKS:
        found["200"]["links"] = LINKS[operation]
    # Whatever is refused before it is known what is asked for is refused in OpenAI's words.
    error = any_of(*(ref(name) for name in (_UNUSUAL_ERRORS.get(show_error), "Error") if name is not None))
    for status, told in _REFUSALS.items():
        found[status] = {"description": told, "content": {"application/json": {"schema": error}}}
        if status in ("429", "503"):
            found[status]["headers"] = _RETRY
    return found
