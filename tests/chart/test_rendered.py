"""What the chart renders is valid for Kubernetes, restricted, and consistent with the processes."""

import base64
import math
import re
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from cluster.autoscaler.kubernetes_scaler import ACCOUNT
from cluster.chart.schema import CHART
from cluster.cli.main import app
from router.fleet.probes import CanarySettings
from router.metrics.admission import AdmissionMetrics
from router.metrics.router_metrics import RouterMetrics
from router.types.worker_view import DraftSourceTotals, EngineStepTotals, EngineWorkReport
from tandem.cluster_state.redis_settings import SentinelSettings
from tandem.config.cluster import ClusterConfig
from tandem.config.pools import health_port
from tandem.config.worker import cluster_secret, listen_address, num_ranks
from tandem.errors import ConfigError
from tests.chart.edges import allowed, isolated, needed
from tests.chart.pods import (
    POD_IP,
    RACKS,
    containers,
    lapses,
    loose_ends,
    mount_of,
    read_by,
    secrets_of,
)
from tests.chart.rendering import NAMESPACE, Rendered, render
from tests.chart.schemas import KUBERNETES, mistakes
from tests.chart.value_sets import GOOD, IN_CI
from tests.support.router.admission_world import AdmissionBench
from tests.support.router.overload_world import snapshot

LEAST_SETS = 30
SETS = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in GOOD]
_MEMORY = {"Mi": 1 << 20, "Gi": 1 << 30}


@cache
def release_of(name: str) -> Rendered:
    return render(GOOD[name])


@pytest.fixture(params=SETS)
def release(request: pytest.FixtureRequest) -> Rendered:
    return release_of(request.param)


@pytest.fixture
def config(release: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    return read_by(release, "router", tmp_path, monkeypatch)


def test_chart_cases_cover_enough_value_sets() -> None:
    assert len(GOOD) >= LEAST_SETS
    assert set(IN_CI) <= GOOD.keys()


@pytest.mark.parametrize("name", SETS)
def test_chart_passes_strict_lint(name: str) -> None:
    report = helm.lint(CHART, GOOD[name], strict=True, kube_version="v1.31.0")
    assert [one["error"] for one in report["messages"] if one["severity"] >= 2] == []
    assert report["errors"] == []


def test_rendered_objects_validate_and_have_unique_names(release: Rendered) -> None:
    assert [mistake for version in KUBERNETES for one in release.objects for mistake in mistakes(one, version)] == []
    names = [(one["kind"], one["metadata"]["name"]) for one in release.objects]
    assert len(names) == len(set(names))
    assert all("namespace" not in one["metadata"] for one in release.objects)


def test_rendered_pods_are_restricted(release: Rendered) -> None:
    assert [(name, problem) for name, pod in release.pods() for problem in lapses(pod)] == []
    assert [(name, problem) for name, pod in release.pods() for problem in loose_ends(release, pod)] == []
    assert all(one["automountServiceAccountToken"] is False for one in release.of("ServiceAccount"))
    assert not {"ClusterRole", "ClusterRoleBinding"} & {one["kind"] for one in release.objects}


def test_only_planner_has_rbac_for_two_scale_subresources(release: Rendered) -> None:
    planner = release.values["planner"]
    projected = {
        name for name, pod in release.pods() for volume in pod["spec"].get("volumes", ()) if "projected" in volume
    }
    if not planner["enabled"]:
        assert release.of("Role") == release.of("RoleBinding") == []
        assert projected == set()
        return
    assert projected == {"planner"}
    [role], [binding] = release.of("Role"), release.of("RoleBinding")
    sets = {one["metadata"]["name"] for one in release.of("StatefulSet")}
    [rule] = role["rules"]
    assert set(rule.pop("resourceNames")) == sets
    verbs = ["get"] if planner["dryRun"] else ["get", "patch"]
    assert rule == {"apiGroups": ["apps"], "resources": ["statefulsets/scale"], "verbs": verbs}
    [subject] = binding["subjects"]
    pod = release.pod("planner")
    assert (subject["name"], subject["namespace"]) == (pod["spec"]["serviceAccountName"], NAMESPACE)
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_planner_arguments_are_accepted_by_its_command(release: Rendered) -> None:
    if not release.values["planner"]["enabled"]:
        assert [name for name, _ in release.pods() if name == "planner"] == []
        return
    [container] = release.pod("planner")["spec"]["containers"]
    options = dict(arg.removeprefix("--").partition("=")[::2] for arg in container["args"])
    sets = {one["metadata"]["name"] for one in release.of("StatefulSet")}
    assert {f"{options['kubernetes']}-{role}" for role in ("prefill", "decode")} == sets
    host = options["url"].partition("://")[2].rpartition(":")[0]
    [service] = [one for one in release.of("Service") if host == f"{one['metadata']['name']}.{NAMESPACE}.svc"]
    assert service["spec"]["clusterIP"] == "None"
    for certificate in release.of("Certificate"):
        names = certificate["spec"]["dnsNames"]
        assert host in names or certificate["metadata"]["name"].endswith(("-kv-tls", "-cluster-tls"))
    _assert_mounted(release.pod("planner"), [options.get("api-key-file"), options.get("ca"), str(ACCOUNT)])
    arguments = [arg for arg in container["args"] if not arg.startswith(("--api-key-file", "--ca", "--url"))]
    # The command itself reads them all, and gets as far as an address that is none.
    result = CliRunner().invoke(app, [*container["command"][1:], *arguments, "--url=ftp://x"])
    assert isinstance(result.exception, ConfigError)
    assert "is not a router URL" in str(result.exception)
    # Who is sized by it has no number of its own, unless it only looks.
    for one in release.of("StatefulSet"):
        assert ("replicas" in one["spec"]) == release.values["planner"]["dryRun"]


def test_referenced_secrets_are_rendered_or_user_supplied(release: Rendered) -> None:
    made = {
        one["metadata"]["name"]: {**one.get("data", {}), **one.get("stringData", {})} for one in release.of("Secret")
    }
    issued = {one["spec"]["secretName"] for one in release.of("Certificate")}
    for component, pod in release.pods():
        for name, key in secrets_of(pod):
            assert name in made or name in issued or name in str(release.values), (component, name)
            assert name not in made or key is None or key in made[name]
    for keys in (text for name, one in made.items() if name.endswith("-api-keys") for text in one.values()):
        assert all(one["operator"] for one in yaml.safe_load(keys)["api_keys"]), "/metrics is asked for with them"
    # Keys in the clear are for who asks alone.
    first = {component for component, pod in release.pods() if any("first-key" in name for name, _ in secrets_of(pod))}
    assert first <= {"test", "planner"}


def test_prometheus_uses_an_operator_key_known_to_routers(release: Rendered) -> None:
    for monitor in (*release.of("ServiceMonitor"), *release.of("PodMonitor")):
        for endpoint in (*monitor["spec"].get("endpoints", ()), *monitor["spec"].get("podMetricsEndpoints", ())):
            if endpoint["port"] != "http":
                continue  # the planner's own, which asks for no key
            named = endpoint.get("authorization", {}).get("credentials")
            if _has_open_metrics(release):
                assert named is None
                continue
            if (stated := release.values["monitoring"]["bearerSecret"])["name"]:
                assert named == stated
                continue
            [secret] = [one for one in release.of("Secret") if one["metadata"]["name"] == named["name"]]
            key = base64.b64decode(secret["data"][named["key"]]).decode()
            keys = yaml.safe_load(release.named("Secret", "-api-keys")["stringData"]["api-keys.yaml"])["api_keys"]
            [known] = [one for one in keys if one["key"] == f"sha256:{sha256(key.encode()).hexdigest()}"]
            assert known == {"key": known["key"], "tenant": "metrics", "operator": True}
            assert not any(named["name"] in dict(secrets_of(pod)) for _, pod in release.pods())


def _has_open_metrics(release: Rendered) -> bool:
    access = release.values["config"].get("router", {}).get("operator_access", {})
    return access.get("metrics") == "open" or not release.values["secrets"]["apiKeys"]["enabled"]


def test_secrets_are_never_on_command_lines(release: Rendered) -> None:
    for component, pod in release.pods():
        for container in containers(pod):
            secret = {one["name"] for one in container.get("env", ()) if "secretKeyRef" in one.get("valueFrom", {})}
            for word in (*container.get("command", ()), *container.get("args", ())):
                assert not {name for name in secret if f"$({name})" in word}, component


def test_releases_in_two_namespaces_share_no_cluster_objects() -> None:
    here, there = (
        {
            (one["kind"], one["metadata"]["name"])
            for one in render(GOOD[_RANKED], namespace=namespace).of("PriorityClass")
        }
        for namespace in ("llm", "llm-2")
    )
    assert len(here) == len(there) == len(list(release_of(_RANKED).pods())) - 1, "all but the test's"
    assert not here & there


def test_priority_classes_are_rendered_or_user_supplied(release: Rendered) -> None:
    made = {one["metadata"]["name"] for one in release.of("PriorityClass")}
    for component, pod in release.pods():
        if "priorityClassName" in pod["spec"]:
            named = release.values[component.removesuffix("-node")]["priorityClassName"]
            assert pod["spec"]["priorityClassName"] in ({named} if named else made), component


_RANKED = "planned, everything else on"


def test_services_and_selectors_match_their_pods(release: Rendered) -> None:
    pods = dict(release.pods())
    for service in release.of("Service"):
        found = [
            pod for pod in pods.values() if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        assert len(found) == 1, service["metadata"]["name"]
        ports = {port["name"] for one in containers(found[0]) for port in one.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for kind, path in _SELECTING:
        for one in release.of(kind):
            wanted = _at(one["spec"], path)["matchLabels"]
            assert sum(wanted.items() <= pod["metadata"]["labels"].items() for pod in pods.values()) == 1
    for monitor in release.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert [one for one in release.of("Service") if wanted.items() <= one["metadata"]["labels"].items()]
    targets = {(one["kind"], one["metadata"]["name"]) for one in release.objects}
    for scaler in (*release.of("HorizontalPodAutoscaler"), *release.of("ScaledObject")):
        reference = scaler["spec"]["scaleTargetRef"]
        assert (reference["kind"], reference["name"]) in targets
        # Two who set the same number would fight over it.
        assert "replicas" not in release.named(reference["kind"], reference["name"].removeprefix("chat-tandem"))["spec"]


_SELECTING = [
    ("Deployment", "selector"),
    ("StatefulSet", "selector"),
    ("PodDisruptionBudget", "selector"),
    ("PodMonitor", "selector"),
]


def _at(spec: Any, path: str) -> Any:
    for key in path.split("."):
        spec = spec[key]
    return spec


def test_network_policies_allow_exactly_the_needed_edges(release: Rendered, config: ClusterConfig) -> None:
    if not release.values["networkPolicy"]["enabled"]:
        assert release.of("NetworkPolicy") == []
        return
    every = {(component, kind) for component, _ in release.pods() for kind in ("Ingress", "Egress")}
    assert isolated(release) == every
    assert allowed(release) == needed(release, config)


def test_processes_read_the_intended_configuration(
    release: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = {component for component, _ in release.pods()} & {"router", "prefill", "decode"}
    assert {"router", "decode"} <= roles
    for role in roles:
        config = read_by(release, role, tmp_path, monkeypatch)
        tls = config.cluster.tls
        assert tls.mode == release.values["tls"]["cluster"]["mode"]
        assert tls.has_certificates == (tls.mode != "off")
        _assert_mounted(release.pod(role), [tls.cert, tls.key, tls.ca])
        assert cluster_secret(config) == b"7" * 20
        assert config.redis.redis_settings() is not None
        assert config.router.host == release.values["router"]["listen"]
        if role == "router":
            continue
        pool = getattr(config, role)
        assert listen_address(pool, role, 1) == (f"[{POD_IP}]", release.values[role]["port"])
        assert health_port(pool, 1) == release.values[role]["healthPort"]
        label = release.values[role]["rackLabel"]
        assert pool.rack == (RACKS[label] if label else "")
        assert num_ranks(config, pool) == pool.ranks_per_node
        assert config.engine.device == ("cuda" if release.values[role]["gpu"]["enabled"] else "cpu")


def test_sentinel_values_reach_redis_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = release_of("redis behind sentinels")
    settings = read_by(release, "decode", tmp_path, monkeypatch).redis.redis_settings()
    assert settings is not None
    assert settings.tls
    assert settings.sentinel == SentinelSettings(
        addresses=(("sentinel-0.redis", 26379), ("sentinel-1.redis", 26379), ("fd00::7", 26380)),
        master="cache",
        username="tandem",
        password="0456",
    )


def test_configured_files_are_mounted(release: Rendered, config: ClusterConfig) -> None:
    router = release.pod("router")
    files = [config.router.api_keys_file, config.router.batches.path]
    files += [config.router.tls.cert, config.router.tls.key] if config.router.tls else []
    files += [config.router.audit_log.path] if config.router.audit_log else []
    _assert_mounted(router, [*files, config.redis.ca])
    for role, pod in release.pods():
        if role.removesuffix("-node") not in ("prefill", "decode"):
            continue
        tls = config.transfer.tls
        _assert_mounted(pod, [tls.cert, tls.key, tls.ca] if tls else [])
        if not role.endswith("-node"):
            _assert_mounted(pod, [config.redis.ca, config.engine.disk_cache_path])
        if config.model.path != "builtin":
            assert mount_of(pod, "/models") is not None


def _assert_mounted(pod: Any, files: list[str | None]) -> None:
    [container] = pod["spec"]["containers"]
    places = [mount["mountPath"] for mount in container["volumeMounts"]]
    for file in files:
        assert file is None or any(Path(file).is_relative_to(place) for place in places), file


def test_termination_grace_covers_drain_and_margin(release: Rendered, config: ClusterConfig) -> None:
    margin = release.values["terminationMarginSeconds"]
    for role, pod in release.pods():
        if role in ("redis", "test", "planner"):
            continue
        [container] = pod["spec"]["containers"]
        pre = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert (pre > 0) == (role == "router")
        # A worker's other nodes stay for its drain.
        role = role.removesuffix("-node")
        drain = config.prefill.drain_s if role == "prefill" else config.decode.drain_s
        assert pod["spec"]["terminationGracePeriodSeconds"] >= pre + math.ceil(drain) + margin
        stated = release.values[role].get("terminationGracePeriodSeconds")
        assert pod["spec"]["terminationGracePeriodSeconds"] == (stated or pre + math.ceil(drain) + margin)


def test_probes_cover_startup_and_drain_of_each_role(release: Rendered) -> None:
    for role, pod in release.pods():
        if role in ("redis", "test", "planner"):
            continue
        [container] = pod["spec"]["containers"]
        if role.endswith("-node"):
            assert not {"startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "ports"} & container.keys()
            continue
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= release.values[role]["startupSeconds"]
        if role == "router":
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz?exclude=workers"
            assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        else:
            # Not at the worker's own port: the kubelet speaks no TLS.
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert container[probe]["grpc"] == {"port": release.values[role]["healthPort"]}


def test_min_ready_seconds_covers_router_canary(release: Rendered) -> None:
    canary = CanarySettings()
    for pool in release.of("StatefulSet"):
        assert pool["spec"]["minReadySeconds"] >= canary.silence_s + 2 * canary.interval_s


def test_model_volume_is_mounted_read_only(release: Rendered) -> None:
    for _, pod in release.pods():
        for volume in pod["spec"].get("volumes", ()):
            if volume["name"] == "models" and (claim := volume.get("persistentVolumeClaim")):
                assert claim.get("readOnly", False) == (release.values["model"]["source"] == "volume")


def test_gateway_routes_are_unique_per_listener_and_host(release: Rendered) -> None:
    taken: dict[tuple[str, str], str] = {}
    for kind in ("HTTPRoute", "GRPCRoute"):
        for route in release.of(kind):
            for parent in route["spec"]["parentRefs"]:
                for name in route["spec"].get("hostnames", ["*"]):
                    assert taken.setdefault((str(parent), name), kind) == kind


def test_pod_resources_match_ranks(release: Rendered, config: ClusterConfig) -> None:
    for role in ("prefill", "decode"):
        ranks = getattr(config, role).ranks_per_node
        values = release.values[role]
        for component, pod in release.pods():
            if component.removesuffix("-node") != role:
                continue
            [container] = pod["spec"]["containers"]
            limits = container["resources"]["limits"]
            assert limits.get(values["gpu"]["resource"]) == (ranks if values["gpu"]["enabled"] else None)
            assert limits.get(values["rdma"]["resource"]) == (
                values["rdma"]["count"] if values["rdma"]["enabled"] else None
            )
            shm = mount_of(pod, "/dev/shm")
            assert (shm is not None) == (ranks > 1 or values["rdma"]["enabled"])
            if shm is not None:
                assert shm["emptyDir"]["medium"] == "Memory"
                size = values.get("shmSize") or f"{256 * ranks}Mi"
                assert shm["emptyDir"]["sizeLimit"] == size
                assert _bytes(size) < _bytes(limits["memory"])


def _bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * _MEMORY[unit]


def test_rendered_queries_use_exported_metrics(release: Rendered) -> None:
    known = emitted()
    recorded = set()
    for rule in _rules(release):
        assert named_in(rule["expr"]) <= known, rule["expr"]
        recorded.add(rule["record"])
    for scaler in release.of("ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            assert named_in(trigger["metadata"]["query"]) <= known
    queried = {
        metric["external"]["metric"]["name"]
        for scaler in release.of("HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "External"
    }
    assert queried <= recorded


def _rules(release: Rendered) -> Iterator[dict[str, Any]]:
    scaling = [one for one in release.of("PrometheusRule") if one["metadata"]["name"].endswith("-scaling")]
    for one in scaling:
        for group in one["spec"]["groups"]:
            yield from group["rules"]


def test_tandem_environment_variables_are_settings(release: Rendered) -> None:
    for role, pod in release.pods():
        for container in containers(pod):
            for name in (variable["name"] for variable in container.get("env", ())):
                assert not name.startswith("TANDEM_") or name.startswith(_SETTINGS), (role, name)


_SETTINGS = (
    "TANDEM_SECRET",
    "TANDEM_CLUSTER__TLS",
    "TANDEM_PREFILL__HEALTH_PORT",
    "TANDEM_DECODE__HEALTH_PORT",
    "TANDEM_REDIS__",
    "TANDEM_PREFILL__RACK",
    "TANDEM_DECODE__RACK",
    "TANDEM_PREFILL__HOST",
    "TANDEM_DECODE__HOST",
    "TANDEM_ENGINE__DEVICE",
    "TANDEM_TELEMETRY__OTLP_HEADERS",
)


_STEPS = EngineStepTotals(steps=1, seconds=0.1, tokens=1, requests=1)
_WORK = EngineWorkReport(
    prefill=_STEPS,
    decode=_STEPS,
    preemptions=0,
    resident_bytes=1,
    weights_bytes=1,
    kv_bytes=1,
    flops_per_token=1,
    drafts=(DraftSourceTotals(source="lookup", drafts=1, draft_tokens=(1,), accepted_tokens=(1,)),),
)
_SERIES = re.compile(r"\b(?:tandem_|vllm:)[a-z0-9_:]+")


@cache
def emitted() -> frozenset[str]:
    """With one worker in sight."""
    metrics = RouterMetrics("m")
    metrics.registry.register(AdmissionMetrics(AdmissionBench().admission, metrics.tenants))
    metrics.worker_loads([snapshot(work=_WORK)])
    families = text_string_to_metric_families(metrics.render().decode())
    return frozenset(sample.name for family in families for sample in family.samples)


def named_in(expression: str) -> set[str]:
    return set(_SERIES.findall(expression))
