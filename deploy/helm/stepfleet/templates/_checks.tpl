{{/* What fits the schema and still cannot work. All of it is said at once, each with what to do. */}}
{{- define "stepfleet.checks" -}}
{{- $wrong := concat (include "stepfleet.checks.missing" . | fromJsonArray) (include "stepfleet.checks.taken" . | fromJsonArray) (include "stepfleet.checks.groups" . | fromJsonArray) }}
{{- if $wrong }}{{ fail (printf "\n- %s" (join "\n- " $wrong)) }}{{ end }}
{{- end }}

{{- define "stepfleet.checks.missing" -}}
{{- $wrong := list }}
{{- with .Values }}
{{- if not .image.repository }}{{ $wrong = append $wrong "image.repository: name the image with your agents" }}{{ end }}
{{- if not (or .image.tag .image.digest) }}{{ $wrong = append $wrong "image.tag: give the tag of your image, or image.digest" }}{{ end }}
{{- if not .agents }}{{ $wrong = append $wrong "agents: name the module or file with your agents" }}{{ end }}
{{- if not .redis.existingSecret }}{{ $wrong = append $wrong "redis.existingSecret: name a Secret with the address of Redis" }}{{ end }}
{{- if .flower.enabled }}
{{- if not .flower.existingSecret }}{{ $wrong = append $wrong "flower.existingSecret: name a Secret with the key basic-auth, USER:PASSWORD" }}{{ end }}
{{- end }}
{{- if .flower.ingress.enabled }}
{{- if not .flower.ingress.host }}{{ $wrong = append $wrong "flower.ingress.host: give the host of Flower's pages" }}{{ end }}
{{- if not .flower.ingress.tlsSecret }}{{ $wrong = append $wrong "flower.ingress.tlsSecret: name a Secret with the host's certificate" }}{{ end }}
{{- end }}
{{- with .archive }}
{{- if regexMatch "^(file|local)://" .url }}
{{- if not (and .existingClaim (regexMatch "^(file|local):///archive(/|$)" .url)) }}{{ $wrong = append $wrong "archive.url: a folder needs archive.existingClaim, which is mounted at /archive: file:///archive" }}{{ end }}
{{- end }}
{{- if regexMatch "(?i)://[^/]*:[^/]*@|[?&][a-z_]*(key|secret|token|password|connection_string)=" .url }}{{ $wrong = append $wrong "archive.url: its credentials would be readable in the release and its pods: use archive.existingSecret" }}{{ end }}
{{- end }}
{{- if .externalSecret.enabled }}
{{- if not .externalSecret.store.name }}{{ $wrong = append $wrong "externalSecret.store.name: name the store" }}{{ end }}
{{- if not .externalSecret.key }}{{ $wrong = append $wrong "externalSecret.key: name the entry of the store" }}{{ end }}
{{- end }}
{{- end }}
{{- toJson $wrong }}
{{- end }}

{{/* Settings that the chart gives its containers: a second value would be ignored, or break a port or a grace. */}}
{{- define "stepfleet.checks.taken" -}}
{{- $wrong := list }}
{{- $taken := dict "redis_url" "the Secret of redis.existingSecret" "broker_url" "a Secret among envFromSecrets with the key STEPFLEET_BROKER_URL" "drain" "the value drain" "queue" "the value queue" }}
{{- if .Values.metrics.enabled }}
{{- $taken = merge $taken (dict "metrics_port" "the chart (9464); metrics.enabled: false frees it" "metrics_host" "the chart (0.0.0.0); metrics.enabled: false frees it") }}
{{- end }}
{{- if .Values.archive.url }}
{{- $taken = merge $taken (dict "archive_url" "the value archive.url" "archive_after" "the value archive.after") }}
{{- end }}
{{- range $name, $by := $taken }}
{{- if include "stepfleet.setting" (dict "root" $ "name" $name) }}
{{- $wrong = append $wrong (printf "config: %s is set by %s" $name $by) }}
{{- end }}
{{- end }}
{{- $taken = merge $taken (dict "slots" "slots of a group, or slots in config" "agents" "the value agents" "flower_basic_auth" "the Secret of flower.existingSecret") }}
{{- $given := dict "env" .Values.env "flower.env" .Values.flower.env }}
{{- range $group, $values := .Values.workers }}
{{- if kindIs "map" $values }}{{ $_ := set $given (printf "workers.%s.env" $group) $values.env }}{{ end }}
{{- end }}
{{- range $place, $env := $given }}
{{- range $variable, $_ := $env | default dict }}
{{- if regexMatch "_(API_KEY|ACCESS_KEY|SIGNING_KEY|TOKEN|SECRET|PASSWORD)$" (upper $variable) }}
{{- $wrong = append $wrong (printf "%s: %s would be readable in the release and its pods: use existingSecret/envFromSecrets" $place $variable) }}
{{- end }}
{{- end }}
{{- range $name, $by := $taken }}
{{- $variable := printf "STEPFLEET_%s" (upper $name) }}
{{- if hasKey ($env | default dict) $variable }}
{{- $wrong = append $wrong (printf "%s: %s is set by %s" $place $variable $by) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $wrong }}
{{- end }}

{{- define "stepfleet.checks.groups" -}}
{{- $wrong := list }}
{{- $scaled := dict }}
{{- range $group, $given := .Values.workers }}
{{- if kindIs "map" $given }}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$" $group) }}
{{- $wrong = append $wrong (printf "workers.%s: name a group with small letters, digits and inner hyphens, 15 at most" $group) }}
{{- end }}
{{- with $given.autoscaling }}
{{- $at := printf "workers.%s.autoscaling" $group }}
{{- if hasKey $given "replicas" }}
{{- $wrong = append $wrong (printf "%s: take it away, or replicas: a group has one of the two" $at) }}
{{- end }}
{{- if gt (int (.min | default 0)) (int .max) }}
{{- $wrong = append $wrong (printf "%s: min is %d, more than max, %d" $at (int .min) (int .max)) }}
{{- end }}
{{- if eq (.type | default "keda") "keda" }}
{{- if not $.Values.keeper.enabled }}
{{- $wrong = append $wrong (printf "%s: KEDA asks the keeper: set keeper.enabled, or type: hpa" $at) }}
{{- else if not (int $.Values.keeper.replicas) }}
{{- $wrong = append $wrong (printf "%s: KEDA asks the keeper: set keeper.replicas to 1 or more, or type: hpa" $at) }}
{{- end }}
{{- end }}
{{- range $queue := $given.queues | default (list $.Values.queue) }}
{{- if hasKey $scaled $queue }}
{{- $wrong = append $wrong (printf "%s: workers.%s scales on the same work, so there would be twice the workers that are wanted; give one of them replicas" $at (get $scaled $queue)) }}
{{- end }}
{{- $_ := set $scaled $queue $group }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $wrong }}
{{- end }}
