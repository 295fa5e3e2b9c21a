"""Section `redis`: the address of Redis, if there is one."""

from typing import Annotated

from pydantic import Field, SecretStr

from tandem.cluster_state.redis_settings import HOSTLESS_URL, RedisSettings, SentinelSettings
from tandem.config.section import Section
from tandem.errors import ConfigError


class RedisConfig(Section):
    """State shared by routers and workers: cached prefixes, live processes, and each router's load."""

    url: SecretStr | None = None
    """redis://[user:password@]host[:port][/database], rediss:// for TLS; with `sentinels` without host and port. null:
    workers report to their single router directly, or redis:///0 if there are `sentinels`. Needs the `redis` extra on
    every machine."""
    password: SecretStr | None = None
    """Password, instead of one in the URL."""
    ca: str | None = None
    """PEM file of the CA of a rediss:// server and its sentinels. null: the system's CAs."""
    sentinels: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    """Addresses host:port of the Redis Sentinels that know which server is the master; three or more, so that a
    majority survives. With rediss:// they are reached over TLS, too. []: no Sentinel."""
    sentinel_master: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "mymaster"
    """Name of the master at the sentinels."""
    sentinel_username: str | None = None
    """User at the sentinels. null: their default user."""
    sentinel_password: SecretStr | None = None
    """Password at the sentinels, which is not that of Redis. null: they ask for none."""
    cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "tandem"
    """Prefix of all keys; clusters that share a Redis must have different ones."""
    timeout_s: Annotated[float, Field(ge=0.05, le=30.0)] = 1.0
    """Timeout of connecting, of each command, and of a search among the sentinels. Requests never wait for Redis."""
    lease_s: Annotated[float, Field(ge=1.0, le=300.0)] = 3.0
    """How long the entries of a worker or router outlive it."""

    def redis_settings(self) -> RedisSettings | None:
        """The settings for reaching Redis; None when there are none. Raises ConfigError, which never shows the URL."""
        password, url, sentinel_password = map(_shown, (self.password, self.url, self.sentinel_password))
        sentinel = SentinelSettings.from_addresses(
            self.sentinels, master=self.sentinel_master, username=self.sentinel_username, password=sentinel_password
        )
        if url is None and sentinel is None:
            if password is not None:
                raise ConfigError("redis.password is set without redis.url")
            return None
        return RedisSettings.from_url(
            HOSTLESS_URL if url is None else url,
            password=password,
            ca=self.ca,
            sentinel=sentinel,
            cluster=self.cluster,
            timeout_s=self.timeout_s,
            lease_s=self.lease_s,
        )


def _shown(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
