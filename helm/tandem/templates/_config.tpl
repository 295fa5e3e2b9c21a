{{/* The cluster's whole configuration as a dict in YAML: Tandem's defaults, then `config`. Only for computations in the chart. */}}
{{- define "tandem.effective" -}}
{{- $defaults := .Files.Get "files/defaults.yaml" | fromYaml -}}
{{- toYaml (mustMergeOverwrite $defaults (deepCopy .Values.config)) -}}
{{- end -}}

{{/* Settings that follow from the pods and that the chart therefore sets: added to `config`, never part of it. */}}
{{- define "tandem.clusterYaml" -}}
{{- $v := .Values -}}
{{- $own := dict
      "model" (dict "path" (include "tandem.modelPath" .))
      "router" (dict "host" $v.router.listen "port" (int $v.router.ports.http) "grpc_port" (int $v.router.ports.grpc))
      "prefill" (dict "port" (int $v.prefill.port))
      "decode" (dict "port" (int $v.decode.port))
      "redis" (dict) -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := index $v $role -}}
{{- if gt (int $pool.nodesPerWorker) 1 -}}
{{- $_ := set (index $own $role) "nodes" (int $pool.nodesPerWorker) -}}
{{- $_ := set (index $own $role) "rank_port" (int $pool.rankPort) -}}
{{- $_ := set (index $own $role) "join_s" (int $pool.startupSeconds) -}}
{{- end -}}
{{- end -}}
{{- if $v.secrets.apiKeys.enabled -}}
{{- $_ := set $own.router "api_keys_file" "/etc/tandem/api-keys/api-keys.yaml" -}}
{{- end -}}
{{- if $v.tls.door.enabled -}}
{{- $_ := set $own.router "tls" (dict "cert" "/etc/tandem/door-tls/tls.crt" "key" "/etc/tandem/door-tls/tls.key") -}}
{{- end -}}
{{- if $v.tls.kv.enabled -}}
{{- $_ := set $own "transfer" (dict "tls" (dict
      "cert" "/etc/tandem/kv-tls/tls.crt" "key" "/etc/tandem/kv-tls/tls.key" "ca" "/etc/tandem/kv-tls/ca.crt")) -}}
{{- end -}}
{{- if $v.redis.enabled -}}
{{- $_ := set $own.redis "url" (printf "redis://%s-redis:6379/0" (include "tandem.fullname" .)) -}}
{{- else -}}
{{- with $v.redis.external -}}
{{- if .caSecret -}}
{{- $_ := set $own.redis "ca" "/etc/tandem/redis-ca/ca.crt" -}}
{{- end -}}
{{- if .sentinels -}}
{{- $_ := set $own.redis "sentinels" .sentinels -}}
{{- $_ := set $own.redis "sentinel_master" .sentinelMaster -}}
{{- end -}}
{{- if .sentinelUsername -}}
{{- $_ := set $own.redis "sentinel_username" .sentinelUsername -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite (deepCopy $v.config) $own) -}}
{{- end -}}

{{/* Where the model's files are in every pod. */}}
{{- define "tandem.modelPath" -}}
{{- if eq .Values.model.source "builtin" -}}
builtin
{{- else if eq .Values.model.source "volume" -}}
{{- printf "/models/%s" (trimPrefix "/" .Values.model.path) | trimSuffix "/" -}}
{{- else -}}
{{- /* Each model and revision has its own directory, because running pods may still read the previous one. The last part is its name. */ -}}
{{- $m := .Values.model.hub -}}
{{- printf "/models/%s/%s/%s" ($m.id | replace "/" "--") ($m.revision | default "main" | replace "/" "--") ($m.id | splitList "/" | last) -}}
{{- end -}}
{{- end -}}

{{/* A dict of `root`, `drain`, `pre` (preStop), `stated`, `name`: seconds from SIGTERM's preStop to SIGKILL. */}}
{{- define "tandem.grace" -}}
{{- $needed := add (int .pre) (int (ceil (float64 .drain))) (int .root.Values.terminationMarginSeconds) -}}
{{- if kindIs "invalid" .stated -}}
{{- $needed -}}
{{- else if lt (int .stated) (int $needed) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d s are too few: preStop %d s + drain %v s + terminationMarginSeconds %d s = %d s" .name (int .stated) (int .pre) .drain (int .root.Values.terminationMarginSeconds) (int $needed)) -}}
{{- else -}}
{{- int .stated -}}
{{- end -}}
{{- end -}}

{{/* Refuses, by name, every combination of values that would render into something that does not work. */}}
{{- define "tandem.check" -}}
{{- $v := .Values -}}
{{- $c := include "tandem.effective" . | fromYaml -}}
{{- include "tandem.checkNames" . -}}
{{- include "tandem.checkAccess" (dict "root" . "c" $c) -}}
{{- include "tandem.checkModel" . -}}
{{- include "tandem.checkRedis" $v.redis -}}
{{- if and (has $c.transfer.transport (list "shm" "cuda_ipc" "memory")) -}}
{{- fail (printf "config.transfer.transport: %s joins processes of one network namespace; workers here are pods, take auto, tcp or nixl" $c.transfer.transport) -}}
{{- end -}}
{{- if and $v.tls.kv.enabled (has $c.transfer.transport (list "nixl" "torch_dist")) -}}
{{- fail (printf "tls.kv.enabled: %s carries KV unencrypted; TLS is for tcp" $c.transfer.transport) -}}
{{- end -}}
{{- include "tandem.checkPlanner" (dict "root" . "c" $c) -}}
{{- range $name := list "prefill" "decode" -}}
{{- include "tandem.checkPool" (dict "root" $ "c" $c "name" $name "pool" (index $v $name) "settings" (index $c $name)) -}}
{{- end -}}
{{- end -}}

{{/* Root context: refuses what Kubernetes would refuse without naming the value that causes it. */}}
{{- define "tandem.checkNames" -}}
{{- $name := include "tandem.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride: names of Services begin with %s, of the release's name unless it is stated; that takes a letter, then letters, digits and -" $name) -}}
{{- end -}}
{{- range $pool := list "router" "prefill" "decode" -}}
{{- range $label := list "name" "instance" "component" -}}
{{- if hasKey (index $.Values $pool).podLabels (printf "app.kubernetes.io/%s" $label) -}}
{{- fail (printf "%s.podLabels: app.kubernetes.io/%s is the chart's own, by which pods are found" $pool $label) -}}
{{- end -}}
{{- end -}}
{{- if hasKey (index $.Values $pool).podAnnotations "checksum/config" -}}
{{- fail (printf "%s.podAnnotations: checksum/config is the chart's own, by which a changed configuration starts new pods" $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The values of Redis. */}}
{{- define "tandem.checkRedis" -}}
{{- $e := .external -}}
{{- if and (not .enabled) (not $e.urlSecret) (not $e.sentinels) -}}
{{- fail "redis.enabled: false needs redis.external.urlSecret, or redis.external.sentinels: without Redis no router hears of a worker" -}}
{{- end -}}
{{- if and .enabled $e.sentinels -}}
{{- fail "redis.external.sentinels: they watch a Redis of your own; set redis.enabled: false" -}}
{{- end -}}
{{- if and (or $e.sentinelUsername $e.sentinelPasswordSecret) (not $e.sentinels) -}}
{{- fail "redis.external.sentinels: sentinelUsername and sentinelPasswordSecret are set, but no sentinel is named" -}}
{{- end -}}
{{- if and $e.caSecret $e.sentinels (not $e.urlSecret) -}}
{{- fail "redis.external.urlSecret: caSecret is for a rediss:// server, as in rediss:///0" -}}
{{- end -}}
{{- if and $e.sentinelUsername (not $e.sentinelPasswordSecret) -}}
{{- fail "redis.external.sentinelPasswordSecret: sentinelUsername needs a password" -}}
{{- end -}}
{{- end -}}

{{/* A dict of `root`, `c`. */}}
{{- define "tandem.checkAccess" -}}
{{- $v := .root.Values -}}
{{- $access := .c.router.operator_access -}}
{{- if and (not $v.secrets.apiKeys.enabled) (not .c.router.allow_open) -}}
{{- fail "secrets.apiKeys.enabled: false serves anyone who can reach it; set config.router.allow_open: true to confirm" -}}
{{- end -}}
{{- range $page := list "health" "readyz" -}}
{{- if ne (index $access $page) "open" -}}
{{- fail (printf "config.router.operator_access.%s: the kubelet has no key, so no router would ever be ready; leave it open" $page) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $v.monitoring.scrape "none") $v.secrets.apiKeys.enabled (ne (default "operator" $access.metrics) "open") (not (include "tandem.metricsKey" .root | fromYaml).name) -}}
{{- fail "monitoring.scrape: /metrics asks for an operator's key: name one in monitoring.bearerSecret, or open it with config.router.operator_access.metrics: open" -}}
{{- end -}}
{{- if eq (int $v.router.ports.http) (int $v.router.ports.grpc) -}}
{{- fail (printf "router.ports: http and grpc are both %d" (int $v.router.ports.http)) -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}
{{- fail "ingress.host: an Ingress needs the name that clients use" -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $v.gateway.parentRefs) -}}
{{- fail "gateway.parentRefs: routes need the Gateway that they belong to" -}}
{{- end -}}
{{- if and $v.gateway.enabled $v.gateway.grpc (not $v.gateway.grpcParentRefs) -}}
{{- include "tandem.checkListener" $v.gateway -}}
{{- end -}}
{{- range $name, $tls := $v.tls -}}
{{- if and $tls.enabled (not $tls.existingSecret) (not $tls.certManager.issuerRef.name) -}}
{{- fail (printf "tls.%s: needs existingSecret, or certManager.issuerRef.name for a Certificate" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $v.router.autoscaling.enabled (gt (int $v.router.autoscaling.minReplicas) (int $v.router.autoscaling.maxReplicas)) -}}
{{- fail "router.autoscaling.minReplicas is above maxReplicas" -}}
{{- end -}}
{{- end -}}

{{/* The values' `gateway`, whose two routes share a listener: it accepts only one of two routes with a hostname in common. */}}
{{- define "tandem.checkListener" -}}
{{- $way := "a listener takes either the HTTPRoute or the GRPCRoute of a name: say other names, gateway.grpcParentRefs, or gateway.grpc: false" -}}
{{- if or (not .hostnames) (not .grpcHostnames) -}}
{{- fail (printf "gateway.grpcHostnames: both kinds of clients need names of their own: %s" $way) -}}
{{- end -}}
{{- range $one := .hostnames -}}
{{- range $other := $.grpcHostnames -}}
{{- if or (eq $one $other) (and (hasPrefix "*." $one) (hasSuffix (trimPrefix "*" $one) $other)) (and (hasPrefix "*." $other) (hasSuffix (trimPrefix "*" $other) $one)) -}}
{{- fail (printf "gateway.grpcHostnames: %s is among gateway.hostnames, too: %s" $other $way) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A dict of `root`, `c`. */}}
{{- define "tandem.checkPlanner" -}}
{{- $v := .root.Values -}}
{{- $p := $v.planner -}}
{{- if $p.enabled -}}
{{- range $pool := list "prefill" "decode" -}}
{{- if ne (index $v $pool).autoscaling.mode "none" -}}
{{- fail (printf "planner.enabled: %s.autoscaling.mode is %s: two who set the same number would fight over it" $pool (index $v $pool).autoscaling.mode) -}}
{{- end -}}
{{- end -}}
{{- if eq (int .c.prefill.replicas) 0 -}}
{{- fail "planner.enabled: it sizes two pools, and config.prefill.replicas is 0" -}}
{{- end -}}
{{- if gt (add (int $p.least.prefill) (int $p.least.decode)) (int $p.mostWorkers) -}}
{{- fail (printf "planner.mostWorkers: %d cannot hold planner.least" (int $p.mostWorkers)) -}}
{{- end -}}
{{- if and $v.secrets.apiKeys.existingSecret (ne (default "operator" .c.router.operator_access.metrics) "open") (not $p.keySecret.name) -}}
{{- fail "planner.enabled: /metrics asks for an operator's key: name one in planner.keySecret, or open it with config.router.operator_access.metrics: open" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checkModel" -}}
{{- $m := .Values.model -}}
{{- if and (eq $m.source "volume") (not $m.cache.existingClaim) -}}
{{- fail "model.cache.existingClaim: model.source volume is a directory of an existing claim" -}}
{{- end -}}
{{- if and (eq $m.source "volume") (not (trimAll "/" $m.path)) -}}
{{- fail "model.path: the model's directory or .gguf file inside the claim" -}}
{{- end -}}
{{- if and (eq $m.source "hub") (not $m.hub.id) -}}
{{- fail "model.hub.id: which model, such as Qwen/Qwen3-0.6B" -}}
{{- end -}}
{{- if and $m.cache.create $m.cache.existingClaim -}}
{{- fail "model.cache.create and model.cache.existingClaim: one of them is the cache" -}}
{{- end -}}
{{- end -}}

{{/* A dict of `root`, `c`, `name`, `pool` (the chart's values), `settings` (the configuration's). */}}
{{- define "tandem.checkPool" -}}
{{- range $other := list "port" "rankPort" -}}
{{- if eq (int $.pool.healthPort) (int (index $.pool $other)) -}}
{{- fail (printf "%s.healthPort and %s.%s are both %d" $.name $.name $other (int $.pool.healthPort)) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.checkNodes" . -}}
{{- $quantization := .settings.quantization | default .c.engine.quantization -}}
{{- if and .pool.gpu.enabled (has $quantization (list "fp8" "nf4")) -}}
{{- fail (printf "config.%s.quantization: %s is for the CPU kernels, and %s.gpu.enabled is true" (ternary .name "engine" (not (empty .settings.quantization))) $quantization .name) -}}
{{- end -}}
{{- if and .pool.rdma.enabled (not .c.transfer.isolated_network) -}}
{{- fail (printf "%s.rdma.enabled: KV over RDMA is neither encrypted nor authenticated; config.transfer.isolated_network: true says that nobody else reaches that network" .name) -}}
{{- end -}}
{{- if and (has .c.transfer.transport (list "nixl" "torch_dist")) (not .c.transfer.isolated_network) -}}
{{- fail (printf "config.transfer.transport: %s neither encrypts nor authenticates KV; config.transfer.isolated_network: true says that nobody else reaches that network" .c.transfer.transport) -}}
{{- end -}}
{{- if and .c.engine.disk_cache_path (not .pool.diskCache.size) -}}
{{- fail (printf "%s.diskCache.size: config.engine.disk_cache_path needs a volume" .name) -}}
{{- end -}}
{{- $auto := .pool.autoscaling -}}
{{- if ne $auto.mode "none" -}}
{{- if gt (int $auto.minReplicas) (int $auto.maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas is above maxReplicas" .name) -}}
{{- end -}}
{{- if and (eq $auto.mode "keda") (not .root.Values.monitoring.prometheusUrl) -}}
{{- fail (printf "%s.autoscaling.mode: keda asks Prometheus: set monitoring.prometheusUrl" .name) -}}
{{- end -}}
{{- if eq .root.Values.monitoring.scrape "none" -}}
{{- fail (printf "%s.autoscaling.mode: %s goes by what routers tell Prometheus: set monitoring.scrape" .name $auto.mode) -}}
{{- end -}}
{{- if and (eq $auto.mode "hpa") (not .root.Values.monitoring.rules.enabled) -}}
{{- fail (printf "%s.autoscaling.mode: hpa reads recorded metrics: set monitoring.rules.enabled" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The same dict: a worker over several nodes. */}}
{{- define "tandem.checkNodes" -}}
{{- $nodes := int .pool.nodesPerWorker -}}
{{- $ranks := int .settings.tensor_parallel_size -}}
{{- if gt $nodes 1 -}}
{{- if ne (mod $ranks $nodes) 0 -}}
{{- fail (printf "%s.nodesPerWorker: %d: it must divide config.%s.tensor_parallel_size, which is %d" .name $nodes .name $ranks) -}}
{{- end -}}
{{- if not (or .root.Values.tls.kv.enabled (eq .root.Values.tls.cluster.mode "required")) -}}
{{- fail (printf "%s.nodesPerWorker: %d: what a worker tells its ranks on other nodes needs tls.cluster.mode: required, or tls.kv.enabled" .name $nodes) -}}
{{- end -}}
{{- if not .c.transfer.isolated_network -}}
{{- fail (printf "%s.nodesPerWorker: %d: gloo and NCCL neither encrypt nor authenticate what ranks sum; config.transfer.isolated_network: true says that nobody else reaches that network" .name $nodes) -}}
{{- end -}}
{{- if .root.Values.planner.enabled -}}
{{- fail (printf "planner.enabled: %s.nodesPerWorker is %d, and it sizes StatefulSets alone; take %s.autoscaling" .name $nodes .name) -}}
{{- end -}}
{{- if eq (int .pool.rankPort) (int .pool.port) -}}
{{- fail (printf "%s.rankPort and %s.port are both %d" .name .name (int .pool.port)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
