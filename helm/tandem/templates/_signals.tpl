{{/* Root context: which series are of this release. */}}
{{- define "tandem.series" -}}
namespace="{{ .Release.Namespace }}",app_kubernetes_io_instance="{{ .Release.Name }}"
{{- end -}}

{{/* A dict of `root`, `role`, `metric`, `more`: summed over a pool's workers, which every router shows. */}}
{{- define "tandem.poolSum" -}}
sum(max by (worker) ({{ .metric }}{role="{{ .role }}"{{ .more }},{{ include "tandem.series" .root }}}))
{{- end -}}

{{/* A dict of `root`, `role`, `metric`: of the routers' queues, what waits because this pool has too little for it. What
     waits for both pools counts for both: either alone would not help. */}}
{{- define "tandem.queueSum" -}}
sum({{ .metric }}{lacks=~"{{ .role }}|both",{{ include "tandem.series" .root }}})
{{- end -}}

{{/* A dict of `root`, `role`: requests that wait for a pool, as PromQL: at its workers, in the routers' queues for want
     of it, and, of the decode pool, those that all its workers were too full for. Reservations of decode workers
     (`state="reserved"`) wait for the prefill pool, whose workers have them in their own lines. */}}
{{- define "tandem.waitingRequests" -}}
{{- $workers := dict "root" .root "role" .role "metric" "tandem_worker_requests" "more" `,state="waiting"` -}}
{{- $queue := dict "root" .root "role" .role "metric" "tandem_queue_requests" -}}
({{ include "tandem.poolSum" $workers }} or vector(0)) + ({{ include "tandem.queueSum" $queue }} or vector(0))
{{- if eq .role "decode" }} + (sum(tandem_refused_choices{ {{- include "tandem.series" .root -}} }) or vector(0)){{ end }}
{{- end -}}

{{/* The same in tokens: what a pool has accepted and not computed, and what of the queues waits for it. */}}
{{- define "tandem.waitingTokens" -}}
{{- $workers := dict "root" .root "role" .role "metric" "tandem_worker_backlog_tokens" "more" "" -}}
{{- $queue := dict "root" .root "role" .role "metric" "tandem_queue_tokens" -}}
({{ include "tandem.poolSum" $workers }} or vector(0)) + ({{ include "tandem.queueSum" $queue }} or vector(0))
{{- end -}}
