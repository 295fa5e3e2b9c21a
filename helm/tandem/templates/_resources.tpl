{{/* A dict of `pool`, `ranks`: a GPU for each rank, and the RDMA device, beside what the values say. */}}
{{- define "tandem.workerResources" -}}
{{- $r := deepCopy .pool.resources -}}
{{- $limits := $r.limits | default dict -}}
{{- if .pool.gpu.enabled -}}
{{- $_ := set $limits .pool.gpu.resource .ranks -}}
{{- end -}}
{{- if .pool.rdma.enabled -}}
{{- $_ := set $limits .pool.rdma.resource (int .pool.rdma.count) -}}
{{- end -}}
{{- toYaml (set $r "limits" $limits) -}}
{{- end -}}
