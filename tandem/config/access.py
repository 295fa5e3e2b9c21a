"""The part of the router's configuration about access: keys, TLS, operator pages, the audit log."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, ValidationError, model_validator

from tandem.config.admission import BearerKey, LimitsConfig, keys_problem
from tandem.config.section import Seconds, Section
from tandem.config.source.yaml_file import read_mapping
from tandem.errors import ConfigError, UnreadableFile
from tandem.rpc.hosts import checked_host, checked_origin, is_loopback

Host = Annotated[str, AfterValidator(checked_host)]
Origin = Annotated[str, AfterValidator(checked_origin)]
Openness = Literal["open", "key"]
MetricsAccess = Literal["open", "key", "operator"]
_GROUP, _GROUP_READS, _OTHERS = 0o070, 0o040, 0o007


class OperatorAccess(Section):
    """Who may read the pages for operators. `open`: everyone; `key`: every API key, or everyone when no keys are
    configured. null: `open` while `router.host` is loopback, otherwise `key`, and `operator` for metrics."""

    health: Openness = "open"
    """/health."""
    readyz: Openness = "open"
    """/readyz."""
    metrics: MetricsAccess | None = None
    """/metrics. `operator`: keys with `operator: true`, or everyone when no keys are configured. `key`: other keys see
    only the series of their own tenant."""
    version: Openness | None = None
    """/version."""
    openapi: Openness | None = None
    """/openapi.json."""
    page: Openness = "open"
    """The static files of the page at /, which contain nothing about the cluster. The data that the page shows always
    needs a key when keys are configured."""

    def access_to(self, page: str, *, is_local: bool) -> MetricsAccess:
        """Who may read a page. `is_local`: the servers listen on loopback."""
        found: dict[str, MetricsAccess | None] = self.model_dump()
        beyond: MetricsAccess = "operator" if page == "metrics" else "key"
        return found[page] or ("open" if is_local else beyond)


class RouterTls(Section):
    """PEM files of the HTTP and gRPC servers. They are reloaded when they change; open connections keep the old
    ones."""

    cert: str
    """The servers' certificate, followed by any intermediate certificates."""
    key: str
    """The certificate's private key, unencrypted."""
    client_ca: str | None = None
    """CA certificates for client certificates. When set, every client must present a certificate."""


class AuditConfig(Section):
    """One JSON line for each request that presented a key or was rejected: who, when, which route, how many tokens."""

    path: str
    """File that lines are appended to, created with mode 0600."""
    max_bytes: PositiveInt = 64 << 20
    """Size at which the file is rotated: it becomes `path.1`, the former `path.1` becomes `path.2`, and so on."""
    keep: int = Field(default=8, ge=1, le=1000)
    """Number of rotated files to keep."""


class RouterAccess(Section):
    """Access settings of the `router` section."""

    host: Host = "127.0.0.1"
    """Address that the HTTP and gRPC servers listen on. Beyond loopback API keys or `tls.client_ca` are required,
    unless `allow_open` is true."""
    allow_open: bool = False
    """Serve everyone who can reach the ports, without keys."""
    api_keys: tuple[BearerKey, ...] = ()
    """Bearer keys, each a string or `{key, tenant}`; the string is a key's digest as `tandem key new` prints it, or the
    key itself. Empty: no key is required."""
    api_keys_file: str | None = None
    """A file `{api_keys: [...], limits: {...}}` to use instead of `api_keys`; only its owner may have access to it. It
    is reloaded when it changes; an invalid file changes nothing. Its `limits`, if any, replace `router.limits`."""
    api_keys_trust_s: Seconds = 300.0
    """How long keys of `api_keys_file` stay valid while the file cannot be read, since a revocation would go unnoticed.
    After that no key is valid and the router is not ready until the file can be read again."""
    allowed_origins: tuple[Origin, ...] = ()
    """Origins of web pages, such as `https://chat.example.com`, that may use a router without API keys. Pages of other
    origins than the router's own get 403, and so do requests to a loopback router without TLS for a `Host` that is
    neither a loopback name nor named here. State the public origin of a reverse proxy in front of such a router. With
    API keys nothing of this is checked: a page does not know one. No CORS headers are sent."""
    tls: RouterTls | None = None
    operator_access: OperatorAccess = OperatorAccess()
    audit_log: AuditConfig | None = None

    @model_validator(mode="after")
    def _refuse_two_sources_of_keys(self) -> Self:
        if self.api_keys and self.api_keys_file is not None:
            raise ValueError("api_keys and api_keys_file are both set: set only one of them")
        return self

    @model_validator(mode="after")
    def _refuse_open_beyond_loopback(self) -> Self:
        if not (self.is_local or self.allow_open or self.requires_authentication):
            raise ValueError(
                f"host {self.host} is reachable from other machines and clients are not authenticated: set api_keys,"
                " api_keys_file or tls.client_ca, or allow_open if that is intended"
            )
        return self

    @property
    def requires_authentication(self) -> bool:
        """Whether clients must authenticate."""
        return bool(self.api_keys or self.api_keys_file or (self.tls and self.tls.client_ca))

    @property
    def is_local(self) -> bool:
        """Whether the servers listen on loopback only."""
        return is_loopback(self.host)

    @property
    def warning(self) -> str | None:
        """A warning about what this exposes; None when there is nothing to warn of."""
        if self.is_local:
            return None
        if not self.requires_authentication:
            return f"everyone who can reach {self.host} may use this router (router.allow_open)"
        if self.tls is None:
            return f"traffic with {self.host} is not encrypted, keys included: set router.tls, or put TLS in front"
        return None


class KeysFile(Section):
    """The content of `router.api_keys_file`."""

    api_keys: Annotated[tuple[BearerKey, ...], Field(min_length=1)]
    limits: LimitsConfig | None = None


def is_shared(about: os.stat_result, *, user: int, groups: Collection[int]) -> bool:
    """Whether others than its owner may access a file; `user` and `groups` are those of this process.

    A file of root that only one of this process's groups may read counts as private: Kubernetes mounts secrets that way
    for processes without root's rights.
    """
    given = about.st_uid == 0 and user != 0 and about.st_gid in groups
    of_group = _GROUP & ~_GROUP_READS if given else _GROUP
    return bool(about.st_mode & (of_group | _OTHERS))


def read_keys(path: Path, limits: LimitsConfig) -> tuple[tuple[BearerKey, ...], LimitsConfig]:
    """Read keys and limits from such a file; `limits` when it has none.

    Raises ConfigError, which contains no key; UnreadableFile when the file cannot be read.
    """
    what = f"router.api_keys_file: {path}"

    def check_private(status: os.stat_result) -> None:
        if is_shared(status, user=os.geteuid(), groups=(os.getegid(), *os.getgroups())):
            raise ConfigError(f"{path} is accessible to users other than its owner; chmod 600 it")

    try:
        said = read_mapping(path, check_private)
    except UnreadableFile as error:
        raise UnreadableFile(f"router.api_keys_file: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"router.api_keys_file: {error}") from None
    try:
        found = KeysFile.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{what}: {name}: {first['msg'].removeprefix('Value error, ')}") from None
    applied = found.limits or limits
    if reason := keys_problem(found.api_keys, applied):
        raise ConfigError(f"{what}: {reason}")
    return found.api_keys, applied
