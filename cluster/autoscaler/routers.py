"""Fetches the metrics of a cluster's routers, from every address that their names resolve to, concurrently."""

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
"""Maximum time between two parts of a response."""
_WHOLE_S = 10.0
"""Maximum time for a whole response, so that a slow one does not keep the planner from the others."""
_MOST_BYTES = 64 << 20


class RouterGroup:
    """HTTP connections to a cluster's routers; an async context manager."""

    def __init__(self, urls: Sequence[str], *, api_key_file: Path | None, tls: ssl.SSLContext | None) -> None:
        """`urls`: a name may resolve to several routers, as a headless Service's does. Raises ConfigError."""
        self._urls = [urlsplit(url if "//" in url else f"http://{url}") for url in urls]
        for url in self._urls:
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ConfigError(f"{url.geturl()} is not a router URL: expected http://HOST:PORT or https://HOST:PORT")
        self._api_key_file = api_key_file
        self._addresses: dict[str, list[str]] = {}
        """Addresses by URL, as the name was last resolved."""
        # trust_env is off: a corporate proxy cannot reach the cluster's addresses.
        self._http = httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False, verify=tls if tls is not None else True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def scrape(self) -> dict[str, RouterFigures | str]:
        """Return the figures of each router, or why there are none. Never raises."""
        results: dict[str, RouterFigures | str] = {}
        found: list[tuple[str, str, str]] = []
        for url in self._urls:
            host, port = str(url.hostname), url.port or (443 if url.scheme == "https" else 80)
            try:
                self._addresses[url.geturl()] = await _addresses(host, port)
            except (OSError, UnicodeError) as error:
                # Routers keep running while their name cannot be resolved: use their last addresses.
                if url.geturl() not in self._addresses:
                    results[url.geturl()] = f"cannot resolve its name: {error}"
                    continue
            addresses = self._addresses[url.geturl()]
            path = url.path.rstrip("/").removesuffix("/v1")
            found += [(f"{url.scheme}://{join(address, port)}{path}", host, url.netloc) for address in addresses]
        answers = await asyncio.gather(*(self._figures(*one) for one in found))
        return results | dict(zip([name for name, _, _ in found], answers, strict=True))

    async def _figures(self, url: str, host: str, netloc: str) -> RouterFigures | str:
        try:
            # Its certificate is for the name, whichever of its addresses is used.
            headers = {"Host": netloc} | self._key()
            async with (
                asyncio.timeout(_WHOLE_S),
                self._http.stream(
                    "GET", f"{url}/metrics", headers=headers, extensions={"sni_hostname": host}
                ) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    return f"HTTP {response.status_code}{_HINTS.get(response.status_code, '')}"
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > _MOST_BYTES:
                        return f"its metrics exceed {_MOST_BYTES >> 20} MiB"
            return await asyncio.to_thread(read_figures, body.decode())
        except TimeoutError:
            return f"its metrics took longer than {_WHOLE_S:g} s"
        except (ConfigError, httpx.HTTPError, OSError, ValueError) as error:
            return f"{type(error).__name__} {error}".strip()

    def _key(self) -> dict[str, str]:
        """Return the authorization header; the key is read each time, as it may change while the planner runs."""
        if self._api_key_file is None:
            return {}
        key = read_regular_text(self._api_key_file).strip()
        if not (key.isascii() and key.isprintable()):  # an error message further down would print it
            raise ValueError(f"{self._api_key_file} is not a key: expected one line of ASCII")
        return {"Authorization": f"Bearer {key}"}


_HINTS = {
    401: ": it needs an API key (--api-key-file)",
    403: ": the key is not an operator's, or a router without keys does not accept this host name",
    404: ": not a router, or its metrics are not served to this address",
}


async def _addresses(host: str, port: int) -> list[str]:
    """Resolve to addresses of a single family: a router that listens on both would be counted twice."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family = found[0][0]
    return sorted({str(address[0]) for kind, _, _, _, address in found if kind == family})
