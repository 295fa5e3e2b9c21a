{{/* Root context: which series are of this release. */}}
{{- define "tandem.series" -}}
namespace="{{ .Release.Namespace }}",app_kubernetes_io_instance="{{ .Release.Name }}"
{{- end -}}

{{/* A dict of `root`, `role`, `metric`, `more`: summed over a pool's workers, which every router shows. */}}
{{- define "tandem.poolSum" -}}
sum(max by (worker) ({{ .metric }}{role="{{ .role }}"{{ .more }},{{ include "tandem.series" .root }}}))
{{- end -}}

{{/* A dict of `root`, `role`: requests that wait for a pool, as PromQL. Those in the routers' queues wait for the pool
     that has a line of its own: for the prefill pool in proportion to its line, else for the decode pool, which refuses
     when it is full and so has none. */}}
{{- define "tandem.waitingRequests" -}}
{{- $waiting := `,state="waiting"` -}}
{{- $metric := "tandem_worker_requests" -}}
{{- $prefill := include "tandem.poolSum" (dict "root" .root "role" "prefill" "metric" $metric "more" $waiting) -}}
{{- $decode := include "tandem.poolSum" (dict "root" .root "role" "decode" "metric" $metric "more" $waiting) -}}
{{- $queue := printf "sum(tandem_queue_requests{%s})" (include "tandem.series" .root) -}}
{{- $p := printf "(%s or vector(0))" $prefill -}}
{{- $d := printf "(%s or vector(0))" $decode -}}
{{- $share := printf "%s / clamp_min(%s + %s, 1)" $p $p $d -}}
{{- if eq .role "prefill" -}}
{{ $p }} + {{ $queue }} * ({{ $share }})
{{- else -}}
{{ $d }} + {{ $queue }} * (1 - {{ $share }})
{{- end -}}
{{- end -}}

{{/* The same in tokens: what a pool has accepted and not computed, and its part of what waits before it. */}}
{{- define "tandem.waitingTokens" -}}
{{- $metric := "tandem_worker_backlog_tokens" -}}
{{- $prefill := include "tandem.poolSum" (dict "root" .root "role" "prefill" "metric" $metric "more" "") -}}
{{- $decode := include "tandem.poolSum" (dict "root" .root "role" "decode" "metric" $metric "more" "") -}}
{{- $queue := printf "sum(tandem_queue_tokens{%s})" (include "tandem.series" .root) -}}
{{- $p := printf "(%s or vector(0))" $prefill -}}
{{- $d := printf "(%s or vector(0))" $decode -}}
{{- $share := printf "%s / clamp_min(%s + %s, 1)" $p $p $d -}}
{{- if eq .role "prefill" -}}
{{ $p }} + {{ $queue }} * ({{ $share }})
{{- else -}}
{{ $d }} + {{ $queue }} * (1 - {{ $share }})
{{- end -}}
{{- end -}}
