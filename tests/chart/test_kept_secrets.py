"""Secrets that the chart generates survive upgrades; `lookup` is answered here as a cluster would."""

import base64
import re
import shutil
import time
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from cluster.chart.schema import CHART
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.mutual_tls import TlsFiles
from tests.chart.rendering import RELEASE, Rendered, preset, render

_LOOKUP = re.compile(r'lookup "v1" "Secret" \$?\.Release\.Namespace (\$\w+|\((?:[^()]|\([^()]*\))*\))')


_DRAWN = ("cluster", "cluster-tls", "redis", "first-key", "metrics-key")


@pytest.fixture
def upgradable(tmp_path: Path) -> Path:
    """The chart, with secrets looked up in the value `global.there` instead of a cluster."""
    copied = tmp_path / "tandem"
    shutil.copytree(CHART, copied)
    template = copied / "templates" / "secrets.yaml"
    text, count = _LOOKUP.subn(r"dig \1 (dict) $.Values.global.there", template.read_text(encoding="utf-8"))
    assert count == 4
    template.write_text(text, encoding="utf-8")
    return copied


def _secrets(release: Rendered) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: {"data": one["data"]} for one in release.of("Secret") if "data" in one}


def test_upgrade_keeps_generated_secrets(upgradable: Path) -> None:
    values = preset("h100-8x")
    first = render(values | {"global": {"there": {}}}, upgradable)
    drawn = _secrets(first)
    assert drawn.keys() == {f"{RELEASE}-tandem-{name}" for name in _DRAWN}
    again = render(values | {"global": {"there": drawn}}, upgradable)
    assert _secrets(again) == drawn
    assert again.named("Secret", "-api-keys") == first.named("Secret", "-api-keys")


def test_upgrade_enabling_scraping_adds_metrics_key(upgradable: Path) -> None:
    before = _secrets(render({"global": {"there": {}}}, upgradable))
    after = render({"monitoring": {"scrape": "service"}, "global": {"there": before}}, upgradable)
    assert _secrets(after).keys() - before.keys() == {f"{RELEASE}-tandem-metrics-key"}
    assert before.items() <= _secrets(after).items()
    keys = yaml.safe_load(after.named("Secret", "-api-keys")["stringData"]["api-keys.yaml"])["api_keys"]
    assert [one["tenant"] for one in keys] == ["first", "metrics"]


def test_generated_certificates_serve_both_sides_for_ten_years(tmp_path: Path) -> None:
    data = render({}).named("Secret", "-cluster-tls")["data"]
    names = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    files = TlsFiles(**{field: tmp_path / name for field, name in names.items()}, setting="cluster.tls")
    for name in names.values():
        (tmp_path / name).write_bytes(base64.b64decode(data[name]))
    assert ClusterCredentials(files).not_after_s > time.time() + 3600 * 86_400
    other = base64.b64decode(render({}).named("Secret", "-cluster-tls")["data"]["ca.crt"])
    assert other != files.ca.read_bytes()


def test_upgrade_without_certificates_requires_permissive_first(upgradable: Path) -> None:
    template = upgradable / "templates" / "secrets.yaml"
    template.write_text(template.read_text().replace(".Release.IsUpgrade", "(not .Release.IsUpgrade)"))
    with pytest.raises(helm.HelmError, match=r"tls\.cluster\.mode: the pods of this release have no certificates yet"):
        render({"global": {"there": {}}}, upgradable)
    permissive = {"tls": {"cluster": {"mode": "permissive"}}}
    first = _secrets(render(permissive | {"global": {"there": {}}}, upgradable))
    assert _secrets(render({"global": {"there": first}}, upgradable)) == first


def test_chart_generates_full_length_key_without_cluster_lookup() -> None:
    release = render({"monitoring": {"scrape": "pod"}})
    key = base64.b64decode(release.named("Secret", "-metrics-key")["data"]["api-key"]).decode()
    assert re.fullmatch(r"tandem-[A-Za-z0-9]{43}", key)
