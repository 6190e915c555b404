{{/* Names, labels and ports: each is said here once. */}}

{{- define "antiphon.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimAll "-" -}}
{{- end -}}

{{- define "antiphon.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimAll "-" -}}
{{- else if contains (include "antiphon.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimAll "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "antiphon.name" .) | trunc 40 | trimAll "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects every pod of the release. */}}
{{- define "antiphon.selectorLabels" -}}
app.kubernetes.io/name: {{ include "antiphon.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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

{{/* Labels of an object with some of its own: root, more. */}}
{{- define "antiphon.labelsWith" -}}
{{- toYaml (mergeOverwrite (include "antiphon.labels" .root | fromYaml) (deepCopy (.more | default dict))) -}}
{{- end -}}

{{/* Number of a named port. */}}
{{- define "antiphon.port" -}}
{{- $ports := dict "http" 8000 "gcs-server" 6379 "dashboard" 8265 "client" 10001 "metrics" 8080 "agent" 52365 "supervisor" 9464 "worker-0" 9465 -}}
{{- required (printf "no port is called %s" .) (get $ports .) -}}
{{- end -}}

{{/* Reference of an image: root, kind; tag and digest are those of the values where they are absent. */}}
{{- define "antiphon.image" -}}
{{- $image := .root.Values.image -}}
{{- $repository := ternary $image.routerRepository $image.workerRepository (eq .kind "router") -}}
{{- $digest := dig "digest" (ternary $image.routerDigest $image.workerDigest (eq .kind "router")) . -}}
{{- printf "%s%s:%s" $image.registry $repository (default .root.Chart.AppVersion (dig "tag" $image.tag .)) -}}
{{- with $digest }}@{{ . }}{{ end -}}
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

{{/* The revisions that have worker groups: the one of these values, then those that it replaces. As YAML. */}}
{{- define "antiphon.revisions" -}}
{{- $root := . -}}
{{- $revisions := list (dict "name" .Values.revision "tag" .Values.image.tag "digest" .Values.image.workerDigest "retired" false "prefill" .Values.prefill "decode" .Values.decode) -}}
{{- range $previous := .Values.previousRevisions -}}
{{- $revision := dict "name" $previous.name "tag" $previous.tag "digest" ($previous.digest | default "") "retired" ($previous.retired | default false) -}}
{{- range $role := list "prefill" "decode" -}}
{{- $_ := set $revision $role (mergeOverwrite (deepCopy (get $root.Values $role)) (deepCopy (get $previous $role | default dict))) -}}
{{- end -}}
{{- $revisions = append $revisions $revision -}}
{{- end -}}
{{- toYaml $revisions -}}
{{- end -}}

{{/*
The worker groups of the RayCluster, as YAML: name, component, revision, tag and digest of the image; pods now and at most; workers of
each role, CPUs and GPUs per pod; and the values of the pods. A retired group stays in the RayCluster, without pods: KubeRay
forgets the pods of a group that is taken out, and Ray's autoscaler stumbles over them.
*/}}
{{- define "antiphon.groups" -}}
{{- $root := . -}}
{{- $shared := eq .Values.placement.mode "samePod" -}}
{{- $groups := list -}}
{{- range $revision := include "antiphon.revisions" . | fromYamlArray -}}
{{- $own := list -}}
{{- if $shared -}}
{{- $pods := int $root.Values.placement.pods -}}
{{- $own = list (dict "component" "workers" "pods" $pods "most" $pods "prefill" (div $revision.prefill.replicas $pods) "decode" (div $revision.decode.replicas $pods) "pool" $root.Values.placement.pod) -}}
{{- else -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := get $revision $role -}}
{{- $own = append $own (dict "component" $role "pods" (int $pool.replicas) "most" (int ($pool.maxReplicas | default $pool.replicas)) "prefill" (ternary 1 0 (eq $role "prefill")) "decode" (ternary 1 0 (eq $role "decode")) "pool" $pool) -}}
{{- end -}}
{{- end -}}
{{- range $group := $own -}}
{{- $_ := set $group "name" (ternary $group.component (printf "%s-%s" $group.component $revision.name) (eq $revision.name "")) -}}
{{- $_ := set $group "revision" $revision.name -}}
{{- $_ := set $group "tag" $revision.tag -}}
{{- $_ := set $group "digest" $revision.digest -}}
{{- $_ := set $group "cpus" (add (mul $group.prefill (include "antiphon.cpusPerWorker" $revision.prefill | int)) (mul $group.decode (include "antiphon.cpusPerWorker" $revision.decode | int))) -}}
{{- $_ := set $group "gpus" (include "antiphon.gpusPerPod" (dict "prefill" $group.prefill "decode" $group.decode "pools" $revision) | int) -}}
{{- $_ := set $group "router" 0 -}}
{{- if $revision.retired -}}
{{- $_ := set $group "pods" 0 -}}
{{- $_ := set $group "most" 0 -}}
{{- end -}}
{{- $groups = append $groups $group -}}
{{- end -}}
{{- end -}}
{{- $routers := int .Values.router.replicas -}}
{{- $groups = append $groups (dict "name" "router" "component" "router" "revision" "" "tag" .Values.image.tag "digest" .Values.image.routerDigest "pods" $routers "most" $routers "prefill" 0 "decode" 0 "router" 1 "cpus" 1 "gpus" 0 "pool" .Values.router) -}}
{{- toYaml $groups -}}
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

{{/* CPUs that one worker of a pool reserves with Ray: each of its ranks does. */}}
{{- define "antiphon.cpusPerWorker" -}}
{{- mul .tensorParallel .cpuThreads -}}
{{- end -}}

{{/*
GPUs of a pod that holds so many prefill and decode workers of these pools. Workers that reserve a share of a GPU each
take the first one that has as much left, in the order in which the supervisor asks for them.
*/}}
{{- define "antiphon.gpusPerPod" -}}
{{- $whole := 0 -}}
{{- $left := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := get $.pools $role -}}
{{- $workers := get $ $role | int -}}
{{- $share := include "antiphon.gpuShare" $pool | float64 -}}
{{- if eq $share 1.0 -}}
{{- $whole = add $whole (mul $workers $pool.tensorParallel) -}}
{{- else if gt $share 0.0 -}}
{{- range until $workers -}}
{{- $placed := false -}}
{{- $now := list -}}
{{- range $free := $left -}}
{{- if and (not $placed) (ge (addf $free 1e-9) $share) -}}
{{- $placed = true -}}
{{- $free = subf $free $share -}}
{{- end -}}
{{- $now = append $now $free -}}
{{- end -}}
{{- $left = ternary $now (append $now (subf 1.0 $share)) $placed -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- add $whole (len $left) -}}
{{- end -}}

{{/* What of a GPU one rank of a pool reserves; 0 on a CPU. */}}
{{- define "antiphon.gpuShare" -}}
{{- ternary (dig "gpu_share" 1.0 .config) 0.0 (eq .device "cuda") -}}
{{- end -}}
