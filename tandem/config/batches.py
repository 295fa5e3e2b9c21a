"""The part of the router's configuration for batches: requests in files, run while nobody else wants the workers."""

from pydantic import Field, PositiveInt

from tandem.config.section import Section


class BatchesConfig(Section):
    """`/v1/files` and `/v1/batches`."""

    path: str | None = None
    """A folder of the router's own for files, batches and their results; null: there are no such routes. Router
    processes of one host share it, and one of them runs what is there; routers on several hosts must not."""
    max_file_bytes: PositiveInt = 128 << 20
    """Largest file that may be uploaded."""
    max_tenant_bytes: PositiveInt = 1 << 30
    """Of all files of a tenant, results included; beyond it nothing more is taken."""
    max_requests: PositiveInt = 50_000
    """In one batch."""
    max_batches: PositiveInt = 64
    """Of one tenant that have not ended."""
    max_concurrent: PositiveInt = 8
    """Requests of batches that workers have at once."""
    keep_s: float = Field(default=30 * 86400.0, gt=0.0, le=365 * 86400.0)
    """After which a file, and a batch that has ended, are deleted."""
