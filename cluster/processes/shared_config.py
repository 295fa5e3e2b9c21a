"""The configuration that every process of a cluster reads, and its changes while they run."""

from collections.abc import Mapping

from cluster.processes.effective_config import with_addresses, with_live_settings, with_sizes
from cluster.processes.launcher import Launcher
from cluster.supervisor.exceptions import ChangeFailed
from cluster.supervisor.supervisor import Role
from tandem.config.cluster import ClusterConfig


class SharedConfig:
    """Holds the configuration that was written last; if a write fails, it stays as it was."""

    def __init__(self, launcher: Launcher, config: ClusterConfig) -> None:
        """`config` as the user wrote it. Raises ConfigError for an invalid one."""
        self._launcher = launcher
        self.config = launcher.settle(config)

    def resize(self, sizes: Mapping[Role, int]) -> None:
        """Set the number of workers of each pool, by which new ones share the machine. Raises ChangeFailed."""
        try:
            self._write(with_sizes(self.config, {role.value: size for role, size in sizes.items()}))
        except OSError as error:  # a full disk, or a cleared temporary folder
            raise ChangeFailed(f"cannot write the configuration: {error.strerror or error}") from None

    def name_workers(self, *, prefill: tuple[str, ...], decode: tuple[str, ...]) -> bool:
        """Write the worker addresses for routers; False when they are unchanged. Raises OSError."""
        named = with_addresses(self.config, prefill=prefill, decode=decode)
        if named == self.config:
            return False
        self._write(named)
        return True

    def apply_live_settings(self, fresh: ClusterConfig) -> None:
        """Apply the settings of `fresh` that need no restart, effective from the next SIGHUP. Raises OSError."""
        self._write(with_live_settings(self.config, fresh))

    def _write(self, config: ClusterConfig) -> None:
        self._launcher.configure(config)
        self.config = config
