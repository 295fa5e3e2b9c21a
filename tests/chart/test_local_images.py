"""Images from `make image-build` are the ones that presets pull, and can be loaded into a local cluster's nodes."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from cluster.chart.schema import CHART
from tests.chart.pods import containers
from tests.chart.rendering import preset, render

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
_OURS = re.compile(r"\btandem-(?:router|worker|ray)(?:-\w+)?:[\w.-]+")


def make(target: str, *variables: str) -> str:
    """The commands of a target, which are not run."""
    command = ["make", "--no-print-directory", "-n", target, *variables]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def images(values: dict[str, object]) -> set[str]:
    """Images that a release pulls, Redis excepted."""
    found = {one["image"] for _, pod in render(values).pods() for one in containers(pod)}
    return {image for image in found if "tandem" in image}


def test_make_image_build_and_load_match_laptop_preset() -> None:
    wanted = images(preset("laptop"))
    assert wanted == {f"tandem-router:{VERSION}", f"tandem-worker:{VERSION}"}
    assert set(re.findall(r"-t (\S+)", make("image-build"))) == wanted
    assert wanted <= set(make("image-load").split())


@pytest.mark.parametrize("name", ["h100-8x", "70b-2p4d"])
def test_make_image_build_and_push_match_gpu_presets(name: str) -> None:
    values = preset(name)
    [registry] = {one["repository"].rsplit("/", 1)[0] for one in values["images"].values()}
    variables = ("DEVICE=cuda", f"REGISTRY={registry}")
    assert set(re.findall(r"-t (\S+)", make("image-build", *variables))) == images(values)
    assert set(re.findall(r"push (\S+)", make("image-push", *variables))) == images(values)
    assert "--target cuda" in make("image-build", *variables)
    # Its own head says how.
    assert " ".join(variables) in (CHART / f"values-{name}.yaml").read_text()


def test_presets_name_both_images() -> None:
    for path in CHART.glob("values-*.yaml"):
        named = yaml.safe_load(path.read_text())["images"]
        assert all(named[which]["repository"] for which in ("router", "worker")), path.name


def test_image_tags_equal_project_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == VERSION
    files = [*(ROOT / "deploy").glob("*.yaml"), *(ROOT / "deploy/docker").glob("*.Dockerfile")]
    files += [*(ROOT / "docs").rglob("*.md"), *CHART.rglob("*.yaml")]
    found = {str(path.relative_to(ROOT)): set(_OURS.findall(path.read_text(encoding="utf-8"))) for path in files}
    named_in = ("deploy/compose.yaml", "deploy/compose.gpu.yaml", "deploy/kuberay.yaml", "docs/operate/images.md")
    assert all(found[path] for path in named_in)
    for name, named in found.items():
        assert all(image.endswith(f":{VERSION}") for image in named), (name, named)


def test_notes_name_images_and_their_values() -> None:
    [notes] = [text for name, text in render(preset("h100-8x")).sources.items() if name.endswith("NOTES.txt")]
    for image in images(preset("h100-8x")):
        assert image in notes
    assert "images.router.repository" in notes
    assert "images.worker.repository" in notes
    assert "make image-build" in notes


def test_notes_warn_of_missing_runbook_url() -> None:
    def notes(rules: dict[str, object]) -> str:
        sources = render({"monitoring": {"rules": {"enabled": True} | rules}}).sources
        return next(text for name, text in sources.items() if name.endswith("NOTES.txt"))

    assert "monitoring.rules.runbookUrl" in notes({})
    assert "monitoring.rules.runbookUrl" not in notes({"runbookUrl": "https://wiki.example.com/runbook"})


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Stand-ins for kubectl and the clusters' own tools, which record their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("kind", "k3d", "minikube"):
        _program(folder / name, f'echo {name} "$@" >> {tmp_path}/calls')
    return folder


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def load(tools: Path, context: str | None, **variables: str) -> tuple[int, list[str], str]:
    """Exit code, calls and output."""
    _program(tools / "kubectl", "exit 1" if context is None else f"echo {context}")
    env = {"PATH": f"{tools}:{os.environ['PATH']}"} | variables
    done = subprocess.run([ROOT / "deploy/docker/load.sh", "a:1", "b:1"], env=env, capture_output=True, text=True)
    calls = tools.parent / "calls"
    made = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return done.returncode, made, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("context", "variables", "expected"),
    [
        ("kind-dev", {}, "kind load docker-image {} --name dev"),
        ("k3d-dev", {}, "k3d image import {} --cluster dev"),
        ("minikube", {}, "minikube --profile minikube image load {}"),
        (
            "my-profile",
            {"CLUSTER": "minikube", "CLUSTER_NAME": "my-profile"},
            "minikube --profile my-profile image load {}",
        ),
        (None, {"CLUSTER": "kind"}, "kind load docker-image {} --name kind"),
    ],
)
def test_image_load_calls_tool_of_local_cluster(
    tools: Path, context: str | None, variables: dict[str, str], expected: str
) -> None:
    code, calls, _ = load(tools, context, **variables)
    assert (code, calls) == (0, [expected.format(image) for image in ("a:1", "b:1")])


def test_image_load_into_docker_desktop_does_nothing(tools: Path) -> None:
    assert load(tools, "docker-desktop")[:2] == (0, [])


@pytest.mark.parametrize("context", [None, "arn:aws:eks:production"])
def test_image_load_into_remote_cluster_suggests_push(tools: Path, context: str | None) -> None:
    code, calls, output = load(tools, context)
    assert (code, calls) == (1, [])
    assert "make image-push" in output
