"""Rule tests for two releases under one Prometheus, made from those for one: that one as it is, another one well."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

GROUPING = ("namespace", "app_kubernetes_io_instance")
"""The labels that tell releases apart, as the chart's monitors set them."""
Release = tuple[str, str]
TROUBLED, WELL = ("prod", "chat"), ("staging", "chat")
_SERIES = re.compile(r"([\w:]*)(?:\{(.*)\})?")
_FIRST = re.compile(r"(-?[\d.]+)([+-][\d.]+)?x\d+")
_AGGREGATED = re.compile(
    r"\b(?:sum|max|min|avg|count|group|topk|bottomk|quantile|stddev)\b\s*(?:by\s*\(([^)]*)\))?\s*\("
)
_MATCHED = re.compile(r"\bon\s*\(([^)]*)\)")
_UNITS = {"h": 3600, "m": 60, "s": 1}


def mixing(expr: str) -> list[str]:
    """Aggregations and matchings of an expression that do not keep releases apart."""
    expr = re.sub(r"#[^\n]*", "", expr)
    return [
        found.group()
        for pattern in (_AGGREGATED, _MATCHED)
        for found in pattern.finditer(expr)
        if not {label.strip() for label in (found.group(1) or "").split(",")}.issuperset(GROUPING)
    ]


def of_release(series: str, release: Release) -> str:
    """A series as a release's monitor labels it."""
    name, labels = _SERIES.fullmatch(series).groups()  # type: ignore[union-attr]
    grouping = ", ".join(f'{label}="{value}"' for label, value in zip(GROUPING, release, strict=True))
    return f"{name}{{{labels}, {grouping}}}" if labels else f"{name}{{{grouping}}}"


def two_releases(
    path: Path, rule_files: Iterable[Path], *, troubled: Release = TROUBLED, well: Release = WELL, fires: bool = True
) -> dict[str, Any]:
    """The cases of one file of tests/rules, each with a release beside it that goes on as both began.

    What is expected of an alarm is then expected for the troubled release, with its labels, and nothing for the other.
    `fires`: whether alerts of the troubled one are expected at all.
    """
    suite = yaml.safe_load(path.read_text())
    return {
        "rule_files": [str(file) for file in rule_files],
        "evaluation_interval": suite["evaluation_interval"],
        "tests": [_with_another(case, troubled, well, fires=fires) for case in suite["tests"]],
    }


def _with_another(case: dict[str, Any], troubled: Release, well: Release, *, fires: bool) -> dict[str, Any]:
    num_samples = max(_seconds(one["eval_time"]) for one in case["promql_expr_test"]) // _seconds(case["interval"])
    series = []
    for one in case["input_series"]:
        series.append({"series": of_release(one["series"], troubled), "values": one["values"]})
        series.append({"series": of_release(one["series"], well), "values": _unchanging(one["values"], num_samples)})
    queries = [_by_release(one, troubled if fires else None) for one in case["promql_expr_test"]]
    return {**case, "input_series": series, "promql_expr_test": queries}


def _by_release(query: dict[str, Any], troubled: Release | None) -> dict[str, Any]:
    alerts = re.search(r"ALERTS\{.*?\}", query["expr"]).group()  # type: ignore[union-attr]
    [sample] = query["exp_samples"]
    labels = of_release("", troubled) if troubled else ""
    expected = [{"labels": labels, "value": sample["value"]}] if troubled and sample["value"] else []
    expr = f"count by ({', '.join(GROUPING)}) ({alerts})"
    return {"expr": expr, "eval_time": query["eval_time"], "exp_samples": expected}


def _unchanging(values: str, num_samples: int) -> str:
    """For ever as it began: all these tests begin without trouble."""
    start, step = _FIRST.match(values).groups()  # type: ignore[union-attr]
    return f"{start}{step or '+0'}x{num_samples}"


def _seconds(text: str) -> int:
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([hms])", text))
