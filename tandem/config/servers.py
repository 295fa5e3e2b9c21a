"""Sections of `router`: client connections, grammars, prompt caching and the quality probe."""

from typing import Literal, TypeAlias

from pydantic import Field, PositiveInt

from tandem.config.section import Seconds, Section

ToolParserName: TypeAlias = Literal["hermes", "qwen3_coder", "mistral", "llama3", "deepseek", "pythonic"]
"""Format of the model's tool calls; null: derived from its chat template."""
ReasoningParserName: TypeAlias = Literal["none", "think", "magistral", "seed_oss"]
"""Markers around the model's reasoning; null: derived from its chat template; none: the model has none."""


class ConnectionsConfig(Section):
    """Client connections of one router process."""

    head_timeout_s: Seconds = 15.0
    """Timeout for the head of a request, from its first byte on, and for the first byte on a new connection; over gRPC
    for the handshake."""
    keep_alive_s: Seconds = 65.0
    """How long an idle connection is kept open after a response."""
    max_http: PositiveInt | None = None
    """Maximum number of HTTP connections; beyond it the one that has been idle longest is closed. null: the process's
    open file limit, less a quarter of it, at least 64, for workers, Redis and logs, and less `max_grpc`."""
    max_grpc: PositiveInt | None = None
    """Maximum number of gRPC connections; further ones are rejected. null: a quarter of what both servers have
    together."""


class GrammarsConfig(Section):
    """Limits of compiling a grammar, which happens once for each grammar, in a process that can be killed."""

    compile_s: float = Field(default=3.0, gt=0.0, le=60.0)
    """Maximum time to compile one grammar."""
    compile_bytes: int = Field(default=1 << 30, ge=1 << 26)
    """Maximum memory to compile one grammar."""
    disable_additional_properties: bool = False
    """Objects of a JSON schema may have only the properties that it names, unless it states `additionalProperties`.
    This always holds for schemas sent with `strict: true` and for the arguments of tools."""


class PromptCacheConfig(Section):
    """Prompt caching that clients control: pins and named caches."""

    shared_by_tenants: bool = False
    """Share cached prefixes between tenants. Equal prompts are then computed once, but response times reveal whether
    another tenant has sent the same prompt."""
    max_pins: PositiveInt = 4096
    """Maximum number of pinned prefixes that one router process tracks."""
    max_named: PositiveInt = 64
    """Maximum number of `cachedContents` of one tenant on one host, over all its router processes."""
    max_ttl_s: Seconds = 86_400.0
    """Maximum TTL of a pin or of `cachedContents`."""


_TEXT = (
    "Once upon a time there was a little fox who lived at the edge of a quiet wood. Every morning she went down to the "
    "river to drink, and every morning an old heron stood there on one leg and said nothing. One day the fox asked him "
    "what he was waiting for. The heron looked at the water for a long time. Then he said that he was waiting for "
    "somebody to ask him. The fox laughed, and from that day on they had breakfast together."
)


class QualityConfig(Section):
    """What is watched of the model's quality: every worker scores a fixed text; both pools score clients' answers."""

    period_s: Seconds | None = None
    """How often each worker scores the text, first when it joins. null: never."""
    text: str = Field(default=_TEXT, min_length=32, max_length=8192)
    """The text: about a hundred words of the kind that the model is used for."""
    shadow_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of clients' answers that a worker of each pool scores again, after they have ended, to compare the pools
    (`tandem_shadow_*`): needs a prefill pool, and costs two prefills of prompt and answer at the lowest priority. At
    most eight answers wait in a router's memory; what is exported are sums."""
