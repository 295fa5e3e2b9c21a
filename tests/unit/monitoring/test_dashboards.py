"""Dashboards: every expression parses, and panels do not overlap."""

import json
from collections import Counter
from pathlib import Path

import yaml

from tests.support.monitoring_files import DASHBOARDS, alarms, expressions, panels, promtool
from tests.support.promql import Matcher, Selector, named
from tests.support.two_releases import GROUPING, mixing


def test_dashboard_expressions_parse(tmp_path: Path) -> None:
    used = list(expressions())
    assert len(used) > 150
    rules = [{"record": f"said:{number}", "expr": one.expr} for number, one in enumerate(used)]
    path = tmp_path / "said.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "said", "rules": rules}]}))
    assert f"{len(used)} rules found" in promtool("check", "rules", path)


def test_dashboard_panels_have_unique_titles_and_places() -> None:
    assert len({json.loads(path.read_text())["uid"] for path in DASHBOARDS}) == len(DASHBOARDS) == 6
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        cells = Counter(
            (at["x"] + dx, at["y"] + dy)
            for panel in dashboard["panels"]
            for at in [panel["gridPos"]]
            for dx in range(at["w"])
            for dy in range(at["h"])
        )
        assert max(cells.values()) == 1, path.name
        assert max(x for x, _ in cells) < 24
        titles = Counter((panel["type"], panel["title"]) for panel in dashboard["panels"])
        assert max(titles.values()) == 1, path.name
    assert all(panel["datasource"]["uid"] == "${datasource}" for _, panel in panels())


def test_dashboard_panels_are_described_and_link_to_runbook() -> None:
    linked: set[str] = set()
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        assert {"title": "Runbook", "url": "docs/operate/runbook.md"}.items() <= dashboard["links"][-1].items(), (
            path.name
        )
    for path, panel in panels():
        where = f"{path.stem}: {panel['title']}"
        # One word would need the row above it to be understood, in a list of panels or an alert's screenshot.
        assert len(panel["title"].split()) > 1 or panel["title"] in ("Goodput", "Preemptions"), where
        assert panel["description"], where
        for link in panel.get("links", ()):
            name = link["title"].removeprefix("Runbook: ")
            assert link["url"] == f"docs/operate/runbook.md#{name.lower()}", where
            linked.add(name)
    # From every alert's page there is a panel that shows its trouble, and from that panel a way back.
    assert alarms().keys() - linked == {"TandemFileNotFollowed", "TandemCertificateExpires"}


def test_dashboards_filter_by_namespace_and_release() -> None:
    chosen = {Matcher(label, "=~", f"${name}") for label, name in zip(GROUPING, ("namespace", "release"), strict=True)}
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        variables = {one["name"]: one for one in dashboard["templating"]["list"]}
        assert list(variables) == ["datasource", "namespace", "release"]
        for label, name in zip(GROUPING, ("namespace", "release"), strict=True):
            assert variables[name]["query"]["query"].endswith(f", {label})")
            # Where nobody sets the labels there is nothing to choose from, and all is what has none.
            assert variables[name]["includeAll"] is True
            assert variables[name]["allValue"] == ".*"
        [firing] = dashboard["annotations"]["list"]
        assert chosen <= set(named(firing["expr"]).selectors[0].matchers)
    for path, panel in panels():
        for target in panel["targets"]:
            where = f"{path.stem}: {panel['title']}"
            assert mixing(target["expr"]) == [], where
            assert all(chosen <= set(selector.matchers) for selector in named(target["expr"]).selectors), where
            # Lines of two releases have different names.
            assert target["legendFormat"].endswith(" ".join(f"{{{{{label}}}}}" for label in GROUPING)), where


def test_promql_parser_finds_selectors_and_labels() -> None:
    expr = """histogram_quantile(0.95, sum by (le, zone) (rate(a:b_bucket{x="1", y=~"p|q"}[5m] offset 30m)))
      # not this
      > 2 * on (zone) c and deriv(d_total[$__x]) unless e offset 1h"""
    assert named(expr) == (
        (
            Selector("a:b_bucket", (Matcher("x", "=", "1"), Matcher("y", "=~", "p|q"))),
            Selector("c", ()),
            Selector("d_total", ()),
            Selector("e", ()),
        ),
        {"le", "zone"},
    )
