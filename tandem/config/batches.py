"""Section `router.batches`: files of requests that run while workers are otherwise idle."""

from pydantic import Field, PositiveInt

from tandem.config.section import Section


class BatchesConfig(Section):
    """Files and batches of `/v1/files` and `/v1/batches`."""

    path: str | None = None
    """Directory for files, batches and their results, used by nothing else. null: these routes do not exist. Router
    processes of one host share it, and one of them runs the batches; routers on different hosts must not share it."""
    max_file_bytes: PositiveInt = 128 << 20
    """Maximum size of an uploaded file."""
    max_tenant_bytes: PositiveInt = 1 << 30
    """Maximum size of all files of one tenant, results included. Further uploads are rejected."""
    max_requests: PositiveInt = 50_000
    """Maximum number of requests in one batch."""
    max_batches: PositiveInt = 64
    """Maximum number of unfinished batches of one tenant."""
    max_concurrent: PositiveInt = 8
    """Maximum number of batch requests that workers process at once."""
    keep_s: float = Field(default=30 * 86400.0, gt=0.0, le=365 * 86400.0)
    """How long files, and batches that have ended, are kept."""
