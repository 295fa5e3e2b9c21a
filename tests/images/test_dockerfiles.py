"""The Dockerfiles, parsed and linted; test_built.py builds them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.images import context
from tests.images.dockerfile import FOLDER, Stage, argument, lineage, needed, read

ROOT = Path(__file__).parents[2]
TARGETS = [("router.Dockerfile", "router"), ("worker.Dockerfile", "cpu"), ("worker.Dockerfile", "cuda")]


def _last(stages: list[Stage], name: str):
    return [step for stage in stages if (step := stage.last(name))][-1]


def test_dockerfiles_pass_the_linter():
    linter = Path(sys.executable).with_name("hadolint")
    files = sorted(map(str, FOLDER.glob("*.Dockerfile")))
    done = subprocess.run(
        [linter, "--failure-threshold=style", "--format=json", *files], capture_output=True, text=True
    )
    assert json.loads(done.stdout) == []
    assert done.returncode == 0


@pytest.mark.parametrize(("file", "target"), TARGETS)
def test_image_user_is_unprivileged_and_arbitrary(file, target):
    stages = read(FOLDER / file)
    grown = lineage(stages, target)
    values = yaml.safe_load((ROOT / "helm/tandem/values.yaml").read_text())["securityContext"]
    assert _last(grown, "USER").words == (f"{values['user']}:{values['group']}",)
    assert _last(grown, "CMD").words[0] == "tandem"
    labels = _last(grown, "LABEL").pairs
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    variables = {
        name: value
        for stage in grown
        for step in stage.steps
        if step.name == "ENV"
        for name, value in step.pairs.items()
    }
    assert variables["HOME"] == "/tmp"
    assert variables["XDG_CACHE_HOME"] == "/cache"
    assert variables["PATH"].startswith("/opt/tandem/bin:")


@pytest.mark.parametrize(("file", "target"), TARGETS)
def test_image_contains_no_build_tools(file, target):
    """The final stage descends from no build stage and runs no pip; it copies the dependencies."""
    stages = read(FOLDER / file)
    first = lineage(stages, target)[0]
    assert not any(first.base == name for name in stages)
    assert not [step for stage in lineage(stages, target) for step in stage.steps if "pip" in " ".join(step.words)]
    assert "dependencies" in needed(stages, target)


def test_router_image_does_not_install_torch():
    assert "torch" not in read(FOLDER / "router.Dockerfile")
    assert "torch" in needed(read(FOLDER / "worker.Dockerfile"), "cpu")


def _run_torch_index_step(index: str) -> subprocess.CompletedProcess[str]:
    """The result of the step that requires it."""
    [step] = [step for step in read(FOLDER / "worker.Dockerfile")["index"].steps if step.name == "RUN"]
    variables = {"TORCH_INDEX": index}
    return subprocess.run(["/bin/sh", "-c", *step.words], env=variables, capture_output=True, text=True, check=False)


def test_build_without_torch_index_fails_at_once_with_a_hint():
    refused = _run_torch_index_step("")
    assert refused.returncode == 1
    for word in ("TORCH_INDEX is empty", "--build-arg TORCH_INDEX=ADDRESS", "compose", "TORCH_INDEX=configured"):
        assert word in refused.stderr
    for index in ("configured", "file:///srv/index"):
        assert (_run_torch_index_step(index).returncode, _run_torch_index_step(index).stderr) == (0, "")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_build_checks_torch_index_before_fetching(target):
    stages = read(FOLDER / "worker.Dockerfile")
    order = needed(stages, target)
    fetching = [name for name in order if any("tools/bin/pip" in " ".join(step.words) for step in stages[name].steps)]
    assert order[0] == "index"
    assert fetching
    first = stages[fetching[0]].steps
    asks = next(i for i, step in enumerate(first) if step.flags.get("from") == "index")
    assert asks < next(i for i, step in enumerate(first) if step.name == "RUN")


@pytest.mark.parametrize(("file", "stages"), [("router", ("dependencies",)), ("worker", ("dependencies", "torch"))])
def test_custom_package_index_reaches_pip(file, stages):
    """As build arguments without defaults, declared in each stage before its first RUN."""
    names = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT")
    found = read(FOLDER / f"{file}.Dockerfile")
    for stage in stages:
        declared = [step for step in found[stage].steps if step.name == "ARG" and step.words[0] in names]
        assert tuple(step.words[0] for step in declared) == names
        assert not any(argument(step, {}) for step in declared)
        first = next(i for i, step in enumerate(found[stage].steps) if step.name == "RUN")
        assert all(found[stage].steps.index(step) < first for step in declared)


def test_copied_stage_ends_with_run_or_copy():
    """podman, and buildah with layers, create no folder for a WORKDIR without a RUN or COPY after it."""
    for name in ("router", "worker"):
        stages = read(FOLDER / f"{name}.Dockerfile")
        copied = {step.flags["from"] for stage in stages.values() for step in stage.steps if "from" in step.flags}
        assert copied
        for stage in copied:
            assert stages[stage].steps[-1].name in ("RUN", "COPY"), f"{name}: {stage}"


def test_build_context_contains_only_wheel_sources():
    sent = context.files()
    assert {"pyproject.toml", "README.md", "LICENSE", "cluster/cli/main.py", "engine/kernels/cpu/csrc/simd.h"} <= set(
        sent
    )
    assert {name.split("/")[0] for name in sent if "/" in name}.isdisjoint({"tests", ".git", ".venv", "helm", "docs"})
    assert all(name.startswith("deploy/docker/") for name in sent if name.startswith("deploy/"))
    assert context.is_ignored(
        "cluster/__pycache__/cli.cpython-312.pyc", (ROOT / ".dockerignore").read_text().splitlines()
    )


def test_dockerfiles_share_the_same_constants():
    """Duplicated because a Dockerfile cannot include another."""
    router, worker = (read(FOLDER / f"{name}.Dockerfile") for name in ("router", "worker"))
    bases = {lineage(stages, name)[0].base for stages in (router, worker) for name in stages}
    assert bases == {router["dependencies"].base}
    assert [step.words for step in router["own"].steps if step.name != "RUN"] == [
        step.words for step in worker["own"].steps if step.name != "RUN"
    ]
    makefile = (ROOT / "Makefile").read_text()
    [version] = [step.words[0] for step in worker["torch"].steps if step.words[0].startswith("TORCH_VERSION=")]
    assert f"TORCH ?= torch=={version.partition('=')[2]}\n" in makefile
