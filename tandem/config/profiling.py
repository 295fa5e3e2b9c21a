"""The part of the configuration that says whether processes may be looked into while they work."""

from typing import Annotated

from pydantic import Field

from tandem.config.section import Section


class ProfilingConfig(Section):
    """Traces of a worker's steps and flame graphs of a router. They tell names of code, counts and times."""

    enabled: bool = False
    """Serve /debug/profile/* to operators' keys. Off, there is no such route and workers have no such service."""
    max_seconds: Annotated[float, Field(ge=0.1, le=600.0)] = 60.0
    """Longest look."""
    max_steps: Annotated[int, Field(ge=1, le=10_000)] = 200
    """Most steps of one trace."""
    max_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 64 << 20
    """Largest trace, compressed; one that grows beyond it is thrown away."""
