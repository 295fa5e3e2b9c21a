"""Checks that dashboards and alerts use only metrics that a cluster exports."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from kv_transfer.session.stats import AttemptOutcome
from tests.support.monitoring_files import UsedExpression, rules
from tests.support.promql import Matcher, named
from tests.support.two_releases import GROUPING

ADDED_BY_PROMETHEUS = {"instance", "job", *GROUPING}
ONLY_IN_TROUBLE = {
    # These have no samples in a cluster in which nothing goes wrong; their names are exported all the same.
    "tandem_worker_breaker",
    "tandem_worker_inherited_blocks_total",
}
OUTCOMES = {outcome.value for outcome in AttemptOutcome}
"""Of transfers: most of them are seen in trouble alone."""


def emitted_labels(exposition: str) -> dict[str, list[Mapping[str, str]]]:
    """The labels of all samples by name; of a metric without any, no labels."""
    found: dict[str, list[Mapping[str, str]]] = {}
    for family in text_string_to_metric_families(exposition):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not family.samples:
            found.setdefault(name, [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def is_of_planner(expression: UsedExpression) -> bool:
    """Whether it names what a planner tells, which is another process than a router."""
    return any(selector.name.startswith("tandem_planner_") for selector in named(expression.expr).selectors)


def is_of_files(expression: UsedExpression) -> bool:
    """Whether it names what only a router that follows files tells."""
    return any(selector.name.startswith("tandem_file_") for selector in named(expression.expr).selectors)


def uses_certificate_metrics(expression: UsedExpression) -> bool:
    """Whether it names what only the router of a cluster in TLS tells."""
    return any(selector.name.startswith("tandem_member_") for selector in named(expression.expr).selectors)


def is_of_drafts(expression: UsedExpression) -> bool:
    """Whether it names what only the router of workers that have verified drafts tells."""
    drafts = ("vllm:spec_decode_", "tandem_worker_draft_")
    return any(selector.name.startswith(drafts) for selector in named(expression.expr).selectors)


def unknown(used: Iterable[UsedExpression], exposition: str) -> list[str]:
    """What expressions name and the cluster does not tell: metrics, labels, and values of labels."""
    metrics = emitted_labels(exposition)
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    faults = []
    for one in used:
        names = named(one.expr)
        labels = set(ADDED_BY_PROMETHEUS)
        for selector in names.selectors:
            if selector.name in recorded:
                labels |= named(recorded[selector.name]).grouped_by
            elif selector.name not in metrics:
                faults.append(f"{one.where}: no metric {selector.name}")
            elif samples := metrics[selector.name]:
                labels |= samples[0].keys()
                faults += [
                    f"{one.where}: {selector.name} has no {matcher}"
                    for matcher in selector.matchers
                    if matcher.label not in ADDED_BY_PROMETHEUS and not _fits(matcher, samples)
                ]
            elif selector.name in ONLY_IN_TROUBLE:
                labels |= names.grouped_by
            else:
                faults.append(f"{one.where}: {selector.name} has no samples")
        faults += [f"{one.where}: no label {label}" for label in names.grouped_by - labels]
    return faults


def _fits(matcher: Matcher, samples: Sequence[Mapping[str, str]]) -> bool:
    """Whether each label value that a selector names is exported."""
    values = {labels[matcher.label] for labels in samples if matcher.label in labels}
    if matcher.label == "outcome":
        values |= OUTCOMES
    wanted = matcher.value.split("|") if matcher.op == "=~" else [matcher.value]
    return values >= set(wanted)
