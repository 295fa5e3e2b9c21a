"""Alarms fire when they should, and link to their runbook section."""

import re

import yaml

from tests.support.monitoring_files import ROOT, RULE_TESTS, RULES, alarms, promtool


def test_promtool_accepts_the_rules() -> None:
    assert "rules found" in promtool("check", "rules", *RULES)


def test_alerts_fire_only_during_their_incident() -> None:
    expected: dict[str, set[int]] = {}
    for path in RULE_TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for query in case["promql_expr_test"]:
                assert f'alertname="{case["name"]}"' in query["expr"]
                expected.setdefault(case["name"], set()).add(query["exp_samples"][0]["value"])
    assert expected == {name: {0, 1} for name in alarms()}
    promtool("test", "rules", *RULE_TESTS)


def test_runbook_has_a_section_for_each_alert() -> None:
    runbook = (ROOT / "docs/operate/runbook.md").read_text()
    headings = re.findall(r"^#### (\w+)$", runbook, re.MULTILINE)
    assert sorted(headings) == sorted(alarms())
    for name, alarm in alarms().items():
        assert alarm["annotations"]["runbook_url"] == f"docs/operate/runbook.md#{name.lower()}"
        after = f", after {alarm['for']}" if "for" in alarm else ""
        first = f"#### {name}\n\n{alarm['annotations']['summary']} ({alarm['labels']['severity']}{after})."
        assert first in runbook, name
        assert alarm["labels"]["severity"] in ("critical", "warning")
