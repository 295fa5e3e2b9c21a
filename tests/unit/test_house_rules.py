"""The rules of CONTRIBUTING.md that a program can check."""

import ast
import collections
import functools
import gc
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.main import app

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "tandem",
    "engine",
    "kv_transfer",
    "worker",
    "router",
    "prefill_worker",
    "decode_worker",
    "cluster",
    "tandem_bench",
    "training",
    "tests",
)
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_PARAMETERS = 9
MAX_FOLDER_MODULES = 18
MAX_SHORT_DOCSTRINGS = 50
"""Docstrings of at most three words. Few of them say more than the name above them."""
ROOMY_FOLDERS = ("engine/kernels", "tests/unit/engine/kernels", "tandem/v1")
"""Where one module is one kernel, or is generated."""
IMPURE = frozenset({"torch", "triton", "grpc", "redis", "asyncio", "opentelemetry"})


@functools.cache
def sources() -> list[Path]:
    return [p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py")) if "_pb2" not in p.name]


RULED = (
    ast.Module,
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Import,
    ast.ImportFrom,
    ast.Call,
    ast.Constant,
)
"""Kinds of nodes that a rule looks at."""


@functools.cache
def nodes_by_kind(path: Path) -> dict[type[ast.AST], list[Any]]:
    """A file's syntax tree, walked once for all rules."""
    found: dict[type[ast.AST], list[Any]] = {kind: [] for kind in RULED}
    for node in ast.walk(ast.parse(path.read_text())):
        if (of_kind := found.get(type(node))) is not None:
            of_kind.append(node)
    return found


def nodes(path: Path, *kinds: type[ast.AST]) -> list[Any]:
    return [node for kind in kinds for node in nodes_by_kind(path)[kind]]


@pytest.fixture(scope="module", autouse=True)
def _kept_trees() -> Iterator[None]:
    """They are a million objects without a cycle: the collector need not look through them time and again."""
    gc.disable()
    for path in sources():
        nodes_by_kind(path)
    gc.freeze()
    gc.enable()
    yield
    gc.unfreeze()
    nodes_by_kind.cache_clear()


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)


def pure_contracts() -> list[dict[str, object]]:
    """Import contracts by which folders are pure: pyproject.toml is the only list of them."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return [c for c in linter["contracts"] if c["id"].startswith("pure-")]


def test_wheel_imports_only_shipped_packages() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    shipped = {name for name in PACKAGES if f"{name}*" in setup["include"]}
    left_out = set(PACKAGES) - shipped
    assert left_out == {"training", "tests"}
    found = [
        (str(path.relative_to(ROOT)), name)
        for path in sources()
        if path.relative_to(ROOT).parts[0] in shipped
        for node in nodes(path, ast.Import, ast.ImportFrom)
        for name in imported(node)
        if name.partition(".")[0] in left_out
    ]
    assert not found


def test_wheel_runs_only_shipped_modules() -> None:
    """As an argument of `python -m`. The bench's gates are skipped without a clone."""
    found = {
        str(path.relative_to(ROOT))
        for path in sources()
        if path.relative_to(ROOT).parts[0] not in ("training", "tests")
        for node in nodes(path, ast.Constant)
        if isinstance(node.value, str) and node.value.startswith(("training.", "tests."))
    }
    assert found == {"tandem_bench/spine/measure.py"}


def test_no_small_module_has_a_single_importer() -> None:
    """It belongs in its importer. Commands and parsers are exempt, as entries of registries; what only tests import
    counts by them."""
    commands = {command.callback.__module__ for command in app.registered_commands if command.callback is not None}
    assert {"cluster.cli.doctor", "cluster.cli.fleet"} <= commands
    registries = (
        "engine/model/checkpoints/formats/",
        "engine/model/families/",
        "router/text/tool_parsers/",
    )
    by_module = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()}
    importers: dict[str, set[Path]] = {name: set() for name in by_module}
    for path in sources():
        is_test = path.relative_to(ROOT).parts[0] == "tests"
        for node in nodes(path, ast.Import, ast.ImportFrom):
            names = imported(node)
            if isinstance(node, ast.ImportFrom):
                names = names + [f"{name}.{alias.name}" for name in names for alias in node.names]
            for name in names:
                if name in importers and (not is_test or name.startswith("tests.")):
                    importers[name].add(path)
    found = {
        name: len(importers[name])
        for name, path in by_module.items()
        if path.relative_to(ROOT).parts[0] != "training"
        and not path.name.startswith(("__init__.", "__main__.", "conftest.", "test_"))
        and len(importers[name]) == 1
        and len(path.read_text().splitlines()) < 60
        and name not in commands
        and not str(path.relative_to(ROOT)).startswith(registries)
    }
    assert not found


def imported(node: ast.AST) -> list[str]:
    """Modules that a statement imports by their whole names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def test_house_rules_find_sources() -> None:
    assert len(sources()) > 150


def test_files_are_at_most_700_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in sources() if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_functions_are_at_most_60_lines() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}": lines
        for path in sources()
        for f in functions(path)
        if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


def test_constructors_have_few_parameters() -> None:
    wide = {
        f"{path.relative_to(ROOT)}:{f.lineno}": count
        for path in sources()
        for f in functions(path)
        if f.name == "__init__"
        and (count := len(f.args.args) + len(f.args.kwonlyargs) - 1) > MAX_CONSTRUCTOR_PARAMETERS
    }
    assert not wide


def test_folders_have_few_modules() -> None:
    modules = collections.Counter(str(p.parent.relative_to(ROOT)) for p in sources() if p.name != "__init__.py")
    crowded = {
        folder: count
        for folder, count in modules.items()
        if count > MAX_FOLDER_MODULES and not folder.startswith(ROOMY_FOLDERS)
    }
    assert not crowded


def test_few_docstrings_have_at_most_three_words() -> None:
    short = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for path in sources()
        for node in nodes(path, ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node)) is not None and len(text.split()) <= 3
    ]
    assert len(short) < MAX_SHORT_DOCSTRINGS, short


SERVING = tuple(name for name in PACKAGES if name not in ("tandem_bench", "training", "tests"))
MAX_METHODS_NAMED_TAKE = 8


def serving_nodes(kind: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    for path in sources():
        if path.relative_to(ROOT).parts[0] in SERVING:
            for node in nodes(path, kind):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = collections.defaultdict(list)
    for place, node in serving_nodes(ast.ClassDef):
        if not node.name.startswith("_"):
            places[node.name].append(place)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_few_methods_are_named_take() -> None:
    found = [place for place, node in serving_nodes(ast.FunctionDef) if node.name == "take"]
    assert len(found) < MAX_METHODS_NAMED_TAKE, found


def test_packages_have_empty_init_files() -> None:
    assert not [str(p) for p in sources() if p.name == "__init__.py" and p.read_text()]
    assert not list((ROOT / "proto").rglob("__init__.py"))
    assert not [str(p) for p in sources() if not (p.parent / "__init__.py").exists()]


def test_no_module_has_a_generic_name() -> None:
    nothing = {"utils", "util", "common", "helpers", "misc"}
    assert not [str(p) for p in sources() if p.stem in nothing or p.parent.name in nothing]


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

    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    found = [f"{p}:{node.lineno}" for p in sources() for node in nodes(p, *kinds) if unsafe(node)]
    assert not found


def test_pure_contracts_name_folders_and_forbid_impure_modules() -> None:
    contracts = pure_contracts()
    assert len(contracts) >= 10
    for contract in contracts:
        assert set(contract["forbidden_modules"]) == IMPURE, contract["id"]  # type: ignore[call-overload]
        for name in contract["source_modules"]:  # type: ignore[attr-defined]
            assert (ROOT / name.replace(".", "/")).is_dir(), f"{contract['id']} names {name}, which is no folder"


IMPORT_ALL = """
import importlib, json, sys
loaded = {}
for module in sys.argv[1].split():
    before = set(sys.modules)
    importlib.import_module(module)
    loaded[module] = [name for name in sys.argv[2].split() if name in sys.modules and name not in before]
print(json.dumps({module: names for module, names in loaded.items() if names}))
"""
"""Prints what impure modules each module was the first to import."""


def test_pure_folders_import_no_impure_module() -> None:
    """import-linter follows imports in the text; this follows imports at run time."""
    modules = [
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for contract in pure_contracts()
        for name in contract["source_modules"]  # type: ignore[attr-defined]
        for path in sorted((ROOT / name.replace(".", "/")).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    assert len(modules) > 100
    command = [sys.executable, "-c", IMPORT_ALL, " ".join(modules), " ".join(sorted(IMPURE))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {}


def test_router_starts_without_torch_and_redis_client() -> None:
    code = "import sys; sys.modules['redis'] = None; import router.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_gpu_code_imports_without_router_packages() -> None:
    """A GPU machine need not have packages that only routers and tools use."""
    absent = ("fastapi", "pydantic", "redis", "ray", "prometheus_client", "opentelemetry", "yaml", "uvloop")
    code = (
        f"import sys\nfor name in {absent!r}: sys.modules[name] = None\n"
        "import engine.assembly, worker.engine_host, decode_worker.worker, prefill_worker.worker\n"
        "import kv_transfer.session.receiver_hub, kv_transfer.session.sender_hub, kv_transfer.transports.catalogue\n"
        "import worker.cluster_state.redis_publisher, worker.sessions\n"
        "import tandem.rpc.cluster_grpc, tandem.process.lifetime\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
