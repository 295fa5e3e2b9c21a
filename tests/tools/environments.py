"""The tools that quantize models: how each is installed, which script calls it, and in which ways it is asked to.

A tool sees the packages of the interpreter that the tests run with: its own torch would be gigabytes. Where pip would
replace that torch all the same, the tool's other requirements are named, and pip asks for no more.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem_bench.peers.environments import PeerEnvironment, ensure

ROOT = Path(__file__).parents[2]
_LONGEST_S = 3000.0
_LAST_CHARACTERS = 3000
_DATASETS = (
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "pandas==3.1.1",
    "pyarrow==26.0.1",
    "xxhash==4.1.0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool and what it is asked to write."""

    module: str
    """The script, among these tests."""
    environment: PeerEnvironment
    ways: Sequence[str]
    """In float32 the weights are what the tool restores; inputs are not rounded."""
    rounding: Sequence[str] = ()
    """Likewise, and with `stored` inputs are rounded as well, as the tool computes."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What is not read, and the text by which it is refused."""

    @property
    def all_ways(self) -> tuple[str, ...]:
        return (*self.ways, *self.rounding, *self.refused)

    def write(self, source: Path, out: Path) -> None:
        """Have the tool write every way to `out` (`tests.tools.written`). Raises PeerNotInstalled."""
        python = ensure(self.environment, print)
        left = list(self.all_ways)
        while left:
            command = [str(python), "-m", f"tests.tools.{self.module}", str(source), str(out), *left]
            code, output = _run(command, out)
            if code == 0:
                return
            # The last way begun ended the tool's process: those after it get another.
            begun = [way for way in left if (out / way).exists()]
            last = begun[-1] if begun else left[-1]
            for way in (last,) if begun else left:
                (out / way).mkdir(exist_ok=True)
                (out / way / "error.txt").write_text(f"its process ended ({code}): {output}", encoding="utf-8")
            left = left[left.index(last) + 1 :]


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Exit status and last output of a tool, which is ended after `_LONGEST_S` seconds and runs in `folder`."""
    limit = ["timeout", "--kill-after=10", f"{_LONGEST_S:.0f}"]
    done = subprocess.run(
        [*limit, *command],
        cwd=folder,
        env=_variables(),
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout[-_LAST_CHARACTERS:]


def _variables() -> dict[str, str]:
    """What the tool's process has: this tree, and no model hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TANDEM_"))}
    return kept | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


TOOLS: Mapping[str, Tool] = {
    "llmcompressor": Tool(
        module="on_llmcompressor",
        environment=PeerEnvironment(name="tool-llmcompressor", steps=(("llmcompressor==0.14.0.1",),), sees_ours=True),
        ways=(
            *("W4A16", "W4A16_ASYM", "W8A16", "W2A16", "W3A16", "W6A16", "MXFP4A16", "MXFP8A16"),
            *("NVFP4A16", "W4AFP8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "GPTQ-W4A16", "GPTQ-W8A16"),
        ),
        rounding=("W8A8", "GPTQ-W8A8"),
    ),
    "gptqmodel": Tool(
        module="on_gptqmodel",
        environment=PeerEnvironment(
            name="tool-gptqmodel",
            steps=(
                (
                    *("--no-deps", "gptqmodel==7.7.0", "accelerate==1.15.0", "defuser==0.0.28", "device-smi==0.5.7"),
                    *("logbar==0.4.15", "maturin==1.16.0", "ninja==1.13.2", "pypcre==0.6.4", "threadpoolctl==3.8.0"),
                    *("tokenicer==0.0.14", "torchao==0.18.0", *_DATASETS),
                ),
            ),
            sees_ours=True,
        ),
        ways=(
            *("gptq-4-128", "gptq-4-64-desc_act", "gptq-8-row", "gptq-3-64", "gptq-2-64"),
            *("gptq-4-32-v2-asym", "awq-4-64-asym"),
        ),
    ),
    "bitsandbytes": Tool(
        module="on_bitsandbytes",
        environment=PeerEnvironment(
            name="tool-bitsandbytes", steps=(("bitsandbytes==0.50.2", "accelerate==1.15.0"),), sees_ours=True
        ),
        ways=("nf4", "nf4-nested", "fp4", "fp4-nested", "int8"),
    ),
    "torchao": Tool(
        module="on_torchao",
        environment=PeerEnvironment(
            name="tool-torchao", steps=(("torchao==0.18.0", "accelerate==1.15.0"),), sees_ours=True
        ),
        ways=(),
        refused={"int8": "quant_method must be one of .*, is 'torchao'"},
    ),
    "llama.cpp": Tool(
        module="on_llama_cpp",
        environment=PeerEnvironment(
            name="tool-llama.cpp", steps=(("sentencepiece==0.2.3", "accelerate==1.15.0"),), sees_ours=True
        ),
        ways=("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "iq4_nl"),
    ),
}
