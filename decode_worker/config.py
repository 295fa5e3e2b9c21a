"""From the cluster's configuration to what a decode worker needs."""

from engine.assembly import EngineSpec
from kv_transfer.config import TransferSettings
from tandem.config import ClusterConfig
from tandem.errors import ConfigError
from tandem.model_path import model_directory

FIRST_THING_TO_FIX = "secret is not set: `tandem up` draws one; a cluster made by hand states it in its YAML"


def engine_spec(config: ClusterConfig) -> EngineSpec:
    """The engine of one worker. Raises ConfigError."""
    return EngineSpec(
        **config.engine.model_dump(),
        model_path=model_directory(config.model.path),
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        num_workers_here=config.prefill.replicas + config.decode.replicas,
        secret=cluster_secret(config),
    )


def cluster_secret(config: ClusterConfig) -> bytes:
    """The key of block names and of the cluster's gRPC. Raises ConfigError when there is none."""
    if config.secret is None:
        raise ConfigError(FIRST_THING_TO_FIX)
    return config.secret.get_secret_value().encode()


def transfer_settings(config: ClusterConfig) -> TransferSettings:
    """The hand-off layer's bounds."""
    return TransferSettings(lease_s=config.transfer.lease_s, chunk_bytes=config.transfer.chunk_bytes)


def listen_address(config: ClusterConfig, index: int) -> tuple[str, int]:
    """Where this worker of the pool serves. Raises ConfigError."""
    pool = config.decode
    if index >= len(pool.addresses):
        raise ConfigError(f"decode.addresses names {len(pool.addresses)} workers, there is no index {index}")
    host, _, port = pool.addresses[index].rpartition(":")
    return host, int(port)
