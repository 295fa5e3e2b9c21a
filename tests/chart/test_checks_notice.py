"""The checks of rendered objects fail on a chart that was broken for each of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.chart.schema import CHART
from tests.chart import test_rendered as checks
from tests.chart.pods import read_by
from tests.chart.rendering import render
from tests.chart.value_sets import GOOD

pytestmark = pytest.mark.slow
_EDGES, _PODS = checks.test_network_policies_allow_exactly_the_needed_edges, checks.test_rendered_pods_are_restricted
_OBJECTS = checks.test_rendered_objects_validate_and_have_unique_names
_ENDS = checks.test_services_and_selectors_match_their_pods
_SIZES = checks.test_pod_resources_match_ranks
_PROMETHEUS = checks.test_rendered_queries_use_exported_metrics
_RIGHTS = checks.test_only_planner_has_rbac_for_two_scale_subresources
_ASKED = checks.test_planner_arguments_are_accepted_by_its_command
_SECRETS = checks.test_secrets_are_never_on_command_lines
_NAMES = checks.test_gateway_routes_are_unique_per_listener_and_host
_GRACE = checks.test_termination_grace_covers_drain_and_margin
_PROBES = checks.test_probes_cover_startup_and_drain_of_each_role
SPOILT = [
    ("networkpolicy.yaml", "policyTypes: [Ingress, Egress]", "policyTypes: [Ingress]", "defaults", _EDGES),
    ("networkpolicy.yaml", 'range concat (list "router") $roles', 'range list "router"', "defaults", _EDGES),
    ("_network.tpl", "{{ $port }}, protocol: TCP", "54, protocol: TCP", "defaults", _EDGES),
    ("_network.tpl", "endPort: {{ int .kv.last }}", "endPort: 65535", "defaults", _EDGES),
    ("_pod.tpl", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "defaults", _PODS),
    ("_pod.tpl", "enableServiceLinks: false", "enableServiceLinks: true", "defaults", _PODS),
    ("_pod.tpl", "- {name: tmp, mountPath: /tmp}", "- {name: temp, mountPath: /tmp}", "laptop", _PODS),
    ("redis.yaml", "emptyDir: {sizeLimit: 64Mi}", "emptyDir: {}", "defaults", _PODS),
    ("redis.yaml", 's "$REDIS_PASSWORD"', "s $(REDIS_PASSWORD)", "defaults", _SECRETS),
    ("router.yaml", "preStop:", "prestop:", "defaults", _OBJECTS),
    ("routes.yaml", "with $v.gateway.grpcHostnames", "with $v.gateway.hostnames", "gateway", _NAMES),
    ("routes.yaml", "type: PathPrefix", "type: Prefix", "gateway", _OBJECTS),
    ("monitoring.yaml", "podTargetLabels:", "targetLabels:", "pod monitor with open metrics", _OBJECTS),
    ("workers.yaml", "targetPort: grpc", "targetPort: http", "defaults", _ENDS),
    ("workers.yaml", 'eq $pool.autoscaling.mode "none"', "true", "keda", _ENDS),
    ("_signals.tpl", "tandem_worker_backlog_tokens", "tandem_worker_backlog", "keda", _PROMETHEUS),
    ("_signals.tpl", "tandem_worker_kv_blocks", "tandem_worker_blocks", "keda", _PROMETHEUS),
    ("autoscaling.yaml", "name: tandem_pool_use", "name: tandem_pools_use", "hpa", _PROMETHEUS),
    ("autoscaling.yaml", '"tandem_pool_waiting_tokens"', '"tandem_pool_tokens"', "hpa", _PROMETHEUS),
    ("_config.tpl", "(int .root.Values.terminationMarginSeconds)", "0", "defaults", _GRACE),
    ("_workers.tpl", "(mul 256 (int .ranks))", "64", "ranks on a CPU", _SIZES),
    ("router.yaml", "/readyz?exclude=workers", "/readyz", "defaults", _PROBES),
    ("planner.yaml", "resources: [statefulsets/scale]", "resources: [statefulsets]", "planned", _RIGHTS),
    ("planner.yaml", "{{ $full }}-decode]", "{{ $full }}-router]", "planned", _RIGHTS),
    ("planner.yaml", "clusterIP: None", "type: ClusterIP", "planned", _ASKED),
    ("planner.yaml", "--hold-s=", "--hold=", "planned", _ASKED),
    ("workers.yaml", "(not $.Values.planner.enabled)", "true", "planned", _ASKED),
    ("networkpolicy.yaml", "{port: 6443, protocol: TCP}", "{port: 6444, protocol: TCP}", "planned", _EDGES),
    ("nodepolicies.yaml", "{{ int $pool.rankPort }}", "7999", "workers over nodes", _EDGES),
    ("workers.yaml", "startupPolicy: LeaderCreated", "startupPolicy: Leader", "workers over nodes", _OBJECTS),
    ("_workers.tpl", "command: [tandem, follower", "commands: [tandem, follower", "workers over nodes", _OBJECTS),
    ("_pod.tpl", "\"'$(CLUSTER_SECRET)'\"", "$(CLUSTER_SECRET)", "defaults", None),
]  # fmt: skip


@pytest.mark.parametrize(("file", "right", "wrong", "name", "check"), SPOILT)
def test_chart_checks_detect_broken_chart(
    file: str,
    right: str,
    wrong: str,
    name: str,
    check: Callable[..., Any] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = tmp_path / "tandem"
    shutil.copytree(CHART, copied)
    template = copied / "templates" / file
    text = template.read_text(encoding="utf-8")
    assert right in text
    template.write_text(text.replace(right, wrong), encoding="utf-8")
    release = render(GOOD[name], copied)
    if check is None:  # secrets of digits alone: YAML would make a number of them
        with pytest.raises(Exception, match="secret"):
            read_by(release, "router", tmp_path, monkeypatch)
        return
    needs = check.__code__.co_varnames[: check.__code__.co_argcount]
    arguments: dict[str, Any] = {"release": release}
    if "config" in needs:
        arguments["config"] = read_by(release, "router", tmp_path, monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check(**arguments)
