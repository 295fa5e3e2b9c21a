"""The Helm chart's own values: their types and bounds. `helm/tandem/values.yaml` has their defaults and meanings.

No field has a default here, and none is required: whatever a user omits comes from that file.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from tandem.config.pools import MAX_TENSOR_PARALLEL
from tandem.config.section import Section

_NAME = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
Name = Annotated[str, Field(pattern=rf"^({_NAME})?$", max_length=63)]
ObjectName = Annotated[str, Field(pattern=rf"^({_NAME}(\.{_NAME})*)?$", max_length=253)]
HostAndPort = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[1-9][0-9]{0,4}$", max_length=260)]
Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=253)]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$")]
NoQuantity = Annotated[str, Field(pattern=r"^([0-9]+(\.[0-9]+)?([kMGTPE]i?)?)?$")]
Amount = Quantity | Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Duration = Annotated[str, Field(pattern=r"^[1-9][0-9]*(ms|s|m|h)$")]
PortNumber = Annotated[int, Field(ge=1, le=65535)]
PodPort = Annotated[int, Field(ge=1024, le=65535)]
Seconds = Annotated[int, Field(ge=0, le=86400)]
Path = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]*$")]
ResourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?$")]
Spreading = Literal["ScheduleAnyway", "DoNotSchedule", "none"]
LabelName = Annotated[str, Field(pattern=r"^(([a-z0-9.-]+/)?[A-Za-z0-9._-]+)?$", max_length=317)]
Texts = dict[str, str]
Kubernetes = dict[str, Any]
"""Kubernetes object, validated by Kubernetes."""


class Image(Section):
    repository: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._:/-]+$")]
    tag: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]*$", max_length=128)]
    digest: Digest
    pullPolicy: Literal["Always", "IfNotPresent", "Never"]


class Images(Section):
    router: Image
    worker: Image


class Resources(Section):
    requests: dict[ResourceName, Amount]
    limits: dict[ResourceName, Amount]


class SecurityContext(Section):
    user: PositiveInt
    group: PositiveInt


class SecretKey(Section):
    name: ObjectName
    key: Key


class HubValues(Section):
    id: Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)?$")]
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]*$")]
    tokenSecret: SecretKey | None
    resources: Resources


class ModelCache(Section):
    existingClaim: ObjectName
    create: bool
    size: Quantity
    tokenizerSize: Quantity
    storageClass: ObjectName
    accessModes: list[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]]


class ModelValues(Section):
    source: Literal["builtin", "volume", "hub"]
    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]*$")]
    hub: HubValues
    cache: ModelCache


class SpreadValues(Section):
    nodes: Spreading
    zones: Spreading


class Placed(Section):
    nodeSelector: Texts
    tolerations: list[Kubernetes]
    affinity: Kubernetes
    priorityClassName: ObjectName
    spread: SpreadValues


class Ports(Section):
    http: PodPort
    grpc: PodPort


class RouterScaling(Section):
    enabled: bool
    minReplicas: PositiveInt
    maxReplicas: PositiveInt
    cpuPercent: Annotated[int, Field(ge=1, le=100)]


class Service(Section):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    annotations: Texts


class Router(Placed):
    replicas: PositiveInt
    listen: Literal["0.0.0.0", "::"]  # noqa: S104  # a pod listens on all addresses
    ports: Ports
    resources: Resources
    preStopSeconds: Annotated[int, Field(ge=1, le=3600)]
    terminationGracePeriodSeconds: Seconds | None
    startupSeconds: Annotated[int, Field(ge=10, le=86400)]
    maxUnavailable: Annotated[int, Field(ge=0)]
    autoscaling: RouterScaling
    service: Service
    podLabels: Texts
    podAnnotations: Texts
    extraVolumes: list[Kubernetes]
    extraVolumeMounts: list[Kubernetes]


class Gpu(Section):
    enabled: bool
    resource: ResourceName


class Rdma(Section):
    enabled: bool
    resource: ResourceName
    count: PositiveInt


class DiskCache(Section):
    size: NoQuantity
    storageClass: ObjectName


class PoolScaling(Section):
    mode: Literal["none", "hpa", "keda"]
    minReplicas: PositiveInt
    maxReplicas: PositiveInt
    waitingRequests: PositiveInt
    waitingTokens: PositiveInt
    usePercent: Annotated[int, Field(ge=1, le=100)]
    upSeconds: Annotated[int, Field(ge=0, le=3600)]
    downSeconds: Annotated[int, Field(ge=0, le=3600)]


class Pool(Placed):
    port: PodPort
    nodesPerWorker: Annotated[int, Field(ge=1, le=MAX_TENSOR_PARALLEL)]
    rankPort: PodPort
    healthPort: PodPort
    gpu: Gpu
    rdma: Rdma
    resources: Resources
    shmSize: Quantity | None
    diskCache: DiskCache
    startupSeconds: Annotated[int, Field(ge=10, le=86400)]
    terminationGracePeriodSeconds: Seconds | None
    maxUnavailable: Annotated[int, Field(ge=0)]
    autoscaling: PoolScaling
    runtimeClassName: ObjectName
    rackLabel: LabelName
    podLabels: Texts
    podAnnotations: Texts


class PlannerLeast(Section):
    prefill: PositiveInt
    decode: PositiveInt


class PlannerSlo(Section):
    ttftSeconds: PositiveFloat
    itlSeconds: PositiveFloat


class PlannerValues(Placed):
    enabled: bool
    dryRun: bool
    least: PlannerLeast
    mostWorkers: Annotated[int, Field(ge=2, le=512)]
    slo: PlannerSlo
    latency: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    periodSeconds: Annotated[int, Field(ge=1, le=600)]
    startSeconds: Annotated[int, Field(ge=1, le=7200)]
    holdSeconds: Annotated[int, Field(ge=1, le=86400)]
    keySecret: SecretKey
    resources: Resources


class PriorityClasses(Section):
    create: bool
    base: Annotated[int, Field(ge=-2000000000, le=999999990)]


class ExternalRedis(Section):
    urlSecret: ObjectName
    urlKey: Key
    port: PortNumber
    caSecret: ObjectName
    sentinels: Annotated[list[HostAndPort], Field(max_length=16)]
    sentinelMaster: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    sentinelUsername: str
    sentinelPasswordSecret: ObjectName
    sentinelPasswordKey: Key


class Redis(Placed):
    enabled: bool
    image: Image
    existingSecret: ObjectName
    passwordKey: Key
    maxMemory: Annotated[str, Field(pattern=r"^[1-9][0-9]*(kb|mb|gb)$")]
    resources: Resources
    external: ExternalRedis


class ClusterSecret(Section):
    existingSecret: ObjectName
    key: Key


class ApiKeys(ClusterSecret):
    enabled: bool


class Secrets(Section):
    cluster: ClusterSecret
    apiKeys: ApiKeys


class IssuerRef(Section):
    name: ObjectName
    kind: Annotated[str, Field(min_length=1)]
    group: ObjectName


class CertManager(Section):
    issuerRef: IssuerRef
    dnsNames: list[str]
    duration: Duration
    renewBefore: Duration


class TlsValues(Section):
    enabled: bool
    existingSecret: ObjectName
    certManager: CertManager


class ClusterTlsValues(Section):
    mode: Literal["required", "permissive", "off"]
    existingSecret: ObjectName
    certManager: CertManager


class AllTls(Section):
    cluster: ClusterTlsValues
    door: TlsValues
    kv: TlsValues


class Telemetry(Section):
    headersSecret: SecretKey | None


class Ingress(Section):
    enabled: bool
    className: ObjectName
    host: str
    paths: Annotated[list[Path], Field(min_length=1)]
    tlsSecret: ObjectName
    annotations: Texts


class Gateway(Section):
    enabled: bool
    grpc: bool
    parentRefs: list[Kubernetes]
    hostnames: list[str]
    grpcHostnames: list[str]
    grpcParentRefs: list[Kubernetes]
    paths: Annotated[list[Path], Field(min_length=1, max_length=64)]


class Rules(Section):
    enabled: bool
    runbookUrl: Annotated[str, Field(pattern=r"^(https?://)?[^\s#]+$")]


class Dashboards(Section):
    enabled: bool
    folder: str


class Monitoring(Section):
    scrape: Literal["none", "service", "pod"]
    interval: Duration
    labels: Texts
    bearerSecret: SecretKey
    caSecret: SecretKey
    rules: Rules
    dashboards: Dashboards
    prometheusUrl: Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$")]


class KvPorts(Section):
    first: PodPort
    last: PodPort


class NetworkValues(Section):
    enabled: bool
    clients: list[Kubernetes]
    prometheus: Annotated[list[Kubernetes], Field(min_length=1)]
    dns: Annotated[list[Kubernetes], Field(min_length=1)]
    dnsPort: PortNumber
    redis: list[Kubernetes]
    collector: list[Kubernetes]
    hub: list[Kubernetes]
    apiServer: list[Kubernetes]
    kvPorts: KvPorts


class Test(Section):
    enabled: bool
    keySecret: SecretKey


class ChartValues(Section):
    nameOverride: Name
    fullnameOverride: Name
    images: Images
    requireDigests: bool
    imagePullSecrets: list[ObjectName]
    securityContext: SecurityContext
    model: ModelValues
    router: Router
    prefill: Pool
    decode: Pool
    planner: PlannerValues
    terminationMarginSeconds: Annotated[int, Field(ge=10, le=600)]
    tmpSize: Quantity
    kernelCacheSize: Quantity
    priorityClasses: PriorityClasses
    redis: Redis
    secrets: Secrets
    tls: AllTls
    telemetry: Telemetry
    ingress: Ingress
    gateway: Gateway
    monitoring: Monitoring
    networkPolicy: NetworkValues
    test: Test
