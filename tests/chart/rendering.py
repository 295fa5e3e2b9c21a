"""The chart through the real Helm engine, and what it renders as objects."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from cluster.chart.schema import CHART

RELEASE, NAMESPACE = "chat", "llm"
Object = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet", "Pod")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Objects of a rendered release, with the values that made them."""

    objects: tuple[Object, ...]
    values: Mapping[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)

    def of(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    def named(self, kind: str, name: str) -> Object:
        return next(one for one in self.of(kind) if one["metadata"]["name"] == f"{RELEASE}-tandem{name}")

    def pods(self) -> Iterator[tuple[str, Object]]:
        """Component and pod template of everything that runs."""
        for one in self.objects:
            if one["kind"] in WORKLOADS:
                pod = one if one["kind"] == "Pod" else one["spec"]["template"]
                yield pod["metadata"]["labels"]["app.kubernetes.io/component"], pod
            elif one["kind"] == "LeaderWorkerSet":
                yield from _of_group(one, index=0)

    def pod(self, component: str) -> Object:
        return next(pod for name, pod in self.pods() if name == component)

    def cluster_yaml(self) -> str:
        return str(self.named("ConfigMap", "")["data"]["cluster.yaml"])


def preset(name: str) -> dict[str, Any]:
    """As Helm itself reads the file."""
    return helm.values_from_yaml((CHART / f"values-{name}.yaml").read_text(encoding="utf-8"))


@cache
def chart(path: Path = CHART) -> helm.Chart:
    return helm.Chart.load(path)


def render(
    values: Mapping[str, Any], path: Path = CHART, *, namespace: str = NAMESPACE, name: str = RELEASE
) -> Rendered:
    """Raises HelmError with the engine's own words."""
    loaded = chart(path)
    loaded.validate_schema(dict(values))
    sources = loaded.render(dict(values), name=name, namespace=namespace)
    objects = [
        one
        for file, text in sorted(sources.items())
        if not file.endswith("NOTES.txt")
        for one in yaml.safe_load_all(text)
        if one is not None
    ]
    return Rendered(objects=tuple(objects), values=loaded.merge_values(dict(values)), sources=sources)


def _of_group(one: Object, *, index: int) -> Iterator[tuple[str, Object]]:
    """A worker's first pod and one of its others, with what the operator adds to their labels."""
    for worker, name in enumerate(("leaderTemplate", "workerTemplate")):
        pod = deepcopy(one["spec"]["leaderWorkerTemplate"][name])
        added = {"name": one["metadata"]["name"], "group-index": str(index), "worker-index": str(worker)}
        pod["metadata"]["labels"] |= {f"leaderworkerset.sigs.k8s.io/{key}": value for key, value in added.items()}
        yield pod["metadata"]["labels"]["app.kubernetes.io/component"], pod
