{{/* The deployment file that `antiphon serve` reads, as YAML. Keys of the chart win over `config:`. */}}

{{- define "antiphon.modelFolder" -}}
{{- $source := .Values.model.source -}}
{{- if eq $source.type "pvc" -}}
/models{{ with $source.pvc.path }}/{{ trimPrefix "/" . }}{{ end }}
{{- else if eq $source.type "hostPath" -}}
/models
{{- else if eq $source.type "huggingface" -}}
/models/{{ $source.huggingface.repository | replace "/" "--" }}/{{ $source.huggingface.revision | replace "/" "--" }}
{{- else -}}
/models/{{ $source.synthetic.like }}
{{- end -}}
{{- end -}}

{{- define "antiphon.workerConfig" -}}
{{- $own := dict "replicas" (int .replicas) "device" .device "tensor_parallel" (int .tensorParallel) "expert_parallel" .expertParallel "cpu_threads" (int .cpuThreads) -}}
{{- if not (kindIs "invalid" .maxReplicas) -}}
{{- $_ := set $own "max_replicas" (int .maxReplicas) -}}
{{- end -}}
{{- toYaml (merge $own (deepCopy .config)) -}}
{{- end -}}

{{- define "antiphon.deployment" -}}
{{- $router := dict
  "replicas" (int .Values.router.replicas)
  "host" "0.0.0.0"
  "port" (include "antiphon.port" "http" | int)
  "drain_timeout_s" .Values.router.drainTimeoutSeconds
-}}
{{- if .Values.auth.enabled -}}
{{- $_ := set $router "api_key_file" "/etc/antiphon/keys/api-keys" -}}
{{- end -}}
{{- if .Values.router.tls.secretName -}}
{{- $_ := set $router "tls_certificate_file" "/etc/antiphon/tls/tls.crt" -}}
{{- $_ := set $router "tls_key_file" "/etc/antiphon/tls/tls.key" -}}
{{- end -}}
model:
  path: {{ include "antiphon.modelFolder" . | quote }}
  served_name: {{ .Values.model.name | quote }}
  dtype: {{ .Values.model.dtype }}
  kv_dtype: {{ .Values.model.kvDtype }}
  max_context_tokens: {{ .Values.model.maxContextTokens | toJson }}
router:
  {{- toYaml (merge $router (deepCopy .Values.router.config)) | nindent 2 }}
prefill:
  {{- include "antiphon.workerConfig" .Values.prefill | nindent 2 }}
decode:
  {{- include "antiphon.workerConfig" .Values.decode | nindent 2 }}
transfer:
  {{- toYaml (merge (dict "lease_s" .Values.transfer.leaseSeconds) (deepCopy .Values.transfer.config)) | nindent 2 }}
ray:
  address: auto
  role_resources: true
  {{- with .Values.revision }}
  revision: {{ . | quote }}
  {{- end }}
  placement_timeout_s: {{ .Values.ray.placementTimeoutSeconds }}
autoscale:
  {{- toYaml .Values.autoscaling.config | nindent 2 }}
log:
  level: {{ .Values.log.level }}
{{- if or (eq .Values.prefill.device "cuda") (eq .Values.decode.device "cuda") }}
kernels:
  require_built: {{ .Values.kernels.requireBuilt }}
{{- end }}
{{- with .Values.weightCache }}
{{- if .directory }}
weight_cache:
  directory: {{ .directory | quote }}
  limit_gib: {{ .limitGib }}
{{- end }}
{{- end }}
metrics:
  host: 0.0.0.0
  supervisor_port: {{ include "antiphon.port" "supervisor" }}
  worker_port: {{ include "antiphon.port" "worker-0" }}
  compat: {{ ternary "null" .Values.metrics.compat (eq .Values.metrics.compat "") }}
tracing:
  otlp_endpoint: {{ ternary "null" (.Values.tracing.otlpEndpoint | quote) (eq .Values.tracing.otlpEndpoint "") }}
  sample_ratio: {{ .Values.tracing.sampleRatio }}
{{- end -}}
