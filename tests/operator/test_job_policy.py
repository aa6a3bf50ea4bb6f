"""A job that the policy for jobs refuses is held with all reasons, and goes on once it is allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import UserError
from penstock.core.job_policy import SECRETS_LABEL, Allowance, JobPolicy
from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.pod import MEASURES_LABEL
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.resources import CLUSTER_PROFILES, JOBSETS, NAMESPACES
from penstock.kube.transport import KubeError
from penstock.operator.settings import settings_from
from tests.support.fake_apiserver import FakeApiserver, kubeconfig_of, served
from tests.support.fake_planner import FakePlanner
from tests.support.manifests import CLUSTER_PROFILE, loaded
from tests.support.one_job import condition, end_all, example, running
from tests.support.operating import SETTINGS, Operating

SECRET = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]


def held(operating: Operating, manifest: dict[str, Any]) -> str:
    """The uid of the job once it was looked at and refused."""
    uid = operating.kube.submit(manifest)
    with pytest.raises(KubeError, match=r"allowed|own"):
        operating.turn()
    assert operating.names() == []
    assert condition(operating, uid, ConditionType.ADMITTED) == (ConditionStatus.FALSE, "NotAllowed")
    return uid


def test_it_is_held_with_every_reason() -> None:
    operating = Operating(FakePlanner())
    changes = {"image": "evil:1", "env": SECRET, "tolerations": [{"operator": "Exists"}]}
    uid = held(operating, example(kubernetes=changes))
    status = operating.status(uid)
    assert status.phase is Phase.QUEUED
    for word in ("'evil:1'", "Secret 's'", "tolerations[0]", "jobPolicy.images", SECRETS_LABEL):
        assert word in status.message


def test_it_goes_on_once_its_namespace_is_labelled() -> None:
    operating = Operating(FakePlanner())
    uid = held(operating, example(kubernetes={"env": SECRET}))
    labels = {SECRETS_LABEL: "true"}
    operating.kube.add(NAMESPACES, {"metadata": {"name": "default", "namespace": "", "labels": labels}})
    operating.turn()
    assert (operating.names(), operating.status(uid).message) == (["stdlib-llama-a1"], "")


def test_an_attempt_that_runs_is_not_ended_and_the_next_is_held() -> None:
    """As after an upgrade: the operator before knew no policy."""
    operating = Operating(FakePlanner(), JobPolicy(everywhere=Allowance(images=("own:1",), claims=("*",))))
    uid = running(operating, kubernetes={"image": "own:1"})
    operating.forbid()
    operating.turn()
    assert operating.phase(uid) is Phase.RUNNING
    end_all(operating, AttemptState.STOPPED)
    with pytest.raises(KubeError, match="'own:1' is not an allowed image"):
        operating.turn(8)
    status = operating.status(uid)
    assert (status.phase, status.attempt) == (Phase.QUEUED, 2)
    assert "'own:1' is not an allowed image" in status.message


@pytest.mark.parametrize("namespace", ["kube-system", "penstock-system"])
def test_a_namespace_of_the_system_holds_no_jobs(namespace: str) -> None:
    manifest = example()
    manifest["metadata"]["namespace"] = namespace
    held(Operating(FakePlanner()), manifest)


def test_a_job_that_measures_may_run_where_the_operator_lives_and_nowhere_else() -> None:
    manifest = example()
    manifest["metadata"] |= {"namespace": "penstock-system", "labels": {MEASURES_LABEL: "a"}}
    operating = Operating(FakePlanner())
    operating.kube.submit(manifest)
    operating.turn()
    assert operating.names() == ["stdlib-llama-a1"]
    manifest["metadata"]["namespace"] = "kube-system"
    held(Operating(FakePlanner()), manifest)


def test_the_operator_s_image_is_always_allowed() -> None:
    operating = Operating(FakePlanner())
    operating.kube.submit(example(kubernetes={"image": SETTINGS.image}))
    operating.turn()
    assert len(operating.kube.all(JOBSETS)) == 1


class TestFile:
    def test_it_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "policy.json"
        file.write_text('{"ownNamespace": "own", "everywhere": {"images": ["a:1"]}}')
        policy = settings_from({"PENSTOCK_POLICY_FILE": str(file)}).policy
        assert policy == JobPolicy(own_namespace="own", everywhere=Allowance(images=("a:1",)))

    @pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"images": []}', '{"namespaces": "a"}', '"\ud800"'])
    def test_one_that_cannot_be_used_is_named(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "policy.json"
        file.write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(UserError) as raised:
            settings_from({"PENSTOCK_POLICY_FILE": str(file)})
        assert raised.value.where == str(file)
        assert raised.value.remedy

    def test_one_that_is_not_there_is_named(self) -> None:
        with pytest.raises(UserError, match="/nowhere"):
            settings_from({"PENSTOCK_POLICY_FILE": "/nowhere"})


class TestCheck:
    def checked(self, folder: Path, fake: FakeApiserver, **environment: str) -> subprocess.CompletedProcess[str]:
        with served(fake) as client:
            told = {"KUBECONFIG": str(kubeconfig_of(client, folder)), **environment}
            command = [sys.executable, "-m", "penstock.operator", "check-policy"]
            return subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=False)

    def test_jobs_that_would_be_held_are_listed(self, tmp_path: Path) -> None:
        fake = FakeApiserver()
        changed = example(kubernetes={"image": "own:1", "env": SECRET})
        fake.add_job(changed, phase="Running", attempt=1)
        for name, phase in (("fine", "Running"), ("over", "Succeeded")):
            kubernetes = {"image": "own:1"} if phase == "Succeeded" else {}
            fake.add_job({**example(kubernetes=kubernetes), "metadata": {"name": name}}, phase=phase, attempt=1)
        done = self.checked(tmp_path, fake)
        assert done.returncode == 1, done.stderr
        first, *_, last = done.stdout.splitlines()
        said = "default/stdlib-llama (Running): spec.kubernetes.image: 'own:1' is not an allowed image"
        assert first.startswith(said)
        assert "env[0].valueFrom.secretKeyRef" in done.stdout
        assert last.startswith("1 refused")
        assert "fine" not in done.stdout
        assert "over" not in done.stdout

    def test_none(self, tmp_path: Path) -> None:
        fake = FakeApiserver()
        fake.add_job(example(kubernetes={"image": "own:1"}))
        done = self.checked(tmp_path, fake, PENSTOCK_TRAINER_IMAGE="own:1")
        assert (done.returncode, done.stdout) == (0, "the policy refuses no unfinished job\n")

    def test_a_mistake_is_two_lines(self, tmp_path: Path) -> None:
        done = self.checked(tmp_path, FakeApiserver(), PENSTOCK_POLICY_FILE="/nowhere")
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 2

    def test_profiles_whose_image_is_refused_are_listed(self, tmp_path: Path) -> None:
        fake = FakeApiserver()
        profile = loaded(CLUSTER_PROFILE)
        profile["spec"]["image"] = "own:1"
        fake.add(CLUSTER_PROFILES.plural, profile)
        done = self.checked(tmp_path, fake)
        name = profile["metadata"]["name"]
        assert done.returncode == 1, done.stderr
        assert done.stdout.startswith(f"ClusterProfile {name}: spec.kubernetes.image: 'own:1' is not an allowed image")
