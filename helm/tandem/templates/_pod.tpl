{{/* Pod Security "restricted". Only the planner's pod talks to the API server. */}}
{{- define "tandem.podSecurity" -}}
automountServiceAccountToken: false
# Variables such as TANDEM_PORT, which the kubelet derives from Services, would be read as settings.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int .Values.securityContext.user }}
  runAsGroup: {{ int .Values.securityContext.group }}
  # Makes secrets and claims readable by the process's group.
  fsGroup: {{ int .Values.securityContext.group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* A dict of `root`, `component`: a name that no other release in the cluster makes, in whatever namespace it is. A linter
     has none. */}}
{{- define "tandem.priorityClass" -}}
{{ include "tandem.fullname" .root }}.{{ .root.Release.Namespace | default "default" }}.{{ .component }}
{{- end -}}

{{/* A dict of `root`, `pool`, `component`: where the pods go. */}}
{{- define "tandem.scheduling" -}}
{{- with .pool.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .pool.priorityClassName }}
priorityClassName: {{ .pool.priorityClassName | quote }}
{{- else if .root.Values.priorityClasses.create }}
priorityClassName: {{ include "tandem.priorityClass" (dict "root" .root "component" (.priority | default .component)) }}
{{- end }}
{{- if or (ne .pool.spread.nodes "none") (ne .pool.spread.zones "none") }}
topologySpreadConstraints:
  {{- range $key, $when := dict "kubernetes.io/hostname" .pool.spread.nodes "topology.kubernetes.io/zone" .pool.spread.zones }}
  {{- if ne $when "none" }}
  - topologyKey: {{ $key }}
    maxSkew: 1
    whenUnsatisfiable: {{ $when }}
    labelSelector:
      matchLabels: {{- include "tandem.selector" (dict "root" $.root "component" $.component) | nindent 8 }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Root context: what may only come from a secret, for every process. Quoted, so that YAML does not read it as a number. */}}
{{- define "tandem.clusterSecretEnv" -}}
- name: CLUSTER_SECRET
  valueFrom:
    secretKeyRef: {name: {{ include "tandem.clusterSecret" . | quote }}, key: {{ .Values.secrets.cluster.key | quote }}}
- name: TANDEM_SECRET
  value: "'$(CLUSTER_SECRET)'"
{{- /* Not in the ConfigMap: a pod of the version before that restarts during an upgrade would refuse settings that it does not know. */}}
{{- if eq .Values.tls.cluster.mode "off" }}
- {name: TANDEM_CLUSTER__TLS, value: "'off'"}
{{- else }}
- {name: TANDEM_CLUSTER__TLS__MODE, value: {{ .Values.tls.cluster.mode }}}
- {name: TANDEM_CLUSTER__TLS__CERT, value: /etc/tandem/cluster-tls/tls.crt}
- {name: TANDEM_CLUSTER__TLS__KEY, value: /etc/tandem/cluster-tls/tls.key}
- {name: TANDEM_CLUSTER__TLS__CA, value: /etc/tandem/cluster-tls/ca.crt}
{{- end }}
{{- end -}}
{{- define "tandem.secretEnv" -}}
{{ include "tandem.clusterSecretEnv" . }}
{{- if .Values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "tandem.redisSecret" . | quote }}, key: {{ .Values.redis.passwordKey | quote }}}
- name: TANDEM_REDIS__PASSWORD
  value: "'$(REDIS_PASSWORD)'"
{{- else }}
{{- with .Values.redis.external }}
{{- if .urlSecret }}
- name: REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .urlSecret | quote }}, key: {{ .urlKey | quote }}}
- name: TANDEM_REDIS__URL
  value: "'$(REDIS_URL)'"
{{- end }}
{{- if .sentinelPasswordSecret }}
- name: SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .sentinelPasswordSecret | quote }}, key: {{ .sentinelPasswordKey | quote }}}
- name: TANDEM_REDIS__SENTINEL_PASSWORD
  value: "'$(SENTINEL_PASSWORD)'"
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.telemetry.headersSecret }}
- name: OTLP_HEADERS
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
- name: TANDEM_TELEMETRY__OTLP_HEADERS
  value: "$(OTLP_HEADERS)"
{{- end }}
{{- end -}}

{{/* A dict of `root`, `image`, `tokenizerOnly`, `resources`: downloads the model before anything serves it. */}}
{{- define "tandem.fetch" -}}
{{- $m := .root.Values.model -}}
{{- if eq $m.source "hub" }}
initContainers:
  - name: fetch-model
    image: {{ include "tandem.image" (dict "image" .image "root" .root) | quote }}
    imagePullPolicy: {{ .image.pullPolicy }}
    command: [python, -m, cluster.hub]
    args:
      - {{ $m.hub.id }}
      - --into={{ include "tandem.modelPath" .root }}
      {{- with $m.hub.revision }}
      - --revision={{ . }}
      {{- end }}
      {{- if .tokenizerOnly }}
      - --tokenizer-only
      {{- end }}
    env:
      - {name: HOME, value: /tmp}
      - {name: HF_HOME, value: /tmp/hub}
      {{- with $m.hub.tokenSecret }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
      {{- end }}
    securityContext: {{- include "tandem.containerSecurity" .root | nindent 6 }}
    resources: {{- toYaml $m.hub.resources | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}

{{/* A dict of `root`, `size` (of the model's own volume in this pod): volumes of routers and workers alike. */}}
{{- define "tandem.volumes" -}}
- name: config
  configMap: {name: {{ include "tandem.fullname" .root | quote }}}
- name: tmp
  emptyDir: {sizeLimit: {{ .root.Values.tmpSize }}}
{{- if ne .root.Values.tls.cluster.mode "off" }}
- name: cluster-tls
  secret: {secretName: {{ include "tandem.clusterTlsSecret" .root | quote }}, defaultMode: 0440}
{{- end }}
{{- if and (not .root.Values.redis.enabled) .root.Values.redis.external.caSecret }}
- name: redis-ca
  secret: {secretName: {{ .root.Values.redis.external.caSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- if ne .root.Values.model.source "builtin" }}
- name: models
  {{- if .root.Values.model.cache.existingClaim }}
  # Nothing is downloaded into a given volume, and a volume that many nodes may only read is attached read-only.
  persistentVolumeClaim: {claimName: {{ .root.Values.model.cache.existingClaim | quote }}{{ if eq .root.Values.model.source "volume" }}, readOnly: true{{ end }}}
  {{- else if .root.Values.model.cache.create }}
  persistentVolumeClaim: {claimName: {{ include "tandem.fullname" .root }}-models}
  {{- else }}
  emptyDir: {sizeLimit: {{ .size }}}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Root context: mount points of these volumes in the serving process. */}}
{{- define "tandem.mounts" -}}
- {name: config, mountPath: /etc/tandem/cluster, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if ne .Values.tls.cluster.mode "off" }}
- {name: cluster-tls, mountPath: /etc/tandem/cluster-tls, readOnly: true}
{{- end }}
{{- if and (not .Values.redis.enabled) .Values.redis.external.caSecret }}
- {name: redis-ca, mountPath: /etc/tandem/redis-ca, readOnly: true}
{{- end }}
{{- if ne .Values.model.source "builtin" }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{/* A dict of `root`, `component`, `extra`: metadata of a pod template. A changed configuration starts new pods. */}}
{{- define "tandem.podMetadata" -}}
labels:
  {{- include "tandem.selector" . | nindent 2 }}
  {{- with .pool.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include "tandem.clusterYaml" .root | sha256sum }}
  {{- with .pool.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
