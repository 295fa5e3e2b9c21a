"""Models of the answers of /v1/files and /v1/batches, and links to their path operations."""

from typing import Any, Literal

from router.batches.files.types import ENDPOINTS, Endpoint
from router.http.body.answer_object import Count, ExactObject

_BatchState = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class FileObject(ExactObject):
    id: str
    object: Literal["file"]
    bytes: Count
    created_at: Count
    expires_at: Count
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class PageObject(ExactObject):
    """Fields common to both lists."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(PageObject):
    data: list[FileObject]


class DeletedFileObject(ExactObject):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class WrongLineObject(ExactObject):
    """An error in one line of a batch's input."""

    code: str
    line: Count
    message: str
    param: str | None


class BatchErrorList(ExactObject):
    object: Literal["list"]
    data: list[WrongLineObject]


class RequestCountsObject(ExactObject):
    total: Count
    completed: Count
    failed: Count


class BatchObject(ExactObject):
    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    errors: BatchErrorList | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: _BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: Count
    expires_at: Count
    failed_at: Count | None
    in_progress_at: Count | None
    finalizing_at: Count | None
    completed_at: Count | None
    expired_at: Count | None
    cancelling_at: Count | None
    cancelled_at: Count | None
    request_counts: RequestCountsObject
    metadata: dict[str, str] | None


class BatchList(PageObject):
    data: list[BatchObject]


_ID = "$response.body#/id"


def _link(operation: str, **parameters: str) -> dict[str, Any]:
    return {"operationId": operation, "parameters": {f"path.{name}": value for name, value in parameters.items()}}


FILE_LINKS: dict[str, Any] = {
    "links": {
        "file": _link("get_v1_files_file_id", file_id=_ID),
        "content": _link("get_v1_files_file_id_content", file_id=_ID),
        "delete": _link("delete_v1_files_file_id", file_id=_ID),
        "batches": {
            "operationId": "post_v1_batches",
            "requestBody": {"input_file_id": _ID, "endpoint": ENDPOINTS[0], "completion_window": "24h"},
        },
    }
}
BATCH_LINKS: dict[str, Any] = {
    "links": {
        "batch": _link("get_v1_batches_batch_id", batch_id=_ID),
        "cancel": _link("post_v1_batches_batch_id_cancel", batch_id=_ID),
        "input": _link("get_v1_files_file_id", file_id="$response.body#/input_file_id"),
    }
}
