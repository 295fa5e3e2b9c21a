"""Values that somebody may give the chart, and values that make no sense. Each set is the smallest that shows it."""

from typing import Any

from tests.chart.rendering import preset

Values = dict[str, Any]
_KEDA = {"mode": "keda"}
_HPA = {"mode": "hpa"}
_GATEWAY = {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["llm.example.com"]}
_WATCHED: Values = {
    "scrape": "service",
    "bearerSecret": {"name": "metrics-key"},
    "rules": {"enabled": True},
    "prometheusUrl": "http://prometheus:9090",
}
_ISSUED: Values = {"enabled": True, "certManager": {"issuerRef": {"name": "ours", "kind": "ClusterIssuer"}}}
_PEERS = [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}]
_DIGEST = "sha256:" + "0123456789abcdef" * 4

GOOD: dict[str, Values] = {
    "defaults": {},
    "laptop": preset("laptop"),
    "h100-8x": preset("h100-8x"),
    "70b-2p4d": preset("70b-2p4d"),
    "one pool": {"config": {"prefill": {"replicas": 0}, "decode": {"replicas": 3}}},
    "one pool of several GPUs": {
        "config": {"prefill": {"replicas": 0}, "decode": {"tensor_parallel_size": 4}},
        "decode": {"gpu": {"enabled": True}},
    },
    "both pools of several GPUs": {
        "config": {"prefill": {"tensor_parallel_size": 2}, "decode": {"tensor_parallel_size": 4}},
        "prefill": {"gpu": {"enabled": True}},
        "decode": {"gpu": {"enabled": True}},
    },
    "ranks on a CPU": {"config": {"prefill": {"tensor_parallel_size": 2}, "decode": {"tensor_parallel_size": 4}}},
    "workers over nodes": {
        "config": {
            "prefill": {"tensor_parallel_size": 4},
            "decode": {"tensor_parallel_size": 6, "replicas": 2},
            "transfer": {"isolated_network": True},
        },
        "prefill": {"nodesPerWorker": 2},
        "decode": {"nodesPerWorker": 3, "rankPort": 7301, "rdma": {"enabled": True}},
        "tls": {"kv": _ISSUED},
        "model": {"source": "hub", "hub": {"id": "org/name"}},
    },
    "workers over nodes, of GPUs, that grow": {
        "config": {
            "prefill": {"replicas": 0},
            "decode": {"tensor_parallel_size": 16, "replicas": 2},
            "transfer": {"isolated_network": True},
        },
        "decode": {"nodesPerWorker": 2, "gpu": {"enabled": True}, "autoscaling": _HPA | {"maxReplicas": 3}},
        "tls": {"kv": {"enabled": True, "existingSecret": "k"}},
        "monitoring": _WATCHED,
        "priorityClasses": {"create": True},
    },
    "workers of GPUs over nodes in both pools": {
        "config": {
            "prefill": {"tensor_parallel_size": 2},
            "decode": {"tensor_parallel_size": 16},
            "transfer": {"isolated_network": True},
        },
        "prefill": {"gpu": {"enabled": True}},
        "decode": {"nodesPerWorker": 2, "gpu": {"enabled": True}},
        "tls": {"kv": {"enabled": True, "existingSecret": "k"}},
    },
    "workers over nodes with their KV for themselves": {
        "config": {
            "engine": {"kv_memory": "private"},
            "prefill": {"tensor_parallel_size": 2},
            "decode": {"tensor_parallel_size": 4},
            "transfer": {"isolated_network": True},
        },
        "prefill": {"nodesPerWorker": 2},
        "decode": {"nodesPerWorker": 2},
        "tls": {"kv": _ISSUED},
    },
    "int4 on a GPU": {
        "config": {"decode": {"quantization": "int4"}, "model": {"dtype": "bfloat16"}},
        "decode": {"gpu": {"enabled": True}},
    },
    "stated shm": {"config": {"decode": {"tensor_parallel_size": 2}}, "decode": {"shmSize": "2Gi"}},
    "racks": {"prefill": {"rackLabel": "topology.kubernetes.io/zone"}, "decode": {"rackLabel": "rack"}},
    "racks that pods do not know": {"decode": {"rackLabel": "no.such.label"}},
    "other GPUs": {
        "prefill": {"gpu": {"enabled": True, "resource": "amd.com/gpu"}, "runtimeClassName": "nvidia"},
        "decode": {"gpu": {"enabled": True, "resource": "amd.com/gpu"}},
    },
    "rdma by nixl": {
        "config": {"transfer": {"transport": "nixl", "isolated_network": True}},
        "prefill": {"rdma": {"enabled": True}},
        "decode": {"rdma": {"enabled": True, "count": 2}},
    },
    "rdma by nixl into GPUs": {
        "config": {"transfer": {"isolated_network": True}},
        "prefill": {"rdma": {"enabled": True}, "gpu": {"enabled": True}},
        "decode": {"rdma": {"enabled": True}, "gpu": {"enabled": True}},
    },
    "rdma by nccl": {
        "config": {"transfer": {"transport": "torch_dist", "isolated_network": True}},
        "prefill": {"rdma": {"enabled": True}, "gpu": {"enabled": True}},
        "decode": {"rdma": {"enabled": True}, "gpu": {"enabled": True}},
    },
    "redis elsewhere": {"redis": {"enabled": False, "external": {"urlSecret": "shared-redis", "port": 6380}}},
    "redis elsewhere with its own authority": {
        "redis": {"enabled": False, "external": {"urlSecret": "shared-redis", "caSecret": "redis-ca"}},
        "networkPolicy": {"redis": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]},
    },
    "redis behind sentinels": {
        "redis": {
            "enabled": False,
            "external": {
                "urlSecret": "shared-redis",
                "sentinels": ["sentinel-0.redis:26379", "sentinel-1.redis:26379", "[fd00::7]:26380"],
                "sentinelMaster": "cache",
                "sentinelUsername": "tandem",
                "sentinelPasswordSecret": "sentinels",
                "caSecret": "redis-ca",
            },
        },
    },
    "redis behind sentinels that ask for nothing": {
        "redis": {"enabled": False, "external": {"sentinels": ["sentinels:26379"]}},
    },
    "secrets that stand": {
        "secrets": {
            "cluster": {"existingSecret": "c", "key": "k"},
            "apiKeys": {"existingSecret": "a", "key": "f.yaml"},
        },
        "redis": {"existingSecret": "r", "passwordKey": "p"},
        "test": {"keySecret": {"name": "one-key", "key": "k"}},
    },
    "secrets that stand, and no key to test with": {"secrets": {"apiKeys": {"existingSecret": "a"}}},
    "open access": {"secrets": {"apiKeys": {"enabled": False}}, "config": {"router": {"allow_open": True}}},
    "model of a claim": {"model": {"source": "volume", "path": "/qwen/3", "cache": {"existingClaim": "models"}}},
    "model of the hub": {"model": {"source": "hub", "hub": {"id": "Qwen/Qwen3-0.6B", "revision": "a1b2c3"}}},
    "model of the hub with a token and a claim": {
        "model": {
            "source": "hub",
            "hub": {"id": "org/name", "tokenSecret": {"name": "hub", "key": "token"}},
            "cache": {"create": True, "storageClass": "nfs", "size": "200Gi"},
        },
        "networkPolicy": {"hub": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]},
    },
    "tls of cert-manager": {"tls": {"door": _ISSUED, "kv": _ISSUED}},
    "tls of secrets": {
        "tls": {"door": {"enabled": True, "existingSecret": "d"}, "kv": {"enabled": True, "existingSecret": "k"}},
        "monitoring": _WATCHED | {"caSecret": {"name": "ca"}},
    },
    "tls between the pods of cert-manager": {
        "tls": {"cluster": {"certManager": {"issuerRef": {"name": "ours"}, "dnsNames": ["chat.internal"]}}}
    },
    "tls between the pods of a secret": {"tls": {"cluster": {"existingSecret": "m"}}},
    "tls between the pods that begins": {"tls": {"cluster": {"mode": "permissive"}}, "decode": {"healthPort": 7777}},
    "no tls between the pods": {"tls": {"cluster": {"mode": "off"}}, "networkPolicy": {"enabled": False}},
    "workers over nodes in the tls of the cluster": {
        "config": {
            "prefill": {"replicas": 0},
            "decode": {"tensor_parallel_size": 2},
            "transfer": {"isolated_network": True},
        },
        "decode": {"nodesPerWorker": 2},
    },
    "ingress": {"ingress": {"enabled": True, "host": "llm.example.com", "className": "nginx", "tlsSecret": "t"}},
    "gateway": {"gateway": _GATEWAY | {"grpcHostnames": ["grpc.example.com"]}},
    "gateways of their own": {"gateway": _GATEWAY | {"grpcParentRefs": [{"name": "g", "sectionName": "grpc"}]}},
    "gateway without grpc": {
        "gateway": {"enabled": True, "grpc": False, "parentRefs": [{"name": "g", "namespace": "edge"}]},
        "config": {"router": {"request_timeout_s": 0.5}},
    },
    "a key for Prometheus that is made": {"monitoring": {"scrape": "pod"}},
    "service monitor": {
        "monitoring": _WATCHED | {"labels": {"release": "prometheus"}, "dashboards": {"enabled": True}}
    },
    "pod monitor with open metrics": {
        "monitoring": {"scrape": "pod"},
        "config": {"router": {"operator_access": {"metrics": "open"}}},
    },
    "hpa": {"monitoring": _WATCHED, "prefill": {"autoscaling": _HPA}, "decode": {"autoscaling": _HPA}},
    "keda": {"monitoring": _WATCHED, "prefill": {"autoscaling": _KEDA}, "decode": {"autoscaling": _KEDA}},
    "one pool grows": {"monitoring": _WATCHED, "decode": {"autoscaling": _KEDA | {"maxReplicas": 32}}},
    "planned": {"planner": {"enabled": True, "least": {"prefill": 2, "decode": 3}}},
    "planned, everything else on": {
        "planner": {"enabled": True, "keySecret": {"name": "operator"}, "slo": {"ttftSeconds": 1.5}},
        "secrets": {"apiKeys": {"existingSecret": "a"}},
        "monitoring": _WATCHED,
        "tls": {"door": _ISSUED},
        "priorityClasses": {"create": True},
        "networkPolicy": {"clients": _PEERS, "apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
    },
    "planned, but only said": {
        "planner": {"enabled": True, "dryRun": True},
        "router": {"listen": "::"},
        "config": {"router": {"operator_access": {"metrics": "open"}}},
        "secrets": {"apiKeys": {"existingSecret": "a"}},
    },
    "routers grow": {"router": {"autoscaling": {"enabled": True, "maxReplicas": 3}}},
    "named clients": {"networkPolicy": {"clients": _PEERS}, "monitoring": _WATCHED},
    "no policies": {"networkPolicy": {"enabled": False}},
    "traces": {
        "config": {"telemetry": {"otlp_endpoint": "http://otel.monitoring:4317", "sample_ratio": 0.1}},
        "telemetry": {"headersSecret": {"name": "otel", "key": "headers"}},
        "networkPolicy": {"collector": _PEERS},
    },
    "traces to a port that is not said": {"config": {"telemetry": {"otlp_endpoint": "https://otel.example.com"}}},
    "long drains": {
        "config": {"prefill": {"drain_s": 90.5}, "decode": {"drain_s": 600}},
        "router": {"preStopSeconds": 45},
    },
    "stated graces": {
        "router": {"terminationGracePeriodSeconds": 55},
        "prefill": {"terminationGracePeriodSeconds": 45},
        "decode": {"terminationGracePeriodSeconds": 300},
    },
    "disk cache": {
        "config": {"engine": {"host_cache_bytes": 1 << 30, "disk_cache_bytes": 8 << 30, "disk_cache_path": "/kv"}},
        "prefill": {"diskCache": {"size": "10Gi"}},
        "decode": {"diskCache": {"size": "10Gi", "storageClass": "local"}},
    },
    "priorities": {"priorityClasses": {"create": True}, "decode": {"priorityClassName": "mine"}},
    "scheduling": {
        "router": {"affinity": {"nodeAffinity": {}}, "spread": {"nodes": "none", "zones": "none"}},
        "decode": {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"a": "b"}, "podLabels": {"x": "y"}},
        "imagePullSecrets": ["registry"],
    },
    "digests": {
        "requireDigests": True,
        "images": {"router": {"digest": _DIGEST}, "worker": {"digest": _DIGEST}},
        "redis": {"image": {"digest": _DIGEST}},
    },
    "audit and batches": {
        "config": {"router": {"audit_log": {"path": "/var/log/tandem/audit"}, "batches": {"path": "/batches"}}},
        "router": {
            "extraVolumes": [
                {"name": "audit", "emptyDir": {"sizeLimit": "1Gi"}},
                {"name": "batches", "persistentVolumeClaim": {"claimName": "batches"}},
            ],
            "extraVolumeMounts": [
                {"name": "audit", "mountPath": "/var/log/tandem"},
                {"name": "batches", "mountPath": "/batches"},
            ],
        },
    },
    "IPv6, other ports, another name": {
        "router": {"listen": "::", "ports": {"http": 8080, "grpc": 9090}},
        "prefill": {"port": 7100},
        "decode": {"port": 7200},
        "nameOverride": "tandem",
        "networkPolicy": {"kvPorts": {"first": 40000, "last": 50000}, "dnsPort": 5353},
    },
    "much of the cluster's YAML": {
        "config": {
            "log_level": "debug",
            "engine": {"kv_dtype": "int8", "memory_bytes": 17179869184, "eviction": "lfu"},
            "router": {"max_inflight_requests": 4096, "processes": 8, "hedging": {}, "max_body_bytes": 16777216},
            "prices": {},
        },
    },
    "no test": {"test": {"enabled": False}, "networkPolicy": {"clients": _PEERS}},
}
IN_CI = (
    "defaults",
    "planned, everything else on",
    "70b-2p4d",
    "tls of cert-manager",
    "gateway",
    "workers over nodes",
    "named clients",
    "hpa",
)

BAD: dict[str, tuple[Values, str]] = {
    "a mode of tls that is none": ({"tls": {"cluster": {"mode": "auto"}}}, "/tls/cluster/mode"),
    "tls in the cluster's YAML": ({"config": {"cluster": {"tls": {"mode": "off"}}}}, "cluster"),
    "health where sessions are": ({"decode": {"healthPort": 7000}}, "decode.healthPort and decode.port are both 7000"),
    "health where ranks are": ({"prefill": {"healthPort": 7001}}, "prefill.healthPort and prefill.rankPort are both"),
    "no such value": ({"replicas": 2}, "replicas"),
    "no such value below": ({"router": {"replica": 2}}, "replica"),
    "no such setting": ({"config": {"engine": {"blok_size": 16}}}, "blok_size"),
    "no such section": ({"config": {"routr": {}}}, "routr"),
    "a secret in the clear": ({"config": {"secret": "0123456789abcdef"}}, "secret"),
    "keys in the clear": ({"config": {"router": {"api_keys": ["a"]}}}, "api_keys"),
    "an address": ({"config": {"decode": {"addresses": ["a:1"]}}}, "addresses"),
    "a Redis in the clear": ({"config": {"redis": {"url": "redis://x"}}}, "url"),
    "block size": ({"config": {"engine": {"block_size": 24}}}, "/config/engine/block_size"),
    "transport": ({"config": {"transfer": {"transport": "pigeon"}}}, "/config/transfer/transport"),
    "too many workers": ({"config": {"decode": {"replicas": 257}}}, "/config/decode/replicas"),
    "a text for a number": ({"config": {"router": {"max_queue_s": "long"}}}, "/config/router/max_queue_s"),
    "a name of no Service": ({"fullnameOverride": "1-chat"}, "fullnameOverride: names of Services begin with 1-chat"),
    "an image in two lines": ({"images": {"worker": {"repository": "a\n  b: c"}}}, "/images/worker/repository"),
    "a tag with more behind it": ({"images": {"router": {"tag": "1, evil: 2"}}}, "/images/router/tag"),
    "another's label": (
        {"decode": {"podLabels": {"app.kubernetes.io/component": "router"}}},
        "decode.podLabels: app.kubernetes.io/component",
    ),
    "a checksum of one's own": ({"router": {"podAnnotations": {"checksum/config": "x"}}}, "router.podAnnotations"),
    "a low port": ({"router": {"ports": {"http": 80}}}, "/router/ports/http"),
    "a digest that is none": ({"images": {"worker": {"digest": "latest"}}}, "/images/worker/digest"),
    "root": ({"securityContext": {"user": 0}}, "/securityContext/user"),
    "a size that is none": ({"tmpSize": "big"}, "/tmpSize"),
    "pull policy": ({"images": {"router": {"pullPolicy": "Sometimes"}}}, "/images/router/pullPolicy"),
    "a tag where digests are asked for": (
        {"requireDigests": True},
        "requireDigests: the image tandem-router has no digest",
    ),
    "ranks that no nodes share": (
        {"config": {"decode": {"tensor_parallel_size": 2}}, "decode": {"nodesPerWorker": 3}},
        "decode.nodesPerWorker: 3: it must divide",
    ),
    "nodes in the clear": (
        {
            "config": {"decode": {"tensor_parallel_size": 2}},
            "decode": {"nodesPerWorker": 2},
            "tls": {"cluster": {"mode": "off"}},
        },
        "decode.nodesPerWorker: 2: what a worker tells its ranks",
    ),
    "nodes on everybody's network": (
        {"config": {"decode": {"tensor_parallel_size": 2}}, "decode": {"nodesPerWorker": 2}, "tls": {"kv": _ISSUED}},
        "decode.nodesPerWorker: 2: gloo and NCCL",
    ),
    "a planner of groups": (
        {
            "config": {"decode": {"tensor_parallel_size": 2}, "transfer": {"isolated_network": True}},
            "decode": {"nodesPerWorker": 2},
            "tls": {"kv": _ISSUED},
            "planner": {"enabled": True},
        },
        "planner.enabled: decode.nodesPerWorker is 2",
    ),
    "nf4 on a GPU": (
        {"config": {"decode": {"quantization": "nf4"}}, "decode": {"gpu": {"enabled": True}}},
        "config.decode.quantization: nf4",
    ),
    "fp8 on a GPU": (
        {"config": {"engine": {"quantization": "fp8"}}, "prefill": {"gpu": {"enabled": True}}},
        "config.engine.quantization: fp8",
    ),
    "shared memory between pods": ({"config": {"transfer": {"transport": "shm"}}}, "config.transfer.transport: shm"),
    "nixl over everybody's network": (
        {"config": {"transfer": {"transport": "nixl"}}},
        "config.transfer.isolated_network",
    ),
    "rdma over everybody's network": ({"prefill": {"rdma": {"enabled": True}}}, "prefill.rdma.enabled"),
    "tls of what has none": (
        {
            "config": {"transfer": {"transport": "nixl", "isolated_network": True}},
            "tls": {"kv": {"enabled": True, "existingSecret": "k"}},
        },
        "tls.kv.enabled: nixl",
    ),
    "no Redis": ({"redis": {"enabled": False}}, "redis.external.urlSecret"),
    "sentinels of our Redis": (
        {"redis": {"external": {"sentinels": ["a:26379"]}}},
        "redis.external.sentinels: they watch",
    ),
    "a sentinel without a port": (
        {"redis": {"enabled": False, "external": {"sentinels": ["a"]}}},
        "/redis/external/sentinels/0",
    ),
    "a sentinel's password without one": (
        {"redis": {"enabled": False, "external": {"urlSecret": "u", "sentinelPasswordSecret": "p"}}},
        "redis.external.sentinels: sentinelUsername and sentinelPasswordSecret",
    ),
    "a sentinel's user without a password": (
        {"redis": {"enabled": False, "external": {"sentinels": ["a:1"], "sentinelUsername": "u"}}},
        "redis.external.sentinelPasswordSecret",
    ),
    "sentinels with an authority and no TLS": (
        {"redis": {"enabled": False, "external": {"sentinels": ["a:1"], "caSecret": "c"}}},
        "redis.external.urlSecret: caSecret",
    ),
    "sentinels of the configuration": ({"config": {"redis": {"sentinels": ["a:1"]}}}, "sentinels"),
    "a router's grace": (
        {"router": {"terminationGracePeriodSeconds": 54}},
        "router.terminationGracePeriodSeconds: 54 s",
    ),
    "a worker's grace": (
        {"config": {"decode": {"drain_s": 31}}, "decode": {"terminationGracePeriodSeconds": 45}},
        "decode.terminationGracePeriodSeconds: 45 s",
    ),
    "margin": ({"terminationMarginSeconds": 1}, "/terminationMarginSeconds"),
    "open access unconfirmed": ({"secrets": {"apiKeys": {"enabled": False}}}, "secrets.apiKeys.enabled"),
    "locked probes": (
        {"config": {"router": {"operator_access": {"readyz": "key"}}}},
        "config.router.operator_access.readyz",
    ),
    "locked metrics": (
        {"monitoring": {"scrape": "service"}, "secrets": {"apiKeys": {"existingSecret": "a"}}},
        "monitoring.bearerSecret",
    ),
    "one port for two": ({"router": {"ports": {"http": 8001}}}, "router.ports: http and grpc are both 8001"),
    "ingress without a name": ({"ingress": {"enabled": True}}, "ingress.host"),
    "routes without a gateway": ({"gateway": {"enabled": True}}, "gateway.parentRefs"),
    "no name for gRPC": ({"gateway": _GATEWAY}, "gateway.grpcHostnames"),
    "one name for two routes": ({"gateway": _GATEWAY | {"grpcHostnames": ["*.example.com"]}}, "gateway.grpcHostnames"),
    "tls of nobody": ({"tls": {"door": {"enabled": True}}}, "tls.door"),
    "a volume without a claim": ({"model": {"source": "volume", "path": "m"}}, "model.cache.existingClaim"),
    "a claim without a directory": (
        {"model": {"source": "volume", "cache": {"existingClaim": "m"}}},
        "model.path",
    ),
    "a hub without a model": ({"model": {"source": "hub"}}, "model.hub.id"),
    "two caches": ({"model": {"cache": {"create": True, "existingClaim": "m"}}}, "model.cache.create"),
    "scaling unseen": ({"decode": {"autoscaling": _HPA}}, "decode.autoscaling.mode: hpa"),
    "scaling unrecorded": (
        {"monitoring": _WATCHED | {"rules": {"enabled": False}}, "decode": {"autoscaling": _HPA}},
        "monitoring.rules.enabled",
    ),
    "a runbook nowhere": ({"monitoring": {"rules": {"runbookUrl": "some where"}}}, "runbookUrl"),
    "keda with nobody to ask": (
        {"monitoring": _WATCHED | {"prometheusUrl": ""}, "prefill": {"autoscaling": _KEDA}},
        "monitoring.prometheusUrl",
    ),
    "more at least than at most": (
        {"monitoring": _WATCHED, "decode": {"autoscaling": _HPA | {"minReplicas": 9}}},
        "decode.autoscaling.minReplicas",
    ),
    "two who scale": (
        {"monitoring": _WATCHED, "planner": {"enabled": True}, "decode": {"autoscaling": _HPA}},
        "planner.enabled: decode.autoscaling.mode is hpa",
    ),
    "a planner of one pool": (
        {"planner": {"enabled": True}, "config": {"prefill": {"replicas": 0}}},
        "planner.enabled: it sizes two pools",
    ),
    "a planner without a key": (
        {"planner": {"enabled": True}, "secrets": {"apiKeys": {"existingSecret": "a"}}},
        "planner.keySecret",
    ),
    "a planner without room": (
        {"planner": {"enabled": True, "least": {"prefill": 5, "decode": 5}}},
        "planner.mostWorkers: 8",
    ),
    "a planner's promise": ({"planner": {"slo": {"ttftSeconds": 0}}}, "/planner/slo/ttftSeconds"),
    "a disk without a volume": (
        {"config": {"engine": {"host_cache_bytes": 1, "disk_cache_bytes": 1, "disk_cache_path": "/kv"}}},
        "prefill.diskCache.size",
    ),
}
