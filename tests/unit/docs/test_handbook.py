"""The runbook and its pages name only existing commands, options, links, alarms, panels and pictures."""

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cluster import kv_arithmetic, measure_profile
from cluster.cli.main import app
from tandem_bench import __main__ as bench
from tandem_bench.incidents import __main__ as incidents
from tandem_bench.incidents.__main__ import panel_of
from tandem_bench.incidents.known import INCIDENTS
from tandem_bench.quality import __main__ as quality_of_models
from tests.support.monitoring_files import DASHBOARDS, ROOT, alarms
from training import quality

PAGES = {name: (ROOT / "docs/operate" / name).read_text() for name in ("runbook.md", "capacity.md", "walkthroughs.md")}
BOARDS = {
    "Overview": "overview",
    "P/D flow": "pd-flow",
    "KV cache": "kv-cache",
    "Router": "router",
    "Tenants": "tenants",
    "Planner": "planner",
}
MOST_PICTURES, MOST_BYTES = 8, 60_000


def commands() -> Iterator[tuple[str, str]]:
    """Every fenced line that begins like one of our commands, and those in the runbook's table."""
    for row in re.findall(r"^\|.*\|$", PAGES["runbook.md"], re.MULTILINE):
        yield from (("runbook.md", line) for line in re.findall(r"`(tandem [^`]+)`", row))
    for page, text in PAGES.items():
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if re.match(r"(tandem|python -m) ", line):
                    yield page, line


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def parse_tandem(words: list[str]) -> None:
    """With the real command line's own options; nothing runs."""
    group: Any = typer.main.get_command(app)
    passed_on = {"bench": bench.parser, "eval": quality_of_models.parser}
    if words[0] not in passed_on:
        group.commands[words[0]].make_context(words[0], words[1:])
    elif words[-1] == "--help":
        with pytest.raises(SystemExit, match="0"):
            passed_on[words[0]]().parse_args(words[1:])
    else:
        passed_on[words[0]]().parse_args(words[1:])


def parsers() -> dict[str, Callable[[], argparse.ArgumentParser]]:
    """Of modules that are run as commands."""
    return {
        "tandem_bench.incidents": incidents.parser,
        "training.quality": quality.parser,
        "cluster.kv_arithmetic": kv_arithmetic.parser,
        "cluster.measure_profile": measure_profile.parser,
    }


def test_handbook_commands_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("azure.csv", "mooncake.jsonl"):
        (tmp_path / name).touch()
    found = list(commands())
    assert len(found) >= 18
    for page, line in found:
        words = shlex.split(line, comments=True)
        try:
            if words[0] == "tandem":
                parse_tandem(words[1:])
            else:
                parsers()[words[2]]().parse_args(words[3:])
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page}: {line}: {error}") from error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tandem plan --workers gpus=1", "No such option"),
        ("tandem simulate --prefill x", "valid integer"),
        ("tandem fly", "fly"),
    ],
)
def test_handbook_check_finds_wrong_command(line: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        parse_tandem(shlex.split(line)[1:])


def test_handbook_links_resolve() -> None:
    links = [(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert len(links) > 20
    for page, link in links:
        name, _, anchor = link.partition("#")
        path = ROOT / "docs/operate" / (name or page)
        assert path.is_file(), f"{page}: {link}"
        assert not anchor or anchor in anchors(path), f"{page}: {link}"


def test_handbook_names_only_existing_alerts_dashboards_and_panels() -> None:
    titles = {path.stem: {panel["title"] for panel in json.loads(path.read_text())["panels"]} for path in DASHBOARDS}
    assert set(BOARDS.values()) == titles.keys()
    for page, text in PAGES.items():
        words = " ".join(text.split())
        assert set(re.findall(r"\bTandem[A-Z]\w+", words)) <= alarms().keys(), page
        assert set(re.findall(r"[Bb]oard \*([^*]+)\*", words)) <= BOARDS.keys(), page
        for board, title in re.findall(r'\*([^*]+)\*, "([^"]+)"', words):
            assert title in titles[BOARDS[board]], f"{page}: {board}, {title}"
        if page != "capacity.md":
            assert set(re.findall(r'"([^"]+)"', words)) <= set().union(*titles.values()), page


def test_incidents_name_only_existing_panels_and_alerts() -> None:
    walked = PAGES["walkthroughs.md"]
    for name, made in INCIDENTS.items():
        incident = made()
        assert f"pictures/{name}.png" in walked
        assert sum(phase.is_trouble for phase in incident.phases) == 1
        assert set(incident.alarms) <= alarms().keys()
        for shown in incident.panels:
            assert panel_of(shown)["title"] == shown.title
            assert f'"{shown.title}"' in walked
        for alarm in incident.alarms:
            assert f"[{alarm}]" in walked


def test_pictures_are_few_and_small() -> None:
    pictures = list((ROOT / "docs/operate/pictures").iterdir())
    assert len(pictures) <= MOST_PICTURES
    assert all(path.suffix == ".png" and path.stat().st_size < MOST_BYTES for path in pictures)
    shown = set(re.findall(r"\]\(pictures/([^)]+)\)", PAGES["walkthroughs.md"]))
    assert shown == {path.name for path in pictures}
