"""The command that generates the chart's schema and defaults, without the chart."""

import sys
from pathlib import Path

import pytest

from cluster.chart import schema


@pytest.mark.parametrize("arguments", [[], ["--check"]])
def test_chart_schema_outside_a_clone_names_the_missing_chart(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schema, "CHART", tmp_path / "helm" / "tandem")
    monkeypatch.setattr(sys, "argv", ["schema", *arguments])
    with pytest.raises(SystemExit) as caught:
        schema.main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/helm/tandem does not exist" in error
    assert "a clone of the repository, not in the wheel" in error
    assert list(tmp_path.iterdir()) == []
