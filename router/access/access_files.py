"""The files that both servers' access control watches and rereads on change: API keys and certificates; and the audit
log.

A request's key is checked by `router.access.api_keys.ApiKeyStore`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry

from router.access.api_keys import ApiKeyStore
from router.access.audit_file import AuditFile
from router.access.audit_log import NO_AUDIT, AuditLog
from router.access.tls import ServerIdentity, ServerTlsState, read_identity
from router.access.watched_files import FileWatcher, WatchedFile
from router.admission.shared_rate_limits import SharedRateLimits
from tandem.config.access import read_keys
from tandem.config.cluster import RouterConfig

_log = logging.getLogger(__name__)
_KEYS = "api_keys"


class AccessControl:
    """Holds the configured keys; while entered, it reads keys and certificates from files and follows their changes."""

    def __init__(
        self,
        config: RouterConfig,
        limits: SharedRateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits`: the rate limits of the keys' tenants, which a changed key file may alter."""
        self._config = config
        self._limits = limits
        self._clock = clock
        self.keys = ApiKeyStore(config.api_keys)
        self.audit: AuditLog = NO_AUDIT
        self.tls: ServerTlsState | None = None
        self._live: FileWatcher | None = None
        self._collectors: list[Any] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start watching. Raises ConfigError that names the file and the problem."""
        if self._config.warning is not None:
            _log.warning("%s", self._config.warning)
        async with AsyncExitStack() as stack:
            if self._config.audit_log is not None:
                audit = AuditFile(self._config.audit_log)
                stack.push_async_callback(asyncio.to_thread, audit.close)
                self.audit = audit
                self._collectors.append(audit)
            if files := self._files():
                self._live = await stack.enter_async_context(FileWatcher(files, clock=self._clock))
                self._collectors.append(self._live)
                self.keys.lapsed = self._keys_lapsed
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def check_files(self) -> None:
        """Check the files now rather than within a second."""
        if self._live is not None:
            self._live.check_now()

    def not_ready_reason(self) -> str | None:
        """Return why no key is accepted; None when keys are accepted."""
        return None if self.keys.lapsed is None else self.keys.lapsed()

    def register_metrics(self, registry: CollectorRegistry) -> None:
        """Register the watchers' metrics."""
        for collector in self._collectors:
            registry.register(collector)

    def _files(self) -> list[WatchedFile]:
        config, found = self._config, []
        if config.api_keys_file is not None:
            path = Path(config.api_keys_file)
            found.append(
                WatchedFile(
                    what=_KEYS,
                    paths=[path],
                    load=lambda: read_keys(path, config.limits),
                    apply=self._use_keys,
                    trust_s=config.api_keys_trust_s,
                )
            )
        if (tls := config.tls) is not None:
            paths = [Path(name) for name in (tls.cert, tls.key, tls.client_ca) if name is not None]
            found.append(
                WatchedFile(what="tls", paths=paths, load=lambda: read_identity(tls), apply=self._use_identity)
            )
        return found

    def _keys_lapsed(self) -> str | None:
        if self._live is None or self._config.api_keys_file is None:
            return None
        reason = self._live.distrust_reason(_KEYS)
        return None if reason is None else f"no API key is accepted: router.api_keys_file was {reason}"

    def _use_keys(self, found: Any) -> None:
        keys, limits = found
        self.keys.replace(keys)
        if self._limits is not None:
            self._limits.reconfigure(limits, self.keys.tenants)

    def _use_identity(self, identity: ServerIdentity) -> None:
        if self.tls is None:
            self.tls = ServerTlsState(identity)
        self.tls.identity = identity
