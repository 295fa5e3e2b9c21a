"""The mixed load of a soak: at a steady rate, requests of every kind, all of which a server must forget once served."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any

import httpx

from tandem_bench import stories

_MAX_IN_FLIGHT = 32
"""Requests that are due beyond these are left out and counted: a slow machine must not make a queue of its own."""
_MAX_DIALOGUES = 24
_MAX_TURNS = 5
_TIMEOUT_S = 120.0
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "remember", "parameters": _PERSON}}
_Json = dict[str, Any]


class SoakLoad:
    """Sends requests to one router until it is stopped, and counts how each kind went."""

    def __init__(self, url: str, *, rate: float, rng: Random) -> None:
        """`rate`: requests per second."""
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(_TIMEOUT_S), limits=limits, trust_env=False)
        self._rate = rate
        self._rng = rng
        self._dialogues: list[list[_Json]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._number = 0
        self.served: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Unexpected outcomes, by kind and reason."""
        self.num_left_out = 0
        self.num_cancelled = 0
        """Requests that were in flight when the load was stopped."""
        self._kinds: Mapping[str, Callable[[], Awaitable[None]]] = {
            "chat": self._chat,
            "stream": self._stream,
            "cancelled stream": self._cancelled,
            "embeddings": self._embeddings,
            "tool call": self._tool_call,
            "structured output": self._structured,
            "refused": self._refused,
            "scrape": self._scrape,
        }

    @property
    def num_unaccounted(self) -> int:
        """Requests of which nothing is known, once the load was stopped."""
        known = self.served.total() + self.failures.total() + self.num_left_out + self.num_cancelled
        return self._number - known

    async def run(self) -> None:
        """Send at the steady rate until cancelled; then the requests in flight are cancelled, too."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        names = list(self._kinds)
        try:
            while True:
                if len(self._running) < _MAX_IN_FLIGHT:
                    task = asyncio.create_task(self._one(names[self._number % len(names)]))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                else:
                    self.num_left_out += 1
                self._number += 1
                due_s = max(due_s + 1 / self._rate, loop.time() - 1.0)
                await asyncio.sleep(due_s - loop.time())
        finally:
            self.num_cancelled = sum(not task.done() for task in self._running)
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._http.aclose()

    async def _one(self, kind: str) -> None:
        try:
            await self._kinds[kind]()
        except Exception as error:  # noqa: BLE001  # an answer that cannot be read at all is a failure like any other
            self.failures[f"{kind}: {str(error) or type(error).__name__}"[:200]] += 1
        else:
            self.served[kind] += 1

    def _story(self) -> str:
        return f"{self._number}. {stories.tell(self._rng, short=True).text}"

    async def _chat(self) -> None:
        """Continue a dialogue, whose earlier turns may be cached."""
        if self._dialogues and (len(self._dialogues) >= _MAX_DIALOGUES or self._rng.random() < 0.6):
            dialogue = self._dialogues.pop(self._rng.randrange(len(self._dialogues)))
        else:
            dialogue = []
        dialogue = [*dialogue, {"role": "user", "content": self._story()[:300]}]
        answer = await self._post("/v1/chat/completions", {"messages": dialogue, "max_tokens": 12})
        message = answer["choices"][0]["message"]
        if len(dialogue) < 2 * _MAX_TURNS:
            # A model without training in conversation may write NUL, which is refused in what clients send.
            answer = message["content"].replace("\0", "")
            self._dialogues.append([*dialogue, {"role": "assistant", "content": answer}])

    async def _stream(self) -> None:
        lines = await self._stream_lines({"prompt": self._story(), "max_tokens": 24, "ignore_eos": True}, 1 << 30)
        if lines[-1] != "data: [DONE]":
            raise _Unexpected(f"a stream ended with {lines[-1][:100]}")

    async def _cancelled(self) -> None:
        body = {"prompt": self._story(), "max_tokens": 200, "ignore_eos": True, "n": 1 + self._number % 2}
        await self._stream_lines(body, self._rng.randrange(8))

    async def _embeddings(self) -> None:
        answer = await self._post("/v1/embeddings", {"input": [self._story() for _ in range(3)]})
        if len(answer["data"]) != 3:
            raise _Unexpected(f"{len(answer['data'])} embeddings of 3 texts")

    async def _tool_call(self) -> None:
        messages = [{"role": "user", "content": self._story()}]
        choice = {"type": "function", "function": {"name": "remember"}}
        body = {"messages": messages, "tools": [_TOOL], "tool_choice": choice, "max_tokens": 120, "temperature": 1.0}
        answer = await self._post("/v1/chat/completions", body)
        if not answer["choices"][0]["message"].get("tool_calls"):
            raise _Unexpected("no tool call where one was demanded")

    async def _structured(self) -> None:
        # A grammar of its own now and then, as clients bring theirs.
        schema = {**_PERSON, "title": f"v{self._number // 40}"}
        form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
        messages = [{"role": "user", "content": self._story()}]
        body = {"messages": messages, "response_format": form, "max_tokens": 120, "temperature": 1.0}
        answer = await self._post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])

    async def _refused(self) -> None:
        wrong = self._rng.choice(({"max_tokens": -1}, {"model": f"m{self._number}"}, {"prompt": 7}))
        response = await self._http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **wrong})
        if not 400 <= response.status_code < 500:
            raise _Unexpected(f"status {response.status_code} for {wrong}")

    async def _scrape(self) -> None:
        for page in ("/metrics", "/v1/models", "/readyz"):
            response = await self._http.get(page)
            if response.status_code != httpx.codes.OK:
                raise _Unexpected(f"{page}: status {response.status_code}")

    async def _post(self, path: str, body: _Json) -> _Json:
        response = await self._http.post(path, json={"user": f"u{self._number}", **body})
        if response.status_code != httpx.codes.OK:
            raise _Unexpected(f"status {response.status_code}: {response.text}")
        answer: _Json = response.json()
        return answer

    async def _stream_lines(self, body: _Json, most: int) -> list[str]:
        """Read at most so many lines, then hang up."""
        lines: list[str] = []
        async with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != httpx.codes.OK:
                raise _Unexpected(f"status {response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    lines.append(line)
                    if '"error"' in line:
                        raise _Unexpected(line)
                if len(lines) > most:
                    break
        return lines


class _Unexpected(Exception):
    """An answer that the request should not have; the message says which."""
