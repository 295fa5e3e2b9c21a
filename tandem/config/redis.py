"""The part of the configuration that says where Redis is, if there is one."""

from typing import Annotated

from pydantic import Field, SecretStr

from tandem.cluster_state.settings import RedisSettings
from tandem.config.section import Section
from tandem.errors import ConfigError


class RedisConfig(Section):
    """What routers and workers share: where cached prefixes are, who is there, what each router has under way."""

    url: SecretStr | None = None
    """redis://[user:password@]host[:port][/database], rediss:// for TLS; null: workers tell their one router directly.
    Needs the `redis` extra on every machine."""
    password: SecretStr | None = None
    """In place of one in the URL."""
    ca: str | None = None
    """PEM file of the authority that signed the certificate of a rediss:// server; the system's own when absent."""
    cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "tandem"
    """What the keys begin with: clusters that share a Redis differ in it."""
    timeout_s: Annotated[float, Field(ge=0.05, le=30.0)] = 1.0
    """Longest wait for a connection or an answer. No request ever waits for either."""
    lease_s: Annotated[float, Field(ge=1.0, le=300.0)] = 3.0
    """How long a worker's or router's entries outlive it."""

    def redis_settings(self) -> RedisSettings | None:
        """How to reach Redis; None when none is named. Raises ConfigError, which never shows the URL."""
        password = self.password.get_secret_value() if self.password is not None else None
        if self.url is None:
            if password is not None:
                raise ConfigError("redis.password: there is no redis.url")
            return None
        return RedisSettings.from_url(
            self.url.get_secret_value(),
            password=password,
            ca=self.ca,
            cluster=self.cluster,
            timeout_s=self.timeout_s,
            lease_s=self.lease_s,
        )
