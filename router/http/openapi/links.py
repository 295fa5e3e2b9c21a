"""Where the answers of /openapi.json lead: the operations that take an id out of one."""

from typing import Any

from router.batches.files.types import ENDPOINTS

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
