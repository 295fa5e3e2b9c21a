"""The parts of the suite in order, each with its budget. Imports none of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of the suite, run in a process of its own."""

    name: str
    module: str
    function: str
    """Name of the function `(Stage) -> Findings`."""
    budget_s: float


def _part(name: str, where: str, budget_s: float) -> Part:
    module, _, function = where.rpartition(".")
    return Part(name=name, module=f"tandem_bench.gpu.{module}", function=function, budget_s=budget_s)


PARTS = (
    _part("environment", "machine.environment", 10),
    _part("ceilings", "machine.ceilings", 14),
    _part("parity.flash_decode", "kernels.attention_parity.flash_decode_parity", 26),
    _part("parity.paged_prefill", "kernels.attention_parity.paged_prefill_parity", 26),
    _part("parity.rope_kv", "kernels.row_parity.rope_kv_parity", 14),
    _part("parity.add_rms_norm", "kernels.row_parity.add_rms_norm_parity", 10),
    _part("parity.silu_mul", "kernels.row_parity.silu_mul_parity", 10),
    _part("parity.gemm_fixed", "kernels.row_parity.gemm_fixed_parity", 14),
    _part("parity.gemm_few", "kernels.row_parity.gemm_few_parity", 22),
    _part("parity.group_gemm", "kernels.quantized_products.group_gemm_parity", 22),
    _part("parity.byte_gemm", "kernels.quantized_products.byte_gemm_parity", 14),
    _part("parity.sampling", "kernels.row_parity.sampling_parity", 14),
    _part("parity.engine", "engine_parity.engine_parity", 66),
    _part("speed.decode", "model_speed.decode", 40),
    _part("speed.chunks", "model_speed.chunks", 28),
    _part("speed.prefill", "model_speed.prefill", 13),
    _part("speed.pipelining", "pipelining.pipelining", 14),
    _part("speed.flash_decode", "kernels.speed.flash_decode_speed", 18),
    _part("speed.paged_prefill", "kernels.speed.paged_prefill_speed", 12),
    _part("speed.rows", "kernels.speed.row_kernels_speed", 12),
    _part("speed.quantized", "kernels.quantized_products.group_gemm_speed", 16),
    _part("memory.quantised_kv", "kernels.quantised_kv.sequences_held", 10),
    _part("hand-off", "hand_off.hand_off", 30),
)
APART = (
    _part("peer.transformers", "transformers_peer.continuous_batching", 150),
    _part("cluster", "cluster.part.cluster", 240),
)
"""Parts that run only when they are named: they do not fit into the eight minutes of the others, and need more."""
