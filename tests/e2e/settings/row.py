"""What a row of the table of settings is, and what every row's cluster has to do."""

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.kernels.cpu.gemm import Arithmetic
from tests.support.oracle import Oracle, noise
from tests.support.running_cluster import RunningCluster

MAX_TOKENS = 16
Prompts = Sequence[Sequence[int]]
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a check may ask its cluster, and where its files are."""

    cluster: RunningCluster
    oracle: Oracle
    folder: Path
    names: Mapping[str, Any]

    async def post(self, path: str, body: Mapping[str, Any], key: str | None = None, **more: str) -> Any:
        """Send JSON; the response, whatever its status."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.cluster.http.post(path, json=body, headers=headers | more)

    async def get(self, path: str, key: str | None = None) -> Any:
        """The response, whatever its status."""
        return await self.cluster.http.get(path, headers={"Authorization": f"Bearer {key}"} if key else {})


async def _no_names(_folder: Path, _stack: AsyncExitStack) -> Mapping[str, Any]:
    """For settings that name nothing outside the cluster."""
    return {}


async def nothing_else(_: Asked) -> None:
    """For settings that promise nothing but the same answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Settings that one cluster runs with, all at once."""

    settings: Mapping[str, Any]
    """By dotted names, as in the file. `{folder}` in a text is the test's folder; `start` returns what others mean."""
    check: Callable[[Asked], Awaitable[None]] = nothing_else
    """That the settings do what they say, seen from outside."""
    start: Callable[[Path, AsyncExitStack], Awaitable[Mapping[str, Any]]] = _no_names
    """Writes what the settings name into the folder, and starts what they connect to; returns ports and the like."""
    expected: Callable[[Oracle, Prompts, Path], Tokens] | None = None
    """What the cluster says; None: the same as `transformers`."""
    is_warm_equal: bool = True
    """Whether an answer from cached blocks is the same: not where those are less exact than what computes anew."""
    block_size: int = 16
    """Of the pool that finds the prompts in its cache."""
    needs: Arithmetic | None = None
    """Instructions without which the setting is refused or replaced."""
    key: str = ""
    """API key of the ordinary requests, an operator's."""
    believes: Callable[[Path], ssl.SSLContext] | None = None
    """Of clients in TLS."""
    moves: bool = True
    """Whether prompts go through the prefill pool."""

    def named(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with these in place: a text that is nothing but a name becomes the value itself."""
        return _named(self.settings, names)


def _named(value: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _named(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [_named(one, names) for one in value]
    if not isinstance(value, str):
        return value
    for name, meant in names.items():
        if value == f"{{{name}}}":
            return meant
        value = value.replace(f"{{{name}}}", str(meant))
    return value


def prompts(oracle: Oracle) -> Tokens:
    """Texts and noise, long enough for the prefill pool."""
    draw = random.Random("settings")
    return [make(i, draw.randint(80, 300)) for i, make in enumerate([oracle.story, noise] * 3)]


async def check_answers(row: Row, asked: Asked, expected: Tokens) -> None:
    """Each prompt alone, again from the caches, and all at once past them: the expected tokens each time."""
    cluster, made = asked.cluster, prompts(asked.oracle)

    async def tokens(prompt: Sequence[int], salt: str) -> tuple[list[int], int]:
        answer = await cluster.complete(prompt, MAX_TOKENS, cache_salt=salt)
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    cold = [await tokens(prompt, "a") for prompt in made]
    assert [one for one, _ in cold] == expected
    if row.moves:
        assert await cluster.disaggregated() == len(made)
    warm = [await tokens(prompt, "a") for prompt in made]
    if row.is_warm_equal:
        assert [one for one, _ in warm] == expected
    size = row.block_size
    assert [num_cached for _, num_cached in warm] == [(len(prompt) - 1) // size * size for prompt in made]
    together = await asyncio.gather(*(tokens(prompt, "b") for prompt in made))
    assert [one for one, _ in together] == expected
