"""A cluster whose model does worse than its gate allows does not start, and says why."""

import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from cluster.supervisor.exceptions import ClusterFailed
from tandem.model_path import BUILTIN, model_directory
from tandem_bench.quality.__main__ import main as write_gate
from tests.support.running_cluster import running

pytestmark = pytest.mark.slow


async def test_cluster_with_a_wrecked_scale_does_not_start(fork_servers, tmp_path):
    folder = tmp_path / "wrecked"
    shutil.copytree(model_directory(BUILTIN), folder)
    write_gate([BUILTIN, "--suite", "kl", "--samples", "2", "--gate", str(folder / "gate.json")])
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(weights | {name: weights[name] * 4}, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"model__path": str(folder), "engine__quality_gate": "gate.json"}
    with pytest.raises(ClusterFailed) as failed:
        async with running(command=fork_servers.command, **settings):
            pass
    wrong = rf"error: engine\.quality_gate: {re.escape(str(folder))}/gate\.json: perplexity [\d.]+, \+[\d.]+ % from"
    assert re.search(wrong, str(failed.value)), failed.value
