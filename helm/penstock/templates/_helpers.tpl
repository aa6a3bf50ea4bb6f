{{/* The operator's name, of its account, role and Deployment. */}}
{{- define "penstock.operator" -}}
{{ printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The name of what is not in a namespace: two releases may share a cluster. */}}
{{- define "penstock.cluster.operator" -}}
{{ printf "%s-%s" .Release.Namespace (include "penstock.operator" .) }}
{{- end }}

{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end }}

{{/* What selects the operator's pods, and never changes. */}}
{{- define "penstock.operator.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}
