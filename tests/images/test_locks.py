"""The lock files of the images: complete, exact, and at the versions used in development."""

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy/docker/locks"
IN_IMAGES = ("redis", "hub", "telemetry")
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(name: str) -> dict[str, Requirement]:
    """Locked distributions by canonical name; all exact and with hashes."""
    found: dict[str, Requirement] = {}
    for entry in (LOCKS / f"{name}.txt").read_text().replace("\\\n", " ").splitlines():
        text, *hashes = re.split(r"\s+--hash=", entry.strip())
        assert hashes, f"{name}.txt: {text} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes)
        requirement = Requirement(text)
        [only] = requirement.specifier
        assert only.operator == "=="
        found[canonicalize_name(requirement.name)] = requirement
    return found


def excluded(name: str) -> set[str]:
    lines = (LOCKS / f"{name}-excludes.txt").read_text().splitlines()
    return {canonicalize_name(line) for line in lines if line and not line.startswith("#")}


def requirements(*extras: str) -> list[Requirement]:
    optional = _PROJECT["optional-dependencies"]
    texts = [*_PROJECT["dependencies"], *(text for extra in extras for text in optional[extra])]
    return [
        one for text in texts if (one := Requirement(text)).marker is None or one.marker.evaluate(default_environment())
    ]


@pytest.mark.parametrize(
    ("lock", "without", "extras"),
    [("router", "router", ()), ("worker", "worker", ()), ("ray", "worker", ("ray",)), ("nixl", "worker", ("nixl",))],
)
def test_lock_covers_all_requirements(lock, without, extras):
    there, absent = locked(lock), excluded(without)
    wrong = [
        str(requirement)
        for requirement in requirements(*IN_IMAGES, *extras)
        if (name := canonicalize_name(requirement.name)) not in absent
        and not (name in there and requirement.specifier.contains(_version(there[name]), prereleases=True))
    ]
    assert not wrong, "make locks"
    assert not absent & set(there)


@pytest.mark.parametrize("lock", ["router", "worker", "ray", "nixl"])
def test_locked_versions_match_constraints(lock):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tried = {canonicalize_name(one.name): one for line in lines if line.strip() and (one := Requirement(line))}
    differing = {
        name: str(requirement)
        for name, requirement in locked(lock).items()
        if name in tried and not tried[name].specifier.contains(_version(requirement), prereleases=True)
    }
    assert not differing, "make locks"


def test_torch_requirements_are_locked():
    listed = {canonicalize_name(Requirement(line).name) for line in _lines("torch-needs.in")}
    wanted = [Requirement(text) for text in importlib.metadata.requires("torch") or ()]
    names = {canonicalize_name(one.name) for one in wanted if one.marker is None or "extra" not in str(one.marker)}
    of_gpus = {name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))}
    assert names - of_gpus == listed
    there = locked("worker")
    assert all(
        one.specifier.contains(_version(there[canonicalize_name(one.name)]))
        for one in wanted
        if canonicalize_name(one.name) in listed
    )


def test_router_imports_nothing_excluded_from_its_lock():
    """Wherever the import stands: lazy imports must be found as well."""
    left_out = {module for name in excluded("router") for module in _modules_of(name)}
    assert left_out >= {"torch", "safetensors", "isal"}
    assert not {path: modules & left_out for path, modules in _router_imports().items() if modules & left_out}


def test_router_imports_are_locked_or_first_party():
    there = {module for name in locked("router") for module in _modules_of(name)}
    known = there | sys.stdlib_module_names | {"router", "tandem"}
    assert not {path: modules - known for path, modules in _router_imports().items() if modules - known}


def test_wheel_contains_all_data_files():
    """Kernel sources, the built-in model, the page: without an entry in package-data only checkouts have them."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {
        path for package, patterns in data.items() for pattern in patterns for path in (ROOT / package).glob(pattern)
    }
    packages = ("tandem", "engine", "kv_transfer", "worker", "router", "prefill_worker", "decode_worker", "cluster")
    there = {path for package in packages for path in (ROOT / package).rglob("*") if path.is_file()}
    ours = {path for path in there if path.suffix not in (".py", ".pyi", ".pyc", ".md")}
    assert len(ours) > 40
    assert not sorted(str(path.relative_to(ROOT)) for path in ours - shipped)


@functools.cache
def _router_imports() -> dict[str, set[str]]:
    """Top-level modules by file."""
    files = [path for package in ("router", "tandem") for path in (ROOT / package).rglob("*.py")]
    return {str(path.relative_to(ROOT)): {name.partition(".")[0] for name in _imported(path)} for path in files}


def _imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: relative imports are not used here"
            yield node.module


def _modules_of(name: str) -> set[str]:
    """Top-level modules of an installed distribution; none for other platforms' distributions."""
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {path.parts[0].partition(".")[0] for path in files if path.suffix in (".py", ".so")}


def _lines(name: str) -> list[str]:
    return [line for line in (LOCKS / name).read_text().splitlines() if line and not line.startswith("#")]


def _version(requirement: Requirement) -> Version:
    [only] = requirement.specifier
    return Version(only.version)
