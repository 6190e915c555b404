{{/* The value of `--resources`, quoted as KubeRay hands it to a shell. */}}
{{- define "antiphon.roleResources" -}}
{{- $all := dict -}}
{{- range $role, $count := dict "prefill" .prefill "decode" .decode "router" .router -}}
{{- if gt (int $count) 0 -}}
{{- $_ := set $all (printf "antiphon_%s%s" $role (ternary "" (printf "_%s" $.revision) (eq $.revision ""))) (int $count) -}}
{{- end -}}
{{- end -}}
{{- toJson $all | quote | squote -}}
{{- end -}}

{{/* The Ray container of a worker group: root, group, pool, gpus. */}}
{{- define "antiphon.workerContainer" -}}
{{- $root := .root -}}
{{- $router := eq .group.name "router" -}}
{{- $rdma := and (not $router) (gt (int .pool.rdma.count) 0) -}}
{{- $context := deepCopy $root.Values.containerSecurityContext -}}
{{- if $rdma -}}
{{- $capabilities := get $context "capabilities" | default dict -}}
{{- $_ := set $capabilities "add" (append (get $capabilities "add" | default list) "IPC_LOCK" | uniq) -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- $resources := deepCopy .pool.resources -}}
{{- range $side := list "requests" "limits" -}}
{{- $amounts := get $resources $side | default dict -}}
{{- if gt (int $.gpus) 0 -}}{{- $_ := set $amounts $.pool.gpu.resource (int $.gpus) -}}{{- end -}}
{{- if $rdma -}}{{- $_ := set $amounts $.pool.rdma.resource (int $.pool.rdma.count) -}}{{- end -}}
{{- $_ := set $resources $side $amounts -}}
{{- end -}}
- name: ray-worker
  image: {{ include "antiphon.image" (dict "root" $root "kind" (ternary "router" "worker" $router) "tag" .group.tag "digest" .group.digest) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  securityContext: {{- toYaml $context | nindent 4 }}
  resources: {{- toYaml $resources | nindent 4 }}
  ports:
    {{- if $router }}
    - {name: http, containerPort: {{ include "antiphon.port" "http" }}}
    {{- end }}
    {{- include "antiphon.workerPorts" .group | indent 4 }}
    - {name: metrics, containerPort: {{ include "antiphon.port" "metrics" }}}
    - {name: agent, containerPort: {{ include "antiphon.port" "agent" }}}
  {{- $own := include "antiphon.rayEnv" $root }}
  {{- if not $router }}
  {{- $own = printf "%s\n%s" $own (include "antiphon.transferEnv" $root) }}
  {{- end }}
  env:
    {{- include "antiphon.env" (dict "own" $own "more" .pool.env) | nindent 4 }}
  {{- include "antiphon.rayProbes" $root | nindent 2 }}
  readinessProbe:
    {{- if $router }}
    # A prefill and a decode worker have moved a test page, and this router takes requests.
    httpGet: {path: /ready, port: http, scheme: {{ include "antiphon.scheme" $root | upper }}}
    {{- else }}
    httpGet: {path: /api/healthz, port: agent}
    {{- end }}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: 3
  lifecycle:
    preStop:
      exec:
        command:
          - python3
          - /etc/antiphon/scripts/wait_drained.py
          - --limit-s={{ .pool.preStopSeconds }}
          {{- if $router }}
          # Until load balancers have seen that the pod is going.
          - --settle-s=5
          - --metrics-url={{ include "antiphon.scheme" $root }}://127.0.0.1:{{ include "antiphon.port" "http" }}/metrics
          {{- end }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
    - {name: scripts, mountPath: /etc/antiphon/scripts, readOnly: true}
    {{- if $router }}
    {{- if $root.Values.auth.enabled }}
    - {name: keys, mountPath: /etc/antiphon/keys, readOnly: true}
    {{- end }}
    {{- if $root.Values.router.tls.secretName }}
    - {name: tls, mountPath: /etc/antiphon/tls, readOnly: true}
    {{- end }}
    {{- else }}
    - {name: models, mountPath: /models}
    {{- end }}
    {{- with .pool.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
