"""Invalid values are refused by name, and the values file is as documented."""

import json
import re
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from pydantic import BaseModel

from cluster.chart.schema import CHART, DECIDED_BY_THE_CHART, rendered
from cluster.chart.values import ChartValues
from tandem.config.cluster import ClusterConfig
from tests.chart.rendering import chart, preset, render
from tests.chart.schemas import mistakes
from tests.chart.value_sets import BAD

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", BAD)
def test_chart_invalid_value_is_refused_by_name(name: str) -> None:
    values, message = BAD[name]
    with pytest.raises(helm.HelmError, match=re.escape(message)):
        render(values)


def test_generated_chart_files_are_up_to_date() -> None:
    for path, text in rendered().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: python -m cluster.chart.schema"


def test_chart_schema_forbids_unknown_properties() -> None:
    def closed(schema: Any, where: str) -> None:
        if isinstance(schema, dict):
            if "properties" in schema and where != "#/properties/global":
                assert schema.get("additionalProperties") is False, where
            for key, value in schema.items():
                closed(value, f"{where}/{key}")

    schema = chart().schema
    assert schema is not None
    closed(schema, "#")


def test_keys_decided_by_chart_are_settings() -> None:
    settings = ClusterConfig().model_dump()
    for dotted in DECIDED_BY_THE_CHART:
        found: Any = settings
        for key in dotted.split("."):
            assert key in found, dotted
            found = found[key]


def test_values_file_lists_every_value() -> None:
    def compare(model: type[BaseModel], values: dict[str, Any], where: str) -> None:
        assert values.keys() == model.model_fields.keys(), where
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                compare(field.annotation, values[name], f"{where}{name}.")

    values = yaml.safe_load(VALUES)
    assert values.pop("config") == {}
    compare(ChartValues, values, "")


def test_values_file_documents_every_value() -> None:
    lines = VALUES.splitlines()
    silent = []
    for number, line in enumerate(lines):
        found = re.match(r"( *)([A-Za-z]\w*):(.*)", line)
        if found is None:
            continue
        after = lines[number + 1] if number + 1 < len(lines) else ""
        begins_section = re.fullmatch(r"( &\w+)?", found[3]) and after.startswith(found[1] + " ")
        of_resources = number > 0 and any(above.strip() == "resources:" for above in lines[max(0, number - 2) : number])
        if not begins_section and not of_resources and not lines[number - 1].lstrip().startswith("#"):
            silent.append(line.strip())
    assert silent == []


def test_kubernetes_schemas_reject_unknown_fields() -> None:
    for name in ("laptop", "h100-8x", "70b-2p4d"):
        assert preset(name)["config"]
    release = render(preset("70b-2p4d"))
    for one in release.objects:
        wrong = one | {"spec": {**one.get("spec", {}), "noSuchField": 1}} if "spec" in one else one | {"noSuchField": 1}
        assert list(mistakes(wrong, "1.31.0")), one["kind"]


def test_chart_rules_and_dashboards_are_rendered_verbatim(tmp_path: Path) -> None:
    copied = tmp_path / "tandem"
    for path in CHART.rglob("*"):
        if path.is_file() and path.parent.name not in ("rules", "dashboards"):
            into = copied / path.relative_to(CHART)
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_bytes(path.read_bytes())
    (copied / "rules").mkdir()
    (copied / "dashboards").mkdir()
    alarm = {"alert": "TandemSlow", "expr": "up == 0", "annotations": {"summary": "{{ $value }} is slow"}}
    (copied / "rules" / "slo_burn.yaml").write_text(yaml.safe_dump({"groups": [{"name": "slo", "rules": [alarm]}]}))
    (copied / "dashboards" / "overview.json").write_text('{\n  "title": "{{ name }}",\n  "uid": "a"\n}\n')
    monitoring = {"rules": {"enabled": True}, "dashboards": {"enabled": True}}
    release = render({"monitoring": monitoring}, copied)
    [rule] = release.named("PrometheusRule", "-slo-burn")["spec"]["groups"][0]["rules"]
    assert rule == alarm
    dashboard = release.named("ConfigMap", "-dashboard-overview")
    assert yaml.safe_load(dashboard["data"]["overview.json"]) == {"title": "{{ name }}", "uid": "a"}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert [mistake for one in release.objects for mistake in mistakes(one, "1.33.0")] == []


def test_dashboards_link_to_configured_runbook() -> None:
    wiki = "https://wiki.example.com/tandem/runbook"
    release = render({"monitoring": {"dashboards": {"enabled": True}, "rules": {"runbookUrl": wiki}}})
    dashboards = [
        text
        for one in release.of("ConfigMap")
        if "-dashboard-" in one["metadata"]["name"]
        for text in one["data"].values()
    ]
    assert len(dashboards) == 6
    for page in map(json.loads, dashboards):
        assert wiki in [link.get("url") for link in page["links"]]
        links = [link["url"] for panel in page["panels"] for link in panel.get("links", ())]
        assert links
        assert all(link.startswith(f"{wiki}#tandem") for link in links)


def test_alerts_link_to_the_runbook() -> None:
    wiki = "https://wiki.example.com/tandem/runbook"
    release = render({"monitoring": {"rules": {"enabled": True, "runbookUrl": wiki}}})
    groups = [group for one in release.of("PrometheusRule") for group in one["spec"]["groups"]]
    alarms = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(alarms) > 20
    assert {alarm["annotations"]["runbook_url"] for alarm in alarms} == {
        f"{wiki}#{alarm['alert'].lower()}" for alarm in alarms
    }
