{{- define "stepfleet.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* What never changes: a Deployment's selector cannot be upgraded. Takes root, component, group. */}}
{{- define "stepfleet.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .group }}
stepfleet/group: {{ . }}
{{- end }}
{{- end }}

{{- define "stepfleet.labels" -}}
{{ include "stepfleet.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "stepfleet.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "stepfleet.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end }}

{{- define "stepfleet.image" -}}
{{- with .Values.image -}}
{{- .repository }}{{ with .digest }}@{{ . }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/* What the three kinds of pods have in common. Takes root and placement. */}}
{{- define "stepfleet.pod" -}}
serviceAccountName: {{ include "stepfleet.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
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
      name: {{ include "stepfleet.fullname" .root }}
  {{- with .root.Values.redis.caSecret }}
  - name: redis-ca
    secret:
      secretName: {{ . }}
  {{- end }}
{{- end }}

{{- define "stepfleet.container" -}}
image: {{ include "stepfleet.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
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
  {{- if .Values.redis.caSecret }}
  - name: redis-ca
    mountPath: /etc/stepfleet/redis-ca
    readOnly: true
  {{- end }}
{{- end }}

{{/* Redis's address, and the release's variables. Takes root, env. */}}
{{- define "stepfleet.env" -}}
{{- with .root.Values.redis }}
{{- if .trial.enabled }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: password}
- name: STEPFLEET_REDIS_URL
  value: redis://stepfleet:$(REDIS_PASSWORD)@{{ include "stepfleet.fullname" $.root }}-redis:6379/0
{{- else }}
- name: STEPFLEET_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .urlKey }}}
{{- end }}
{{- end }}
{{- range $name, $value := merge (dict) (.env | default dict) .root.Values.env }}
- name: {{ $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{- define "stepfleet.envFrom" -}}
{{- if . }}
envFrom:
  {{- range . }}
  - secretRef: {name: {{ . }}}
  {{- end }}
{{- end }}
{{- end }}

{{/* A pod is replaced when its stepfleet.toml changes. */}}
{{- define "stepfleet.checksum" -}}
checksum/config: {{ .Values.config | sha256sum }}
{{- end }}
