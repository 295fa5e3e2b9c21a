"""The part of the configuration for `tandem up --ray`: what of a Ray cluster each worker takes."""

from typing import Annotated

from pydantic import AfterValidator, Field

from tandem.config.section import Section


def _custom(name: str) -> str:
    if name in ("CPU", "GPU"):
        raise ValueError(f"{name} is counted by itself")
    return name


ResourceName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_:.-]{0,63}$"), AfterValidator(_custom)]


class RayPoolConfig(Section):
    """One worker of this pool, all its ranks together."""

    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Null: `engine.num_threads` of each rank, or one of each. On CPUs it is also how many threads a rank has, and
    how many like it share its node's memory, unless `engine` says either."""
    resources: dict[ResourceName, Annotated[float, Field(gt=0)]] = Field(default={})
    """What else its node must have, such as `{h100: 1}`; `memory` is in bytes. GPUs are one for each rank."""


class RayConfig(Section):
    """Workers on the nodes of a Ray cluster; the routers stay where `tandem up` runs."""

    address: str | None = None
    """`auto`: the Ray cluster that this machine belongs to; host:port of its head; `local`: one of its own, here; null:
    no Ray."""
    prefill: RayPoolConfig = RayPoolConfig()
    decode: RayPoolConfig = RayPoolConfig()
    silence_s: Annotated[float, Field(ge=2.0, le=3600.0)] = 8.0
    """A node of which nothing is heard for so long is taken for dead, and its workers are started elsewhere, unless Ray
    says so sooner."""
