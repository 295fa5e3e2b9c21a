"""Every process of a cluster is replaced while clients stream from it over both doors: none of them notices."""

import asyncio
import json
import time
from dataclasses import dataclass, field

import grpc.aio
import httpx
import pytest

from cluster.control_wire import FlipAsked, RestartAsked, ScaleAsked
from cluster.operations import carry_out
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.e2e.running_cluster import WAIT_S, body, running

PROMPTS = 6
ANSWER = 48
ROUNDS = 4


@dataclass(slots=True)
class Load:
    """Clients that ask again and again. A stream that fails, or says anything else than `transformers`, is told."""

    cluster: object
    expected: dict
    over: bool = False
    answers: dict = field(default_factory=lambda: {"kept": 0, "fresh": 0, "grpc": 0})
    failures: list = field(default_factory=list)
    longest_pause_s: float = 0.0
    """Between two pieces of one stream."""

    async def ask(self, kind, number):
        """One client, until it is over."""
        prompts = list(self.expected)
        async with (
            httpx.AsyncClient(base_url=self.cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http,
            grpc.aio.insecure_channel(self.cluster.local.grpc_address) as channel,
        ):
            stub = InferenceStub(channel)
            while not self.over:
                number += 1
                prompt = prompts[number % len(prompts)]
                try:
                    said = await (self._call(stub, prompt) if kind == "grpc" else self._stream(http, kind, prompt))
                except (httpx.HTTPError, grpc.aio.AioRpcError, AssertionError) as error:
                    self.failures.append((kind, repr(error)))
                else:
                    self.answers[kind] += 1
                    if said != self.expected[prompt]:
                        self.failures.append((kind, f"{len(said)} tokens, other than expected"))

    async def _stream(self, http, kind, prompt):
        said, pieces_s = [], []
        headers = {"Connection": "close"} if kind == "fresh" else {}
        asked = body(prompt, ANSWER) | {"stream": True}
        async with http.stream("POST", "/v1/completions", json=asked, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    said += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                    pieces_s.append(time.monotonic())
        self._note(pieces_s)
        return said

    async def _call(self, stub, prompt):
        said, pieces_s = [], []
        asked = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=prompt), max_tokens=ANSWER, ignore_eos=True)
        async for piece in stub.GenerateStream(asked, timeout=WAIT_S, wait_for_ready=True):
            said += piece.token_ids
            pieces_s.append(time.monotonic())
        self._note(pieces_s)
        return said

    def _note(self, pieces_s):
        gaps = [later - earlier for earlier, later in zip(pieces_s, pieces_s[1:], strict=False)]
        self.longest_pause_s = max(self.longest_pause_s, *gaps, 0.0)
