"""A quantized checkpoint through both pools says what `transformers` says with its restored weights."""

import asyncio
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.engine.quantized_writers import pack_stream
from tests.support.oracle import BUILTIN, Oracle, prompts
from tests.support.running_cluster import running

MAX_TOKENS = 24
GROUP = 32
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def quantize(folder: Path) -> None:
    """Write the built-in model in W4A16, rounded to nearest, to `folder/w4a16`, and as restored to `folder/dense`."""
    stored, dense = {}, {}
    for file in BUILTIN.glob("*.safetensors"):
        for name, values in load_file(file).items():
            dense[name] = values.float()
            if not name.endswith("_proj.weight"):
                stored[name] = dense[name]
                continue
            rows, columns = values.shape
            groups = dense[name].view(rows, columns // GROUP, GROUP)
            scale = (groups.abs().amax(2, keepdim=True).clamp(min=1e-6) / 7).half().float()
            codes = torch.round(groups / scale).clamp(-8, 7)
            dense[name] = (codes * scale).view(rows, columns)
            packed = pack_stream(codes.view(rows, columns).to(torch.int64).numpy() + 8, 4)
            stored[f"{name}_packed"] = torch.from_numpy(packed.copy())
            stored[f"{name}_scale"] = scale.squeeze(2).half()
            stored[f"{name}_shape"] = torch.tensor([rows, columns])
    config = json.loads((BUILTIN / "config.json").read_text())
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    }
    for kind, tensors, more in (("w4a16", stored, {"quantization_config": settings}), ("dense", dense, {})):
        path = folder / kind
        shutil.copytree(BUILTIN, path, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | more))


async def test_quantized_checkpoint_through_both_pools_equals_transformers_with_restored_weights(
    fork_servers, tmp_path
):
    quantize(tmp_path)
    oracle = Oracle(tmp_path / "dense")
    cases = [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in prompts(oracle, 6, seed=8)]
    ways = {"model__path": str(tmp_path / "w4a16"), "model__dtype": "float32", "decode__tensor_parallel_size": 2}
    async with running(command=fork_servers.command, **ways) as cluster:
        answers = await asyncio.gather(*(cluster.tokens(prompt, MAX_TOKENS) for prompt, _ in cases))
        assert answers == [expected for _, expected in cases]
        assert await cluster.disaggregated() > 0
        lines = [line for line in cluster.logs.lines if "weights are restored to float32 from" in line]
        assert len(lines) == 2  # of the prefill worker, and of the decode worker's first rank
        assert all("compressed-tensors pack-quantized, 4 bits, groups of 32" in line for line in lines)
        await cluster.until_idle()
