{{/* A dict of `pool`, `kv`: calls come in at a worker's port. Sessions go on, and KV comes in, at ports that the worker is given by
     the system and tells its peers, so the range of those is open to routers and other workers, and to nobody else. */}}
{{- define "tandem.workerPorts" -}}
- {port: {{ int .pool.port }}, protocol: TCP}
- {port: {{ int .kv.first }}, endPort: {{ int .kv.last }}, protocol: TCP}
{{- end -}}

{{/* A dict of `root`, `c`: what routers and workers both reach. */}}
{{- define "tandem.sharedEgress" -}}
{{- $v := .root.Values -}}
{{ include "tandem.modelEgress" .root }}
{{- if $v.redis.enabled }}
- to:
    - podSelector:
        matchLabels: {{- include "tandem.selector" (dict "root" .root "component" "redis") | nindent 10 }}
  ports: [{port: 6379, protocol: TCP}]
{{- else }}
- {{- with $v.networkPolicy.redis }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $ports := list (int $v.redis.external.port) }}
  {{- range $v.redis.external.sentinels }}
  {{- $ports = append $ports (regexFind "[0-9]+$" . | int) }}
  {{- end }}
  ports:
    {{- range uniq $ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end }}
{{- with .c.telemetry.otlp_endpoint }}
- {{- with $v.networkPolicy.collector }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
  ports: [{port: {{ regexFind ":[0-9]+$" . | trimPrefix ":" | default (ternary "443" "80" (hasPrefix "https:" .)) }}, protocol: TCP}]
{{- end }}
{{- end -}}

{{/* Root context. */}}
{{- define "tandem.dnsPorts" -}}
{{- $port := int .Values.networkPolicy.dnsPort -}}
[{port: {{ $port }}, protocol: UDP}, {port: {{ $port }}, protocol: TCP}]
{{- end -}}

{{/* Root context: DNS, and the hub from which the model is downloaded. */}}
{{- define "tandem.modelEgress" -}}
{{- $v := .Values -}}
- to: {{- toYaml $v.networkPolicy.dns | nindent 4 }}
  ports: {{ include "tandem.dnsPorts" $ }}
{{- if eq $v.model.source "hub" }}
- {{- with $v.networkPolicy.hub }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
  ports: [{port: 443, protocol: TCP}]
{{- end }}
{{- end -}}

{{/* A dict of `root`, `component`, `name` (of the set), `index`: the pods of one component in one group, as its operator labels them. */}}
{{- define "tandem.groupSelector" -}}
{{ include "tandem.selector" . }}
leaderworkerset.sigs.k8s.io/name: {{ .name }}
leaderworkerset.sigs.k8s.io/group-index: {{ .index | quote }}
{{- end -}}
