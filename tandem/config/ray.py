"""Section `ray`, for `tandem up --ray`: the resources that each worker requests from Ray."""

from typing import Annotated

from pydantic import AfterValidator, Field

from tandem.config.section import Section


def _custom(name: str) -> str:
    if name in ("CPU", "GPU"):
        raise ValueError(f"{name} must not be listed: it follows from the other settings")
    return name


ResourceName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_:.-]{0,63}$"), AfterValidator(_custom)]


class RayPoolConfig(Section):
    """Resources of one worker of this pool, all its ranks together."""

    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    """CPUs that a worker requests. null: `engine.num_threads` for each rank, or one. On CPU nodes it also sets how many
    threads a rank has and how many workers share a node's memory, unless `engine` states them."""
    resources: dict[ResourceName, Annotated[float, Field(gt=0)]] = Field(default={})
    """Further resources that its node must have, such as `{h100: 1}`; `memory` is in bytes. Each rank gets one GPU."""


class RayConfig(Section):
    """Workers on the nodes of a Ray cluster; routers run where `tandem up` runs."""

    address: str | None = None
    """`auto`: the Ray cluster that this machine belongs to; host:port: the head of a Ray cluster; `local`: start one
    here; null: no Ray."""
    prefill: RayPoolConfig = RayPoolConfig()
    decode: RayPoolConfig = RayPoolConfig()
    silence_s: Annotated[float, Field(ge=2.0, le=3600.0)] = 8.0
    """A node that has been silent for this long is considered dead, and its workers are started elsewhere, unless Ray
    reports it dead sooner."""
