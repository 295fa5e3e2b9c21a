{{/* A dict of `root`, `expr`: PromQL of Tandem's series, each narrowed to this release. Rules are plain files that know no
     release: with two of them under one Prometheus each would otherwise judge, and record, both. */}}
{{- define "tandem.ofRelease" -}}
{{- $series := include "tandem.series" .root -}}
{{- $name := `\b((?:tandem[_:]|vllm:|gen_ai_)[a-zA-Z0-9_:]+)` -}}
{{- $matched := regexReplaceAll (printf `%s\{` $name) .expr (printf `${1}{%s,` $series) -}}
{{- regexReplaceAll (printf `%s([^a-zA-Z0-9_:{]|$)` $name) $matched (printf `${1}{%s}${2}` $series) -}}
{{- end -}}
