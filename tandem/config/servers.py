"""Sections of `router`: client connections, grammars, prompt caching and the quality probe."""

from typing import Literal, TypeAlias

from pydantic import Field, PositiveInt

from tandem.config.section import Seconds, Section

ToolParserName: TypeAlias = Literal["hermes", "qwen3_coder", "mistral", "llama3", "deepseek", "pythonic"]
"""How the model writes calls of functions; null: as its chat template shows."""
ReasoningParserName: TypeAlias = Literal["none", "think", "magistral", "seed_oss"]
"""Marks between which the model thinks before it answers; null: those that its chat template knows; none: no such."""


class ConnectionsConfig(Section):
    """Clients' connections to one router process."""

    head_timeout_s: Seconds = 15.0
    """For the head of a request, from the connection's or the request's first byte on; over gRPC for the handshake. A
    new connection has as long to say something at all."""
    keep_alive_s: Seconds = 65.0
    """For how long a connection is kept that was answered and asks nothing more."""
    max_http: PositiveInt | None = None
    """Beyond it the one that has asked nothing for the longest time makes way. When absent what is left of the open
    files that the process may have: a quarter of them, at least 64, are for workers, Redis and logs."""
    max_grpc: PositiveInt | None = None
    """Beyond it new ones are refused. When absent a quarter of what HTTP and gRPC have together."""


class GrammarsConfig(Section):
    """What answers are asked to be is compiled once, by a process that may be killed."""

    compile_s: float = Field(default=3.0, gt=0.0, le=60.0)
    """Most time for one."""
    compile_bytes: int = Field(default=1 << 30, ge=1 << 26)
    """Most memory for one."""
    disable_additional_properties: bool = False
    """Objects of a JSON schema have no properties but those that it names, unless it says otherwise with
    `additionalProperties`. So it is in any case for schemas sent with `strict: true` and for the arguments of tools."""


class PromptCacheConfig(Section):
    """Prompt caching as clients see it."""

    shared_by_tenants: bool = False
    """One tenant finds what another has cached: equal prompts are computed once, and the time that one takes tells
    whether somebody else has sent it."""
    max_pins: PositiveInt = 4096
    """Pinned prefixes that one router process knows of."""
    max_named: PositiveInt = 64
    """`cachedContents` that one tenant has on one host, whichever of its router processes made them."""
    max_ttl_s: Seconds = 86_400.0
    """Longest life of one of them."""


_TEXT = (
    "Once upon a time there was a little fox who lived at the edge of a quiet wood. Every morning she went down to the "
    "river to drink, and every morning an old heron stood there on one leg and said nothing. One day the fox asked him "
    "what he was waiting for. The heron looked at the water for a long time. Then he said that he was waiting for "
    "somebody to ask him. The fox laughed, and from that day on they had breakfast together."
)


class QualityConfig(Section):
    """A text that every worker is asked to read: how probable it is to its model is told as a metric."""

    period_s: Seconds | None = None
    """How often each worker reads it, first as it joins; null: never."""
    text: str = Field(default=_TEXT, min_length=32, max_length=8192)
    """Some hundred words of the kind that the model is used for."""
