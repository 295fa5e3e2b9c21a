"""Asks the routers of a cluster for their figures: every address that their names stand for, at once."""

import asyncio
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx

from cluster.planner.router_figures import RouterFigures, read_figures
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError
from tandem.rpc.hosts import join

_ANSWER_S = 5.0
"""Between two pieces of an answer."""
_WHOLE_S = 10.0
"""For all of it: one that drips must not keep the planner from looking at the others."""
_MOST_BYTES = 64 << 20


class RouterGroup:
    """An async context manager."""

    def __init__(self, urls: Sequence[str], *, api_key_file: Path | None, tls: ssl.SSLContext | None) -> None:
        """A name in `urls` may stand for several routers, as a headless Service's does. Raises ConfigError."""
        self._urls = [urlsplit(url if "//" in url else f"http://{url}") for url in urls]
        for url in self._urls:
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ConfigError(f"{url.geturl()} is no router's address: http://HOST:PORT, or https://")
        self._api_key_file = api_key_file
        self._addresses: dict[str, list[str]] = {}
        """By URL, as its name was last resolved."""
        # trust_env: a proxy of the company's network does not know the cluster's addresses.
        self._http = httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False, verify=tls if tls is not None else True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self) -> dict[str, RouterFigures | str]:
        """By router what it says, or why it says nothing. Never raises."""
        told: dict[str, RouterFigures | str] = {}
        found: list[tuple[str, str, str]] = []
        for url in self._urls:
            host, port = str(url.hostname), url.port or (443 if url.scheme == "https" else 80)
            try:
                self._addresses[url.geturl()] = await _addresses(host, port)
            except (OSError, UnicodeError) as error:
                # Routers go on while nobody can resolve their name: they are asked where they were.
                if url.geturl() not in self._addresses:
                    told[url.geturl()] = f"its name is not known: {error}"
                    continue
            addresses = self._addresses[url.geturl()]
            path = url.path.rstrip("/").removesuffix("/v1")
            found += [(f"{url.scheme}://{join(address, port)}{path}", host, url.netloc) for address in addresses]
        answers = await asyncio.gather(*(self._figures(*one) for one in found))
        return told | dict(zip([name for name, _, _ in found], answers, strict=True))

    async def _figures(self, url: str, host: str, netloc: str) -> RouterFigures | str:
        try:
            # The name is what its certificate is for, whichever of its addresses is asked.
            headers = {"Host": netloc} | self._key()
            async with (
                asyncio.timeout(_WHOLE_S),
                self._http.stream(
                    "GET", f"{url}/metrics", headers=headers, extensions={"sni_hostname": host}
                ) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    return f"answers {response.status_code}{_HINTS.get(response.status_code, '')}"
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > _MOST_BYTES:
                        return f"its metrics are more than {_MOST_BYTES >> 20} MiB"
            return await asyncio.to_thread(read_figures, body.decode())
        except TimeoutError:
            return f"its metrics take more than {_WHOLE_S:g} s"
        except (ConfigError, httpx.HTTPError, OSError, ValueError) as error:
            return f"{type(error).__name__} {error}".strip()

    def _key(self) -> dict[str, str]:
        """Read each time: keys are changed while we run."""
        if self._api_key_file is None:
            return {}
        key = read_regular_text(self._api_key_file).strip()
        if not (key.isascii() and key.isprintable()):  # whoever refuses it later would show it
            raise ValueError(f"{self._api_key_file} holds no key: one line of ASCII")
        return {"Authorization": f"Bearer {key}"}


_HINTS = {
    401: ": it wants a key, --api-key-file",
    403: ": the key is no operator's, or a router without keys is not called by this name",
    404: ": no router, or its metrics are not for this address",
}


async def _addresses(host: str, port: int) -> list[str]:
    """Of one family alone: a router that listens at both would be counted twice."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family = found[0][0]
    return sorted({str(address[0]) for kind, _, _, _, address in found if kind == family})
