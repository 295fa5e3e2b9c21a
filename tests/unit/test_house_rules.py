"""The rules of CONTRIBUTING.md that a program can check."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "tandem",
    "engine",
    "kv_transfer",
    "router",
    "prefill_worker",
    "decode_worker",
    "cluster",
    "bench",
    "training",
    "tests",
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_CONSTRUCTOR_PARAMETERS = 7
PURE = (
    "engine.block_manager",
    "engine.blocks",
    "engine.cache_tiers",
    "engine.parallel.shard",
    "engine.prefix_index",
    "engine.quiet",
    "engine.ranks.mirror_book",
    "engine.ranks.mirror_wire",
    "engine.ranks.step_wire",
    "engine.request",
    "engine.reservations",
    "engine.scheduler",
    "kv_transfer.ladder",
    "kv_transfer.mapping",
    "kv_transfer.receiver",
    "kv_transfer.sender",
    "router.admission",
    "router.attempts",
    "router.board_view",
    "router.continuations",
    "router.peer_load",
    "router.placement",
    "router.prefix_map",
    "router.workers",
    "tandem.board.breaker",
    "tandem.board.entries",
    "tandem.board.journal",
    "tandem.board.keys",
    "tandem.board.settings",
    "tandem.dialect",
    "tandem.gpu_placement",
    "tandem.kv_agreement",
    "tandem.session_versions",
    "cluster.autoscale.controller",
    "cluster.autoscale.load_watch",
    "cluster.planner.planner",
    "cluster.simulator.elastic",
    "cluster.simulator.simulation",
    "cluster.rollout",
    "cluster.ray_placement",
    "cluster.supervisor",
    "fabric.destinations",
    "fabric.cost",
    "kv_transfer.attempt_trace",
    "kv_transfer.stats",
    "tandem.tracing",
)
IMPURE = ("torch", "triton", "grpc", "redis", "asyncio", "opentelemetry")


def sources() -> list[Path]:
    return [p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py")) if "_pb2" not in p.name]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_there_is_something_to_check() -> None:
    assert len(sources()) > 150


def test_files_stay_readable() -> None:
    long = {str(p.relative_to(ROOT)): n for p in sources() if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_functions_stay_readable() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}": lines
        for path in sources()
        for f in functions(path)
        if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


def test_constructors_take_few_parameters() -> None:
    wide = {
        f"{path.relative_to(ROOT)}:{f.lineno}": count
        for path in sources()
        for f in functions(path)
        if f.name == "__init__"
        and (count := len(f.args.args) + len(f.args.kwonlyargs) - 1) > MAX_CONSTRUCTOR_PARAMETERS
    }
    assert not wide


def test_packages_have_empty_init_files() -> None:
    assert not [str(p) for p in sources() if p.name == "__init__.py" and p.read_text()]
    assert not list((ROOT / "proto").rglob("__init__.py"))


def test_no_module_is_named_after_nothing() -> None:
    nothing = {"utils", "util", "common", "helpers", "misc"}
    assert not [str(p) for p in sources() if p.stem in nothing]


def test_no_unsafe_deserialization() -> None:
    def unsafe(node: ast.AST) -> bool:
        if isinstance(node, ast.Import):
            return any(alias.name.split(".")[0] in {"pickle", "marshal", "shelve", "dill"} for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").split(".")[0] in {"pickle", "marshal", "shelve", "dill"}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node.func.id in {"eval", "exec"}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return ast.unparse(node.func) in {"torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load"}
        return False

    found = [f"{p}:{node.lineno}" for p in sources() for node in ast.walk(ast.parse(p.read_text())) if unsafe(node)]
    assert not found


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_run_without_the_world(module: str) -> None:
    """import-linter follows imports in the text; this follows what really happens."""
    code = f"import sys, {module}; print(*[m for m in {IMPURE!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_router_starts_without_torch_and_without_the_client_of_redis() -> None:
    code = "import sys; sys.modules['redis'] = None; import router.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_gpu_code_imports_with_little_installed() -> None:
    """A GPU machine need not have what only doors and tools use."""
    absent = ("fastapi", "pydantic", "redis", "ray", "prometheus_client", "opentelemetry", "yaml", "uvloop")
    code = (
        f"import sys\nfor name in {absent!r}: sys.modules[name] = None\n"
        "import engine.assembly, engine.host, decode_worker.worker, prefill_worker.worker\n"
        "import kv_transfer.receiver_hub, kv_transfer.sender_hub, kv_transfer.transports.catalogue\n"
        "import tandem.board.publisher, tandem.worker_session, tandem.rpc, tandem.process\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
