"""A group of ranks that spans nodes: which rank is on which node, and how they reach rank 0. Plain values."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.errors import ConfigError
from tandem.rpc.hosts import is_loopback
from tandem.rpc.mutual_tls import MutualTls, TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """One worker's ranks over its nodes, the same number on each; rank 0 is on the first node."""

    num_nodes: int
    size: int
    host: str
    """Address at which rank 0 listens for the ranks of other nodes."""
    port: int
    secret: bytes
    """The cluster's secret, by which ranks authenticate each other."""
    tls: TlsFiles | None
    join_s: float
    """Longest time that rank 0 waits for all to join."""
    isolated_network: bool = False
    revision: str = ""
    """Revision of this node's deployment, if stated: ranks of another belong to a group that is starting or ending."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a group that is impossible, or whose traffic others could read."""
        if self.num_nodes < 2 or self.size % self.num_nodes:
            raise ConfigError(f"{self.size} ranks cannot be spread evenly over {self.num_nodes} nodes")
        if is_loopback(self.host):
            return
        if self.tls is None:
            raise ConfigError(
                f"nodes is {self.num_nodes}: beyond this machine (at {self.host}) that needs cluster.tls or"
                " transfer.tls"
            )
        if not self.isolated_network:
            raise ConfigError(
                f"nodes is {self.num_nodes}: gloo and NCCL neither encrypt nor authenticate what they sum, so beyond "
                f"this machine (at {self.host}) that needs transfer.isolated_network: true"
            )

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.size // self.num_nodes

    @property
    def elsewhere(self) -> range:
        """Ranks that are not on rank 0's node."""
        return range(self.ranks_per_node, self.size)

    def ranks_of(self, node: int) -> range:
        """Ranks of one node. Raises ConfigError for a node that does not exist, or rank 0's."""
        if not 0 < node < self.num_nodes:
            raise ConfigError(f"node must be in [1, {self.num_nodes - 1}], got {node}")
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def open_tls(self) -> MutualTls | None:
        """Load the certificates for the connections; None: unencrypted, only within this machine. Raises
        ConfigError.
        """
        return None if self.tls is None else MutualTls(self.tls)

    def to_json(self) -> bytes:
        """Encode the group for a process that is to join; contains the secret."""
        values = asdict(self) | {"secret": self.secret.hex()}
        return json.dumps(values, default=str).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "NodeGroup":
        """Decode the output of `to_json`."""
        values = json.loads(data)
        tls = None
        if (files := values.pop("tls")) is not None:
            setting = files.pop("setting")
            tls = TlsFiles(**{name: Path(path) for name, path in files.items()}, setting=setting)
        return cls(**{**values, "secret": bytes.fromhex(values["secret"])}, tls=tls)
