"""Schemas of what the door keeps for its clients: files, batches, cached contents. Each says all that there is."""

from router.batches.files.types import ENDPOINTS, BatchStatus
from router.http.openapi.json_schema import COUNT, FLAG, TEXT, Schema, exactly, list_of, one_of, or_null, ref

_TIME: Schema = {"type": "string", "format": "date-time"}
_WRONG_LINE = exactly({"code": TEXT, "line": COUNT, "message": TEXT, "param": or_null(TEXT)})
_STATES = [state.value for state in BatchStatus]


def _page(item: str) -> Schema:
    return exactly(
        {
            "object": one_of("list"),
            "data": list_of(ref(item)),
            "first_id": or_null(TEXT),
            "last_id": or_null(TEXT),
            "has_more": FLAG,
        }
    )


STORED: dict[str, Schema] = {
    "File": exactly(
        {
            "id": TEXT,
            "object": one_of("file"),
            "bytes": COUNT,
            "created_at": COUNT,
            "expires_at": COUNT,
            "filename": TEXT,
            "purpose": one_of("batch", "batch_output"),
            "status": one_of("processed"),
            "status_details": {"type": "null"},
        }
    ),
    "FilePage": _page("File"),
    "DeletedFile": exactly({"id": TEXT, "object": one_of("file"), "deleted": {"const": True}}),
    "BatchErrors": exactly({"object": one_of("list"), "data": list_of(_WRONG_LINE)}),
    "Batch": exactly(
        {
            "id": TEXT,
            "object": one_of("batch"),
            "endpoint": one_of(*ENDPOINTS),
            "errors": {"anyOf": [ref("BatchErrors"), {"type": "null"}]},
            "input_file_id": TEXT,
            "completion_window": one_of("24h"),
            "status": one_of(*_STATES),
            "output_file_id": or_null(TEXT),
            "error_file_id": or_null(TEXT),
            "created_at": COUNT,
            "expires_at": COUNT,
            **{f"{state}_at": or_null(COUNT) for state in _STATES if state != BatchStatus.VALIDATING.value},
            "request_counts": exactly({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "metadata": {"type": ["object", "null"], "additionalProperties": TEXT},
        }
    ),
    "BatchPage": _page("Batch"),
    "CachedContent": exactly(
        {
            "name": {"type": "string", "pattern": "^cachedContents/"},
            "model": {"type": "string", "pattern": "^models/"},
            "createTime": _TIME,
            "updateTime": _TIME,
            "expireTime": _TIME,
            "usageMetadata": exactly({"totalTokenCount": COUNT}),
        },
        displayName={"type": "string", "maxLength": 128},
    ),
    "CachedContentPage": exactly({"cachedContents": list_of(ref("CachedContent"))}, nextPageToken=TEXT),
    "Nothing": exactly({}),
}
"""By name."""
