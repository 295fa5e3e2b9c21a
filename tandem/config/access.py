"""The part of the router's configuration that says who may come in, and what is written down of it."""

import ipaddress
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, ValidationError, model_validator

from tandem.config.admission import BearerKey, LimitsConfig, mistaken_keys
from tandem.config.section import Seconds, Section
from tandem.config.source.yaml_file import read_mapping
from tandem.errors import ConfigError, UnreadableFile
from tandem.rpc.hosts import checked_host

Host = Annotated[str, AfterValidator(checked_host)]
Openness = Literal["open", "key"]
MetricsAccess = Literal["open", "key", "operator"]
_GROUP, _GROUP_READS, _OTHERS = 0o070, 0o040, 0o007


class OperatorAccess(Section):
    """Pages for who runs the cluster. `open`: to everybody; `key`: to every API key, and to everybody where there are
    none. null: `open` while `router.host` is loopback, and beyond it `key`; for metrics `operator`."""

    health: Openness = "open"
    """/health."""
    readyz: Openness = "open"
    """/readyz."""
    metrics: MetricsAccess | None = None
    """/metrics. `operator`: to keys with `operator: true`, and to everybody where there are no keys. `key`: other keys
    see the series of their own tenant alone."""
    version: Openness | None = None
    """/version."""
    openapi: Openness | None = None
    """/openapi.json."""
    page: Openness = "open"
    """The files of the page at /, which say nothing of the cluster; what it shows always needs a key where there are
    any."""

    def access_to(self, page: str, *, is_local: bool) -> MetricsAccess:
        """Who may read the page of that name; `is_local`: the servers listen on loopback alone."""
        found: dict[str, MetricsAccess | None] = self.model_dump()
        beyond: MetricsAccess = "operator" if page == "metrics" else "key"
        return found[page] or ("open" if is_local else beyond)


class RouterTls(Section):
    """PEM files of the HTTP and the gRPC server. Read again when they change: who is connected stays, who comes gets
    the new ones."""

    cert: str
    """The servers' certificate, and what lies between that and its authority."""
    key: str
    """The certificate's key, not encrypted."""
    client_ca: str | None = None
    """Certificates of the authorities that sign for clients; with it nobody comes in without such a certificate."""


class AuditConfig(Section):
    """One line of JSON for each request that showed a key or was refused: who, when, what route, how many tokens."""

    path: str
    """File that lines are appended to; it is made with mode 0600."""
    max_bytes: PositiveInt = 64 << 20
    """Then it becomes `path.1`, that one `path.2`, and a new one begins."""
    keep: int = Field(default=8, ge=1, le=1000)
    """Of those."""


class RouterAccess(Section):
    """What the router's section says of its HTTP and gRPC servers."""

    host: Host = "127.0.0.1"
    """Where the router listens. Beyond loopback they need keys or `tls.client_ca`, unless `allow_open` is set."""
    allow_open: bool = False
    """Everybody who can reach the router may use it."""
    api_keys: tuple[BearerKey, ...] = ()
    """Bearer keys, each a text or `{key, tenant}`; the text is a key's digest as `tandem key new` prints it, or the key
    itself. Empty means that no key is asked for."""
    api_keys_file: str | None = None
    """In their place a file `{api_keys: [...], limits: {...}}` that only its owner can read. It is read again when it
    changes; one that makes no sense changes nothing. Its `limits`, if any, take the place of `router.limits`."""
    api_keys_trust_s: Seconds = 300.0
    """How long keys of `api_keys_file` stay good while that file cannot be read, so that nobody could be told that one
    was revoked; then none is good, and the router is not ready, until the file can be read again."""
    tls: RouterTls | None = None
    operator_access: OperatorAccess = OperatorAccess()
    audit_log: AuditConfig | None = None

    @model_validator(mode="after")
    def _locked(self) -> Self:
        if self.api_keys and self.api_keys_file is not None:
            raise ValueError("api_keys and api_keys_file: one of them holds the keys")
        if not (self.is_local or self.allow_open or self.asks_who):
            raise ValueError(
                f"host {self.host} can be reached by others, and nothing asks who they are: set api_keys,"
                " api_keys_file or tls.client_ca, or allow_open if that is meant"
            )
        return self

    @property
    def asks_who(self) -> bool:
        """Whether a client has to show something."""
        return bool(self.api_keys or self.api_keys_file or (self.tls and self.tls.client_ca))

    @property
    def is_local(self) -> bool:
        """Whether it listens on loopback alone."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def warning(self) -> str | None:
        """What somebody should know who serves like this."""
        if self.is_local:
            return None
        if not self.asks_who:
            return f"everybody who can reach {self.host} may use this router (router.allow_open)"
        if self.tls is None:
            return f"keys, prompts and answers travel unencrypted to {self.host}: set router.tls, or end TLS before it"
        return None


class KeysFile(Section):
    """What `router.api_keys_file` holds."""

    api_keys: Annotated[tuple[BearerKey, ...], Field(min_length=1)]
    limits: LimitsConfig | None = None


def is_shared(about: os.stat_result, *, user: int, groups: Collection[int]) -> bool:
    """Whether others than its owner may look into a file that `user` of `groups` has.

    What belongs to root and only our group reads was given to us that way: Kubernetes mounts secrets so, and no process
    without root's rights could open them otherwise.
    """
    given = about.st_uid == 0 and user != 0 and about.st_gid in groups
    of_group = _GROUP & ~_GROUP_READS if given else _GROUP
    return bool(about.st_mode & (of_group | _OTHERS))


def read_keys(path: Path, limits: LimitsConfig) -> tuple[tuple[BearerKey, ...], LimitsConfig]:
    """Keys and limits of such a file; `limits` when it has none.

    Raises ConfigError, with no key in it; UnreadableFile where nothing could be read.
    """
    what = f"router.api_keys_file: {path}"

    def check_private(status: os.stat_result) -> None:
        if is_shared(status, user=os.geteuid(), groups=(os.getegid(), *os.getgroups())):
            raise ConfigError(f"{path}: others than its owner have access; chmod 600 it")

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
    if reason := mistaken_keys(found.api_keys, applied):
        raise ConfigError(f"{what}: {reason}")
    return found.api_keys, applied
