{{/* Takes root, name, select. */}}
{{- define "stepfleet.disruption" -}}
{{- if .root.Values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name | quote }}
  labels: {{- include "stepfleet.labels" .select | nindent 4 }}
spec:
  maxUnavailable: {{ toJson .root.Values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels: {{- include "stepfleet.selector" .select | nindent 6 }}
{{- end }}
{{- end }}

{{/* How many workers serve a queue that no scaler changes. Takes root, queue. */}}
{{- define "stepfleet.beside" -}}
{{- $steady := 0 }}
{{- range .root.Values.workers }}
{{- if and (kindIs "map" .) (not .autoscaling) }}
{{- if has $.queue (.queues | default (list $.root.Values.queue)) }}
{{- $steady = add $steady (hasKey . "replicas" | ternary .replicas 2) }}
{{- end }}
{{- end }}
{{- end }}
{{- $steady }}
{{- end }}

{{/* The query of /scale for a queue, without the workers that are there anyway. Takes root, group, queue. */}}
{{- define "stepfleet.asked" -}}
{{- $asked := list }}
{{- if .group.queues }}{{ $asked = append $asked (printf "queue=%s" (urlquery .queue)) }}{{ end }}
{{- $steady := include "stepfleet.beside" . }}
{{- if ne $steady "0" }}{{ $asked = append $asked (printf "beside=%s" $steady) }}{{ end }}
{{- with $asked }}?{{ join "&" . }}{{ end }}
{{- end }}

{{/* The slots of a group's worker: its own, else those of config, else the program's. Takes root, group. */}}
{{- define "stepfleet.slots" -}}
{{- $said := include "stepfleet.setting" (dict "root" .root "name" "slots") | regexFind "[0-9][0-9_]*" | replace "_" "" }}
{{- .group.slots | default $said | default 1000 }}
{{- end }}

{{/* Takes root, name, select, group. */}}
{{- define "stepfleet.scaling" -}}
{{- $scaling := .group.autoscaling }}
{{- $keda := eq ($scaling.type | default "keda") "keda" }}
---
apiVersion: {{ ternary "keda.sh/v1alpha1" "autoscaling/v2" $keda }}
kind: {{ ternary "ScaledObject" "HorizontalPodAutoscaler" $keda }}
metadata:
  name: {{ .name | quote }}
  labels: {{- include "stepfleet.labels" .select | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ .name | quote }}
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
    {{- range .group.queues | default (list .root.Values.queue) }}
    - type: metrics-api
      metricType: AverageValue
      metadata:
        url: {{ printf "http://%s-keeper.%s.svc:9460/scale%s" (include "stepfleet.fullname" $.root) $.root.Release.Namespace (include "stepfleet.asked" (dict "root" $.root "group" $.group "queue" .)) | quote }}
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
    {{- range .group.queues | default (list .root.Values.queue) }}
    - type: External
      external:
        metric:
          name: stepfleet_work
          selector:
            matchLabels:
              job: {{ include "stepfleet.job" $.root | quote }}
              queue: {{ . | quote }}
        target:
          type: AverageValue
          averageValue: {{ include "stepfleet.slots" $ | quote }}
    {{- end }}
{{- end }}
{{- end }}
