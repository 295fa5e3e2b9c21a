"""A small HTTP client for `tandem chat`, `demo` and `top`: answers with their timing, and the status."""

import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import httpx

from tandem.errors import ConfigError
from tandem.rpc.certificates import read_pem

TIMING_HEADER = "X-Tandem-Timing"
CONNECT_TIMEOUT_S = 5.0
MAX_ERROR_CHARS = 500
_T = TypeVar("_T")


class ClientError(Exception):
    """The cluster cannot be reached or rejected the request; the message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time that each phase of a request took, in seconds, as the router measures it."""

    queue_s: float = 0.0
    """Queueing time on the prefill and the decode worker."""
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse the `timing` object of the last chunk."""
        return cls(
            queue_s=float(value.get("queue_s", 0.0)),
            prefill_s=float(value.get("prefill_s", 0.0)),
            transfer_s=float(value.get("transfer_s", 0.0)),
            decode_s=float(value.get("decode_s", 0.0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    first_token_s: float | None
    """Time measured here from sending the request to the first text, of reasoning or answer."""
    total_s: float
    timing: Timing | None

    def time_line(self) -> str:
        """Render the times in one line: queue, prefill, transfer, decode, cached tokens."""
        parts = []
        if self.timing is not None:
            t = self.timing
            phases = {"queue": t.queue_s, "prefill": t.prefill_s, "transfer": t.transfer_s, "decode": t.decode_s}
            parts = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in phases.items()]
        if self.first_token_s is not None:
            parts.append(f"first token {self.first_token_s * 1e3:.0f} ms")
        parts.append(f"{self.completion_tokens} tokens in {self.total_s:.2f} s")
        parts.append(f"cached {self.cached_tokens} of {self.prompt_tokens} prompt tokens")
        return " · ".join(parts)


@dataclass(slots=True)
class _Collected:
    """State accumulated from the chunks so far."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timing: Timing | None = None
    first_at: float | None = None


def client_tls(ca: Path | None, cert: Path | None) -> ssl.SSLContext | None:
    """Build a TLS context that trusts `ca` and presents `cert`, a PEM file with its key. Raises ClientError."""
    if ca is None and cert is None:
        return None
    try:
        for path, option in ((ca, "--ca"), (cert, "--client-cert")):
            if path is not None:
                read_pem(path, option)
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(
                cert, password=""
            )  # otherwise the terminal would prompt for an encrypted key's password
    except ConfigError as error:
        raise ClientError(str(error)) from None
    except (OSError, ssl.SSLError) as error:
        raise ClientError(f"{ca} and {cert} cannot be used for TLS: {error}") from None
    return context


def base_of(url: str) -> str:
    """Strip the parts of a router's URL that users copy along."""
    return url.rstrip("/").removesuffix("/v1")


def unreachable(url: str, error: Exception) -> ClientError:
    """Return why a router cannot be reached, for the user of a command."""
    if isinstance(error, httpx.ConnectError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return ClientError(
            f"{url} has a certificate that is not trusted here: give its certificate authority with --ca"
        )
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return ClientError(f"no cluster answers at {url}: start one with `tandem up`, or give its address with --url")
    hint = ""
    if isinstance(error, httpx.RemoteProtocolError) and url.startswith("http:"):
        hint = " (a router with TLS answers only on https://)"
    return ClientError(f"{url}: {error or type(error).__name__}{hint}")


_MOST_NAMES = 10
"""Names that an error lists."""


class ServedModel(NamedTuple):
    """Model that a router serves."""

    name: str
    has_chat_template: bool
    """Whether it serves conversations; without a template it only completes plain prompts."""

    @classmethod
    def from_json(cls, card: Mapping[str, Any]) -> Self:
        """Parse an entry of `/v1/models`; routers of the previous version do not report templates."""
        return cls(str(card["id"]), bool(card.get("has_chat_template", True)))


class ChatClient:
    """Connection to one router; an async context manager."""

    def __init__(self, url: str, *, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: trusted authorities and client certificate; by default the system's authorities."""
        self.url = base_of(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=None)
        try:
            # trust_env is off: a corporate proxy cannot reach this machine's loopback
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=timeout,
                trust_env=False,
                verify=tls if tls is not None else True,
            )
        except httpx.InvalidURL as error:
            raise ClientError(f"{url} is not a URL: {error}") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model(self, name: str | None = None) -> ServedModel:
        """Return the served model, or its LoRA adapter of a name. Raises ClientError, also for other names."""

        def read(body: Any) -> ServedModel:
            served = ServedModel.from_json(body["data"][0])
            names = [one["id"] for one in body["data"]]
            if name is not None and name not in names:
                raise ClientError(f"--model: {name} is not served here; {', '.join(names[:_MOST_NAMES])} can be named")
            return served if name is None else served._replace(name=name)

        return await self._get("/v1/models", read)

    async def status(self, read: Callable[[Any], _T]) -> _T:
        """Return the router's status as parsed by `read` (`router.status.snapshot.merge`). Raises ClientError.

        `read` may raise ValueError, LookupError or TypeError for an invalid status.
        """
        return await self._get("/status/snapshot", read)

    async def _get(self, path: str, read: Callable[[Any], _T]) -> _T:
        try:
            response = await self._http.get(path, timeout=CONNECT_TIMEOUT_S)
            if response.status_code != httpx.codes.OK:
                raise ClientError(refusal(response))
            return read(response.json())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unreachable(self.url, error) from None
        except (ValueError, LookupError, TypeError):
            raise ClientError(f"{self.url} answers, but is not a Tandem router") from None

    async def chat(
        self,
        messages: Sequence[dict[str, str]],
        on_text: Callable[[str], None],
        on_thought: Callable[[str], None] = lambda _: None,
        **body: Any,
    ) -> ChatReply:
        """Stream one answer, passing on reasoning and text as they arrive.

        Cancelling this cancels the request. Raises ClientError.
        """
        return await self._stream(
            "/v1/chat/completions", {"messages": list(messages), **body}, on_text=on_text, on_thought=on_thought
        )

    async def complete(self, prompt: str, on_text: Callable[[str], None], **body: Any) -> ChatReply:
        """Stream the continuation of a plain prompt, as `ask` does."""
        return await self._stream("/v1/completions", {"prompt": prompt, **body}, on_text=on_text)

    async def _stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        on_text: Callable[[str], None],
        on_thought: Callable[[str], None] = lambda _: None,
    ) -> ChatReply:
        request = {"stream": True, "stream_options": {"include_usage": True}, **body}
        got, started = _Collected(), time.monotonic()
        try:
            async with self._http.stream("POST", path, json=request, headers={TIMING_HEADER: "1"}) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise ClientError(refusal(response))
                async for chunk in _chunks(response.aiter_lines()):
                    thought, text = _read_chunk(chunk, got)
                    if thought or text:
                        got.first_at = got.first_at or time.monotonic()
                    if thought:
                        on_thought(thought)
                    if text:
                        on_text(text)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unreachable(self.url, error) from None
        details = got.usage.get("prompt_tokens_details") or {}
        return ChatReply(
            text="".join(got.pieces),
            finish_reason=got.finish_reason,
            prompt_tokens=int(got.usage.get("prompt_tokens", 0)),
            completion_tokens=int(got.usage.get("completion_tokens", 0)),
            cached_tokens=int(details.get("cached_tokens", 0)),
            first_token_s=got.first_at - started if got.first_at is not None else None,
            total_s=time.monotonic() - started,
            timing=got.timing,
        )


async def _chunks(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of an event stream up to [DONE]; ClientError if it ends early or is malformed."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise ClientError("the response stream is not JSON") from None
        if not isinstance(chunk, dict):
            raise ClientError("the response stream does not consist of JSON objects")
        yield chunk
    raise ClientError("the response ended prematurely")


def _read_chunk(chunk: dict[str, Any], got: _Collected) -> tuple[str, str]:
    """Record a chunk, and return its reasoning and its text."""
    if "error" in chunk:
        raise ClientError(_message(chunk))
    if isinstance(chunk.get("usage"), dict):
        got.usage = chunk["usage"]
    if isinstance(chunk.get("timing"), dict):
        got.timing = Timing.from_json(chunk["timing"])
    thought = text = ""
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        thought += delta.get("reasoning_content") or ""
        text += delta.get("content") or choice.get("text") or ""
        got.finish_reason = choice.get("finish_reason") or got.finish_reason
    if text:
        got.pieces.append(text)
    return thought, text


def refusal(response: httpx.Response) -> str:
    """Return a router's error response, for the user of a command."""
    try:
        message = _message(response.json())
    except ValueError:
        message = response.text[:MAX_ERROR_CHARS]
    wait = response.headers.get("Retry-After")
    hint = f" (retry in {wait} s)" if wait else ""
    if response.status_code == httpx.codes.UNAUTHORIZED:
        hint = " (give the file of an API key with --api-key-file)"
    return f"{response.status_code}: {message}{hint}"


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or body)[:MAX_ERROR_CHARS]
