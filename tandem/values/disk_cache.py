"""Checks the settings of the disk cache for contradictions, for the configuration and the engine. Pure."""


def contradiction(*, has_path: bool, disk_cache_bytes: int, host_cache_bytes: int, num_ranks: int) -> str | None:
    """The contradiction, beginning with the setting's name; None when workers of `num_ranks` can keep blocks there."""
    if not has_path and not disk_cache_bytes:
        return None
    if not has_path or not disk_cache_bytes:
        return "engine.disk_cache_path and engine.disk_cache_bytes are set together or not at all"
    if not host_cache_bytes:
        return "engine.disk_cache_path needs engine.host_cache_bytes: blocks go to and from disk through it"
    if num_ranks > 1:
        return (
            f"engine.disk_cache_path with tensor_parallel_size {num_ranks}: each rank has its share of a block in "
            "memory of its own; blocks on disk are for one rank"
        )
    return None
