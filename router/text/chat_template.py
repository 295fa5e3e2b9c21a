"""Renders a model's chat template: Jinja from the model directory, within bounds.

The template comes with the model, the messages from clients. Neither may hang the router or exhaust its memory:

* jinja2's sandbox denies access to attributes and mutation;
* every loop step counts against a budget, and so does every character of output;
* `check_template`, called once before the template is compiled here, renders sample conversations in a child process
  with limits on memory and time, which also stops what no budget sees (`'x' * 10 ** 11`).
"""

import json
import resource
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from router.text.conversation import Message as Message
from router.text.conversation import (
    TemplateOptions,
    ToolForm,
    form_shown_by,
    hidden,
    in_plain_words,
    tool_object,
    turns_of,
)
from router.text.reasoning import marks_of
from router.text.tools import ToolDefinition
from tandem.errors import ConfigError, InvalidRequest

MAX_LOOP_STEPS = 200_000
MAX_TEMPLATE_CHARS = 1 << 18
MAX_ERROR_CHARS = 200
CHECK_TIMEOUT_S = 10.0
CHECK_MEMORY_BYTES = 1 << 30
CHECK_OUTPUT_CHARS = 1 << 20
_BUDGET = "tandem_loop_budget"
_EFFORT, _THINKING = "reasoning_effort", "enable_thinking"
"""Variables of templates of reasoning models."""
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", _BUDGET})
"""Variables that clients can set only through their own request fields."""
# Errors that a template can provoke with messages that it did not expect; anything else is a bug of ours.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`, or ran out of budget."""


class _Budget:
    """The loop steps left in one render."""

    left = MAX_LOOP_STEPS

    def over(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, counting each against the budget."""
        for item in items:
            self.left -= 1
            if self.left < 0:
                raise _Refused(f"the chat template took more than {MAX_LOOP_STEPS} loop steps")
            yield item


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    budget: _Budget = context.parent[_BUDGET]
    return budget.over(items)


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}…{% endgeneration %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a set on the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which counts the steps of every `for`."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return tree


def _refuse(message: str) -> None:
    raise _Refused(str(message)[:MAX_ERROR_CHARS])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML; chat templates expect plain JSON, with these keyword arguments.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _as_it_is(text: str) -> str:
    return text


class ChatTemplate:
    """A compiled template and the names of the model's special tokens."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        form: ToolForm | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template. Raises ConfigError when it does not parse. `form`: how it shows tools, see
        `check_template`; None: in plain words. `now`: the time for templates that print the date.
        """
        self.source = source
        self.form = form
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"chat template: more than {MAX_TEMPLATE_CHARS} characters")
        self._special_tokens = dict(special_tokens)
        # Chat templates render prompts, not HTML: escaping would change them.
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            autoescape=False,
            optimized=False,
        )
        environment.filters["counted"] = _counted
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            unassigned = meta.find_undeclared_variables(environment.parse(source))
            self._variables = unassigned - environment.globals.keys() - special_tokens.keys() - _OURS
            template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"chat template: {error}") from None
        # jinja2's own is a chain of mappings in Python, which every new context would walk through.
        template.globals = dict(template.globals)
        self._template = template

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        max_chars: int,
        tools: Sequence[ToolDefinition] = (),
        hide: Callable[[str], str] = _as_it_is,
        options: TemplateOptions = TemplateOptions(),  # noqa: B008  # frozen
    ) -> str:
        """Render a conversation's prompt; `hide`: applied first to each text that a client wrote.

        Raises InvalidRequest when the template refuses the messages, or a budget is exhausted.
        """
        if self.form is None:
            messages, tools = in_plain_words(messages, tools), ()
        turns = turns_of(messages, self.form or ToolForm(), hide)
        end = f"\ufdd2{secrets.token_hex(8)}" if options.continue_final else ""
        if end:
            turns[-1]["content"] += end
        context = {
            **self._template.globals,
            **self._special_tokens,
            **(self._given(options.variables, hide) if options.variables else {}),
            **({} if options.thinks and options.effort is None else self._effort(options)),
            "messages": turns,
            "tools": [hidden(tool_object(tool), hide) for tool in tools] if tools else None,
            "documents": None,  # as transformers passes it: templates may ask whether it is none
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: _Budget(),
        }
        parts: list[str] = []
        size = 0
        try:
            # What `generate` does, without its generator around this one, which only edits tracebacks.
            for part in self._template.root_render_func(self._template.new_context(context, shared=True)):
                size += len(part)
                if size > max_chars:
                    raise _Refused(f"the rendered conversation has more than {max_chars} characters")
                parts.append(part)
        except _Refused as error:
            raise InvalidRequest(f"messages: {error.message}", param="messages") from None
        except _RENDER_ERRORS as error:
            # The exception's own text may quote a message.
            raise InvalidRequest(
                f"messages: the chat template cannot render them ({type(error).__name__})", param="messages"
            ) from None
        text = "".join(parts)
        return _cut_at(text, end) if end else text

    def _given(self, variables: Mapping[str, Any], hide: Callable[[str], str]) -> dict[str, Any]:
        """Return a client's own variables. Raises InvalidRequest for those that the template does not read."""
        if unknown := next((name for name in variables if name not in self._variables), None):
            reason = f"{unknown[:40]!r} is not a variable of this model's chat template"
            raise InvalidRequest(f"chat_template_kwargs: {reason}", param="chat_template_kwargs")
        return {name: hide(value) if isinstance(value, str) else value for name, value in variables.items()}

    def _effort(self, options: TemplateOptions) -> dict[str, Any]:
        """Return the variable for the reasoning effort. Raises InvalidRequest where the template has none."""
        if not options.thinks:
            return self._not_thinking()
        if _EFFORT in self._variables:
            given: dict[str, Any] = {_EFFORT: options.effort}
        elif options.effort == "none" and _THINKING in self._variables:
            given = {_THINKING: False}
        else:
            but = "; reasoning can be turned off with none" if _THINKING in self._variables else ""
            reason = f"this model's chat template does not support this value{but}"
            raise InvalidRequest(f"{_EFFORT}: {reason}", param=_EFFORT)
        if given.keys() & options.variables.keys():
            raise InvalidRequest(f"{_EFFORT}: already set in chat_template_kwargs", param=_EFFORT)
        return given

    def _not_thinking(self) -> dict[str, Any]:
        if _THINKING in self._variables:
            return {_THINKING: False}
        if _EFFORT in self._variables:
            return {_EFFORT: "none"}
        if marks_of(self.source) is not None:
            raise InvalidRequest("thinking: reasoning cannot be turned off for this model", param="thinking")
        return {}


def _cut_at(text: str, end: str) -> str:
    """Return the text without what the template writes after the last turn's text."""
    before, found, _after = text.partition(end)
    if not found:
        reason = "this model's chat template does not render the last message verbatim"
        raise InvalidRequest(f"continue_final_message: {reason}", param="continue_final_message")
    return before


def check_template(source: str, special_tokens: Mapping[str, str]) -> ToolForm | None:
    """Render sample conversations in a limited child process, and return how the template shows tools, if it does.

    Raises ConfigError for a template that cannot render.
    """
    job = json.dumps({"source": source, "special_tokens": dict(special_tokens)})
    try:
        child = subprocess.run(  # our own interpreter and module
            [sys.executable, "-m", "router.text.chat_template"],
            input=job.encode(),
            capture_output=True,
            timeout=CHECK_TIMEOUT_S,
            # `-m` looks in the working directory: the folder that holds the packages.
            cwd=Path(__file__).resolve().parents[2],
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"chat template: a short conversation took longer than {CHECK_TIMEOUT_S} s") from None
    if child.returncode != 0:
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"chat template: {last[0] if last else f'died with status {child.returncode}'}")
    form = json.loads(child.stdout)
    return None if form is None else ToolForm(**form)


def _samples() -> list[list[Message]]:
    user, assistant = Message(role="user", content="Hello"), Message(role="assistant", content="Hi")
    return [[user], [user, assistant] * 32 + [user]]


def _check_child() -> int:
    """Run the child process's checks; return 0 when at least one sample renders within the limits."""
    resource.setrlimit(resource.RLIMIT_AS, (CHECK_MEMORY_BYTES, CHECK_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(CHECK_TIMEOUT_S), int(CHECK_TIMEOUT_S)))
    job = json.load(sys.stdin)
    try:
        template = ChatTemplate(job["source"], job["special_tokens"])
        for sample in _samples():
            template.render(sample, add_generation_prompt=True, max_chars=CHECK_OUTPUT_CHARS)

        def render(messages: Sequence[Message], tools: Sequence[ToolDefinition], form: ToolForm) -> str:
            template.form = form
            return template.render(messages, tools=tools, add_generation_prompt=True, max_chars=CHECK_OUTPUT_CHARS)

        form = form_shown_by(render)
    except (ConfigError, InvalidRequest, MemoryError) as error:
        sys.stderr.write(f"a plain conversation does not render: {str(error) or 'out of memory'}\n")
        return 1
    sys.stdout.write(json.dumps(form and asdict(form)))
    return 0


if __name__ == "__main__":
    sys.exit(_check_child())
