"""Whole clusters on one GPU; on a CPU the same runs with few short streams, to check that it works.

A colocated cluster gives the tokens that are expected; a cluster of two workers of each pool, whose prompts are all
handed over on the device, and a pair of workers over tcp must give the same, also while workers are killed.
"""

from importlib.util import find_spec

from tandem_bench.errors import CannotMeasure
from tandem_bench.gpu.stage import Findings, Stage

NEEDS = (
    "fastapi",
    "google.protobuf",
    "google.rpc",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "httptools",
    "httpx",
    "isal",
    "jinja2",
    "msgspec",
    "orjson",
    "prometheus_client",
    "psutil",
    "pydantic",
    "python_multipart",
    "rich",
    "starlette",
    "tokenizers",
    "typer",
    "uvicorn",
    "uvloop",
    "yaml",
)
"""Modules that a cluster imports beyond those that the rest of the suite needs."""


def cluster(stage: Stage) -> Findings:
    """Compare answers and count hand-offs. Raises CannotMeasure for missing libraries, ClusterFailed with a log."""
    if missing := [name for name in NEEDS if not _is_there(name)]:
        raise CannotMeasure(f"a cluster needs {', '.join(missing)}, which cannot be imported here")
    from tandem_bench.gpu.cluster.runs import run

    yield from run(stage)


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around a module
        return False
