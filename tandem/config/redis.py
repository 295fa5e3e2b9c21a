"""The part of the configuration that says where Redis is, if there is one."""

from typing import Annotated

from pydantic import Field, SecretStr

from tandem.cluster_state.redis_settings import RedisSettings
from tandem.config.section import Section
from tandem.errors import ConfigError


class RedisConfig(Section):
    """State shared by routers and workers: where prefixes are cached, which processes are alive, each router's load."""

    url: SecretStr | None = None
    """redis://[user:password@]host[:port][/database], rediss:// for TLS. null: workers report to their single router
    directly. Needs the `redis` extra on every machine."""
    password: SecretStr | None = None
    """Password, instead of one in the URL."""
    ca: str | None = None
    """PEM file of the CA of a rediss:// server. null: the system's CAs."""
    cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "tandem"
    """Prefix of all keys; clusters that share a Redis must have different ones."""
    timeout_s: Annotated[float, Field(ge=0.05, le=30.0)] = 1.0
    """Timeout of connecting and of each command. Requests never wait for Redis."""
    lease_s: Annotated[float, Field(ge=1.0, le=300.0)] = 3.0
    """How long the entries of a worker or router outlive it."""

    def redis_settings(self) -> RedisSettings | None:
        """How to reach Redis; None when none is named. Raises ConfigError, which never shows the URL."""
        password = self.password.get_secret_value() if self.password is not None else None
        if self.url is None:
            if password is not None:
                raise ConfigError("redis.password is set without redis.url")
            return None
        return RedisSettings.from_url(
            self.url.get_secret_value(),
            password=password,
            ca=self.ca,
            cluster=self.cluster,
            timeout_s=self.timeout_s,
            lease_s=self.lease_s,
        )
