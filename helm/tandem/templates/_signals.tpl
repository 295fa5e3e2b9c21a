{{/* Root context: selects the series of this release. */}}
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
(({{ include "tandem.poolSum" $workers }} or vector(0)) + ({{ include "tandem.queueSum" $queue }} or vector(0))
{{- if eq .role "decode" }} + (sum(tandem_refused_choices{ {{- include "tandem.series" .root -}} }) or vector(0)){{ end }}) {{ include "tandem.ifSeen" .root }}
{{- end -}}

{{/* Root context: a value only if Prometheus sees a router. Without one, the absence of data does not mean an empty queue. */}}
{{- define "tandem.ifSeen" -}}
and on () group(tandem_ready{ {{- include "tandem.series" . -}} })
{{- end -}}

{{/* The same in tokens: what a pool has accepted and not computed, plus the part of the queues that waits for it. */}}
{{- define "tandem.waitingTokens" -}}
{{- $workers := dict "root" .root "role" .role "metric" "tandem_worker_backlog_tokens" "more" "" -}}
{{- $queue := dict "root" .root "role" .role "metric" "tandem_queue_tokens" -}}
(({{ include "tandem.poolSum" $workers }} or vector(0)) + ({{ include "tandem.queueSum" $queue }} or vector(0))) {{ include "tandem.ifSeen" .root }}
{{- end -}}

{{/* A dict of `root`, `role`, `percent`: the mean use of a pool's workers by that percentage; 1 at most, for it holds a pool
     and never makes it grow: decode workers reserve room for prompts that a too small prefill pool has not read yet. A
     prefill worker's use is its share of time in steps, a decode worker's that of its blocks or, where it is more, places. */}}
{{- define "tandem.poolUse" -}}
{{- $of := printf `role="%s",%s` .role (include "tandem.series" .root) -}}
clamp_max(100 / {{ int .percent }} * avg(
{{- if eq .role "prefill" -}}
sum by (worker) (max by (worker, kind) (rate(tandem_worker_step_seconds_total{ {{- $of -}} }[5m])))
{{- else -}}
{{- $used := printf `max by (worker) (tandem_worker_kv_blocks{state="used",%s})` $of -}}
{{- $free := printf `max by (worker) (tandem_worker_kv_blocks{state="free",%s})` $of -}}
{{- $most := int (include "tandem.effective" .root | fromYaml).engine.max_running_requests -}}
{{- $running := printf `max by (worker) (tandem_worker_requests{state="running",%s}) / %d` $of $most -}}
{{ $used }} / ({{ $used }} + {{ $free }}) > {{ $running }} or {{ $running }}
{{- end -}}
), 1)
{{- end -}}
