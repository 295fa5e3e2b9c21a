"""Private names of other distributions: what provides them has an upper bound, as any version may change them.

The program sees imports of private modules and names, and private methods that a class of ours has in place of its
base's; what it cannot see stands in `ALSO`.
"""

import ast
import importlib
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.unit.test_house_rules import PACKAGES, ROOT, sources

ALSO = {
    "fastapi": "router/http: `fastapi.routing.iter_route_contexts`, which is not documented",
    "uvicorn": "router/http/server: methods without an underscore that are internal all the same",
}
OWN = {*PACKAGES, *sys.stdlib_module_names}


def test_private_names_come_from_requirements_with_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    requirements = list(map(Requirement, texts))
    used = private_names()
    assert {"jinja2", "ray", "redis"} <= set(used)
    for name in {*used, *ALSO}:
        found = [one for one in requirements if one.name == name]
        assert found, f"{name} is not required: {used.get(name)}"
        for one in found:
            assert "<" in {specifier.operator for specifier in one.specifier}, (str(one), used.get(name))
            assert one.specifier.contains(version(name)), one


def private_names() -> dict[str, list[str]]:
    """Where private names of other distributions are used, by distribution."""
    distributions = packages_distributions()
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        where = path.relative_to(ROOT)
        if where.parts[0] == "tests":
            continue
        for line, name in private_in(ast.parse(path.read_text())):
            for distribution in set(distributions[name.partition(".")[0]]):
                found[distribution.lower()].append(f"{where}:{line} {name}")
    return found


def private_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines of one file, and the whole names that they use."""
    names = bound_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names if _is_private(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            used = [name for name in whole if _is_private(name)]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            used = [name for name in _resolved(node, names) if _is_module(name)]
        elif isinstance(node, ast.ClassDef):
            used = [name for base in node.bases for name in _overridden(node, _resolved(base, names))]
        else:
            continue
        yield from ((node.lineno, name) for name in used if name.partition(".")[0] not in OWN)


def bound_names(tree: ast.Module) -> dict[str, list[str]]:
    """What each name in a file may stand for, wherever it is bound: whole names of imported things."""
    names: dict[str, list[str]] = defaultdict(list)
    assigned = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first].append(alias.name if alias.asname else first)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name].append(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            assigned.append(node)
    for node in assigned:
        value = node.value
        choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                names[target.id] += [name for choice in choices for name in _resolved(choice, names)]
    return names


def _resolved(node: ast.AST | None, names: dict[str, list[str]]) -> list[str]:
    """Whole names that an expression such as `a.b[T]` may stand for."""
    if isinstance(node, ast.Subscript):
        return _resolved(node.value, names)
    if isinstance(node, ast.Attribute):
        return [f"{name}.{node.attr}" for name in _resolved(node.value, names)]
    return list(names.get(node.id, ())) if isinstance(node, ast.Name) else []


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _is_module(name: str) -> bool:
    """Whether a whole name is a module's; imports nothing."""
    path, whole = None, ""
    for part in name.split("."):
        whole = f"{whole}.{part}" if whole else part
        spec = PathFinder.find_spec(whole, path)
        path = None if spec is None else spec.submodule_search_locations
        if path is None:
            return spec is not None and whole == name
    return True


def _overridden(node: ast.ClassDef, bases: list[str]) -> Iterator[str]:
    """Private methods that a class has in place of those of other distributions' classes."""
    private = [
        method.name
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and _is_private(method.name)
    ]
    for base in bases if private else ():
        module, _, name = base.rpartition(".")
        if module and base.partition(".")[0] not in OWN:
            theirs = getattr(importlib.import_module(module), name)
            yield from (f"{base}.{method}" for method in private if hasattr(theirs, method))


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("import ray._private.services", ["ray._private.services"]),
        ("from ray import _raylet", ["ray._raylet"]),
        ("def f():\n    from ray._private.state import nodes", ["ray._private.state.nodes"]),
        ("import ray\ndef f():\n    ray._raylet.Token()", ["ray._raylet"]),
        ("import ray\nray._no_module()", []),
        ("from os import _exit\nfrom router import _own\nfrom __future__ import annotations", []),
        ("import jinja2\nclass A(jinja2.Environment):\n    def _parse(self): ...", ["jinja2.Environment._parse"]),
        ("from jinja2 import Environment as E\nclass A(E):\n    def _own(self): ...", []),
        (
            "from redis.asyncio import Connection as A, SSLConnection as B\nC = A if x else B\n"
            "class D(C):\n    async def _connect(self): ...",
            ["redis.asyncio.Connection._connect", "redis.asyncio.SSLConnection._connect"],
        ),
    ],
)
def test_private_names_are_seen(text: str, used: list[str]) -> None:
    assert [name for _, name in private_in(ast.parse(text))] == used


def test_listed_files_are_there() -> None:
    assert all(Path(ROOT, where.partition(":")[0]).is_dir() for where in ALSO.values())
