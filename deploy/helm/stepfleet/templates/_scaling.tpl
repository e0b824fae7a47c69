{{/* Takes root, name, select. */}}
{{- define "stepfleet.disruption" -}}
{{- if .root.Values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "stepfleet.labels" .select | nindent 4 }}
spec:
  maxUnavailable: {{ .root.Values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels: {{- include "stepfleet.selector" .select | nindent 6 }}
{{- end }}
{{- end }}

{{/* Takes root, name, select, group. */}}
{{- define "stepfleet.scaling" -}}
{{- $scaling := .group.autoscaling }}
{{- $keda := eq ($scaling.type | default "keda") "keda" }}
{{- if and $keda (not .root.Values.keeper.enabled) }}
{{- fail (printf "%s: autoscaling of type keda asks the keeper: set keeper.enabled" .name) }}
{{- end }}
---
apiVersion: {{ ternary "keda.sh/v1alpha1" "autoscaling/v2" $keda }}
kind: {{ ternary "ScaledObject" "HorizontalPodAutoscaler" $keda }}
metadata:
  name: {{ .name }}
  labels: {{- include "stepfleet.labels" .select | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ .name }}
{{- if $keda }}
  minReplicaCount: {{ $scaling.min | default 0 }}
  maxReplicaCount: {{ $scaling.max }}
  pollingInterval: 15
  cooldownPeriod: {{ $scaling.cooldown | default 300 }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          stabilizationWindowSeconds: {{ $scaling.cooldown | default 300 }}
  triggers:
    # `wanted` is a number of workers: an average of 1 for each of them is what there should be.
    {{- range .group.queues | default (list "") }}
    - type: metrics-api
      metricType: AverageValue
      metadata:
        url: http://{{ include "stepfleet.fullname" $.root }}-keeper.{{ $.root.Release.Namespace }}.svc:9460/scale{{ with . }}?queue={{ . | urlquery }}{{ end }}
        valueLocation: wanted
        targetValue: "1"
    {{- end }}
{{- else }}
  minReplicas: {{ $scaling.min | default 1 }}
  maxReplicas: {{ $scaling.max }}
  behavior:
    scaleDown:
      stabilizationWindowSeconds: {{ $scaling.cooldown | default 300 }}
  metrics:
    {{- range .group.queues | default (list "stepfleet") }}
    - type: External
      external:
        metric:
          name: stepfleet_work
          selector:
            matchLabels:
              queue: {{ . | quote }}
        target:
          type: AverageValue
          averageValue: {{ $.group.slots | default 1000 | quote }}
    {{- end }}
{{- end }}
{{- end }}
