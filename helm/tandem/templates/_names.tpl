{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (.Values.nameOverride | default "tandem") .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (.Values.nameOverride | default "tandem") | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of every object. Call with the root context. */}}
{{- define "tandem.labels" -}}
{{ include "tandem.instance" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels that never change and may be used in a selector. */}}
{{- define "tandem.instance" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "tandem" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Selects the pods of one component: a dict of `root` and `component`. */}}
{{- define "tandem.selector" -}}
{{ include "tandem.instance" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* A dict of `root`, `component`: labels of a component's objects. */}}
{{- define "tandem.componentLabels" -}}
{{ include "tandem.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* A dict of `image` and `root`; by digest where there is one. */}}
{{- define "tandem.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else if .root.Values.requireDigests -}}
{{- fail (printf "requireDigests: the image %s has no digest" .image.repository) -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Names of the secrets, whether they exist already or are created here. */}}
{{- define "tandem.clusterSecret" -}}
{{- .Values.secrets.cluster.existingSecret | default (printf "%s-cluster" (include "tandem.fullname" .)) -}}
{{- end -}}
{{- define "tandem.apiKeysSecret" -}}
{{- .Values.secrets.apiKeys.existingSecret | default (printf "%s-api-keys" (include "tandem.fullname" .)) -}}
{{- end -}}
{{- define "tandem.redisSecret" -}}
{{- .Values.redis.existingSecret | default (printf "%s-redis" (include "tandem.fullname" .)) -}}
{{- end -}}
{{/* As YAML, name and key of the secret with an operator's API key for the planner; no name: none is needed. */}}
{{- define "tandem.plannerKey" -}}
{{- if .Values.planner.keySecret.name -}}
{{- toYaml .Values.planner.keySecret -}}
{{- else if and .Values.secrets.apiKeys.enabled (not .Values.secrets.apiKeys.existingSecret) -}}
{{- toYaml (dict "name" (printf "%s-first-key" (include "tandem.fullname" .)) "key" "api-key") -}}
{{- else -}}
{{- toYaml (dict "name" "" "key" "") -}}
{{- end -}}
{{- end -}}
{{/* "true" if the chart creates a key for Prometheus: it scrapes, creates the API keys, and no other key is named. Else empty. */}}
{{- define "tandem.metricsKeyMade" -}}
{{- $v := .Values -}}
{{- $open := eq (dig "router" "operator_access" "metrics" "" $v.config | toString) "open" -}}
{{- if and (ne $v.monitoring.scrape "none") (not $open) $v.secrets.apiKeys.enabled (not $v.secrets.apiKeys.existingSecret) (not $v.monitoring.bearerSecret.name) -}}
true
{{- end -}}
{{- end -}}
{{/* As YAML, name and key of the secret that Prometheus uses for /metrics; no name: none is needed. */}}
{{- define "tandem.metricsKey" -}}
{{- if include "tandem.metricsKeyMade" . -}}
{{- toYaml (dict "name" (printf "%s-metrics-key" (include "tandem.fullname" .)) "key" "api-key") -}}
{{- else -}}
{{- toYaml .Values.monitoring.bearerSecret -}}
{{- end -}}
{{- end -}}
{{- define "tandem.doorTlsSecret" -}}
{{- .Values.tls.door.existingSecret | default (printf "%s-door-tls" (include "tandem.fullname" .)) -}}
{{- end -}}
{{- define "tandem.clusterTlsSecret" -}}
{{- .Values.tls.cluster.existingSecret | default (printf "%s-cluster-tls" (include "tandem.fullname" .)) -}}
{{- end -}}
{{/* "true" if the chart makes the certificates between the pods itself. Else empty. */}}
{{- define "tandem.clusterTlsMade" -}}
{{- $tls := .Values.tls.cluster -}}
{{- if and (ne $tls.mode "off") (not $tls.existingSecret) (not $tls.certManager.issuerRef.name) -}}
true
{{- end -}}
{{- end -}}
{{- define "tandem.kvTlsSecret" -}}
{{- .Values.tls.kv.existingSecret | default (printf "%s-kv-tls" (include "tandem.fullname" .)) -}}
{{- end -}}

{{/*
The size that a pool has now, where somebody else sizes it: a field that a manifest had and has no more becomes its
default, which is 1. Nothing where there is no cluster to ask, as in `helm template`, or no such pool yet.
*/}}
{{- define "tandem.liveReplicas" -}}
{{- $live := lookup (.api | default "apps/v1") .kind .root.Release.Namespace .name }}
{{- with $live }}{{ with .spec }}{{ with .replicas }}replicas: {{ int . }}{{ end }}{{ end }}{{ end }}
{{- end }}

{{/* A dict of `pool`, `name`: what scales it, as a scaleTargetRef. */}}
{{- define "tandem.scaleTarget" -}}
{{- if gt (int .pool.nodesPerWorker) 1 -}}
{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ .name }}}
{{- else -}}
{apiVersion: apps/v1, kind: StatefulSet, name: {{ .name }}}
{{- end -}}
{{- end -}}
