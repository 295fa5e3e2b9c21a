"""Cost of the router itself: processor time for each request and streamed token, with workers that have no model.

A router that encodes each text once shows what a request costs without tokenizing, which is measured separately,
against a direct call of the same library on the same text.
"""

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tokenizers
import yaml

from cluster.authority import create_member_bundle
from router.text.chat_template import Message
from router.text.encoded_prefixes import EncodedPrefixes
from router.text.tokenizer import Tokenizer
from tandem.model_path import model_directory
from tandem_bench.errors import CannotMeasure

PROMPT_BYTES = 2048
ANSWER_TOKENS = 16
STREAM_TOKENS = 256
NUM_STREAMS = 64
NUM_CLIENTS = 32
NUM_CLIENTS_AT_CAPACITY = 128
"""As many as keep the router busy: those before leave it idle for most of the time, and its caches to others."""
NUM_TURNS = 33
_LAST_WORDS = 500
_START_S = 60.0
_WORDS = "Once upon a time there was a little girl who had a red ball and a big dog. "


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCosts:
    request_ms: float
    """Processor time of the router for one non-streaming chat request, tokenizing excluded."""
    request_at_capacity_ms: float
    """The same from NUM_CLIENTS_AT_CAPACITY."""
    whole_request_ms: float
    """With its tokenizing, from NUM_CLIENTS."""
    tokenize_ms: float
    """Template and tokenizing in a loop."""
    bare_tokenize_ms: float
    next_turn_ms: tuple[float, float]
    """Processor time for tokenizing a long conversation's next turn: all of it, and with its history known."""
    requests_per_s: float
    """Of one router, tokenizing included, from NUM_CLIENTS_AT_CAPACITY."""
    stream_tokens_per_cpu_s: float
    stream_tokens_per_s: float


def chat_body(*, max_tokens: int, stream: bool) -> dict[str, Any]:
    """Return a conversation of one message of PROMPT_BYTES."""
    text = (_WORDS * (PROMPT_BYTES // len(_WORDS) + 1))[:PROMPT_BYTES]
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": stream}


def measure(*, num_requests: int = 3000, num_workers: int = 2, tls: bool = False) -> ServerCosts:
    """Run one round: a router, its workers and a client in processes of their own. `tls`: between the first two."""
    directory = model_directory("builtin")
    tokenize_ms, bare_ms = tokenizing(directory)
    remembering = ("tandem_bench.router.variants.remembering_router",)
    with cluster(num_workers=num_workers, tls=tls, module=remembering) as (url, router):
        few = load(url, router, connections=NUM_CLIENTS, requests=num_requests)
        many = load(url, router, connections=NUM_CLIENTS_AT_CAPACITY, requests=2 * num_requests)
    with cluster(num_workers=num_workers, tls=tls) as (url, router):
        whole = load(url, router, connections=NUM_CLIENTS, requests=num_requests)
        busy = load(url, router, connections=NUM_CLIENTS_AT_CAPACITY, requests=num_requests)
        body = chat_body(max_tokens=STREAM_TOKENS, stream=True)
        run_client(url, body, connections=NUM_STREAMS, requests=NUM_STREAMS)
        before_s = cpu_s(router)
        streamed = run_client(url, body, connections=NUM_STREAMS, requests=2 * NUM_STREAMS)
        stream_s = cpu_s(router) - before_s
    num_tokens = streamed["requests"] * STREAM_TOKENS
    if streamed["bad"] or streamed["events"] < num_tokens:
        raise CannotMeasure(f"the router did not answer everything: {streamed}")
    return ServerCosts(
        request_ms=few.cpu_ms,
        request_at_capacity_ms=many.cpu_ms,
        whole_request_ms=whole.cpu_ms,
        tokenize_ms=tokenize_ms,
        bare_tokenize_ms=bare_ms,
        next_turn_ms=tokenizing_next_turn(directory),
        requests_per_s=busy.requests_per_s,
        stream_tokens_per_cpu_s=num_tokens / stream_s,
        stream_tokens_per_s=num_tokens / streamed["seconds"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What chat requests that are not streamed cost a server."""

    cpu_ms: float
    """Processor time a request."""
    requests_per_s: float


def load(url: str, server: psutil.Process, *, connections: int, requests: int) -> Load:
    """Send chat requests, of which a quarter more comes first and is not counted. Raises CannotMeasure."""
    body = chat_body(max_tokens=ANSWER_TOKENS, stream=False)
    run_client(url, body, connections=connections, requests=requests // 4)
    before_s = cpu_s(server)
    done = run_client(url, body, connections=connections, requests=requests)
    if done["bad"]:
        raise CannotMeasure(f"the server did not answer everything: {done}")
    cpu_ms = 1e3 * (cpu_s(server) - before_s) / done["requests"]
    return Load(cpu_ms=cpu_ms, requests_per_s=done["requests"] / done["seconds"])


def tokenizing(directory: Path, rounds: int = 400) -> tuple[float, float]:
    """Return milliseconds of processor time for the conversation: Tandem's tokenizer, and a direct call on its text."""
    ours, bare = Tokenizer.load(directory), tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    message = chat_body(max_tokens=1, stream=False)["messages"][0]
    messages = [Message(role=message["role"], content=message["content"])]
    best = [float("inf"), float("inf")]
    for _ in range(5):
        for index in (0, 1):
            started_s = time.thread_time()
            for _ in range(rounds // 5):
                if index:
                    _ = bare.encode(message["content"]).ids
                else:
                    ours.encode_chat(messages, add_generation_prompt=True, max_chars=1 << 20)
            best[index] = min(best[index], (time.thread_time() - started_s) / (rounds // 5))
    return 1e3 * best[0], 1e3 * best[1]


def tokenizing_next_turn(directory: Path) -> tuple[float, float]:
    """Return milliseconds of processor time for a conversation of NUM_TURNS, and for its last turn alone."""
    tokenizer = Tokenizer.load(directory)
    turns = [Message(role=("user", "assistant")[n % 2], content=f"{n}: {_WORDS * 13}") for n in range(NUM_TURNS)]
    best = [float("inf"), float("inf")]
    for _ in range(5):
        known = EncodedPrefixes(max_bytes=1 << 20)
        tokenizer.encode_chat(turns[:-2], add_generation_prompt=True, max_chars=1 << 20, known=known)
        for index, maybe in enumerate((None, known)):
            started_s = time.thread_time()
            tokenizer.encode_chat(turns, add_generation_prompt=True, max_chars=1 << 20, known=maybe)
            best[index] = min(best[index], time.thread_time() - started_s)
    return 1e3 * best[0], 1e3 * best[1]


def cpu_s(process: psutil.Process) -> float:
    """Return user and system time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def run_client(
    url: str,
    body: Mapping[str, Any],
    *,
    requests: int,
    connections: int | None = None,
    rate: float | None = None,
    salt: str | None = None,
) -> dict[str, Any]:
    """Run the client and return its counts.

    `connections`, or `rate`: requests at a time, or per second. `salt`: prefix of each request's own cache salt.
    """
    command = [sys.executable, "-m", "tandem_bench.router.client_process", f"{url}/v1/chat/completions"]
    command += ["--body", json.dumps(body), "--requests", str(requests)]
    command += ["--connections", str(connections)] if rate is None else ["--rate", str(rate)]
    command += ["--salt", salt] if salt is not None else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise CannotMeasure(f"the client failed: {done.stderr[-_LAST_WORDS:]}")
    tally: dict[str, Any] = json.loads(done.stdout)
    return tally


@contextmanager
def cluster(
    *,
    num_workers: int,
    step_ms: float = 10.0,
    more: Mapping[str, Any] | None = None,
    tls: bool = False,
    module: Sequence[str] = ("router",),
) -> Iterator[tuple[str, psutil.Process]]:
    """Run a router over mock workers; yields its URL and process.

    `more`: sections of its configuration; `module`: the module that is run, with its first arguments.
    """
    pem = create_member_bundle() if tls else None
    secret, ports = secrets.token_hex(16), free_ports(num_workers + 2)
    tokenizer = Tokenizer.load(model_directory("builtin"))
    says = [str(token_id) for token_id in tokenizer.encode(_WORDS, add_special_tokens=False)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-router-")))
        for index, port in enumerate(ports[2:]):
            command = [sys.executable, "-m", "tandem_bench.router.mock_worker", "--port", str(port)]
            command += ["--index", str(index), "--secret", secret, "--vocab-size", str(tokenizer.size), "--says", *says]
            if pem is not None:
                (folder / "member.pem").write_text(pem)
                command += ["--pem", str(folder / "member.pem")]
            worker = start(stack, [*command, "--step-ms", str(step_ms)], stdout=subprocess.PIPE)
            if worker.stdout is None or worker.stdout.readline() != b"ready\n":
                raise CannotMeasure("a mock worker did not start")
        config = {
            "secret": secret,
            "log_level": "warning",
            "router": {
                "port": ports[0],
                "grpc_port": ports[1],
                "max_inflight_requests": 4096,
                # All requests are alike here, and a real one has a text of its own.
                "tokenizer_cache_bytes": 0,
            },
            "prefill": {"replicas": 0},
            "decode": {"replicas": num_workers, "addresses": [f"127.0.0.1:{port}" for port in ports[2:]]},
            **({} if pem is None else {"cluster": {"tls": {"pem": pem}}}),
            **(more or {}),
        }
        file = folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(config))
        router = _start_router(stack, file, module)
        url = f"http://127.0.0.1:{ports[0]}"
        yield url, psutil.Process(router.pid)


def start(stack: ExitStack, command: Sequence[str], **more: Any) -> "subprocess.Popen[bytes]":
    """Start a process that is killed when the stack ends."""
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **more)

    def stop() -> None:
        process.send_signal(signal.SIGKILL)
        process.communicate()

    stack.callback(stop)
    return process


def _start_router(stack: ExitStack, file: Path, module: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start the router, and return when it reports that it serves."""
    ready, ready_fd = os.pipe()
    stack.callback(os.close, ready)
    command = [sys.executable, "-m", *module, "--config", str(file), "--ready-fd", str(ready_fd)]
    log = stack.enter_context(file.with_name("router.log").open("w+", encoding="utf-8"))
    router = start(stack, command, pass_fds=(ready_fd,), stderr=log)
    os.close(ready_fd)  # the pipe then ends with the router, so its end is noticed
    if not select.select([ready], [], [], _START_S)[0]:
        raise CannotMeasure(f"the router was not ready within {_START_S:g} s")
    if not os.read(ready, 1):
        log.seek(0)
        raise CannotMeasure(f"the router ended with {router.wait()}: {log.read()[-_LAST_WORDS:]}")
    return router


def free_ports(count: int) -> list[int]:
    """Choose ports that were free a moment ago."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in held]
