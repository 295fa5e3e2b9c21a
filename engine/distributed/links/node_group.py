"""A group of ranks that spans nodes: who is where, and how the others reach rank 0. Plain values."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.errors import ConfigError
from tandem.rpc.hosts import is_loopback
from tandem.rpc.mutual_tls import MutualTls, TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """One worker's ranks over its nodes, as many on each; the first node is that of rank 0."""

    num_nodes: int
    size: int
    host: str
    """Where rank 0 listens for the ranks of other nodes, and they for it."""
    port: int
    secret: bytes
    """The cluster's."""
    tls: TlsFiles | None
    join_s: float
    """How long rank 0 waits for all to come."""
    isolated_network: bool = False
    revision: str = ""
    """Of what this node runs, where somebody says it: ranks of another are of a group that comes or goes."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a group that cannot be, or must not: what it says would be everybody's to read."""
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
        """The same on every node."""
        return self.size // self.num_nodes

    @property
    def elsewhere(self) -> range:
        """The ranks that are not on rank 0's node."""
        return range(self.ranks_per_node, self.size)

    def ranks_of(self, node: int) -> range:
        """The ranks of one node. Raises ConfigError when there is no such node, or it is rank 0's."""
        if not 0 < node < self.num_nodes:
            raise ConfigError(f"node must be in [1, {self.num_nodes - 1}], got {node}")
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def open_tls(self) -> MutualTls | None:
        """What the connections are made with; None: in the clear, on this machine alone. Raises ConfigError."""
        return None if self.tls is None else MutualTls(self.tls)

    def to_json(self) -> bytes:
        """For a process that is to join; the secret is in it."""
        values = asdict(self) | {"secret": self.secret.hex()}
        return json.dumps(values, default=str).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "NodeGroup":
        """What `to_json` was given."""
        values = json.loads(data)
        tls = None
        if (files := values.pop("tls")) is not None:
            setting = files.pop("setting")
            tls = TlsFiles(**{name: Path(path) for name, path in files.items()}, setting=setting)
        return cls(**{**values, "secret": bytes.fromhex(values["secret"])}, tls=tls)
