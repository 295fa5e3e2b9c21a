"""`tandem chat`: a conversation in the terminal with a running cluster; from a pipe, one question per line."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.text import Text

from cluster.router_client import ChatClient, ChatReply, ClientError
from cluster.terminal_text import without_controls

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

HELP = "/clear starts over, /stats shows totals, /exit or Ctrl-D quits; Ctrl-C stops an answer"
COMPLETES = "has no chat template: it completes each text on its own, without the ones before"
COMPLETION_TOKENS = 128
"""Default length of a completion without --max-tokens; a router's own default is 16."""
_OnText: TypeAlias = Callable[[str], None]
_AnswerTo: TypeAlias = Callable[[str, _OnText, _OnText], Coroutine[Any, Any, ChatReply]]


@dataclass(slots=True)
class Conversation:
    """The turns of a conversation so far, and what they cost."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    answers: list[ChatReply] = field(default_factory=list)

    def asking(self, question: str) -> list[dict[str, str]]:
        """Return the messages to send for this question; only `add` extends the conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: ChatReply) -> None:
        """Record a question with its complete answer."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)

    def clear(self) -> None:
        """Forget the turns; the totals are kept."""
        self.turns.clear()

    def stats(self) -> str:
        """Summarize all answers in one line."""
        if not self.answers:
            return "no answers yet"
        prompt = sum(a.prompt_tokens for a in self.answers)
        cached = sum(a.cached_tokens for a in self.answers)
        made = sum(a.completion_tokens for a in self.answers)
        seconds = sum(a.total_s for a in self.answers)
        rate = f", {made / seconds:.1f} tokens/s" if seconds > 0 else ""
        return (
            f"{len(self.answers)} answers · {prompt} prompt tokens, {cached} from the cache · "
            f"{made} tokens generated in {seconds:.1f} s{rate}"
        )


async def chat(
    client: ChatClient,
    conversation: Conversation,
    *,
    model: str | None = None,
    max_tokens: int | None,
    temperature: float,
) -> int:
    """Chat until the input ends, and return the exit code. Raises ClientError when no cluster answers at the start, or
    none serves `model`.
    """
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    served = await client.model(model)
    interactive = sys.stdin.isatty()
    if interactive:
        err.print(Text(f"{served.name} at {client.url}\n{HELP}", style="dim"))
    body = {"model": served.name, "temperature": temperature}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    answer = partial(_answer, client, conversation, body)
    if not served.has_chat_template:
        if conversation.system:
            raise ClientError(f"--system: {served.name} has no chat template and can only complete plain text")
        err.print(Text(f"{served.name} {COMPLETES}", style="yellow"), soft_wrap=True)
        answer = partial(_complete, client, {"max_tokens": COMPLETION_TOKENS, **body})
    failed = False
    async for line in _typed() if interactive else _piped():
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/clear":
                conversation.clear()
                err.print("forgotten", style="dim")
            case "/stats":
                err.print(Text(conversation.stats(), style="dim"))
            case "/help":
                err.print(Text(HELP, style="dim"))
            case command if command.startswith("/"):
                err.print(Text(f"unknown command {command.split()[0]}; {HELP}", style="red"), soft_wrap=True)
                failed = True
            case question:
                failed |= not await _exchange(conversation, question, answer, out=out, err=err)
    return 1 if failed and not interactive else 0


class _Thought:
    """Prints the model's reasoning, set apart from the answer, when stderr is a terminal."""

    def __init__(self, err: Console) -> None:
        self._err = err
        self._is_open = False

    def write(self, text: str) -> None:
        if self._err.is_terminal:
            self._is_open = True
            self._err.print(Text(without_controls(text), style="dim italic"), end="", soft_wrap=True)

    def end(self) -> None:
        """End the reasoning, so that the answer begins on a line of its own."""
        if self._is_open:
            self._is_open = False
            self._err.print()


async def _answer(
    client: ChatClient,
    conversation: Conversation,
    body: dict[str, object],
    question: str,
    on_text: _OnText,
    on_thought: _OnText,
) -> ChatReply:
    return await client.chat(conversation.asking(question), on_text, on_thought, **body)


async def _complete(
    client: ChatClient, body: dict[str, object], prompt: str, on_text: _OnText, _on_thought: _OnText
) -> ChatReply:
    return await client.complete(prompt, on_text, **body)


async def _exchange(
    conversation: Conversation, question: str, answer_to: _AnswerTo, *, out: Console, err: Console
) -> bool:
    """Ask and print the answer; return False if it is incomplete."""

    thought = _Thought(err)

    def print_text(text: str) -> None:
        thought.end()
        out.out(without_controls(text), end="", highlight=False)
        out.file.flush()

    task = asyncio.ensure_future(answer_to(question, print_text, thought.write))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        answer = await task
    except asyncio.CancelledError:
        if not task.cancelled():
            task.cancel()
            raise
        err.print("\nstopped", style="yellow")
        return False
    except ClientError as error:
        err.print(Text(str(error), style="red"))
        return False
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        thought.end()
    conversation.add(question, answer)
    out.out("")
    err.print(Text(answer.time_line(), style="dim"), soft_wrap=True)
    return True


async def _piped() -> AsyncIterator[str]:
    # Blocking the loop is harmless here; a thread in readline could not be interrupted by Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while line := sys.stdin.readline():
        yield line


async def _typed() -> AsyncIterator[str]:
    session = _session()
    while True:
        try:
            yield await session.prompt_async("> ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _session() -> "PromptSession[str]":
    """Create a prompt with a history that only its user can read, or without one if the home is not writable."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    path = Path.home() / ".local" / "state" / "tandem" / "chat_history"
    history: History
    try:
        _make_private(path)
        history = FileHistory(str(path))
    except OSError:
        history = InMemoryHistory()
    return PromptSession(history=history)


def _make_private(path: Path) -> None:
    """Create the file if needed and make it readable by its owner only, whatever the umask. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
