{{/* Pods of a pool; their dict: `root`, `component`, `pool` (the chart's values), `settings` (the configuration's). */}}

{{/* The pod that is a worker; of a worker over several nodes the first. */}}
{{- define "tandem.workerPod" -}}
{{- $c := include "tandem.effective" .root | fromYaml -}}
{{- $nodes := int .pool.nodesPerWorker -}}
{{- $ranks := div (int .settings.tensor_parallel_size) $nodes -}}
metadata: {{- include "tandem.podMetadata" . | nindent 2 }}
spec:
  serviceAccountName: {{ include "tandem.fullname" .root }}-{{ .component }}
  {{- include "tandem.podSecurity" .root | nindent 2 }}
  {{- include "tandem.scheduling" . | nindent 2 }}
  {{- with .pool.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "tandem.grace" (dict "root" .root "name" .component "pre" 0 "drain" .settings.drain_s "stated" .pool.terminationGracePeriodSeconds) }}
  {{- include "tandem.fetch" (dict "root" .root "image" .root.Values.images.worker "tokenizerOnly" false) | nindent 2 }}
  containers:
    - name: {{ .component }}
      image: {{ include "tandem.image" (dict "image" .root.Values.images.worker "root" .root) | quote }}
      imagePullPolicy: {{ .root.Values.images.worker.pullPolicy }}
      # SIGTERM starts the drain: the worker notifies routers through its sessions, so no preStop wait is needed.
      command: [tandem, {{ .component }}]
      args: [--config, /etc/tandem/cluster/cluster.yaml, --index, $(POD_INDEX)]
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: POD_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ ternary "leaderworkerset.sigs.k8s.io/group-index" "apps.kubernetes.io/pod-index" (gt $nodes 1) }}']"}}
        {{- include "tandem.groupRevision" $nodes | nindent 8 }}
        # The address on which it listens and which it publishes in Redis.
        - {name: TANDEM_{{ upper .component }}__HOST, value: "'$(POD_IP)'"}
        - {name: TANDEM_{{ upper .component }}__HEALTH_PORT, value: "{{ int .pool.healthPort }}"}
        {{- with .pool.rackLabel }}
        # Quoted, as settings are read as YAML: the label may be missing, or look like a number.
        - name: RACK
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ . }}']"}}
        - {name: TANDEM_{{ upper $.component }}__RACK, value: "'$(RACK)'"}
        {{- end }}
        - {name: TANDEM_ENGINE__DEVICE, value: {{ ternary "cuda" "cpu" .pool.gpu.enabled }}}
        - {name: HOME, value: /tmp}
        - {name: XDG_CACHE_HOME, value: /cache}
        - {name: TRITON_CACHE_DIR, value: /cache/triton}
        - {name: PYTHONUNBUFFERED, value: "1"}
        {{- include "tandem.secretEnv" .root | nindent 8 }}
      ports:
        - {name: grpc, containerPort: {{ int .pool.port }}, protocol: TCP}
        - {name: health, containerPort: {{ int .pool.healthPort }}, protocol: TCP}
        {{- if gt $nodes 1 }}
        - {name: ranks, containerPort: {{ int .pool.rankPort }}, protocol: TCP}
        {{- end }}
      # Nothing listens until the weights are loaded and the largest steps have been run: this is the time allowed for that.
      startupProbe:
        grpc: {port: {{ int .pool.healthPort }}}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: {{ div (add (int .pool.startupSeconds) 4) 5 }}
      # Checks the event loop. A worker whose engine hangs in a step exits by itself (engine.stall_s).
      livenessProbe:
        grpc: {port: {{ int .pool.healthPort }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      # Checks that it accepts work; the routers' canaries check that it produces tokens.
      readinessProbe:
        grpc: {port: {{ int .pool.healthPort }}}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      securityContext: {{- include "tandem.containerSecurity" .root | nindent 8 }}
      resources: {{- include "tandem.workerResources" (dict "pool" .pool "ranks" $ranks) | nindent 8 }}
      volumeMounts:
        {{- include "tandem.workerMounts" (dict "root" .root "pool" .pool "ranks" $ranks) | nindent 8 }}
        {{- if $c.engine.disk_cache_path }}
        - {name: disk-cache, mountPath: {{ $c.engine.disk_cache_path }}}
        {{- end }}
  volumes:
    {{- include "tandem.workerVolumes" (dict "root" .root "pool" .pool "ranks" $ranks) | nindent 4 }}
    {{- if and $c.engine.disk_cache_path (not .pool.diskCache.storageClass) }}
    - name: disk-cache
      emptyDir: {sizeLimit: {{ .pool.diskCache.size }}}
    {{- end }}
{{- end -}}

{{/* Also `role`: the pool of this node's worker. */}}
{{- define "tandem.nodePod" -}}
{{- $nodes := int .pool.nodesPerWorker -}}
{{- $ranks := div (int .settings.tensor_parallel_size) $nodes -}}
metadata: {{- include "tandem.podMetadata" . | nindent 2 }}
spec:
  serviceAccountName: {{ include "tandem.fullname" .root }}-{{ .role }}
  {{- include "tandem.podSecurity" .root | nindent 2 }}
  {{- include "tandem.scheduling" (set . "priority" .role) | nindent 2 }}
  {{- with .pool.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  # The same as the worker's: its ranks here stay until its drain is over.
  terminationGracePeriodSeconds: {{ include "tandem.grace" (dict "root" .root "name" .role "pre" 0 "drain" .settings.drain_s "stated" .pool.terminationGracePeriodSeconds) }}
  {{- include "tandem.fetch" (dict "root" .root "image" .root.Values.images.worker "tokenizerOnly" false) | nindent 2 }}
  containers:
    - name: node
      image: {{ include "tandem.image" (dict "image" .root.Values.images.worker "root" .root) | quote }}
      imagePullPolicy: {{ .root.Values.images.worker.pullPolicy }}
      # Nothing listens here, so there is nothing to probe: the worker detects a rank that dies or hangs, and exits.
      command: [tandem, follower, {{ .role }}]
      args:
        - --config=/etc/tandem/cluster/cluster.yaml
        - --index=$(GROUP_INDEX)
        - --node=$(NODE_INDEX)
        - --leader=$(LWS_LEADER_ADDRESS)
        - --host=$(POD_IP)
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: GROUP_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
        - name: NODE_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
        {{- include "tandem.groupRevision" 2 | nindent 8 }}
        - {name: HOME, value: /tmp}
        - {name: XDG_CACHE_HOME, value: /cache}
        - {name: TRITON_CACHE_DIR, value: /cache/triton}
        - {name: PYTHONUNBUFFERED, value: "1"}
        {{- include "tandem.clusterSecretEnv" .root | nindent 8 }}
      securityContext: {{- include "tandem.containerSecurity" .root | nindent 8 }}
      resources: {{- include "tandem.workerResources" (dict "pool" .pool "ranks" $ranks) | nindent 8 }}
      volumeMounts:
        {{- include "tandem.workerMounts" (dict "root" .root "pool" .pool "ranks" $ranks) | nindent 8 }}
  volumes:
    {{- include "tandem.workerVolumes" (dict "root" .root "pool" .pool "ranks" $ranks) | nindent 4 }}
{{- end -}}

{{/* A dict of `root`, `pool`, `ranks` (in this pod): what computing needs, on every node of a worker. */}}
{{- define "tandem.workerMounts" -}}
{{ include "tandem.mounts" .root }}
- {name: cache, mountPath: /cache}
{{- if or (gt (int .ranks) 1) .pool.rdma.enabled }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if .root.Values.tls.kv.enabled }}
- {name: kv-tls, mountPath: /etc/tandem/kv-tls, readOnly: true}
{{- end }}
{{- end -}}
{{- define "tandem.workerVolumes" -}}
{{ include "tandem.volumes" (dict "root" .root "size" .root.Values.model.cache.size) }}
- name: cache
  emptyDir: {sizeLimit: {{ .root.Values.kernelCacheSize }}}
{{- if or (gt (int .ranks) 1) .pool.rdma.enabled }}
# Used by gloo, NCCL and UCX. KV pools do not use it: they are memfds, which count only as the container's memory.
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .pool.shmSize | default (printf "%dMi" (mul 256 (int .ranks))) }}}
{{- end }}
{{- if .root.Values.tls.kv.enabled }}
- name: kv-tls
  secret: {secretName: {{ include "tandem.kvTlsSecret" .root | quote }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* The revision of the group that a pod belongs to: during a rollout, pods of the previous revision must not join the new first pod. */}}
{{- define "tandem.groupRevision" -}}
{{- if gt (int .) 1 -}}
- name: GROUP_REVISION
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/template-revision-hash']"}}
{{- end -}}
{{- end -}}
