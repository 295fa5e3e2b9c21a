"""What tools themselves write is read as they restore it, and served so: token for token, by any number of ranks.

Minutes for each tool, whose environment is made at the first run. A tool that cannot be had fails its tests, with what
pip said; writers of its documented layout (`tests/support/engine/quantized_writers.py`) are tested everywhere.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.kernels.cpu.gemm import Arithmetic
from tandem.errors import ConfigError
from tandem_bench.peers.environments import PeerNotInstalled
from tandem_bench.quality.engine_forward import EngineForward, Precision
from tests.support.engine.paged_harness import needs
from tests.support.oracle import BUILTIN, Oracle, prompts
from tests.support.running_cluster import running
from tests.tools.environments import TOOLS
from tests.tools.models import checkpoint, read_matrices, write_restored, write_seeded_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
MODELS = ("builtin", "seeded")
MAX_TOKENS = 24
LARGEST_DIFFERENCE = 1e-4
MOST_DIVERGENCE_NATS, LEAST_AGREEMENT = 1e-3, 0.995
_NUM_SCORED, _SCORED_TOKENS = 8, 160
READ = [(tool, way) for tool, one in TOOLS.items() for way in (*one.ways, *one.rounding)]
ROUNDING = [(tool, way) for tool, one in TOOLS.items() for way in one.rounding]
REFUSED = [(tool, way) for tool, one in TOOLS.items() for way in one.refused]
Written = Callable[[str, str, str], Path]


def source_of(model: str, out: Path) -> Path:
    """The directory that was quantized."""
    return BUILTIN if model == "builtin" else out / "source"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """The folder that a tool wrote of a model, in a way: all of its ways at its first use."""

    @cache
    def of_all_ways(tool: str, model: str) -> Path | str:
        out = tmp_path_factory.mktemp(f"{tool}-{model}")
        if model == "seeded":
            write_seeded_llama(source_of(model, out))
        source = source_of(model, out)
        oracle = Oracle(source)
        scored = [oracle.story(i, _SCORED_TOKENS) for i in range(_NUM_SCORED)]
        (out / "prompts.json").write_text(json.dumps(scored), encoding="utf-8")
        try:
            TOOLS[tool].write(source, out)
        except PeerNotInstalled as error:
            return str(error)
        return out

    def of(tool: str, model: str, way: str) -> Path:
        out = of_all_ways(tool, model)
        if isinstance(out, str):
            pytest.fail(f"{tool} cannot be had here: {out}")
        folder = out / way
        if (failed := folder / "error.txt").exists():
            pytest.fail(f"{tool} cannot write {way}: {failed.read_text(encoding='utf-8')}")
        return folder

    yield of
    of_all_ways.cache_clear()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tool", "way"), READ)
def test_tool_checkpoint_is_read_as_the_tool_restores_it(tool: str, way: str, model: str, written: Written) -> None:
    folder = written(tool, model, way)
    expected = load_file(folder / "restored.safetensors")
    found = read_matrices(checkpoint(folder))
    assert found.keys() == {name for name in expected if "_proj." in name}
    worst = max(float((found[name] - expected[name]).abs().max()) for name in found)
    assert worst <= LARGEST_DIFFERENCE


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4)], ids=["ranks 1 and 2", "ranks 2 and 4"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tool", "way"), READ)
async def test_tool_checkpoint_through_both_pools_equals_transformers_with_what_the_tool_restores(
    tool: str, way: str, model: str, sizes: tuple[int, int], written: Written, tmp_path: Path
) -> None:
    folder = written(tool, model, way)
    restored = load_file(folder / "restored.safetensors")
    dense = write_restored(source_of(model, folder.parent), folder / "stored", restored, tmp_path / "dense")
    oracle = Oracle(dense)
    cases = [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in prompts(oracle, 4, seed=22)]
    ways: dict[str, Any] = {"model__path": str(checkpoint(folder)), "model__dtype": "float32"}
    for pool, size in zip(("prefill", "decode"), sizes, strict=True):
        ways[f"{pool}__tensor_parallel_size"] = size
    async with running(**ways) as cluster:
        answers = await asyncio.gather(*(cluster.tokens(prompt, MAX_TOKENS) for prompt, _ in cases))
        assert answers == [expected for _, expected in cases]
        assert await cluster.disaggregated() > 0
        assert any("weights are restored to float32 from" in line for line in cluster.logs.lines)
        await cluster.until_idle()


@pytest.mark.parametrize(("tool", "way"), ROUNDING)
def test_tool_checkpoint_that_rounds_inputs_is_computed_as_the_tool_computes_it(
    tool: str, way: str, written: Written
) -> None:
    needs(Arithmetic.INT8_VECTORS)
    folder = written(tool, "builtin", way)
    scored = json.loads((folder.parent / "prompts.json").read_text(encoding="utf-8"))
    theirs = load_file(folder / "logits.safetensors")["logits"].log_softmax(-1)
    forward = EngineForward(
        folder / "stored", Precision(dtype="bfloat16", quantization="stored"), num_threads=1, max_tokens=_SCORED_TOKENS
    )
    ours = torch.stack([forward(ids) for ids in scored]).log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    agreement = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
    print(f"{tool} {way}: KL {float(divergence.mean()):.6f}, top-1 {float(agreement):.4f}")
    assert float(divergence.mean()) <= MOST_DIVERGENCE_NATS
    assert float(agreement) >= LEAST_AGREEMENT


@pytest.mark.parametrize(("tool", "way"), REFUSED)
def test_tool_checkpoint_that_is_not_read_is_refused_by_name(tool: str, way: str, written: Written) -> None:
    folder = written(tool, "builtin", way)
    with pytest.raises(ConfigError, match=TOOLS[tool].refused[way]):
        read_matrices(checkpoint(folder))
