{{/* Names, labels and ports: each is said here once. */}}

{{- define "antiphon.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "antiphon.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "antiphon.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "antiphon.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects every pod of the release. */}}
{{- define "antiphon.selectorLabels" -}}
app.kubernetes.io/name: {{ include "antiphon.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "antiphon.labels" -}}
{{ include "antiphon.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Number of a named port. */}}
{{- define "antiphon.port" -}}
{{- $ports := dict "http" 8000 "gcs-server" 6379 "dashboard" 8265 "client" 10001 "metrics" 8080 "agent" 52365 "supervisor" 9464 "worker-0" 9465 -}}
{{- required (printf "no port is called %s" .) (get $ports .) -}}
{{- end -}}

{{- define "antiphon.image" -}}
{{- $image := .root.Values.image -}}
{{- $repository := ternary $image.routerRepository $image.workerRepository (eq .kind "router") -}}
{{- printf "%s%s:%s" $image.registry $repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}

{{- define "antiphon.serviceAccountName" -}}
{{- default (include "antiphon.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "antiphon.apiKeySecret" -}}
{{- default (printf "%s-api-keys" (include "antiphon.fullname" .)) .Values.auth.existingSecret.name -}}
{{- end -}}

{{- define "antiphon.apiKeySecretKey" -}}
{{- ternary .Values.auth.existingSecret.key "api-keys" (ne .Values.auth.existingSecret.name "") -}}
{{- end -}}

{{- define "antiphon.raySecret" -}}
{{- default (printf "%s-ray" (include "antiphon.fullname" .)) .Values.ray.auth.existingSecret -}}
{{- end -}}

{{- define "antiphon.scheme" -}}
{{- ternary "https" "http" (ne .Values.router.tls.secretName "") -}}
{{- end -}}

{{/* Whether an optional object is wanted: true, false, or auto and its API is there. */}}
{{- define "antiphon.wanted" -}}
{{- if or (eq (toString .enabled) "true") (and (eq (toString .enabled) "auto") (.root.Capabilities.APIVersions.Has .api)) -}}
true
{{- end -}}
{{- end -}}

{{/* The worker groups of the RayCluster, as YAML: name, roles, pods, values of the pods. */}}
{{- define "antiphon.groups" -}}
{{- $shared := eq .Values.placement.mode "samePod" -}}
{{- if $shared }}
{{- $perPod := dict "prefill" (div .Values.prefill.replicas .Values.placement.pods) "decode" (div .Values.decode.replicas .Values.placement.pods) }}
- {name: workers, pods: {{ .Values.placement.pods }}, most: {{ .Values.placement.pods }}, prefill: {{ $perPod.prefill }}, decode: {{ $perPod.decode }}, router: 0}
{{- else }}
- {name: prefill, pods: {{ .Values.prefill.replicas }}, most: {{ .Values.prefill.maxReplicas | default .Values.prefill.replicas }}, prefill: 1, decode: 0, router: 0}
- {name: decode, pods: {{ .Values.decode.replicas }}, most: {{ .Values.decode.maxReplicas | default .Values.decode.replicas }}, prefill: 0, decode: 1, router: 0}
{{- end }}
- {name: router, pods: {{ .Values.router.replicas }}, most: {{ .Values.router.replicas }}, prefill: 0, decode: 0, router: 1}
{{- end -}}

{{/* Names and numbers of the ports where the workers of a group's pod have their metrics, as YAML. */}}
{{- define "antiphon.workerPorts" -}}
{{- range $i := until (add (int .prefill) (int .decode) | int) }}
- {name: worker-{{ $i }}, containerPort: {{ add (include "antiphon.port" "worker-0" | int) $i }}}
{{- end }}
{{- end -}}

{{/* Most workers that any pod of the release holds. */}}
{{- define "antiphon.workersPerPod" -}}
{{- $most := 0 -}}
{{- range include "antiphon.groups" . | fromYamlArray -}}
{{- $most = max $most (add (int .prefill) (int .decode)) -}}
{{- end -}}
{{- $most -}}
{{- end -}}

{{/* Whether a pool may grow: pools of pods of their own alone, since a shared pod has room for its workers only. */}}
{{- define "antiphon.autoscales" -}}
{{- if or (not (kindIs "invalid" .Values.prefill.maxReplicas)) (not (kindIs "invalid" .Values.decode.maxReplicas)) -}}
true
{{- end -}}
{{- end -}}

{{/* Bytes per second below which KV moves too slowly for the path that was asked for. */}}
{{- define "antiphon.leastTransferRate" -}}
{{- $least := dict "cuda_ipc" "5e+09" "rdma" "2e+09" "tcp" "1e+06" -}}
{{- default (get $least .Values.transfer.path) .Values.metrics.rules.transferBytesPerSecond -}}
{{- end -}}

{{/* GPUs that one worker of a pool needs. */}}
{{- define "antiphon.gpusPerWorker" -}}
{{- ternary (int .tensorParallel) 0 (eq .device "cuda") -}}
{{- end -}}
