"""Formats in which families of models write tool calls, recognised by the chat template or set in the configuration."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.tool_parsers import deepseek, llama, mistral, tagged
from router.text.tool_parsers.events import ToolParser
from router.text.tool_parsers.pythonic import PythonicCalls
from router.text.tools import ToolDefinition

NAME = "\ue000"
"""Placeholder for a tool's name in the text before its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The text around a call's arguments, for a grammar that writes calls. The family's parser reads all of it."""

    open: str = ""
    before: str
    after: str = ""
    joint: str
    """Text between two calls."""
    close: str = ""
    trigger: str | None = None
    """Text that begins a call; None: calls replace an answer, and begin with a brace."""
    starts: tuple[str, ...] = ()
    """Other texts after which the parser looks for a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family's way of writing calls."""

    name: str
    form: CallForm
    markers: tuple[str, ...] = ()
    """Special tokens that the parser sees although clients do not."""
    has_short_ids: bool = False
    is_own_form: bool = True
    """Whether a model of this family begins calls as `form` does without being forced to."""

    def parser(self, tools: Sequence[ToolDefinition], *, is_forced: bool) -> ToolParser:
        """Return a new parser; `is_forced`: for an answer that a grammar restricts to `form`."""
        match self.name:
            case "hermes" | "qwen3_coder":
                return tagged.TaggedCalls(tools, has_bare_functions=self.name == "qwen3_coder" and not is_forced)
            case "mistral":
                return mistral.MistralCalls(tools)
            case "llama3":
                return llama.LlamaCalls(tools)
            case "deepseek":
                return deepseek.DeepSeekCalls(tools)
            case _:
                return tagged.TaggedCalls(tools) if is_forced else PythonicCalls(tools)


_TAGGED = CallForm(
    before=f'{tagged.OPEN}\n{{"name": "{NAME}", "arguments": ',
    after=f"}}\n{tagged.CLOSE}",
    joint="\n",
    trigger=tagged.OPEN,
)
_TAGS = (tagged.OPEN, tagged.CLOSE)
HERMES = Family(name="hermes", form=_TAGGED, markers=_TAGS)
QWEN3_CODER = Family(name="qwen3_coder", form=_TAGGED, markers=_TAGS)
PYTHONIC = Family(name="pythonic", form=_TAGGED, is_own_form=False)
LLAMA3 = Family(
    name="llama3",
    form=CallForm(before=f'{{"name": "{NAME}", "parameters": ', after="}", joint="; ", starts=(llama.OPEN,)),
    markers=(llama.OPEN,),
)
_MISTRAL_MARKERS = (mistral.OPEN, mistral.ARGUMENTS, "[CALL_ID]")
MISTRAL = Family(
    name="mistral",
    form=CallForm(
        open=f"{mistral.OPEN}[",
        before=f'{{"name": "{NAME}", "arguments": ',
        after="}",
        joint=", ",
        close="]",
        trigger=mistral.OPEN,
    ),
    markers=_MISTRAL_MARKERS,
    has_short_ids=True,
)
_MISTRAL_BY_NAME = Family(
    name="mistral",
    form=CallForm(before=f"{mistral.OPEN}{NAME}{mistral.ARGUMENTS}", joint="", trigger=mistral.OPEN),
    markers=_MISTRAL_MARKERS,
    has_short_ids=True,
)
_DEEPSEEK_MARKERS = (deepseek.ALL, deepseek.ALL_END, deepseek.ONE, deepseek.ONE_END, deepseek.NAME)
DEEPSEEK = Family(
    name="deepseek",
    form=CallForm(
        open=deepseek.ALL,
        before=f"{deepseek.ONE}{NAME}{deepseek.NAME}",
        after=deepseek.ONE_END,
        joint="",
        close=deepseek.ALL_END,
        trigger=deepseek.ALL,
        starts=(deepseek.ONE,),
    ),
    markers=_DEEPSEEK_MARKERS,
)
_DEEPSEEK_FENCED = Family(
    name="deepseek",
    form=CallForm(
        open=deepseek.ALL,
        before=f"{deepseek.ONE}function{deepseek.NAME}{NAME}\n```json\n",
        after=f"\n```{deepseek.ONE_END}",
        joint="\n",
        close=deepseek.ALL_END,
        trigger=deepseek.ALL,
        starts=(deepseek.ONE,),
    ),
    markers=_DEEPSEEK_MARKERS,
)
_SIGNS: tuple[tuple[tuple[str, ...], Family], ...] = (
    # Signs that occur together in a template, the more specific ones first.
    ((deepseek.ONE, "```json"), _DEEPSEEK_FENCED),
    ((deepseek.ONE,), DEEPSEEK),
    ((mistral.OPEN, mistral.ARGUMENTS), _MISTRAL_BY_NAME),
    ((mistral.OPEN,), MISTRAL),
    ((tagged.OPEN, "<function="), QWEN3_CODER),
    ((tagged.OPEN, "arguments"), HERMES),
    (("[func_name1(",), PYTHONIC),
    (("<|start_header_id|>", '"parameters"'), LLAMA3),
)
_BY_NAME = {one.name: one for one in (HERMES, QWEN3_CODER, PYTHONIC, LLAMA3, MISTRAL, DEEPSEEK)}


def family_of(template: str, forced: str | None = None) -> Family | None:
    """Return the family whose signs a chat template has, or the one named `forced`. None: unknown."""
    for signs, family in _SIGNS:
        if forced in (None, family.name) and all(sign in template for sign in signs):
            return family
    return _BY_NAME[forced] if forced is not None else None
