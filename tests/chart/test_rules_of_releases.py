"""A release's rules ignore other releases under the same Prometheus."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.rendering import NAMESPACE, RELEASE, Rendered
from tests.chart.test_rendered import release_of
from tests.support.monitoring_files import RULE_TESTS, RULES, promtool
from tests.support.promql import Matcher, named
from tests.support.two_releases import GROUPING, two_releases

OURS, ANOTHER = (NAMESPACE, RELEASE), ("staging", RELEASE)
WATCHED = "planned, everything else on"
_NARROWED = f'namespace="{NAMESPACE}",app_kubernetes_io_instance="{RELEASE}"'


def rule_objects(release: Rendered) -> dict[str, Any]:
    """Rule objects by the file that each is made of."""
    made = {
        one["metadata"]["name"].removeprefix(f"{RELEASE}-tandem-"): one["spec"] for one in release.of("PrometheusRule")
    }
    del made["scaling"]
    return made


def rules_of(file: Any) -> list[Any]:
    return [rule for group in file["groups"] for rule in group["rules"]]


def test_rules_are_restricted_to_their_release() -> None:
    made = rule_objects(release_of(WATCHED))
    assert made.keys() == {path.stem for path in RULES}
    ours = {Matcher(label, "=", value) for label, value in zip(GROUPING, OURS, strict=True)}
    for path in RULES:
        for rule, plain in zip(rules_of(made[path.stem]), rules_of(yaml.safe_load(path.read_text())), strict=True):
            selectors = named(rule["expr"]).selectors
            assert selectors
            assert all(ours <= set(selector.matchers) for selector in selectors), rule
            widened = re.sub(re.escape(_NARROWED) + ",?", "", rule["expr"]).replace("{}", "")
            assert {**rule, "expr": widened} == plain


def test_release_without_planner_has_no_planner_alerts() -> None:
    made = rule_objects(release_of("service monitor"))
    assert made.keys() == {path.stem for path in RULES} - {"planner"}


@pytest.mark.slow
@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("path", RULE_TESTS, ids=[path.stem for path in RULE_TESTS])
def test_alerts_cover_only_their_own_release(path: Path, tmp_path: Path, *, is_ours: bool) -> None:
    made = rule_objects(release_of(WATCHED))
    files = []
    for one in yaml.safe_load(path.read_text())["rule_files"]:
        files.append(tmp_path / Path(one).name)
        files[-1].write_text(yaml.safe_dump(made[Path(one).stem]))
    troubled, well = (OURS, ANOTHER) if is_ours else (ANOTHER, OURS)
    case = tmp_path / "tests.yaml"
    case.write_text(yaml.safe_dump(two_releases(path, files, troubled=troubled, well=well, fires=is_ours)))
    promtool("test", "rules", case)


@pytest.mark.parametrize("name", ["service monitor", "pod monitor with open metrics", WATCHED])
def test_scraped_metrics_are_labelled_with_release(name: str) -> None:
    release = release_of(name)
    monitors = [*release.of("ServiceMonitor"), *release.of("PodMonitor")]
    assert monitors
    for monitor in monitors:
        spec = monitor["spec"]
        by_service = monitor["kind"] == "ServiceMonitor"
        # Prometheus' operator copies these of the Service or pod, and adds the namespace by itself.
        assert "app.kubernetes.io/instance" in spec["targetLabels" if by_service else "podTargetLabels"]
        scraped = release.of("Service") if by_service else [pod for _, pod in release.pods()]
        wanted = spec["selector"]["matchLabels"].items()
        found = [one["metadata"]["labels"] for one in scraped if wanted <= one["metadata"]["labels"].items()]
        assert {labels["app.kubernetes.io/instance"] for labels in found} == {RELEASE}
        assert spec["namespaceSelector"] == {"matchNames": [NAMESPACE]}
        assert not any(
            endpoint.get("honorLabels") for endpoint in spec.get("endpoints", spec.get("podMetricsEndpoints"))
        )
