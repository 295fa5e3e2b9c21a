"""How the board's Redis is reached, and how long anybody waits for it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tandem.errors import ConfigError

if TYPE_CHECKING:
    # GPU machines need not have pydantic.
    from tandem.config import RedisConfig

_DEFAULT_PORT = 6379
_SCHEMES = {"redis": False, "rediss": True}
_FORM = "redis.url is not redis[s]://[user:password@]host[:port][/database]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSettings:
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


def board_settings(config: "RedisConfig") -> BoardSettings | None:
    """The board that the configuration names, if it does. Raises ConfigError, which never shows the URL."""
    if config.url is None:
        if config.password is not None:
            raise ConfigError("redis.password: there is no redis.url")
        return None
    try:
        url = urlsplit(config.url.get_secret_value())
        tls = _SCHEMES[url.scheme]
        port, database = _DEFAULT_PORT if url.port is None else url.port, int(url.path.strip("/") or 0)
    except (KeyError, ValueError):
        raise ConfigError(_FORM) from None
    if not url.hostname or url.query or url.fragment or not 0 <= database < 1024:
        raise ConfigError(_FORM)
    if not port:
        raise ConfigError("redis.url: its port is 0; a port that can be connected to is 1 to 65535")
    if config.ca is not None and not tls:
        raise ConfigError("redis.ca: only rediss:// has certificates")
    password = config.password.get_secret_value() if config.password is not None else url.password
    return BoardSettings(
        host=url.hostname,
        port=port,
        database=database,
        username=unquote(url.username) if url.username else None,
        password=unquote(password) if password and config.password is None else password,
        tls=tls,
        ca=config.ca,
        cluster=config.cluster,
        timeout_s=config.timeout_s,
        lease_s=config.lease_s,
    )
