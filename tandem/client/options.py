"""The options of a client's requests. None and empty values are left to the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

TemplateValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: str | None = None
    """JSON schema, as text, of its arguments, which are an object; None: it takes none."""
    strict: bool = False
    """Whether its arguments obey the schema even when the model itself decides to call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools may or must be called; set one of the fields."""

    mode: Literal["none", "auto", "required"] | None = None
    function: str | None = None
    """Name of the function that must be called."""
    allowed: Sequence[str] = ()
    """Names of the functions that may be called; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made."""

    id: str
    name: str
    arguments: str
    """JSON, as written by the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    """Calls of an assistant's turn; see `Choice.turn`."""
    tool_call_id: str | None = None
    """Id of the call that `content` is the result of; for the role `tool`."""
    cached_for: Literal["5m", "1h"] | None = None
    """Time after its last use for which the conversation up to this turn stays cached."""
    reasoning_content: str | None = None
    """Reasoning of the model in an assistant's turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The required form of every answer; set one of the fields."""

    json_schema: str | None = None
    """JSON schema, as text."""
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark, or in GBNF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a request except its prompt; the server checks their bounds."""

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
    """0: logprobs of the sampled tokens; k: also of the k most likely ones."""
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
    prompt_logprobs: int | None = None
    """Log probabilities of the prompt's tokens, each with this many of the most likely alternatives."""
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Mapping[str, TemplateValue] = field(default_factory=dict)
    """Variables that the model's template reads."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last turn, which is the assistant's."""
    prediction: str | None = None
    """The answer that is expected, such as the text to be edited: where it is right, the answer comes sooner."""
    cached_content: str | None = None
    """Name of the `CachedContent` that the conversation begins with."""
    best_of: int | None = None
    """Generate this many choices and return the `n` most likely."""
    vote: bool | None = None
    """Return one choice of `n`: the answer that most of them gave."""
    vote_pattern: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    timeout_s: float | None = None
    """Time limit of the whole answer, reconnecting included; None: the server's own limit."""

    @property
    def can_be_continued(self) -> bool:
        """Whether a broken answer can be resumed; if not, the caller gets the error."""
        at_end = (self.prompt_logprobs, self.best_of, self.vote or None, self.use_beam_search or None)
        return all(option is None for option in at_end)


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM contents. Without a CA the system's are trusted; certificate and key authenticate the client (mTLS)."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None
    """Name in the server's certificate, if it differs from the address."""
