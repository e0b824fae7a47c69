{{- define "stepfleet.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* The fleet's name in Prometheus, other than that of any other release; a label's value has no slash. */}}
{{- define "stepfleet.job" -}}
{{- printf "%s.%s" .Release.Namespace (include "stepfleet.fullname" .) | trunc 63 | trimAll "-." -}}
{{- end }}

{{/* What never changes: a Deployment's selector cannot be upgraded. Takes root, component, group. */}}
{{- define "stepfleet.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . | quote }}
{{- end }}
{{- with .group }}
stepfleet/group: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "stepfleet.labels" -}}
{{ include "stepfleet.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end }}

{{- define "stepfleet.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "stepfleet.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end }}

{{- define "stepfleet.image" -}}
{{- with .Values.image -}}
{{- .repository }}{{ with .digest }}@{{ . }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}
{{- end }}

{{/* What the three kinds of pods have in common. Takes root and placement. */}}
{{- define "stepfleet.pod" -}}
serviceAccountName: {{ include "stepfleet.serviceAccount" .root | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" }}
{{- with get $.placement $field }}
{{ $field }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
volumes:
  - name: scratch
    emptyDir: {}
  - name: config
    configMap:
      name: {{ include "stepfleet.fullname" .root | quote }}
  {{- with .root.Values.redis.caSecret }}
  - name: redis-ca
    secret:
      secretName: {{ . | quote }}
  {{- end }}
  {{- with .root.Values.archive.existingClaim }}
  - name: archive
    persistentVolumeClaim:
      claimName: {{ . | quote }}
  {{- end }}
  {{- with .placement.volumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{/* Takes root and the group's mounts. */}}
{{- define "stepfleet.container" -}}
image: {{ include "stepfleet.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy | quote }}
workingDir: /etc/stepfleet/config
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - name: scratch
    mountPath: /tmp
    subPath: tmp
  - name: scratch
    mountPath: /home/stepfleet
    subPath: home
  - name: config
    mountPath: /etc/stepfleet/config
    readOnly: true
  {{- if .root.Values.redis.caSecret }}
  - name: redis-ca
    mountPath: /etc/stepfleet/redis-ca
    readOnly: true
  {{- end }}
  {{- if .root.Values.archive.existingClaim }}
  - name: archive
    mountPath: /archive
  {{- end }}
  {{- with .mounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{/* Redis's address, the queue, and the release's variables. Takes root, env. */}}
{{- define "stepfleet.env" -}}
{{- with .root.Values.redis }}
{{- if .trial.enabled }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret | quote }}, key: password}
- name: STEPFLEET_REDIS_URL
  value: {{ printf "redis://stepfleet:$(REDIS_PASSWORD)@%s-redis:6379/0" (include "stepfleet.fullname" $.root) | quote }}
{{- else }}
- name: STEPFLEET_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .urlKey | quote }}}
{{- end }}
{{- end }}
- name: STEPFLEET_QUEUE
  value: {{ .root.Values.queue | quote }}
{{- with .root.Values.archive }}
{{- if .url }}
- name: STEPFLEET_ARCHIVE_URL
  value: {{ .url | quote }}
- name: STEPFLEET_ARCHIVE_AFTER
  value: {{ .after | int64 | quote }}
{{- end }}
{{- end }}
{{- range $name, $value := merge (dict) (.env | default dict) .root.Values.env }}
- name: {{ $name | quote }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{/* Secrets whose variables all containers have, as JSON. */}}
{{- define "stepfleet.secrets" -}}
{{- $found := .Values.envFromSecrets }}
{{- with .Values.archive.existingSecret }}{{ $found = append $found . }}{{ end }}
{{- toJson $found }}
{{- end }}

{{- define "stepfleet.envFrom" -}}
{{- if . }}
envFrom:
  {{- range . }}
  - secretRef: {name: {{ . | quote }}}
  {{- end }}
{{- end }}
{{- end }}

{{/* What config says of a setting, `name = value`, or nothing: settings stand before the first table. Takes root, name. */}}
{{- define "stepfleet.setting" -}}
{{- regexReplaceAll "(?ms)^\\s*\\[.*" .root.Values.config "" | regexFind (printf `(?m)^[ \t]*"?%s"?[ \t]*=.*` .name) | trim -}}
{{- end }}

{{/* A pod is replaced when its stepfleet.toml changes. */}}
{{- define "stepfleet.checksum" -}}
checksum/config: {{ .Values.config | sha256sum | quote }}
{{- end }}
