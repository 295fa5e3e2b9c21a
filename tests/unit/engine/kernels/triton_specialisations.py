"""Lists the kernels that a GPU would compile, on a machine without one: `python -m` this module, with a number of
random batches to run after the dry run, prints JSON.

Triton decides by a launch's arguments which variant of a kernel it needs: their types, whether they are multiples of
16, one, or absent. Here the launchers run as on an H200, over tensors of the host, up to that decision; nothing is
compiled or computed. So it shows whether the cases of ahead-of-time compilation are the engine's own launches, and
whether requests can meet a variant that the dry run has not: each would keep its whole batch waiting for the compiler.
"""

import itertools
import json
import random
import sys
from array import array
from dataclasses import replace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.backends.cuda import attention as cuda_attention
from engine.backends.cuda.backend import CudaBackend
from engine.backends.options import BackendOptions
from engine.kernels.triton.aot import source_of
from engine.kernels.triton.aot_cases import all_cases
from engine.kernels.triton.sampling import compile_for
from engine.kernels.triton.tuning import load_table
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.backend import ProjectionRole
from engine.model.checkpoints.stored_matrix import GroupIntMatrix, Int8Matrix
from engine.model.loader import build_model
from engine.model.memory_budget import kv_layout
from engine.runner import dry_run
from engine.runner.model_runner import ModelRunner
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench.gpu.sources import RandomSource
from tandem_bench.shapes import SHAPES

CPU = torch.device("cpu")
CONTEXT, ROWS, CHUNK, BLOCK_SIZE = 600, 9, 48, 16
SHAPE = replace(SHAPES["8b"], architecture="Qwen3ForCausalLM", num_layers=1, intermediate_size=1024, vocab_size=512)
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "seed": 3},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {3: 1.0}, "num_logprobs": 2},
)


class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Launches:
    """Stands in for compiling and running: remembers what would be compiled."""

    def __init__(self):
        self.variants = {}

    def install(self):
        run = JITFunction.run
        driver.set_active(Hopper())

        def launch(kernel, *args, grid, warmup, **kwargs):
            if kernel.fn.__name__ == "select_kernel":
                args[2].zero_()  # tokens that exist
            return run(kernel, *args, grid=grid, warmup=True, **kwargs)

        def compile_variant(kernel, key, signature, device, constants, options, attributes, warmup):
            name = kernel.fn.__name__
            self.variants[name, str(key)] = {
                "kernel": name,
                "types": dict(signature),
                "constants": sorted(kernel.arg_names[path[0]] for path in constants),
                "aligned": sorted(kernel.arg_names[path[0]] for path, found in attributes.items() if found),
                "launch": [options.num_warps, options.num_stages, options.enable_fp_fusion],
            }
            kernel.device_caches[device][0][key] = kernel
            return kernel

        JITFunction.run = launch
        JITFunction._do_compile = compile_variant


def make_runner(kv_dtype, *, deterministic):
    options = BackendOptions(device=CPU, dtype="bfloat16", kv_dtype=kv_dtype, deterministic=deterministic)
    backend = CudaBackend(options)
    source = RandomSource(SHAPE, seed=0, dtype=torch.bfloat16, device=CPU)
    model = build_model(SHAPE.model_config("bfloat16"), source, backend=backend)
    layout = kv_layout(model.config, fingerprint="", dtype="bfloat16", block_size=BLOCK_SIZE, kv_dtype=kv_dtype)
    return ModelRunner(model, PagedKVCache(layout, num_blocks=1, device=CPU))


def random_batch(rng):
    """Rows that decode and chunks that begin anywhere, of requests that ask for anything."""
    items = []
    for number in range(rng.randint(1, ROWS)):
        count = 1 if rng.random() < 0.8 else rng.randint(2, CHUNK)
        start = rng.randint(0, CONTEXT - count)
        request = Request(
            request_id=RequestId(str(number)),
            token_ids=array("i", [1]) * (start + count),
            num_prompt_tokens=start + count,
            params=SamplingParams(**rng.choice(PARAMS)),
            hash_root=BlockHash(b""),
            block_table=BlockTable([BlockId(0)] * -(-(start + count) // BLOCK_SIZE)),
        )
        items.append(BatchItem(request=request, start=start, num_tokens=count, samples=rng.random() < 0.9))
    return Batch(items=tuple(items))


def warm(runner):
    """The steps of engine.dry_run on a GPU, and what recording graphs makes besides."""
    spans = [dry_run._prefill_spans(CHUNK + ROWS, CHUNK, ROWS, CONTEXT)]
    spans += dry_run._decode_steps(ROWS, CONTEXT, CONTEXT * ROWS, compiles=True)
    for each in spans:
        runner.launch(dry_run._batch(runner.kv_cache.layout, each)).tokens()
    compile_for(SHAPE.vocab_size, CPU)


def launch_quantized():
    """Products of four bits by groups of 128 with zeros, as a checkpoint of GPTQ or AWQ has them, and of bytes."""

    def matrix(rows, columns):
        zero = torch.arange(rows * columns // 128, dtype=torch.int16).view(rows, -1) % 16
        codes, scale = torch.zeros(rows, columns // 2, dtype=torch.uint8), torch.ones(zero.shape, dtype=torch.float16)
        return GroupIntMatrix(bits=4, num_columns=columns, codes=codes, scale=scale, zero=zero, group_size=128)

    def signed_bytes(rows, columns):
        codes = torch.zeros(rows, columns, dtype=torch.int8)
        return Int8Matrix(codes=codes, scale=torch.ones(rows), rounds_inputs=True)

    for deterministic, make in itertools.product((False, True), (matrix, signed_bytes)):
        options = BackendOptions(device=CPU, dtype="bfloat16", quantization="stored", deterministic=deterministic)
        backend = CudaBackend(options)
        down = backend.closing(make(512, 4096), None, ProjectionRole.DOWN)
        gated = backend.gated(make(512, 4096), None)
        for rows in (1, 3, 40, 300):
            down(torch.zeros(rows, 4096, dtype=torch.bfloat16), torch.zeros(rows, 512, dtype=torch.bfloat16))
            gated(torch.zeros(rows, 4096, dtype=torch.bfloat16))


def described(case):
    """A case as the launches above are described."""
    source, names = source_of(case), case.kernel.arg_names
    return {
        "name": case.name,
        "kernel": case.kernel.fn.__name__,
        "types": dict(source.signature),
        "constants": sorted(names[path[0]] for path in source.constants),
        "aligned": sorted(names[path[0]] for path in source.attrs),
        "launch": [case.num_warps, case.num_stages, not case.constants.get("FIXED_KEYS")],
    }


def main(num_batches):
    launches = Launches()
    launches.install()
    cuda_attention._CPU_SMS = 132  # as many as an H200 has: splits depend on it
    late = []
    for kv_dtype, deterministic in (("auto", False), ("int8", False), ("fp8_e4m3", False), ("auto", True)):
        runner, rng = make_runner(kv_dtype, deterministic=deterministic), random.Random(kv_dtype)
        warm(runner)
        known = set(launches.variants)
        for _ in range(num_batches):
            runner.launch(random_batch(rng)).tokens()
        late += [launches.variants[key] for key in launches.variants if key not in known]
    launch_quantized()
    cases = [described(case) for case in all_cases(load_table("")) if case.representative]
    json.dump({"launched": list(launches.variants.values()), "late": late, "cases": cases}, sys.stdout)


main(int(sys.argv[1]))
