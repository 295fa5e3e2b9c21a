"""Names that users give the chart, including ones that look like other YAML types."""

import pytest

from tests.chart.rendering import render
from tests.chart.schemas import KUBERNETES, mistakes


def test_chart_number_like_names_stay_strings() -> None:
    """Users choose these names; Kubernetes must get 123, true and 0x10 as strings."""
    digits, key = {"existingSecret": "123"}, {"name": "0x10", "key": "1e3"}
    values = {
        "nameOverride": "123",
        "imagePullSecrets": ["true"],
        "secrets": {"cluster": digits | {"key": "1"}, "apiKeys": digits | {"key": "2"}},
        "redis": digits | {"passwordKey": "3", "priorityClassName": "4"},
        "tls": {"door": {"enabled": True} | digits, "kv": {"enabled": True} | digits},
        "model": {
            "source": "hub",
            "hub": {"id": "0/1", "revision": "1e5", "tokenSecret": key},
            "cache": {"existingClaim": "null"},
        },
        "telemetry": {"headersSecret": key},
        "monitoring": {"scrape": "service", "bearerSecret": key, "caSecret": key},
        "planner": {"enabled": True, "keySecret": key, "priorityClassName": "0x10"},
        "prefill": {"runtimeClassName": "true", "priorityClassName": "123", "podLabels": {"a": "1"}},
        "ingress": {"enabled": True, "host": "1", "className": "5", "tlsSecret": "6"},
        "test": {"keySecret": key},
    }
    rendered = render(values)
    assert [mistake for one in rendered.objects for mistake in mistakes(one, KUBERNETES[-1])] == []
    env = rendered.pod("decode")["spec"]["containers"][0]["env"]
    assert {"name": "123", "key": "1"} in [one.get("valueFrom", {}).get("secretKeyRef") for one in env]
    made = render({"redis": {"passwordKey": "3"}, "secrets": {"cluster": {"key": "1"}}})
    assert [mistake for one in made.objects for mistake in mistakes(one, KUBERNETES[-1])] == []


@pytest.mark.parametrize("mode", ["hpa", "keda"])
def test_chart_accepts_numeric_release_and_namespace(mode: str) -> None:
    values = {
        "fullnameOverride": "chat",
        "prefill": {"autoscaling": {"mode": mode}},
        "decode": {"autoscaling": {"mode": mode}},
        "monitoring": {
            "scrape": "service",
            "bearerSecret": {"name": "metrics"},
            "rules": {"enabled": True},
            "prometheusUrl": "http://prometheus:9090",
        },
    }
    rendered = render(values, namespace="7", name="123")
    assert [mistake for one in rendered.objects for mistake in mistakes(one, KUBERNETES[-1])] == []
