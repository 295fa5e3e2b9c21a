"""The chart's pods through `podman kube play`, as far as podman knows what is in them.

What the cluster would do and podman does not is done here, and nothing else is changed: a StatefulSet's pods are Pods,
the pod's own address and index are put in, names of Services are in each pod's list of hosts.
"""

import base64
import copy
import itertools
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import yaml

from tests.chart.rendering import NAMESPACE, Object, Rendered
from tests.containers.engine import Engine, EngineFailed
from tests.support.pod_probes import grpc_probe, http_probe, plain_secret

NETWORK = "tandem-kube"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
ORDER = ("redis", "decode", "prefill", "router")


class Played:
    """The pods of a rendered release; a context manager."""

    def __init__(self, engine: Engine, rendered: Rendered) -> None:
        self._engine = engine
        self._rendered = rendered
        self._pods = dict(rendered.pods())
        self.addresses: dict[str, str] = {}
        self._secrets: dict[str, dict[str, str]] = {}

    def __enter__(self) -> "Played":
        subnet = self._engine.network(NETWORK)
        self.addresses = {name: f"{subnet}.{number}" for name, number in zip(self._pods, itertools.count(10))}
        for secret in self._rendered.of("Secret"):
            name = secret["metadata"]["name"]
            self._secrets[name] = plain_secret(secret)
            # For variables podman 4.3 wants the data alone, in JSON, which is not how it keeps a Secret that it plays.
            data = {key: base64.b64encode(value.encode()).decode() for key, value in self._secrets[name].items()}
            self._engine.podman("secret", "create", name, "-", text=json.dumps(data))
        return self

    def __exit__(self, *_: Any) -> None:
        self._engine.podman("pod", "rm", "--all", "--force", "--time", "0")
        self._engine.podman("secret", "rm", "--all")
        self._engine.podman("network", "rm", "--force", NETWORK)

    def play(self, component: str) -> None:
        """Start a pod. Raises EngineFailed for what podman cannot do."""
        text = yaml.safe_dump_all([*self._rendered.of("ConfigMap"), self._manifest(component)])
        self._engine.podman("kube", "play", "--network", NETWORK, "--ip", self.addresses[component], "-", text=text)

    def container(self, component: str) -> str:
        """The name that podman gave the pod's one container."""
        pod = self._manifest(component)
        [one] = pod["spec"]["containers"]
        return f"{pod['metadata']['name']}-{one['name']}"

    def state(self, component: str) -> Any:
        return self._engine.inspect(self.container(component))["State"]

    def passes(self, component: str, kind: str) -> bool:
        """One go of a probe, from outside as the kubelet's; True where there is none."""
        [container] = self._pods[component]["spec"]["containers"]
        probe, address = container.get(kind), self.addresses[component]
        if probe is None:
            return True
        if "exec" in probe:
            try:
                self._engine.podman("exec", self.container(component), *probe["exec"]["command"])
            except EngineFailed:
                return False
            return True
        if "grpc" in probe:
            return grpc_probe(f"{address}:{probe['grpc']['port']}")
        numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
        if "tcpSocket" in probe:
            with socket.socket() as tried:
                return tried.connect_ex((address, numbers[probe["tcpSocket"]["port"]])) == 0
        return http_probe(f"http://{address}:{numbers[probe['httpGet']['port']]}{probe['httpGet']['path']}")

    def log(self, component: str) -> str:
        return self._engine.logs(self.container(component))

    def stop(self, component: str) -> int:
        """As the kubelet does; the exit code."""
        grace = str(self._pods[component]["spec"]["terminationGracePeriodSeconds"])
        self._engine.podman("stop", "--time", grace, self.container(component))
        return int(self.state(component)["ExitCode"])

    def _manifest(self, component: str) -> Object:
        template = copy.deepcopy(self._pods[component])
        spec = template["spec"]
        spec["hostAliases"] = [
            {"ip": self.addresses[self._selected(service)], "hostnames": [name, f"{name}.{NAMESPACE}.svc"]}
            for service in self._rendered.of("Service")
            if (name := service["metadata"]["name"])
        ]
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                place = self._write_secret(volume.pop("secret"), group=spec["securityContext"]["fsGroup"])
                volume["hostPath"] = {"path": str(place), "type": "Directory"}
        fields = {"status.podIP": self.addresses[component], "metadata.labels['apps.kubernetes.io/pod-index']": "0"}
        for container in spec["containers"]:
            self._put_in(container, fields)
        # Without annotations: podman 4.3 takes none of more than 63 characters, which are Kubernetes' bound for labels.
        about = {"name": f"chat-tandem-{component}", "labels": template["metadata"]["labels"]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}

    def _write_secret(self, source: Object, *, group: int) -> Path:
        """A folder with its files, as Kubernetes makes it: podman 4.3 shows everybody what is in a secret's volume."""
        folder = self._engine.folder / "secrets" / source["secretName"]
        folder.mkdir(parents=True, exist_ok=True)
        kept = self._secrets[source["secretName"]]
        paths = {item["key"]: item["path"] for item in source.get("items", ())} or {key: key for key in kept}
        for key, name in paths.items():
            path = folder / name
            path.write_text(kept[key], encoding="utf-8")
            os.chown(path, 0, group)
            path.chmod(source["defaultMode"])
        return folder

    def _put_in(self, container: Object, fields: dict[str, str]) -> None:
        """Values of variables and arguments, which podman 4.3 does not put together; and no ports, which it would all
        open on this machine."""
        made: dict[str, str] = {}
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                del variable["valueFrom"]
                variable["value"] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                made[variable["name"]] = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
                continue
            made[variable["name"]] = variable["value"] = _expanded(variable["value"], made)
        container["args"] = [_expanded(word, made) for word in container.get("args", ())]
        numbers = {port["name"]: port["containerPort"] for port in container.pop("ports", ())}
        for kind in PROBES:
            if (get := container.get(kind, {}).get("httpGet")) is not None:
                get["port"] = numbers[get["port"]]

    def _selected(self, service: Object) -> str:
        return str(service["spec"]["selector"]["app.kubernetes.io/component"])


def _expanded(text: str, made: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: made[found[1]], text)
