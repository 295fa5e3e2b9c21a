"""Derives the node group of a worker whose ranks are on several nodes from the configuration. Loads no torch."""

import os

from engine.distributed.links.node_group import NodeGroup
from tandem.config.cluster import ClusterConfig
from tandem.config.pools import rank_port
from tandem.config.worker import cluster_secret
from tandem.errors import ConfigError
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.values.roles import WorkerRole
from worker.kv_exchange.config import kv_tls_files

RANK_MODULE = "worker.rank"
"""Module that `python -m` runs as a rank that may have its KV for itself."""
_REVISION = "GROUP_REVISION"
"""Environment variable of a group's pods."""


def node_group(
    config: ClusterConfig, role: WorkerRole, index: int, host: str, credentials: ClusterCredentials | None
) -> NodeGroup | None:
    """The nodes of one worker whose first rank is at `host`; None when all are on one. Raises ConfigError.

    `credentials`: those of `cluster.tls`.
    """
    pool = config.prefill if role is WorkerRole.PREFILL else config.decode
    if pool.nodes == 1:
        return None
    try:
        return NodeGroup(
            num_nodes=pool.nodes,
            size=pool.tensor_parallel_size,
            host=host.strip("[]"),
            port=rank_port(pool, index),
            secret=cluster_secret(config),
            tls=kv_tls_files(config.transfer, credentials),
            isolated_network=config.transfer.isolated_network,
            join_s=pool.join_s,
            revision=os.environ.get(_REVISION, ""),
        )
    except ConfigError as error:
        raise ConfigError(f"{role.value}.{error}") from None
