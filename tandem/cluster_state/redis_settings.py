"""How the board's Redis is reached, and how long anybody waits for it."""

from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit

from tandem.errors import ConfigError

_DEFAULT_PORT = 6379
_SCHEMES = {"redis": False, "rediss": True}
_FORM = "redis.url is not redis[s]://[user:password@]host[:port][/database]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """One Redis, and one cluster's keys there."""

    host: str
    port: int
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    """PEM file of who signed the server's certificate; the system's authorities when absent."""
    cluster: str = "tandem"
    """What this cluster's keys begin with."""
    timeout_s: float = 1.0
    """Longest wait for a connection or an answer."""
    lease_s: float = 3.0
    """How long what nobody renews still counts."""

    @property
    def place(self) -> str:
        """For people: where it is, without who we are there."""
        return f"{self.host}:{self.port}/{self.database}"

    @classmethod
    def from_url(
        cls, url: str, *, password: str | None, ca: str | None, cluster: str, timeout_s: float, lease_s: float
    ) -> Self:
        """The Redis at `url`; `password` goes before the one in it. Raises ConfigError, which never shows the URL."""
        try:
            parts = urlsplit(url)
            tls = _SCHEMES[parts.scheme]
            port, database = _DEFAULT_PORT if parts.port is None else parts.port, int(parts.path.strip("/") or 0)
        except (KeyError, ValueError):
            raise ConfigError(_FORM) from None
        if not parts.hostname or parts.query or parts.fragment or not 0 <= database < 1024:
            raise ConfigError(_FORM)
        if not port:
            raise ConfigError("redis.url: the port must be 1 to 65535, got 0")
        if ca is not None and not tls:
            raise ConfigError("redis.ca is set, but redis.url is not rediss://")
        if password is None and parts.password is not None:
            password = unquote(parts.password)
        return cls(
            host=parts.hostname,
            port=port,
            database=database,
            username=unquote(parts.username) if parts.username else None,
            password=password,
            tls=tls,
            ca=ca,
            cluster=cluster,
            timeout_s=timeout_s,
            lease_s=lease_s,
        )
