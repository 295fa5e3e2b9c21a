"""Makes the served model call tools, and parses its calls: one per router, shared by its servers."""

from router.text.grammars.structured_output import Shape, StructuredOutput
from router.text.grammars.tool_calls import CallGrammar, strict_tools
from router.text.tokenizer import Tokenizer
from router.text.tool_parsers.families import HERMES, Family, family_of
from router.text.tool_parsers.request_calls import ToolCallReading
from router.text.tools import ToolUse
from tandem.errors import InvalidRequest

_JSON_SHAPES = frozenset({Shape.JSON_SCHEMA, Shape.JSON_OBJECT})


class ToolCallSupport:
    """The model's way of calling tools, from its template and tokenizer."""

    def __init__(self, tokenizer: Tokenizer, forced: str | None = None, thinks_from: str | None = None) -> None:
        """`forced`: the family's name, if the configuration sets it. `thinks_from`: the mark that begins reasoning."""
        template = tokenizer.template
        self._family = None
        if template is not None and template.form is not None:
            self._family = family_of(template.source, forced)
        elif template is not None:
            # The prompt explains in our words how to call tools.
            self._family = HERMES if forced is None else family_of("", forced)
        self._tokenizer = tokenizer
        self._thinks_from = thinks_from

    def calling(self, use: ToolUse, *, is_forced: bool = False) -> ToolCallReading:
        """`is_forced`: by a structure made here. Raises InvalidRequest when the model's way of calling is unknown."""
        family, ids = self._known(), self._tokenizer.added_ids
        return ToolCallReading(
            use=use,
            new_parser=lambda: family.parser(use.callable_tools, is_forced=is_forced),
            shown_ids=frozenset(ids[mark] for mark in family.markers if mark in ids),
            has_short_ids=family.has_short_ids,
        )

    def structure(self, use: ToolUse, requested: StructuredOutput | None) -> StructuredOutput | None:
        """Return the structure of answers that call as `use` requires and otherwise follow `requested`. None:
        anything."""
        family = self._known()
        ids = self._tokenizer.added_ids
        markers = {mark: ids[mark] for mark in family.markers if mark in ids}
        grammar = CallGrammar(family.form, markers, self._thinks_from)
        if requested is not None and requested.shape not in _JSON_SHAPES:
            raise InvalidRequest(f"{requested.param} cannot be combined with tools", param=requested.param)
        if use.must_call:
            text = grammar.calls_only(use)
        elif requested is not None:
            text = grammar.calls_only(use, requested.schema)
        elif not strict_tools(use.callable_tools):
            return None
        elif not family.is_own_form:
            raise InvalidRequest(f"tools: strict is not supported for {family.name} calls", param="tools")
        else:
            text = grammar.with_text(use)
        return StructuredOutput(shape=Shape.LARK, value=text, param="tools")

    def _known(self) -> Family:
        if self._family is None:
            reason = "this model's tool call format is unknown; the operator can set router.tool_parser"
            raise InvalidRequest(f"tools: {reason}", param="tools")
        return self._family
