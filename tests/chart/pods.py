"""What must hold of every pod that the chart makes, whatever the values; and what the processes in it will read."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.config.cluster import ClusterConfig, load
from tests.chart.rendering import Rendered

Object = Mapping[str, Any]
_VOLUMES = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected"}
_SECRETS = {"CLUSTER_SECRET": "7" * 20, "REDIS_PASSWORD": "0123", "REDIS_URL": "rediss://u:p@cache.example.com:6380/2"}
_HOSTLESS_URL = "rediss://u:p@/2"
_TOLD = _SECRETS | {
    "SENTINEL_PASSWORD": "0456",
    "OTLP_HEADERS": '{"authorization": "Bearer x"}',
    "POD_INDEX": "1",
    "GROUP_INDEX": "1",
    "GROUP_REVISION": "7d9f",
    "NODE_INDEX": "2",
}
POD_IP = "fd00::12"
RACKS = {"topology.kubernetes.io/zone": "no", "rack": "12", "no.such.label": ""}
"""Values of labels that name racks, which a worker must read as text; a pod without the label has an empty one."""


def containers(pod: Object) -> Iterator[Object]:
    yield from pod["spec"].get("initContainers", ())
    yield from pod["spec"]["containers"]


def lapses(pod: Object) -> Iterator[str]:
    """What Pod Security "restricted" would refuse, and what goes beyond it here."""
    spec = pod["spec"]
    about = spec["securityContext"]
    yield from _unless(about["runAsNonRoot"] is True and about["runAsUser"] > 0 and about["runAsGroup"] > 0, "root")
    yield from _unless(about["seccompProfile"] == {"type": "RuntimeDefault"}, "no seccomp profile")
    yield from _unless(spec["automountServiceAccountToken"] is False, "a token of the API server")
    yield from _unless(spec["enableServiceLinks"] is False, "variables of Services")
    yield from _unless(not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), "the host's namespaces")
    for volume in spec.get("volumes", ()):
        yield from _unless(len(volume) == 2 and _VOLUMES & volume.keys(), f"volume {volume['name']}")
        if "emptyDir" in volume:
            yield from _unless(volume["emptyDir"].get("sizeLimit"), f"volume {volume['name']} without a bound")
    for one in containers(pod):
        own = one["securityContext"]
        yield from _unless(own["allowPrivilegeEscalation"] is False, f"{one['name']} may gain rights")
        yield from _unless(own["capabilities"] == {"drop": ["ALL"]}, f"{one['name']} has capabilities")
        yield from _unless(own["readOnlyRootFilesystem"] is True, f"{one['name']} writes to its image")
        yield from _unless("privileged" not in own and own["runAsNonRoot"] is True, f"{one['name']} is root")
        yield from _unless(one["resources"]["limits"].get("memory"), f"{one['name']} has no bound of memory")


def loose_ends(release: Rendered, pod: Object) -> Iterator[str]:
    """Mounts without a volume, volumes that nobody mounts, names of objects that are not there."""
    spec = pod["spec"]
    claims = {
        claim["metadata"]["name"]
        for one in release.of("StatefulSet")
        if one["spec"]["template"] is pod
        for claim in one["spec"].get("volumeClaimTemplates", ())
    }
    volumes = {volume["name"] for volume in spec.get("volumes", ())} | claims
    mounted = {mount["name"] for one in containers(pod) for mount in one.get("volumeMounts", ())}
    yield from (f"volume {name}" for name in volumes ^ mounted)
    for one in containers(pod):
        places = [mount["mountPath"] for mount in one.get("volumeMounts", ())]
        yield from _unless(len(places) == len(set(places)), f"{one['name']} mounts two volumes at one place")
    if spec["serviceAccountName"] not in {one["metadata"]["name"] for one in release.of("ServiceAccount")}:
        yield f"service account {spec['serviceAccountName']}"


def secrets_of(pod: Object) -> Iterator[tuple[str, str | None]]:
    """Name and key of every secret that the pod reads."""
    for one in containers(pod):
        for variable in one.get("env", ()):
            if ref := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield ref["name"], ref["key"]
    for volume in pod["spec"].get("volumes", ()):
        if "secret" in volume:
            items = volume["secret"].get("items") or [{"key": None}]
            yield from ((volume["secret"]["secretName"], item["key"]) for item in items)


def environment(container: Object) -> dict[str, str]:
    """As the kubelet makes it, in order: a variable may use those before it."""
    made: dict[str, str] = {}
    for variable in container.get("env", ()):
        name = variable["name"]
        if "value" in variable:
            made[name] = re.sub(r"\$\((\w+)\)", lambda found: made[found[1]], variable["value"])
        else:
            path = variable["valueFrom"].get("fieldRef", {}).get("fieldPath", "")
            label = path.removeprefix("metadata.labels['").removesuffix("']")
            made[name] = POD_IP if name == "POD_IP" else _TOLD[name] if name in _TOLD else RACKS[label]
    return made


def read_by(release: Rendered, component: str, folder: Path, patch: pytest.MonkeyPatch) -> ClusterConfig:
    """The configuration that a component's process ends up with."""
    path = folder / "cluster.yaml"
    path.write_text(release.cluster_yaml(), encoding="utf-8")
    [container] = release.pod(component)["spec"]["containers"]
    with patch.context() as inside:
        for name, value in environment(container).items():
            if name.startswith("TANDEM_"):
                inside.setenv(name, value)
        if release.values["redis"]["external"]["sentinels"] and "TANDEM_REDIS__URL" in environment(container):
            inside.setenv("TANDEM_REDIS__URL", f"'{_HOSTLESS_URL}'")
        return load(path)


def mount_of(pod: Object, path: str) -> Object | None:
    """The volume at a path of the pod's main container."""
    [container] = pod["spec"]["containers"]
    names = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == path]
    return next((one for one in pod["spec"]["volumes"] if one["name"] in names), None)


def _unless(holds: Any, lapse: str) -> Iterator[str]:
    if not holds:
        yield lapse
