"""How to reach Redis, directly or through sentinels, and how long to wait for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import unquote, urlsplit

from tandem.errors import ConfigError
from tandem.rpc.hosts import split

_DEFAULT_PORT = 6379
_SCHEMES = {"redis": False, "rediss": True}
_FORM = "redis.url is not redis[s]://[user:password@]host[:port][/database]"
HOSTLESS_URL = "redis:///0"
"""Default of `redis.url` when sentinels are configured."""
Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelSettings:
    """The sentinels of one Redis, which know its current master."""

    addresses: tuple[Address, ...]
    master: str
    """The master's name at the sentinels."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def from_addresses(
        cls, addresses: Sequence[str], *, master: str, username: str | None, password: str | None
    ) -> Self | None:
        """Create the settings from addresses `host:port`; None without any. Raises ConfigError."""
        if not addresses:
            for name, value in (("sentinel_username", username), ("sentinel_password", password)):
                if value is not None:
                    raise ConfigError(f"redis.{name} is set without redis.sentinels")
            return None
        if username is not None and password is None:
            raise ConfigError("redis.sentinel_username is set without redis.sentinel_password")
        found: list[Address] = []
        for index, address in enumerate(addresses):
            try:
                one = split(address)
            except ValueError as error:
                raise ConfigError(f"redis.sentinels.{index}: {error}") from None
            if one in found:
                raise ConfigError(f"redis.sentinels.{index} is the same as redis.sentinels.{found.index(one)}")
            found.append(one)
        return cls(addresses=tuple(found), master=master, username=username, password=password)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """How to reach one Redis, and which keys there belong to this cluster."""

    host: str = ""
    """Empty with sentinels, which give the address."""
    port: int = _DEFAULT_PORT
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    """Whether connections use TLS, those to the sentinels included."""
    ca: str | None = None
    """PEM file of the CA that signed the server's certificate; None: the system's CAs."""
    sentinel: SentinelSettings | None = None
    cluster: str = "tandem"
    """Prefix of all keys of this cluster."""
    timeout_s: float = 1.0
    """Bound of connecting, of each command, and of a search among the sentinels."""
    lease_s: float = 3.0
    """How long an entry counts after it was last renewed."""

    @property
    def display_name(self) -> str:
        """Address of the server, or name of the master, for logs; without credentials."""
        if self.sentinel is not None:
            return f"master {self.sentinel.master}"
        return f"{self.host}:{self.port}/{self.database}"

    def for_server(self, address: Address) -> Self:
        """Settings for the server at the address that the sentinels gave."""
        host, port = address
        return replace(self, host=host, port=port, sentinel=None)

    def for_sentinel(self, address: Address) -> Self:
        """Settings for the sentinel at this address, with the credentials for sentinels."""
        sentinel = self.sentinel
        username, password = (sentinel.username, sentinel.password) if sentinel is not None else (None, None)
        return replace(self.for_server(address), database=0, username=username, password=password)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        password: str | None,
        ca: str | None,
        sentinel: SentinelSettings | None,
        cluster: str,
        timeout_s: float,
        lease_s: float,
    ) -> Self:
        """Create the settings from a URL; `password` overrides the one in it. Raises ConfigError, without the URL.

        With sentinels the URL has no host.
        """
        try:
            parts = urlsplit(url)
            tls = _SCHEMES[parts.scheme]
            port, database = _DEFAULT_PORT if parts.port is None else parts.port, int(parts.path.strip("/") or 0)
        except (KeyError, ValueError):
            raise ConfigError(_FORM) from None
        if parts.query or parts.fragment or not 0 <= database < 1024:
            raise ConfigError(_FORM)
        if sentinel is None and not parts.hostname:
            raise ConfigError(_FORM)
        if sentinel is not None and (parts.hostname or parts.port is not None):
            raise ConfigError(
                "redis.url must have no host with redis.sentinels: redis[s]://[user:password@]/[database]"
            )
        if not port:
            raise ConfigError("redis.url: the port must be 1 to 65535, got 0")
        if ca is not None and not tls:
            raise ConfigError("redis.ca is set, but redis.url is not rediss://")
        if password is None and parts.password is not None:
            password = unquote(parts.password)
        return cls(
            host=parts.hostname or "",
            port=port,
            database=database,
            username=unquote(parts.username) if parts.username else None,
            password=password,
            tls=tls,
            ca=ca,
            sentinel=sentinel,
            cluster=cluster,
            timeout_s=timeout_s,
            lease_s=lease_s,
        )
