"""Calls of Kubernetes over real connections: what is asked, and what becomes of every kind of answer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from urllib3 import Timeout

from penstock.core.serialization import yamltext
from penstock.kube import transport
from penstock.kube.resources import CONFIG_MAPS, JOBS, NODES, PODS, Resource
from penstock.kube.transport import Change, KubeError
from penstock.operator.kube import HttpKube
from tests.support.loopback_kube import Answer, Loopback, ReceivedRequest, loopback

OBJECT = {"metadata": {"name": "a", "namespace": "team", "resourceVersion": "5"}}
STATUS = {"kind": "Status", "reason": "Conflict", "message": "changed", "code": 409}


def event(kind: str, version: str, **metadata: str) -> bytes:
    return json.dumps({"type": kind, "object": {"metadata": {"resourceVersion": version, **metadata}}}).encode() + b"\n"


def kube(server: Loopback) -> HttpKube:
    return HttpKube(server.client())


def request_of(call: Callable[[HttpKube], Any], answer: Answer | None = None) -> ReceivedRequest:
    """What a call asks for."""
    with loopback(answer or Answer(body=OBJECT)) as server:
        call(kube(server))
        (found,) = server.asked
    return found


PATHS = [
    (JOBS, ("team", "a", "status"), "/apis/penstock.dev/v1alpha1/namespaces/team/pipelinejobs/a/status"),
    (JOBS, ("", "", ""), "/apis/penstock.dev/v1alpha1/pipelinejobs"),
    (PODS, ("team", "", ""), "/api/v1/namespaces/team/pods"),
    (NODES, ("team", "a", ""), "/api/v1/nodes/a"),
]


@pytest.mark.parametrize(("resource", "names", "path"), PATHS)
def test_paths(resource: Resource, names: tuple[str, str, str], path: str) -> None:
    assert resource.path(*names) == path


class TestWhatIsAsked:
    def test_a_token_goes_with_it(self) -> None:
        found = request_of(lambda kube: kube.get(PODS, "team", "a"))
        assert found.headers["authorization"] == "bearer secret"
        assert (found.method, found.path) == ("GET", "/api/v1/namespaces/team/pods/a")

    def test_a_list_is_selected_by_the_server(self) -> None:
        answer = Answer(body={"items": [OBJECT], "metadata": {"resourceVersion": "7"}})
        with loopback(answer) as server:
            listing = kube(server).list(PODS, "", "penstock.dev/job-uid=u")
            assert server.asked[0].query == {"labelSelector": "penstock.dev/job-uid=u"}
        assert (listing.version, listing.objects) == ("7", (OBJECT,))

    def test_what_is_applied_is_applied_by_the_server_under_the_operator_s_name(self) -> None:
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "team"}}
        found = request_of(lambda kube: kube.apply(manifest, "status"))
        assert (found.method, found.path) == ("PATCH", "/api/v1/namespaces/team/configmaps/a/status")
        assert found.query == {"fieldManager": "penstock-operator", "force": "true"}
        assert found.headers["content-type"] == "application/apply-patch+yaml"
        assert found.body == manifest

    @pytest.mark.parametrize(
        "text", ["GLHF! \U0001f3d6\ufe0f", "a\x00\x1f\x7f\x85\u2028\ufffe\uffffb", "\\ud83c \\\U0001f600"]
    )
    def test_what_a_status_quotes_can_be_read_as_yaml(self, text: str) -> None:
        """What is applied is read as YAML, which knows no halves of surrogates, and wants control characters escaped.
        gloo ends an error with a beach umbrella.
        """
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "status": {"message": text}}
        found = request_of(lambda kube: kube.apply(manifest, "status"))
        assert found.body == manifest
        assert re.search(rb"(?<!\\)(\\\\)*\\ud[89a-f]", found.text) is None
        assert all(character.isascii() or character > "\uffff" for character in found.text.decode())
        assert yamltext.load(found.text.decode()) == manifest

    def test_half_a_surrogate_is_replaced(self) -> None:
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "a"},
            "status": {"message": "\ud83c!"},
        }
        found = request_of(lambda kube: kube.apply(manifest, "status"))
        assert found.body["status"] == {"message": "\ufffd!"}

    def test_an_annotation_names_the_uid(self) -> None:
        found = request_of(lambda kube: kube.annotate(("team", "a", "u"), {"penstock.dev/stop": "now"}))
        assert found.headers["content-type"] == "application/merge-patch+json"
        assert found.body == {"metadata": {"uid": "u", "annotations": {"penstock.dev/stop": "now"}}}

    def test_a_deletion_names_the_uid_and_waits_for_nothing(self) -> None:
        found = request_of(lambda kube: kube.delete(CONFIG_MAPS, "team", "a", "u"))
        assert (found.method, found.body) == (
            "DELETE",
            {"propagationPolicy": "Background", "preconditions": {"uid": "u"}},
        )

    def test_what_is_made(self) -> None:
        manifest = {"apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "a.", "namespace": "team"}}
        found = request_of(lambda kube: kube.create(manifest))
        assert (found.method, found.path, found.body) == ("POST", "/api/v1/namespaces/team/events", manifest)


class TestRefusals:
    def refusal(self, answer: Answer) -> KubeError:
        with loopback(answer) as server, pytest.raises(KubeError) as raised:
            kube(server).get(PODS, "team", "a")
        return raised.value

    def test_a_status_says_why(self) -> None:
        error = self.refusal(Answer(status=409, body=STATUS))
        assert (error.status, error.reason, str(error)) == (409, "Conflict", "Conflict: changed")
        assert (error.is_conflict, error.is_taken, error.is_refusal) == (True, False, False)

    def test_a_name_that_is_taken(self) -> None:
        error = self.refusal(Answer(status=409, body={"reason": "AlreadyExists"}))
        assert (error.is_conflict, error.is_taken, error.is_refusal) == (False, True, True)

    def test_the_fields_at_fault(self) -> None:
        details = {"causes": [{"field": "spec.a", "message": "too long"}]}
        error = self.refusal(Answer(status=422, body={"reason": "Invalid", "details": details}))
        assert error.causes == (("spec.a", "too long"),)

    @pytest.mark.parametrize("body", [b"404 page not found\n", b"[1]", b"", b"\xff\xfe"])
    def test_one_that_is_no_status(self, body: bytes) -> None:
        error = self.refusal(Answer(status=404, body=body))
        assert error.is_missing
        assert "\n" not in str(error)

    @pytest.mark.parametrize("answer", [Answer(body=b"<html>"), Answer(body=b'{"a": ', cut=True)])
    def test_an_answer_that_is_none(self, answer: Answer) -> None:
        error = self.refusal(answer)
        assert (error.status, error.is_refusal) == (0, False)

    def test_nobody_there(self) -> None:
        with loopback() as server:
            pass
        with pytest.raises(KubeError) as raised:
            kube(server).get(PODS, "team", "a")
        assert raised.value.status == 0

    @pytest.mark.parametrize(("status", "body"), [(404, {"reason": "NotFound"}), (409, STATUS)])
    def test_what_is_gone_already_or_another_by_now_need_not_be_deleted(self, status: int, body: Any) -> None:
        request_of(lambda kube: kube.delete(PODS, "team", "a", "u"), Answer(status=status, body=body))

    def test_other_refusals_of_a_deletion_are_told(self) -> None:
        with loopback(Answer(status=403, body={"reason": "Forbidden"})) as server, pytest.raises(KubeError):
            kube(server).delete(PODS, "team", "a", "u")

    def test_the_connection_serves_again(self) -> None:
        with loopback(Answer(status=404, body={}), Answer(body=OBJECT)) as server:
            line = kube(server)
            with pytest.raises(KubeError):
                line.get(PODS, "team", "a")
            assert line.get(PODS, "team", "a") == OBJECT


class TestWatches:
    def changes(self, server: Loopback) -> list[Change]:
        return list(kube(server).watch(PODS, "5", "team", "penstock.dev/job-uid"))

    def test_what_is_asked(self) -> None:
        with loopback(Answer(pieces=(event("BOOKMARK", "6"),))) as server:
            assert self.changes(server) == [Change(version="6")]
            assert server.asked[0].query == {
                "watch": "true",
                "resourceVersion": "5",
                "timeoutSeconds": str(transport.WATCH_SECONDS),
                "allowWatchBookmarks": "true",
                "labelSelector": "penstock.dev/job-uid",
            }

    def test_lines_come_as_they_are_cut(self) -> None:
        """Chunks need not end where lines do."""
        text = event("ADDED", "6", name="a") + event("DELETED", "7", name="a")
        pieces = tuple(text[start : start + 7] for start in range(0, len(text), 7))
        with loopback(Answer(pieces=pieces)) as server:
            told = self.changes(server)
        assert [(each.version, each.removed) for each in told] == [("6", False), ("7", True)]

    def test_each_is_told_when_it_comes(self) -> None:
        with loopback(Answer(pieces=(event("ADDED", "6"), 30.0, event("ADDED", "7")))) as server:
            began = time.monotonic()
            changes = kube(server).watch(PODS, "5")
            assert next(changes).version == "6"
            assert time.monotonic() - began < 10
            server.over.set()
            assert next(changes).version == "7"

    def test_a_large_object(self) -> None:
        with loopback(Answer(pieces=(event("ADDED", "6", name="x" * 1_000_000),))) as server:
            (told,) = self.changes(server)
        assert told.object is not None
        assert len(told.object["metadata"]["name"]) == 1_000_000

    def test_one_that_begins_too_late(self) -> None:
        error = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}
        answer = Answer(pieces=(json.dumps(error).encode() + b"\n",))
        with loopback(answer) as server, pytest.raises(KubeError) as raised:
            self.changes(server)
        assert raised.value.is_expired

    @pytest.mark.parametrize("piece", [b"<html>\n", event("ADDED", "6") + b"{"])
    def test_a_line_that_breaks(self, piece: bytes) -> None:
        with loopback(Answer(pieces=(piece,), cut=True)) as server, pytest.raises(KubeError) as raised:
            self.changes(server)
        assert raised.value.status == 0

    def test_silence_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transport, "WATCHED", Timeout(connect=1.0, read=0.2))
        with loopback(Answer(pieces=(event("ADDED", "6"), 30.0))) as server, pytest.raises(KubeError) as raised:
            self.changes(server)
        assert raised.value.status == 0

    def test_a_refusal(self) -> None:
        with loopback(Answer(status=403, body={"reason": "Forbidden"})) as server, pytest.raises(KubeError) as raised:
            self.changes(server)
        assert raised.value.is_refusal
