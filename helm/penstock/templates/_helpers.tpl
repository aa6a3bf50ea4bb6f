{{- define "penstock.name" -}}
{{- if contains "penstock" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-penstock" .Release.Name }}{{ end }}
{{- end }}

{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Of one part: (list . "operator") */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "penstock.image" -}}
{{- $root := index . 0 -}}
{{ printf "%s/%s:%s" $root.Values.image.registry (index . 1) ($root.Values.image.tag | default $root.Chart.AppVersion) }}
{{- end }}

{{- define "penstock.service.host" -}}
{{ printf "%s-service.%s.svc" (include "penstock.name" .) .Release.Namespace }}
{{- end }}

{{- define "penstock.service.scheme" -}}
{{ ternary "https" "http" (ne .Values.service.tlsSecret "") }}
{{- end }}

{{/* Restricted Pod Security, and a root file system that nobody writes. */}}
{{- define "penstock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "penstock.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "penstock.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.dns" }}
    - ports:
        - {protocol: UDP, port: 53}
        - {protocol: TCP, port: 53}
{{- end }}
{{- define "penstock.apiServer" }}
    {{- with .Values.networkPolicies.apiServer }}
    - ports: [{protocol: TCP, port: {{ .port }}}]
      {{- if .cidr }}
      to: [{ipBlock: {cidr: {{ .cidr }}}}]
      {{- end }}
    {{- end }}
{{- end }}
{{- define "penstock.callers" }}
{{- with .Values.networkPolicies.callers }}
      from: {{ toYaml . | nindent 8 }}
{{- end }}
{{- end }}

{{/* What binds one part's rights: (list . "NAME-operator") */}}
{{- define "penstock.bound" }}
{{- $root := index . 0 }}{{ $part := index . 1 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ ternary "ClusterRole" "Role" (eq $root.Values.namespace "") }}Binding
metadata:
  name: {{ $part }}-jobs
  {{- with $root.Values.namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{ include "penstock.labels" $root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ ternary "ClusterRole" "Role" (eq $root.Values.namespace "") }}
  name: {{ $part }}-jobs
subjects: [{kind: ServiceAccount, name: {{ $part }}, namespace: {{ $root.Release.Namespace }}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $part }}-cluster
  labels: {{ include "penstock.labels" $root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ $part }}-cluster}
subjects: [{kind: ServiceAccount, name: {{ $part }}, namespace: {{ $root.Release.Namespace }}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $part }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{ include "penstock.labels" $root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $part }}}
subjects: [{kind: ServiceAccount, name: {{ $part }}, namespace: {{ $root.Release.Namespace }}}]
{{- end }}
