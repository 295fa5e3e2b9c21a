"""All rows, and where the settings are tested that no row has."""

from tests.e2e.settings import access_rows, engine_rows, router_rows

ROWS = {**engine_rows.ROWS, **router_rows.ROWS, **access_rows.ROWS}

_ANSWERS, _FAILURES, _OPERATION = (f"tests/e2e/{folder}" for folder in ("answers", "failures", "operation"))
ELSEWHERE = {
    **dict.fromkeys(("log_format", "log_format=json", "telemetry.otlp_protocol=grpc"), f"{_OPERATION}/test_traces.py"),
    **dict.fromkeys(("standby_workers",), f"{_FAILURES}/test_standby.py"),
    **dict.fromkeys(("control_socket",), f"{_OPERATION}/test_autoscale.py"),
    "model.generation_config=none": f"{_ANSWERS}/test_generation_config.py",
    "model.reranker=qwen3": "tests/e2e/models/test_pooling_models.py",
    **dict.fromkeys(
        (
            *("model.adapters", "model.adapter_folder", "engine.adapter_bytes", "engine.max_adapter_rank"),
            *("router.limits.default.adapters", "router.limits.tenants.adapters"),
        ),
        f"{_ANSWERS}/test_adapters.py",
    ),
    "engine.device=cuda": "tests/gpu/test_engine_cuda.py",
    "engine.num_threads": "tests/support/running_cluster.py",
    "engine.offload_bytes": f"{_ANSWERS}/test_pipelined.py",
    **dict.fromkeys(
        ("engine.host_cache_bytes", "engine.disk_cache_bytes", "engine.disk_cache_path"),
        f"{_ANSWERS}/test_cache_tiers.py",
    ),
    "engine.kv_memory=private": f"{_ANSWERS}/test_tensor_parallel.py",
    **{
        f"engine.speculation.sources={one}": f"{_ANSWERS}/test_speculation.py"
        for one in ("grammar", "lookup", "prediction", "suffix")
    },
    **dict.fromkeys(
        ("engine.speculation.max_draft_tokens", "engine.speculation.adaptive"), f"{_ANSWERS}/test_speculation.py"
    ),
    "transfer.transport=cuda_ipc": "tandem_bench/gpu/cluster/runs.py",
    **dict.fromkeys(
        ("router.host", "router.processes", "router.handover_socket"), f"{_OPERATION}/test_rolling_restart.py"
    ),
    "router.max_body_bytes": f"{_FAILURES}/test_bad_input_page.py",
    "router.max_queue_s": f"{_ANSWERS}/test_parity.py",
    "router.worker_silence_s": f"{_OPERATION}/test_traces.py",
    **{
        f"{pool}.{name}": path
        for pool in ("prefill", "decode")
        for name, path in {
            "port": "tests/containers/nodes.py",
            "addresses": "tests/images/containers.py",
            "tensor_parallel_size": f"{_ANSWERS}/test_tensor_parallel.py",
            "nodes": f"{_ANSWERS}/test_nodes.py",
            "rank_port": f"{_ANSWERS}/test_nodes.py",
            "join_s": f"{_ANSWERS}/test_nodes.py",
            "rack": f"{_ANSWERS}/test_unequal_pools.py",
            "drain_s": f"{_FAILURES}/test_dying_processes.py",
        }.items()
    },
    "prefill.block_size=64": f"{_ANSWERS}/test_unequal_pools.py",
    **{f"decode.block_size={size}": f"{_ANSWERS}/test_unequal_pools.py" for size in (32, 64)},
    **dict.fromkeys(
        ("redis.sentinels", "redis.sentinel_master", "redis.sentinel_username", "redis.sentinel_password"),
        f"{_FAILURES}/test_sentinel.py",
    ),
    "ray.address": f"{_OPERATION}/test_ray.py",
    **dict.fromkeys(
        (
            *("ray.silence_s", "ray.prefill.cpus", "ray.prefill.resources"),
            *("ray.decode.cpus", "ray.decode.resources"),
        ),
        f"{_OPERATION}/test_ray_bounds.py",
    ),
    **dict.fromkeys(
        ("prices.prompt_per_million", "prices.cached_discount", "prices.completion_per_million"),
        f"{_OPERATION}/test_timing.py",
    ),
    "cluster.tls.mode=permissive": f"{_OPERATION}/test_cluster_tls.py",
    **dict.fromkeys(("cluster.tls.cert", "cluster.tls.key", "cluster.tls.ca"), f"{_OPERATION}/test_cluster_tls.py"),
}
"""`setting` or `setting=choice`: a file that sets it in a cluster."""

WITHOUT_A_CLUSTER = {
    "prefill.gpus": "tests/unit/tandem/config/test_gpu_placement.py",
    "decode.gpus": "tests/unit/tandem/config/test_gpu_placement.py",
}
"""What only a host with several GPUs could show: files that test it with a host that is made up."""
