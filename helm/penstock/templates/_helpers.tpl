{{- define "penstock.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Name of a cluster-scoped object: two releases may share a cluster. (list . "operator") */}}
{{- define "penstock.cluster" -}}
{{ printf "%s-%s-%s" (index . 0).Release.Namespace (include "penstock.name" (index . 0)) (index . 1) }}
{{- end }}

{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end }}

{{/* The policy for jobs in the form of penstock.core.job_policy: the trainer's image, and the values' policy. */}}
{{- define "penstock.jobPolicy" -}}
{{- $lists := omit .Values.jobPolicy "namespaces" "inNamespaces" -}}
{{- $everywhere := merge (dict "images" (prepend .Values.jobPolicy.images .Values.trainer.image)) $lists -}}
{{- $named := pick .Values.jobPolicy "namespaces" "inNamespaces" -}}
{{- merge (dict "ownNamespace" .Release.Namespace "everywhere" $everywhere) $named | toJson -}}
{{- end }}

{{/* Labels of one component: (list . "operator") */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "penstock.service.host" -}}
{{ printf "%s-service.%s.svc" (include "penstock.name" .) .Release.Namespace }}
{{- end }}

{{- define "penstock.service.scheme" -}}
{{ ternary "https" "http" (ne .Values.service.tlsSecret "") }}
{{- end }}

{{/* Restricted Pod Security, and a read-only root file system. */}}
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
{{- with .imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
tolerations:
  # After the loss of a node; by default Kubernetes would keep the pod bound to it for five minutes.
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
  {{- with .tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
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

{{/* Bindings of one component's roles: (list . "operator") */}}
{{- define "penstock.bound" }}
{{- $root := index . 0 }}
{{- $account := printf "%s-%s" (include "penstock.name" $root) (index . 1) }}
{{- $wide := include "penstock.cluster" . }}
{{- $kind := ternary "ClusterRole" "Role" (eq $root.Values.namespace "") }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: {{ $wide }}-jobs
  {{- with $root.Values.namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{ include "penstock.labels" $root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ $kind }}, name: {{ $wide }}-jobs}
subjects: [{kind: ServiceAccount, name: {{ $account }}, namespace: {{ $root.Release.Namespace }}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $wide }}-cluster
  labels: {{ include "penstock.labels" $root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ $wide }}-cluster}
subjects: [{kind: ServiceAccount, name: {{ $account }}, namespace: {{ $root.Release.Namespace }}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $account }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{ include "penstock.labels" $root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $account }}}
subjects: [{kind: ServiceAccount, name: {{ $account }}, namespace: {{ $root.Release.Namespace }}}]
{{- end }}

{{/* Service account of one program as a user name in admission: (list . "operator") */}}
{{- define "penstock.account" -}}
{{ printf "system:serviceaccount:%s:%s-%s" (index . 0).Release.Namespace (include "penstock.name" (index . 0)) (index . 1) }}
{{- end }}

{{/* Namespace in which ClusterProfiles are measured, as in the operator. */}}
{{- define "penstock.measuringNamespace" -}}
{{ .Values.namespace | default .Release.Namespace }}
{{- end }}

{{/* CEL: namespaces that the values name. Jobs may run there even if they are system namespaces or penstock's own. */}}
{{- define "penstock.namedNamespaces" -}}
{{ append .Values.jobPolicy.namespaces .Values.namespace | toJson | replace "\"" "'" }}
{{- end }}

{{/* CEL: the request's namespace is not kube-..., or the values name it. */}}
{{- define "penstock.isForJobs" -}}
(!request.namespace.startsWith('kube-') || request.namespace in {{ include "penstock.namedNamespaces" . }})
{{- end }}

{{/* The binding of an admission policy, which denies: (list . "operator-pods") */}}
{{- define "penstock.denied" }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ include "penstock.cluster" . }}
  labels: {{ include "penstock.labels" (index . 0) | nindent 4 }}
spec:
  policyName: {{ include "penstock.cluster" . }}
  validationActions: [Deny]
{{- end }}

{{/* The head of an admission policy on the writes of one program: (list . "operator-pods" "operator") */}}
{{- define "penstock.policyHead" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ include "penstock.cluster" . }}
  labels: {{ include "penstock.labels" (index . 0) | nindent 4 }}
spec:
  failurePolicy: Fail
  matchConditions:
    - {name: by-the-{{ index . 2 }}, expression: "request.userInfo.username == '{{ include "penstock.account" (list (index . 0) (index . 2)) }}'"}
{{- end }}
