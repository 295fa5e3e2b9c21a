"""The LoRA adapters that clients may name as `model`: those of the configuration, and those loaded while it runs. Pure.

Every router keeps the changes that were made while the cluster runs, and merges the others': of two changes of one
name the later counts, so that they may arrive twice, late, and in any order. Nothing here loads weights: a worker loads
an adapter with the first request for it.
"""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from tandem.adapters.files import Adapter, read_adapter
from tandem.cluster_state.entries import MAX_ADAPTER_CHANGES, AdapterChange
from tandem.errors import InvalidRequest, ModelNotFound, NotAllowed

_REMEMBERED_MS = 3_600_000
"""How long an unloaded adapter is remembered: until every other router has long heard of it."""
_SHOWN_CHARS = 100
_STORE_AGAIN_S = 1.0
"""Time between two tries to write changes that could not be written."""
_log = logging.getLogger(__name__)


class AdapterChanges(Protocol):
    """Keeps the changes of the router processes that share a host's ports."""

    def read(self) -> Iterable[AdapterChange]:
        """Return the changes that this process may not have seen; empty when there are none. Does not wait. Raises
        OSError."""
        ...

    def write(self, changes: Iterable[AdapterChange]) -> None:
        """Add changes of this process; when this returns, every other process's `read` returns them. Raises OSError."""
        ...


class ServedAdapters:
    """The adapters of one router, by name, and who may use them."""

    def __init__(
        self,
        model_name: str,
        configured: Iterable[Adapter] = (),
        *,
        folder: Path | None = None,
        may_use: Callable[[str, str], bool] | None = None,
        read: Callable[[str, Path], Adapter] = read_adapter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder`: the only place that adapters may be loaded from while the cluster runs, None: nowhere. `may_use`:
        whether a tenant may use the adapter of a name; None: every tenant all of them. `read` identifies the adapter
        of a name by its files, and raises ConfigError for one that workers would refuse.
        """
        self.folder = folder
        self.read = read
        self.store: AdapterChanges | None = None
        """Set before the servers open where processes share the ports."""
        self._model_name = model_name
        self._configured = {adapter.name: adapter for adapter in configured}
        self._served = dict(self._configured)
        self._changes: dict[str, AdapterChange] = {}
        self._unwritten: dict[str, AdapterChange] = {}
        """Changes that the store does not have yet."""
        self._tried_s = 0.0
        self._faults: dict[str, str] = {}
        """What was logged last about the store."""
        self._may_use = may_use
        self._wall_clock = wall_clock

    def __len__(self) -> int:
        return len(self._served)

    def remembers(self, name: str) -> bool:
        """Whether an adapter of a name is served, or was until lately."""
        change = self._changes.get(name)
        lately = change is not None and self._is_remembered(change, self._remembered_since_ms())
        return name in self._served or lately

    def get(self, name: str, tenant: str) -> Adapter:
        """Return the adapter of a name. Raises ModelNotFound, also where the tenant may not use it: what others may
        use is not revealed."""
        self._catch_up()
        adapter = self._served.get(name)
        if adapter is None or not self._is_allowed(adapter, tenant):
            rest = ", and the adapters that GET /v1/models lists" if self._served else ""
            shown = name[:_SHOWN_CHARS]
            raise ModelNotFound(f"model {shown!r} is not served here; {self._model_name!r} is{rest}", param="model")
        return adapter

    def available(self, tenant: str) -> list[Adapter]:
        """Return the adapters that a tenant may use, by name."""
        self._catch_up()
        return sorted((one for one in self._served.values() if self._is_allowed(one, tenant)), key=lambda one: one.name)

    def resolve(self, path: str) -> Path:
        """Return the directory that a client may load an adapter from, with its links resolved; a relative path is one
        below the folder. Raises NotAllowed without a folder, or for a path outside of it.
        """
        if self.folder is None:
            raise NotAllowed("adapters can be loaded only where model.adapter_folder is set")
        try:
            folder, found = self.folder.resolve(), (self.folder / path).resolve()
        except (OSError, ValueError, RuntimeError):
            raise InvalidRequest("lora_path: not a path", param="lora_path") from None
        if not found.is_relative_to(folder) or found == folder:
            raise NotAllowed("lora_path must lead below model.adapter_folder, after resolving links", param="lora_path")
        return found

    def check_new(self, name: str, *, replaces: bool) -> None:
        """Check that an adapter may be added under a name. Raises InvalidRequest."""
        self._catch_up()
        if name == self._model_name:
            raise InvalidRequest(f"lora_name: {name!r} is the served model", param="lora_name")
        if name in self._served and not replaces:
            raise InvalidRequest(
                f"lora_name: {name[:_SHOWN_CHARS]!r} is loaded already; unload it first, or send load_inplace",
                param="lora_name",
            )
        if name not in self._changes and len(self._changes) >= MAX_ADAPTER_CHANGES:
            self._forget()
            if len(self._changes) >= MAX_ADAPTER_CHANGES:
                most = f"at most {MAX_ADAPTER_CHANGES} adapters beside those of model.adapters"
                hint = "unload others first; those unloaded within the last hour count"
                raise InvalidRequest(f"lora_name: {most}; {hint}", param="lora_name")

    def add(self, adapter: Adapter, *, replaces: bool = False) -> None:
        """Serve an adapter from now on, here and at the other routers. Raises as `check_new`."""
        self.check_new(adapter.name, replaces=replaces)
        self._change(adapter.name, adapter)

    def remove(self, name: str) -> None:
        """Serve no adapter under a name any more; requests under way continue. Raises ModelNotFound."""
        self._catch_up()
        if name not in self._served:
            raise ModelNotFound(f"lora_name: no adapter {name[:_SHOWN_CHARS]!r} is loaded", param="lora_name")
        self._change(name, None)

    @property
    def changes(self) -> tuple[AdapterChange, ...]:
        """The changes that this router remembers, for other routers: at most MAX_ADAPTER_CHANGES, the newest first."""
        self._catch_up()
        return tuple(self._changes.values())

    def merge(self, changes: Iterable[AdapterChange]) -> None:
        """Merge changes that other routers know; processes that share the ports see them from now on, or once the
        store works again."""
        if (news := self._merged(changes)) and self.store is not None:
            self._unwritten |= {change.name: change for change in news}
            self._write(self.store)

    def _catch_up(self) -> None:
        if self.store is None:
            return
        try:
            changes = self.store.read()
        except OSError as error:
            self._report("read", str(error))
        else:
            self._report("read", "")
            self._merged(changes)
        if self._unwritten and not 0.0 <= self._wall_clock() - self._tried_s < _STORE_AGAIN_S:
            self._write(self.store)

    def _write(self, store: AdapterChanges) -> None:
        self._tried_s = self._wall_clock()
        try:
            store.write(self._unwritten.values())
        except OSError as error:
            self._report("write", str(error))
        else:
            self._report("write", "")
            self._unwritten.clear()

    def _report(self, what: str, fault: str) -> None:
        """Log what is wrong with the store, once."""
        if self._faults.get(what, "") != fault:
            self._faults[what] = fault
            if fault:
                _log.error("cannot %s the changes of adapters that processes of this host share: %s", what, fault)

    def _change(self, name: str, adapter: Adapter | None) -> None:
        before, now_ms = self._changes.get(name), int(self._wall_clock() * 1e3)
        version = now_ms if before is None else max(now_ms, before.version + 1)
        self.merge([AdapterChange(name=name, version=version, adapter=adapter)])

    def _merged(self, changes: Iterable[AdapterChange]) -> list[AdapterChange]:
        """Merge changes and return those that are news here."""
        news, since_ms = [], self._remembered_since_ms()
        for change in changes:
            own = self._changes.get(change.name)
            if change.name == self._model_name or (own is not None and own.order >= change.order):
                continue
            if own is None and not self._is_remembered(change, since_ms):
                continue  # of a router that has not forgotten it yet: or each would tell the others again
            self._changes[change.name] = change
            if change.adapter is None:
                self._served.pop(change.name, None)
            else:
                self._served[change.name] = change.adapter
            news.append(change)
        if news:
            self._forget()
        return [change for change in news if change.adapter is None or change.name in self._changes]

    def _forget(self) -> None:
        """Forget names that were unloaded long ago, except those that the configuration has; and of too many changes
        the oldest, so that every router is told of all that are left. Such adapters are no longer served."""
        since_ms = self._remembered_since_ms()
        kept = [change for change in self._changes.values() if self._is_remembered(change, since_ms)]
        kept.sort(key=lambda change: (change.name in self._configured, change.order), reverse=True)
        for change in kept[MAX_ADAPTER_CHANGES:]:
            if change.name not in self._configured:
                self._served.pop(change.name, None)
        newest_first = sorted(kept[:MAX_ADAPTER_CHANGES], key=lambda change: change.order, reverse=True)
        self._changes = {change.name: change for change in newest_first}

    def _remembered_since_ms(self) -> int:
        return int(self._wall_clock() * 1e3) - _REMEMBERED_MS

    def _is_remembered(self, change: AdapterChange, since_ms: int) -> bool:
        return change.adapter is not None or change.version > since_ms or change.name in self._configured

    def _is_allowed(self, adapter: Adapter, tenant: str) -> bool:
        return self._may_use is None or self._may_use(tenant, adapter.name)
