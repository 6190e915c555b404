{{/* Parts of the pods. All take a map: root, and what they say. */}}

{{/* Volumes and init container that bring the checkpoint to /models; `image` has the antiphon command. */}}
{{- define "antiphon.modelVolume" -}}
{{- $source := .Values.model.source -}}
- name: models
{{- if eq $source.type "pvc" }}
  persistentVolumeClaim: {claimName: {{ $source.pvc.claimName | quote }}, readOnly: true}
{{- else if eq $source.type "hostPath" }}
  hostPath: {path: {{ $source.hostPath.path | quote }}, type: Directory}
{{- else if eq $source.type "synthetic" }}
  emptyDir: {}
{{- else if eq $source.huggingface.cache.type "pvc" }}
  persistentVolumeClaim: {claimName: {{ $source.huggingface.cache.claimName | quote }}}
{{- else if eq $source.huggingface.cache.type "hostPath" }}
  hostPath: {path: {{ $source.huggingface.cache.path | quote }}, type: DirectoryOrCreate}
{{- else }}
  emptyDir: {sizeLimit: {{ $source.huggingface.cache.sizeLimit }}}
{{- end }}
{{- end -}}

{{- define "antiphon.modelInit" -}}
{{- $root := .root -}}
{{- $source := $root.Values.model.source -}}
{{- $folder := include "antiphon.modelFolder" $root -}}
{{- if has $source.type (list "huggingface" "synthetic") }}
- name: model
  image: {{ include "antiphon.image" (dict "root" $root "kind" "worker" "tag" .tag "digest" .digest) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  securityContext: {{- toYaml $root.Values.containerSecurityContext | nindent 4 }}
  resources:
    requests: {cpu: "1", memory: 1Gi}
    limits: {memory: 2Gi}
  {{- if eq $source.type "synthetic" }}
  # The same seed gives the same bytes in every pod. A restarted pod finds what it made before.
  command: [/bin/sh, -c]
  args: ["test -f {{ $folder }}/config.json || antiphon checkpoint synthesize {{ $folder }} --like {{ $source.synthetic.like }} --seed 0"]
  {{- else }}
  command: [hf, download]
  args:
    - {{ $source.huggingface.repository }}
    - --revision={{ $source.huggingface.revision }}
    - --local-dir={{ $folder }}
    - --include=config.json
    - --include=generation_config.json
    - --include=model.safetensors.index.json
    - --include=*.safetensors
    - --exclude=original/*
    - --exclude=metal/*
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
    {{- if and (eq $source.type "huggingface") $source.huggingface.tokenSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ $source.huggingface.tokenSecret | quote }}, key: token}}
    {{- end }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}

{{/* Environment of every container that has to do with Ray. */}}
{{- define "antiphon.rayEnv" -}}
- {name: HOME, value: /tmp}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "antiphon.raySecret" . | quote }}, key: auth_token}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_DEDUP_LOGS, value: "0"}
- {name: RAY_COLOR_PREFIX, value: "0"}
# Of 15 by default, which is for batch work beside a user's own.
- {name: RAY_worker_niceness, value: "0"}
{{- end -}}

{{/* Environment of a container: own, as YAML, and more, the values' list, whose variables take the place of own ones. */}}
{{- define "antiphon.env" -}}
{{- $names := list -}}
{{- range .more -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $all := list -}}
{{- range .own | fromYamlArray -}}
{{- if not (has .name $names) -}}
{{- $all = append $all . -}}
{{- end -}}
{{- end -}}
{{- toYaml (concat $all (.more | default list)) -}}
{{- end -}}

{{/* What UCX may use for the path that KV takes. */}}
{{- define "antiphon.transferEnv" -}}
{{- $tls := dict "cuda_ipc" "cuda_copy,cuda_ipc,sm,tcp,self" "rdma" "rc,cuda_copy,cuda_ipc,sm,self" "tcp" "tcp,cuda_copy,sm,self" -}}
- {name: UCX_TLS, value: {{ get $tls .Values.transfer.path | quote }}}
{{- with .Values.transfer.netDevices }}
- {name: UCX_NET_DEVICES, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* Health of a pod's raylet, and on the head of Ray's own state; what runs in it is the supervisor's care. */}}
{{- define "antiphon.rayProbes" -}}
startupProbe:
  httpGet: {path: /api/healthz, port: agent}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /api/healthz, port: agent}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* Where a pod may run, and what else the values say of it: root, pool, component; token mounts the account's. */}}
{{- define "antiphon.scheduling" -}}
{{- $labels := merge (dict "app.kubernetes.io/component" .component) (include "antiphon.selectorLabels" .root | fromYaml) -}}
{{- with .revision -}}
{{- $_ := set $labels "antiphon-revision" . -}}
{{- end -}}
serviceAccountName: {{ include "antiphon.serviceAccountName" .root | quote }}
# Ray's autoscaler asks Kubernetes for pods; nothing else here talks to it.
automountServiceAccountToken: {{ eq "true" (toString .token) }}
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
terminationGracePeriodSeconds: {{ .pool.terminationGracePeriodSeconds }}
{{- with .pool.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .pool.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- if .pool.hostIPC }}
hostIPC: true
{{- end }}
{{- if .pool.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with .pool.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels))) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "antiphon.podMetadata" -}}
{{- $own := dict "app.kubernetes.io/component" .component -}}
{{- with .revision -}}
{{- $_ := set $own "antiphon-revision" . -}}
{{- end -}}
labels:
  {{- include "antiphon.labelsWith" (dict "root" .root "more" (merge $own (deepCopy (.pool.podLabels | default dict)))) | nindent 2 }}
annotations:
  # KubeRay sees a changed deployment file as a changed pod.
  checksum/deployment: {{ include "antiphon.deployment" .root | sha256sum }}
  {{- with .pool.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
