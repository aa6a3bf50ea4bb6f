"""The chart, rendered: rights that are listed, pods within the restricted standard, definitions that stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from penstock import core
from penstock.core.job_policy import Allowance, JobPolicy
from penstock.core.pod import AGENT_PORT
from penstock.core.serialization import yamltext
from tests.support.charting import CHART, NAMESPACE, refusal, render, run
from tests.support.repository import ROOT

pytestmark = pytest.mark.timeout(900)  # helm may have to be built

TRAINER_IMAGE = f"ghcr.io/penstock/trainer:{core.__version__}"
KEEP = {"helm.sh/resource-policy": "keep"}

VARIANTS: dict[str, tuple[str, ...]] = {
    "as it comes": (),
    "one namespace": ("namespace=team",),
    "no service": ("service.enabled=false",),
    "encrypted": ("service.tlsSecret=certificate",),
    "with a database": ("service.databaseSecret=postgres", "service.storage.claim=own"),
    "watched": (
        "monitoring.serviceMonitor=true",
        "monitoring.dashboards=true",
        "monitoring.alerts=true",
        "monitoring.serviceTokenSecret=viewer",
        "monitoring.labels.release=prometheus",
        "service.tlsSecret=certificate",
    ),
    "open": ("networkPolicies.enabled=false", "admissionPolicies.enabled=false", "crds.install=false"),
    "closed": (
        'networkPolicies.callers=[{"namespaceSelector":{"matchLabels":{"a":"b"}}}]',
        'networkPolicies.jobNamespaces=["team","other"]',
        'networkPolicies.trainerEgress=[{"ports":[{"port":2049}]}]',
        'networkPolicies.apiServer={"cidr":"10.0.0.1/32","port":443}',
    ),
    "placed": (
        'operator.imagePullSecrets=[{"name":"registry"}]',
        'operator.env=[{"name":"A","value":"b"}]',
        'operator.nodeSelector={"a":"b"}',
        'operator.tolerations=[{"operator":"Exists"}]',
        "service.priorityClassName=high",
    ),
}
everywhere = pytest.mark.parametrize("variant", VARIANTS)


def of_kind(found: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] in kinds]


def rules(found: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for role in of_kind(found, "Role", "ClusterRole"):
        for rule in role["rules"]:
            yield f"{role['kind']} {role['metadata']['name']}", rule


@everywhere
def test_a_lost_node_is_left_after_half_a_minute(variant: str) -> None:
    """Kubernetes would leave pods there for five."""
    programs = of_kind(render(*VARIANTS[variant]), "Deployment", "StatefulSet")
    assert programs
    for program in programs:
        tolerations = program["spec"]["template"]["spec"]["tolerations"]
        seconds = sorted(
            (each["key"], each["tolerationSeconds"]) for each in tolerations if "tolerationSeconds" in each
        )
        assert seconds == [("node.kubernetes.io/not-ready", 30), ("node.kubernetes.io/unreachable", 30)]


class TestRights:
    @everywhere
    def test_no_secrets_no_wildcards_and_nothing_that_gives_more(self, variant: str) -> None:
        for role, rule in rules(render(*VARIANTS[variant])):
            words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not any("*" in word for word in words), role
            assert not words & {"secrets", "escalate", "bind", "impersonate", "pods/exec", "serviceaccounts/token"}, (
                role
            )

    @pytest.mark.parametrize(("values", "where"), [((), NAMESPACE), (VARIANTS["one namespace"], "team")])
    def test_jobs_that_measure_are_made_in_one_namespace(self, values: tuple[str, ...], where: str) -> None:
        makers = {
            (role["kind"], role["metadata"].get("namespace"))
            for role in render(*values)
            if role["kind"] in ("Role", "ClusterRole") and "-operator" in role["metadata"]["name"]
            for rule in role["rules"]
            if "pipelinejobs" in rule["resources"] and "create" in rule["verbs"]
        }
        assert makers == {("Role", where)}

    def test_in_one_namespace_jobs_elsewhere_are_out_of_reach(self) -> None:
        found = render(*VARIANTS["one namespace"])
        wide = {
            resource
            for role in of_kind(found, "ClusterRole")
            for rule in role["rules"]
            for resource in rule["resources"]
            if not role["metadata"]["name"].endswith(("-edit", "-view"))
        }
        reviews = {"tokenreviews", "subjectaccessreviews"}
        profiles = {"clusterprofiles", "clusterprofiles/status"}
        assert wide == {"nodes", "namespaces"} | reviews | profiles
        narrow = {each["metadata"]["namespace"] for each in of_kind(found, "Role", "RoleBinding")}
        assert narrow == {"team", NAMESPACE}

    @everywhere
    def test_every_binding_is_of_a_role_and_an_account_that_are_there(self, variant: str) -> None:
        found = render(*VARIANTS[variant])
        roles = {(each["kind"], each["metadata"]["name"]) for each in of_kind(found, "Role", "ClusterRole")}
        accounts = {each["metadata"]["name"] for each in of_kind(found, "ServiceAccount")}
        for binding in of_kind(found, "RoleBinding", "ClusterRoleBinding"):
            assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in roles
            assert {subject["name"] for subject in binding["subjects"]} <= accounts
            assert {subject["namespace"] for subject in binding["subjects"]} == {NAMESPACE}

    def test_people_get_theirs_with_kubernetes_own_roles(self) -> None:
        found = {each["metadata"]["name"]: each for each in of_kind(render(), "ClusterRole")}
        assert (
            found[f"{NAMESPACE}-penstock-view"]["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"]
            == "true"
        )
        assert found[f"{NAMESPACE}-penstock-view"]["rules"][0]["verbs"] == ["get", "list", "watch"]


@everywhere
class TestPods:
    def specs(self, variant: str) -> list[dict[str, Any]]:
        return [each["spec"]["template"]["spec"] for each in of_kind(render(*VARIANTS[variant]), "Deployment")]

    def test_restricted_and_more(self, variant: str) -> None:
        for spec in self.specs(variant):
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
            for container in spec["containers"]:
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert {"requests", "limits"} == container["resources"].keys()

    def test_every_mount_has_its_volume(self, variant: str) -> None:
        for spec in self.specs(variant):
            volumes = {volume["name"] for volume in spec["volumes"]}
            assert {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]} == volumes

    def test_every_probe_and_service_finds_its_port(self, variant: str) -> None:
        found = render(*VARIANTS[variant])
        ports = {}
        for each in of_kind(found, "Deployment"):
            (container,) = each["spec"]["template"]["spec"]["containers"]
            names = {port["name"] for port in container["ports"]}
            for probe in ("startupProbe", "livenessProbe"):
                assert container[probe]["httpGet"]["port"] in names
            ports[json.dumps(each["spec"]["selector"]["matchLabels"], sort_keys=True)] = names
        for each in of_kind(found, "Service"):
            names = ports[json.dumps(each["spec"]["selector"], sort_keys=True)]
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= names

    def test_one_at_a_time(self, variant: str) -> None:
        for each in of_kind(render(*VARIANTS[variant]), "Deployment"):
            assert (each["spec"]["replicas"], each["spec"]["strategy"]) == (1, {"type": "Recreate"})

    def test_no_two_objects_bear_one_name(self, variant: str) -> None:
        names = [
            (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
            for each in render(*VARIANTS[variant])
        ]
        assert len(names) == len(set(names))


class TestDefinitions:
    def test_they_are_the_repository_s_and_stay(self) -> None:
        found = {each["metadata"]["name"]: each for each in of_kind(render(), "CustomResourceDefinition")}
        assert set(found) == {"pipelinejobs.penstock.dev", "clusterprofiles.penstock.dev"}
        for path in (ROOT / "deploy" / "crds").glob("*s.yaml"):
            told = yamltext.load(path.read_text())
            rendered = found[told["metadata"]["name"]]
            assert rendered["metadata"].pop("annotations") == KEEP
            assert rendered == told

    def test_they_need_not_be_made(self) -> None:
        assert of_kind(render("crds.install=false"), "CustomResourceDefinition") == []

    def test_the_service_s_volume_stays_and_is_one_pod_s(self) -> None:
        (claim,) = of_kind(render(), "PersistentVolumeClaim")
        assert claim["metadata"]["annotations"] == KEEP
        assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
        (claim,) = of_kind(render("service.storage.accessMode=ReadWriteOnce"), "PersistentVolumeClaim")
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]

    def test_the_service_leaves_a_lost_node_after_half_a_minute(self) -> None:
        """The cluster's own default is five."""
        found = render("service.tolerations[0].key=example.com/slow")
        (pod,) = [each["spec"]["template"]["spec"] for each in of_kind(found, "Deployment") if named(each, "service")]
        lost = {each["key"]: each.get("tolerationSeconds") for each in pod["tolerations"]}
        assert lost == {
            "node.kubernetes.io/not-ready": 30,
            "node.kubernetes.io/unreachable": 30,
            "example.com/slow": None,
        }
        (container,) = pod["containers"]
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800, "it may wait for the folder's lock"


def named(found: dict[str, Any], part: str) -> bool:
    return str(found["metadata"]["name"]).endswith(f"-{part}")


class TestNetwork:
    def policies(self, *values: str) -> dict[tuple[str, str], dict[str, Any]]:
        return {
            (each["metadata"]["namespace"], each["metadata"]["name"]): each["spec"]
            for each in of_kind(render(*values), "NetworkPolicy")
        }

    def test_what_is_not_named_is_denied(self) -> None:
        for spec in self.policies().values():
            assert spec["policyTypes"] == ["Ingress", "Egress"]
            assert [] not in (spec["ingress"], spec["egress"])
            assert {} not in [*spec["ingress"], *spec["egress"]]

    def test_ranks_are_reached_by_ranks_and_their_agents_by_the_operator(self) -> None:
        spec = self.policies()["default", "penstock-ranks"]
        of_jobs = {"matchExpressions": [{"key": "penstock.dev/job-uid", "operator": "Exists"}]}
        assert spec["podSelector"] == of_jobs
        by_ranks, by_operator = spec["ingress"]
        assert by_ranks == {"from": [{"podSelector": of_jobs}]}
        operator = self.policies()[NAMESPACE, "penstock-operator"]
        [caller] = by_operator["from"]
        assert caller["podSelector"] == operator["podSelector"]
        assert caller["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}
        [reached] = [rule for rule in operator["egress"] if "to" in rule]
        assert reached == {"ports": by_operator["ports"], "to": [{"namespaceSelector": {}, "podSelector": of_jobs}]}
        assert by_operator["ports"] == [{"protocol": "TCP", "port": AGENT_PORT}]

    def test_ranks_reach_the_service_and_not_the_apiserver(self) -> None:
        spec = self.policies()["default", "penstock-ranks"]
        ports = {port["port"] for rule in spec["egress"] for port in rule.get("ports", ())}
        assert ports == {53, 8470}

    def test_one_in_each_namespace_of_jobs_and_where_is_measured(self) -> None:
        found = self.policies(*VARIANTS["closed"])
        assert {namespace for namespace, name in found if name == "penstock-ranks"} == {"team", "other", NAMESPACE}
        assert {"ports": [{"port": 2049}]} in found["team", "penstock-ranks"]["egress"]
        assert {namespace for namespace, name in self.policies("namespace=mine") if name == "penstock-ranks"} == {
            "mine"
        }


class TestValues:
    def test_every_value_is_known_to_the_schema(self) -> None:
        values = yamltext.load((CHART / "values.yaml").read_text())
        schema = json.loads((CHART / "values.schema.json").read_text())
        assert jsonschema_rs.is_valid(schema, values)
        assert set(values) == set(schema["properties"]) - {"global"}
        for name, part in values.items():
            if isinstance(part, dict):
                assert set(part) == set(schema["properties"][name]["properties"]), name

    def test_every_group_of_values_says_what_it_is_for(self) -> None:
        lines = (CHART / "values.yaml").read_text().splitlines()
        silent = [
            line
            for before, line in zip(["", *lines], lines, strict=False)
            if line.startswith("  ")
            and line.strip()[:1] != "#"
            and line.startswith("  ")
            and not line.startswith("   ")
            if not before.strip().startswith("#") and line.split(":")[0].strip() not in WELL_KNOWN
        ]
        assert silent == []

    @pytest.mark.parametrize(
        "value",
        [
            "operator.planners=0",
            "operator.planers=2",
            "service.port=70000",
            "service.imagePullPolicy=Sometimes",
            "service.storage.size=much",
            "operator.log=xml",
            "namespace=Team",
            "monitoring.runbookBase=git.example.org",
        ],
    )
    def test_what_cannot_be_used_is_refused(self, value: str) -> None:
        place = value.partition("=")[0].split(".")
        assert place[0] in refusal(value)

    def test_the_linter_finds_nothing(self) -> None:
        done = run("lint", "--strict")
        assert done.returncode == 0, done.stdout


WELL_KNOWN = {
    "imagePullPolicy", "imagePullSecrets", "install", "resources", "nodeSelector", "tolerations", "affinity",
    "priorityClassName", "port", "labels", "storage",
}  # fmt: skip


class TestJobPolicy:
    """One file for service and operator, whose values mean what core reads."""

    def read(self, *values: str) -> JobPolicy:
        (config_map,) = (each for each in of_kind(render(*values), "ConfigMap"))
        return JobPolicy.from_manifest(json.loads(config_map["data"]["policy.json"]))

    def test_as_it_comes_the_trainer_s_image_is_allowed_and_no_secret(self) -> None:
        (image,) = self.read().everywhere.images
        assert image == TRAINER_IMAGE
        lists = JobPolicy().everywhere + Allowance(images=(image,))
        assert self.read() == JobPolicy(own_namespace=NAMESPACE, everywhere=lists)

    def test_values_extend_it(self) -> None:
        found = self.read(
            'jobPolicy.images=["reg.example/team/*"]',
            'jobPolicy.namespaces=["team-*"]',
            'jobPolicy.inNamespaces={"a":{"secrets":["wandb"]}}',
        )
        assert found.everywhere.images == (TRAINER_IMAGE, "reg.example/team/*")
        assert (found.namespaces, found.in_namespaces) == (("team-*",), {"a": Allowance(secrets=("wandb",))})
        assert found.everywhere.claims == ("*",)

    @pytest.mark.parametrize(
        "value",
        [
            'jobPolicy.images=["reg.example/team*"]',
            'jobPolicy.images=["*/a"]',
            'jobPolicy.claims=["a*b"]',
            'jobPolicy.inNamespaces={"a":{"image":["b"]}}',
            'jobPolicy.secret=["a"]',
        ],
    )
    def test_a_value_that_core_would_refuse_is_refused(self, value: str) -> None:
        assert "jobPolicy" in refusal(value)

    @everywhere
    def test_both_read_it_and_restart_when_it_changes(self, variant: str) -> None:
        for each in of_kind(render(*VARIANTS[variant]), "Deployment"):
            spec = each["spec"]["template"]["spec"]
            (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "policy")
            assert volume["configMap"]["name"] == "penstock-job-policy"
            (container,) = spec["containers"]
            words = [*container.get("args", ()), *(f"={each.get('value')}" for each in container["env"])]
            assert any(word.endswith("=/etc/penstock/policy/policy.json") for word in words)

        def digests(*values: str) -> set[str]:
            found = of_kind(render(*VARIANTS[variant], *values), "Deployment")
            return {each["spec"]["template"]["metadata"]["annotations"]["penstock.dev/job-policy"] for each in found}

        assert len(digests() | digests('jobPolicy.images=["own:1"]')) == 2


OPERATIONS = {"create": "CREATE", "update": "UPDATE", "patch": "UPDATE", "delete": "DELETE"}
NOT_LOOKED_AT = {
    "operator": {"UPDATE pipelinejobs/status", "UPDATE clusterprofiles/status"},
    "service": {"DELETE pipelinejobs", "CREATE tokenreviews", "CREATE subjectaccessreviews"},
}
"""Writes that nothing but the role restricts: each program may do them to any object there is."""


class TestAdmission:
    """What the policies say is tried on an apiserver in `tests/e2e/test_admission.py`."""

    def policies(self, *values: str) -> dict[str, dict[str, Any]]:
        return {
            each["metadata"]["name"].removeprefix(f"{NAMESPACE}-penstock-"): each["spec"]
            for each in of_kind(render(*values), "ValidatingAdmissionPolicy")
        }

    @pytest.mark.parametrize("program", ["operator", "service"])
    def test_every_write_that_rights_allow_is_looked_at(self, program: str) -> None:
        """By a policy for that operation on that resource. What is left is in the threat model."""
        granted = {
            (resource, OPERATIONS[verb])
            for role, rule in rules(render())
            if f"-{program}" in role
            for resource in rule["resources"]
            for verb in rule["verbs"]
            if verb not in ("get", "list", "watch")
        }
        looked_at = {
            (resource, operation)
            for name, spec in self.policies().items()
            if name.startswith(program)
            for rule in spec["matchConstraints"]["resourceRules"]
            for resource in rule["resources"]
            for operation in rule["operations"]
        }
        assert {f"{operation} {resource}" for resource, operation in granted - looked_at} == NOT_LOOKED_AT[program]

    def test_they_fail_closed_and_are_bound(self) -> None:
        for spec in self.policies().values():
            assert spec["failurePolicy"] == "Fail"
        bound = {each["spec"]["policyName"] for each in of_kind(render(), "ValidatingAdmissionPolicyBinding")}
        assert bound == {each["metadata"]["name"] for each in of_kind(render(), "ValidatingAdmissionPolicy")}

    def test_they_speak_of_the_release_s_accounts(self) -> None:
        for name, spec in self.policies().items():
            if name == "pipelinejobs.penstock.dev":
                continue
            (condition,) = spec["matchConditions"]
            program = name.partition("-")[0]
            assert f"system:serviceaccount:{NAMESPACE}:penstock-{program}'" in condition["expression"]

    def test_none_without_the_service(self) -> None:
        assert not [name for name in self.policies("service.enabled=false") if name.startswith("service")]


def test_no_password_is_in_a_command_line() -> None:
    """Everybody on a node may read what a process was started with."""
    found = render(*VARIANTS["with a database"])
    (service,) = (each for each in of_kind(found, "Deployment") if each["metadata"]["name"].endswith("-service"))
    (container,) = service["spec"]["template"]["spec"]["containers"]
    assert not [word for word in container["args"] if "database" in word.lower()]
    (variable,) = (each for each in container["env"] if each["name"] == "PENSTOCK_DATABASE")
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "postgres", "key": "url"}}


class TestAddresses:
    def environment(self, *values: str) -> dict[str, str]:
        (operator, *_) = of_kind(render(*values), "Deployment")
        (container,) = operator["spec"]["template"]["spec"]["containers"]
        return {each["name"]: each.get("value", "") for each in container["env"]}

    def test_ranks_are_told_where_the_service_is(self) -> None:
        host = f"penstock-service.{NAMESPACE}.svc"
        assert self.environment()["PENSTOCK_SERVICE_URL"] == f"http://{host}:8470"
        assert self.environment("service.tlsSecret=x")["PENSTOCK_SERVICE_URL"] == f"https://{host}:8470"
        assert "PENSTOCK_SERVICE_URL" not in self.environment("service.enabled=false")

    def test_images(self) -> None:
        assert self.environment()["PENSTOCK_TRAINER_IMAGE"] == TRAINER_IMAGE
        assert self.environment("trainer.image=own:1")["PENSTOCK_TRAINER_IMAGE"] == "own:1"


def test_dashboards_and_monitors_are_there_when_wanted() -> None:
    found = render(*VARIANTS["watched"])
    assert [each["metadata"]["name"] for each in of_kind(found, "ServiceMonitor")] == [
        "penstock-operator",
        "penstock-service",
    ]
    dashboards = [each for each in of_kind(found, "ConfigMap") if each["metadata"]["labels"].get("grafana_dashboard")]
    for each in dashboards:
        ((name, text),) = each["data"].items()
        assert json.loads(text) == json.loads((ROOT / "deploy" / "dashboards" / name).read_text())
    assert len(dashboards) == 3
    assert of_kind(render(), "ServiceMonitor") == []
    assert [each["metadata"]["name"] for each in of_kind(render(), "ConfigMap")] == ["penstock-job-policy"]


@pytest.mark.parametrize("base", ["", "https://git.example.org/penstock/blob/main/"])
def test_alerts_are_those_of_the_repository_and_link_to_its_pages(base: str) -> None:
    found = render(*VARIANTS["watched"], f"monitoring.runbookBase={base}")
    [rule] = of_kind(found, "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    committed = yamltext.load((ROOT / "deploy" / "dashboards" / "alerts.yaml").read_text())
    for group in committed["groups"]:
        for each in group["rules"]:
            page, _, section = each["annotations"]["runbook_url"].partition("#")
            assert f"### {each['alert']}\n" in (ROOT / page).read_text()
            assert section == each["alert"].lower()
            each["annotations"]["runbook_url"] = f"{base}{page}#{section}"
    assert rule["spec"] == committed
    assert of_kind(render(), "PrometheusRule") == []


def test_the_operator_is_scraped_by_the_name_that_alerts_ask_for() -> None:
    found = render(*VARIANTS["watched"])
    [monitor] = [each for each in of_kind(found, "ServiceMonitor") if each["metadata"]["name"] == "penstock-operator"]
    [endpoint] = monitor["spec"]["endpoints"]
    [relabeling] = endpoint["relabelings"]
    assert relabeling["targetLabel"] == "job"
    alerts = (ROOT / "deploy" / "dashboards" / "alerts.yaml").read_text()
    assert f'up{{job="{relabeling["replacement"]}"}}' in alerts


def test_the_service_is_scraped_by_the_name_that_alerts_ask_for() -> None:
    found = render(*VARIANTS["watched"])
    [monitor] = [each for each in of_kind(found, "ServiceMonitor") if each["metadata"]["name"] == "penstock-service"]
    [service] = [each for each in of_kind(found, "Service") if each["metadata"]["name"] == "penstock-service"]
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert f'up{{job="{job}"}}' in (ROOT / "deploy" / "dashboards" / "alerts.yaml").read_text()


def test_the_versions_are_the_members_() -> None:
    chart = yamltext.load((CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {core.__version__}
    values = yamltext.load((CHART / "values.yaml").read_text())
    images = {values[part]["image"] for part in ("operator", "service", "trainer")}
    assert {image.rpartition(":")[2] for image in images} == {core.__version__}
