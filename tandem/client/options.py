"""What a caller of the client may ask for. Whatever is None or empty is left to the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What every answer must be: one of these."""

    json_schema: str | None = None
    """Text of a JSON schema."""
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    """Lark as llguidance writes it, or GBNF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything about an answer but its prompt; bounds are the server's."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    num_logprobs: int | None = None
    """0: of the sampled tokens; k: of the k most likely as well."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    n: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    request_id: str | None = None
    structure: Structure | None = None
    timeout_s: float | None = None
    """For the whole answer, connecting again included; None: the server's own bound."""


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM contents. Without a CA the system's own are trusted; certificate and key prove the client (mTLS)."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None
    """That the server's certificate bears, when it is not the one of the address."""
