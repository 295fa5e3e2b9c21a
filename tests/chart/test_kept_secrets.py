"""What the chart draws once stays over upgrades: `lookup` is answered here as a cluster would."""

import base64
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.chart.schema import CHART
from tests.chart.rendering import RELEASE, Rendered, preset, render

_LOOKUP = re.compile(r'lookup "v1" "Secret" \$?\.Release\.Namespace (\$\w+|\((?:[^()]|\([^()]*\))*\))')


@pytest.fixture
def upgradable(tmp_path: Path) -> Path:
    """The chart, with secrets looked up in the value `global.there` and not in a cluster."""
    copied = tmp_path / "tandem"
    shutil.copytree(CHART, copied)
    template = copied / "templates" / "secrets.yaml"
    text, count = _LOOKUP.subn(r"dig \1 (dict) $.Values.global.there", template.read_text(encoding="utf-8"))
    assert count == 3
    template.write_text(text, encoding="utf-8")
    return copied


def _secrets(release: Rendered) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: {"data": one["data"]} for one in release.of("Secret") if "data" in one}


def test_upgrade_keeps_every_secret_that_the_install_drew(upgradable: Path) -> None:
    values = preset("h100-8x")
    first = render(values | {"global": {"there": {}}}, upgradable)
    drawn = _secrets(first)
    assert drawn.keys() == {f"{RELEASE}-tandem-{name}" for name in ("cluster", "redis", "first-key", "metrics-key")}
    again = render(values | {"global": {"there": drawn}}, upgradable)
    assert _secrets(again) == drawn
    assert again.named("Secret", "-api-keys") == first.named("Secret", "-api-keys")


def test_upgrade_that_turns_scraping_on_adds_a_key_and_keeps_the_first(upgradable: Path) -> None:
    before = _secrets(render({"global": {"there": {}}}, upgradable))
    after = render({"monitoring": {"scrape": "service"}, "global": {"there": before}}, upgradable)
    assert _secrets(after).keys() - before.keys() == {f"{RELEASE}-tandem-metrics-key"}
    assert before.items() <= _secrets(after).items()
    keys = yaml.safe_load(after.named("Secret", "-api-keys")["stringData"]["api-keys.yaml"])["api_keys"]
    assert [one["tenant"] for one in keys] == ["first", "metrics"]


def test_template_without_a_cluster_draws_a_key_of_full_length() -> None:
    release = render({"monitoring": {"scrape": "pod"}})
    key = base64.b64decode(release.named("Secret", "-metrics-key")["data"]["api-key"]).decode()
    assert re.fullmatch(r"tandem-[A-Za-z0-9]{43}", key)
