"""Who may speak to whom by the rendered NetworkPolicies, worked out as a network plugin does; and who has to."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tandem.config.cluster import ClusterConfig
from tests.chart.rendering import Rendered

Object = Mapping[str, Any]
ANYWHERE = "anywhere"
OUTSIDE = "outside"
Ports = tuple[int, int]


class Edge(NamedTuple):
    source: str
    target: str
    ports: Ports
    protocol: str = "TCP"


def allowed(release: Rendered) -> set[Edge]:
    """Between the release's components both ends must allow it; beyond them the one that is ours."""
    labels = {component: pod["metadata"]["labels"] for component, pod in release.pods()}
    out, into = _edges(release, labels, "egress", "to"), _edges(release, labels, "ingress", "from")
    edges = set()
    for one, other, *ports in out:
        if other in (ANYWHERE, OUTSIDE) or (other, one, *ports) in into:
            edges.add(Edge(one, other, *ports))
    edges |= {Edge(other, one, *ports) for one, other, *ports in into if other in (ANYWHERE, OUTSIDE)}
    # A port that is open to everyone is open to our own pods too, as far as their egress rules allow.
    edges |= {
        Edge(one, other, *ports) for one, other, *ports in out if other in labels and (other, ANYWHERE, *ports) in into
    }
    return edges


def isolated(release: Rendered) -> set[tuple[str, str]]:
    """Component and direction of every pod that some policy isolates: what is not named there is denied."""
    return {
        (component, kind)
        for component, pod in release.pods()
        for policy in release.of("NetworkPolicy")
        if _selects(policy["spec"]["podSelector"], pod["metadata"]["labels"])
        for kind in policy["spec"]["policyTypes"]
    }


def _edges(release: Rendered, labels: Mapping[str, Object], direction: str, peers: str) -> set[tuple[Any, ...]]:
    found = set()
    for policy in release.of("NetworkPolicy"):
        own = [name for name, has in labels.items() if _selects(policy["spec"]["podSelector"], has)]
        for rule in policy["spec"].get(direction, ()):
            others = _others(rule.get(peers), labels)
            for one in own:
                for other in others:
                    for port in rule["ports"]:
                        span = (port["port"], port.get("endPort", port["port"]))
                        found.add((one, other, span, port["protocol"]))
    return found


def _others(peers: Iterable[Object] | None, labels: Mapping[str, Object]) -> set[str]:
    if peers is None:
        return {ANYWHERE}
    names = set()
    for peer in peers:
        if "podSelector" in peer and "namespaceSelector" not in peer:
            names |= {name for name, has in labels.items() if _selects(peer["podSelector"], has)}
        else:
            names.add(OUTSIDE)
    return names


def _selects(selector: Object, labels: Object) -> bool:
    return selector["matchLabels"].items() <= labels.items()


def needed(release: Rendered, config: ClusterConfig) -> set[Edge]:
    """By what the processes do: see docs/extend/architecture.md, "Life of a request" and "How KV moves"."""
    values = release.values
    pools = {"prefill": config.prefill, "decode": config.decode}
    workers = {name: pool.port for name, pool in pools.items() if pool.replicas}
    listening = [config.router.port, config.router.grpc_port]
    kv = (values["networkPolicy"]["kvPorts"]["first"], values["networkPolicy"]["kvPorts"]["last"])
    edges = {Edge("router", worker, ports) for worker, port in workers.items() for ports in ((port, port), kv)}
    for one in workers:
        for other, port in workers.items():
            edges |= {Edge(one, other, (port, port)), Edge(one, other, kv)}
    for name, pool in pools.items():
        if pool.replicas and pool.nodes > 1:
            edges |= _group(name, values, (pool.rank_port, pool.rank_port), kv)
    edges |= _moved(config, values, kv)
    clients = OUTSIDE if values["networkPolicy"]["clients"] else ANYWHERE
    edges |= {Edge(clients, "router", (port, port)) for port in listening}
    for one in ("router", *workers):
        edges |= _shared(one, release, config)
    if values["planner"]["enabled"]:
        server = OUTSIDE if values["networkPolicy"]["apiServer"] else ANYWHERE
        edges |= {Edge("planner", "router", (listening[0], listening[0])), *_dns("planner", values)}
        edges |= {Edge("planner", server, (port, port)) for port in (443, 6443)}
        if values["monitoring"]["scrape"] != "none":
            edges.add(Edge(OUTSIDE, "planner", (9100, 9100)))
    if values["test"]["enabled"]:
        edges |= {Edge("test", "router", (listening[0], listening[0])), *_dns("test", values)}
    return edges


def _group(worker: str, values: Object, rank_port: Ports, summed: Ports) -> set[Edge]:
    """A worker and its other nodes: these come to it, and all of them sum with each other."""
    node, policy = f"{worker}-node", values["networkPolicy"]
    edges = {Edge(node, worker, rank_port), Edge(node, node, summed), *_dns(node, values)}
    edges |= {Edge(node, worker, summed), Edge(worker, node, summed)}
    if values["model"]["source"] == "hub":
        edges.add(Edge(node, OUTSIDE if policy["hub"] else ANYWHERE, (443, 443)))
    return edges


def _moved(config: ClusterConfig, values: Object, kv: Ports) -> set[Edge]:
    """Between ranks that have their KV for themselves, on whatever node."""
    pools = {name: pool for name, pool in (("prefill", config.prefill), ("decode", config.decode)) if pool.replicas}
    spread = [name for name, pool in pools.items() if pool.nodes > 1]
    if config.engine.kv_memory != "private" and not any(values[name]["gpu"]["enabled"] for name in spread):
        return set()
    movers = [*pools, *(f"{name}-node" for name in spread)] if spread else []
    return {Edge(one, other, kv) for one in movers for other in movers}


def _shared(one: str, release: Rendered, config: ClusterConfig) -> set[Edge]:
    values, policy = release.values, release.values["networkPolicy"]
    edges = set(_dns(one, values))
    if values["redis"]["enabled"]:
        edges.add(Edge(one, "redis", (6379, 6379)))
    else:
        external = values["redis"]["external"]
        for port in {external["port"], *(int(one.rpartition(":")[2]) for one in external["sentinels"])}:
            edges.add(Edge(one, OUTSIDE if policy["redis"] else ANYWHERE, (port, port)))
    if endpoint := config.telemetry.otlp_endpoint:
        tail = endpoint.rpartition(":")[2]
        port = int(tail) if tail.isdecimal() else 443 if endpoint.startswith("https") else 80
        edges.add(Edge(one, OUTSIDE if policy["collector"] else ANYWHERE, (port, port)))
    if values["model"]["source"] == "hub":
        edges.add(Edge(one, OUTSIDE if policy["hub"] else ANYWHERE, (443, 443)))
    return edges


def _dns(one: str, values: Object) -> set[Edge]:
    port = values["networkPolicy"]["dnsPort"]
    return {Edge(one, OUTSIDE, (port, port), protocol) for protocol in ("TCP", "UDP")}
