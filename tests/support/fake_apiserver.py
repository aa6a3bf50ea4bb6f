"""An apiserver of one process, over real HTTP: objects, watches, applies by owner, reviews. It has no controllers.

It keeps what the service's step_predictions rest on: names are given once, versions rise, uids and versions are checked
before a write, a status is written by its subresource alone, anyone who applies owns what it applied, and what is owned
goes with its owner. Tests play everybody else by its methods, and may look at every write.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes.client import ApiClient, Configuration

from penstock.core.instants import format_instant
from penstock.kube.names import API_VERSION, JOB_KIND
from penstock.kube.resources import JOBS

Found = dict[str, Any]
Key = tuple[str, str, str]
NOW = 1_700_000_000.0
VERBS = ["create", "delete", "get", "list", "patch", "watch"]
CLUSTER = "11111111-2222-3333-4444-555555555555"


class RefusedError(Exception):
    """A call that is answered by a Status document."""

    def __init__(self, status: int, reason: str, message: str, causes: list[Found] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.document = {"kind": "Status", "status": "Failure", "code": status, "reason": reason, "message": message}
        if causes:
            self.document["details"] = {"causes": causes}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request: ``place`` is plural, namespace, name and subresource."""

    method: str
    place: tuple[str, str, str, str]
    query: Mapping[str, str]
    body: Any
    content_type: str

    @property
    def word(self) -> str:
        """What tests call it by."""
        return " ".join(part for part in (self.method, *self.place) if part)


class FakeApiserver:
    """See the module. ``hook`` is called before every call that is no watch, and may raise `RefusedError`.

    ``watch_hook`` is called with the plural when a watch begins. It may raise `RefusedError`, and an object that it
    returns is sent as an error event that ends the watch. PipelineJobs are known only while ``is_defined``.
    """

    def __init__(self) -> None:
        self.objects: dict[Key, Found] = {}
        self.calls: list[Call] = []
        self.hook: Callable[[Call], None] = lambda call: None
        self.is_defined = True
        self.watch_hook: Callable[[str], Found | None] = lambda plural: None
        self.tokens: dict[str, Found] = {}
        self.rights: set[tuple[str, str, str]] = set()
        self.news = threading.Condition()
        self.ended = False
        self._history: list[tuple[int, str, Found]] = []
        self._numbers = itertools.count(1)
        self._oldest = 0
        self._applied: dict[tuple[Key, str], Found] = {}
        self._plurals: dict[str, str] = {}
        self.add("namespaces", {"metadata": {"name": "kube-system", "uid": CLUSTER}})

    # What tests do and see

    def add(self, plural: str, found: Found) -> Found:
        """An object comes to be, by whomever."""
        with self.news:
            metadata = found["metadata"]
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", format_instant(NOW))
            metadata.setdefault("generation", 1)
            self.objects[(plural, metadata.get("namespace", ""), metadata["name"])] = found
            self._plurals[metadata["uid"]] = plural
            return self._changed("ADDED", plural, found)

    def add_job(self, manifest: Mapping[str, Any], **status: Any) -> Found:
        """Somebody applies a PipelineJob with kubectl, and the operator has written this of its status."""
        job = copy.deepcopy(dict(manifest))
        job["metadata"].setdefault("namespace", "default")
        return self.add(JOBS.plural, {**job, **({"status": status} if status else {})})

    def touch(self, found: Found, **status: Any) -> Found:
        """The object was changed; the operator wrote this of its status."""
        with self.news:
            if status:
                found["status"] = {**found.get("status", {}), **status}
            return self._changed("MODIFIED", self._plural(found), found)

    def remove(self, found: Found) -> None:
        """The object is gone, and with it what it owned."""
        with self.news:
            uid = found["metadata"]["uid"]
            self._changed("DELETED", self._plural(found), found)
            self.objects = {key: each for key, each in self.objects.items() if each["metadata"]["uid"] != uid}
            for each in list(self.objects.values()):
                if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", ())):
                    self.remove(each)

    def forget_history(self) -> None:
        """Watches from before are told that they expired."""
        with self.news:
            self._oldest = next(self._numbers)
            self._history.clear()
            self.news.notify_all()

    def job(self, name: str, namespace: str = "default") -> Found:
        """A PipelineJob as it is."""
        return self.objects[(JOBS.plural, namespace, name)]

    def of(self, plural: str) -> list[Found]:
        """All objects of a kind."""
        return [each for (kind, _, _), each in list(self.objects.items()) if kind == plural]

    def words(self, method: str) -> list[str]:
        """Every call by that method, in order."""
        return [call.word for call in self.calls if call.method == method]

    def add_rank(self, job: Found, attempt: int, token: str, **claims: Any) -> Found:
        """A pod of an attempt with all that it belongs to, and a token that is bound to it; the pod."""
        metadata = job["metadata"]
        name, namespace = f"{metadata['name']}-a{attempt}", metadata["namespace"]
        owner = _owner(API_VERSION, JOB_KIND, metadata)
        made = {"namespace": namespace, "labels": {"penstock.dev/attempt": str(attempt)}}
        jobset = self.add("jobsets", {"metadata": {**made, "name": name, "ownerReferences": [owner]}})
        owner = _owner("jobset.x-k8s.io/v1alpha2", "JobSet", jobset["metadata"])
        batch = self.add("jobs", {"metadata": {**made, "name": f"{name}-ranks-0", "ownerReferences": [owner]}})
        owner = _owner("batch/v1", "Job", batch["metadata"])
        pod = self.add("pods", {"metadata": {**made, "name": f"{name}-ranks-0-0", "ownerReferences": [owner]}})
        extra = {
            "authentication.kubernetes.io/pod-name": [pod["metadata"]["name"]],
            "authentication.kubernetes.io/pod-uid": [pod["metadata"]["uid"]],
        }
        user = {"username": f"system:serviceaccount:{namespace}:default", "extra": extra}
        self.tokens[token] = {"audiences": ["penstock-ingest"], "user": user, **claims}
        return pod

    def undefine(self) -> None:
        """PipelineJobs are no longer a kind of the cluster: all are gone, and watches of them end."""
        with self.news:
            for key in [key for key in self.objects if key[0] == JOBS.plural]:
                self.remove(self.objects[key])
            self.is_defined = False
            self.news.notify_all()

    # Calls

    def discovery(self, call: Call, path: str) -> Found:
        """What the cluster serves below this path, as kopf asks for it at its start."""
        self.hook(call)
        group, version = API_VERSION.split("/")
        names = {"/api": {"versions": ["v1"]}, "/api/v1": _served(v1="Namespace")}
        crds = "apiextensions.k8s.io"
        groups = [_group(crds, "v1"), *([_group(group, version)] if self.is_defined else [])]
        names |= {"/apis": {"groups": groups}, f"/apis/{crds}/v1": _served(v1="CustomResourceDefinition")}
        if self.is_defined:
            names[f"/apis/{API_VERSION}"] = _served(v1=JOB_KIND)
        if path not in names:
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")
        return names[path]

    def begin_watch(self, call: Call) -> Found | None:
        """The object of an error event that ends the watch at once; none if the watch goes on."""
        if call.place[0] == JOBS.plural and not self.is_defined:
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")
        duration = call.query.get("timeoutSeconds", "0")
        if not duration.isdecimal():  # as the apiserver, which reads an int64
            raise RefusedError(400, "BadRequest", f'strconv.ParseInt: parsing "{duration}": invalid syntax')
        return self.watch_hook(call.place[0])

    def answer(self, call: Call) -> Any:
        """What a call that is no watch is answered."""
        with self.news:
            self.calls.append(call)
            self.hook(call)
            plural, namespace, name, subresource = call.place
            if plural == JOBS.plural and not self.is_defined:
                raise RefusedError(404, "NotFound", "the server could not find the requested resource")
            if plural == "tokenreviews":
                return {"status": self._reviewed(call.body["spec"])}
            if plural == "subjectaccessreviews":
                return {"status": {"allowed": self._allowed(call.body["spec"])}}
            if call.method == "POST":
                return self._create(call)
            if not name:
                return self._list(plural, namespace, call.query.get("labelSelector", ""))
            found: Found | None = self.objects.get((plural, namespace, name))
            if "apply" in call.content_type and not subresource:
                return self.add(plural, copy.deepcopy(call.body))
            if found is None:
                raise RefusedError(404, "NotFound", f'{plural} "{name}" not found')
            if call.method == "GET":
                return found
            self._check(found, call.body, subresource)
            if call.method == "DELETE":
                self.remove(found)
                return {"kind": "Status", "status": "Success"}
            if call.method == "PUT":
                found["spec"] = call.body["spec"]
            elif "apply" in call.content_type:
                self._apply(found, call, subresource)
            else:
                self._merge(found, call.body)
            return self._changed("MODIFIED", plural, found)

    def changes(self, plural: str, namespace: str, after: int) -> Iterator[Found]:
        """A watch: what happened after that version, as it happens, until the server ends."""
        while not self.ended:
            with self.news:
                if plural == JOBS.plural and not self.is_defined:
                    return
                if after < self._oldest:
                    yield {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}
                    return
                fresh = self._history[bisect_right(self._history, after, key=lambda each: each[0]) :]
                if not fresh:
                    self.news.wait(0.2)
                    continue
            for version, kind, found in fresh:
                after = version
                if found["plural"] == plural and namespace in ("", found["object"]["metadata"].get("namespace")):
                    yield {"type": kind, "object": found["object"]}

    def _changed(self, kind: str, plural: str, found: Found) -> Found:
        version = next(self._numbers)
        found["metadata"]["resourceVersion"] = str(version)
        self._history.append((version, kind, {"plural": plural, "object": copy.deepcopy(found)}))
        self.news.notify_all()
        return found

    def _plural(self, found: Found) -> str:
        return self._plurals[found["metadata"]["uid"]]

    def _create(self, call: Call) -> Found:
        plural, namespace, _, _ = call.place
        made: Found = copy.deepcopy(call.body)
        made.pop("status", None)
        made["metadata"]["namespace"] = namespace
        prefix = made["metadata"].pop("generateName", "")
        made["metadata"].setdefault("name", f"{prefix}{next(self._numbers)}")
        if (plural, namespace, made["metadata"]["name"]) in self.objects:
            raise RefusedError(409, "AlreadyExists", f'{plural} "{made["metadata"]["name"]}" already exists')
        if call.query.get("dryRun") != "All":
            return self.add(plural, made)
        made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": format_instant(NOW), "generation": 1}
        return made

    def _list(self, plural: str, namespace: str, selector: str) -> Found:
        label, _, value = selector.partition("=")
        wanted = {
            key: each
            for key, each in self.objects.items()
            if key[0] == plural and namespace in ("", key[1])
            if not label or each["metadata"].get("labels", {}).get(label) == value
        }
        return {
            "items": [wanted[key] for key in sorted(wanted)],
            "metadata": {"resourceVersion": str(next(self._numbers))},
        }

    def _check(self, found: Found, body: Any, subresource: str) -> None:
        """Of a status that is written, a real one does not look at the uid either."""
        told = body or {}
        wanted = told.get("preconditions") or told.get("metadata") or {}
        for name in ("resourceVersion",) if subresource == "status" else ("uid", "resourceVersion"):
            if wanted.get(name) not in (None, found["metadata"][name]):
                raise RefusedError(409, "Conflict", f"the object has been modified: {name}")

    def _apply(self, found: Found, call: Call, subresource: str) -> None:
        """Fields that the manager applied before and no longer does are gone; others' stay."""
        assert subresource == "status", "the service applies nothing else"
        place = ((call.place[0], call.place[1], call.place[2]), call.query["fieldManager"])
        status = found.setdefault("status", {})
        _take_out(status, self._applied.get(place, {}))
        _put_in(status, call.body["status"])
        self._applied[place] = copy.deepcopy(call.body["status"])

    def _merge(self, found: Found, body: Found) -> None:
        before = copy.deepcopy(found.get("spec"))
        _put_in(found, {name: value for name, value in body.items() if name == "spec"})
        if found.get("spec") != before:
            found["metadata"]["generation"] += 1

    def _reviewed(self, asked: Found) -> Found:
        known = self.tokens.get(asked["token"])
        audiences = [each for each in (known or {}).get("audiences", ()) if each in asked["audiences"]]
        if known is None or not audiences:
            return {"authenticated": False, "error": "invalid bearer token"}
        return {"authenticated": True, "user": known["user"], "audiences": audiences}

    def _allowed(self, asked: Found) -> bool:
        wanted = asked["resourceAttributes"]
        assert (wanted["group"], wanted["resource"]) == ("penstock.dev", JOBS.plural)
        namespaces = ("", wanted.get("namespace", ""))
        return any((asked["user"], wanted["verb"], each) in self.rights for each in namespaces)


def _served(v1: str) -> Found:
    singular = v1.lower()
    kind = {"name": f"{singular}s", "kind": v1, "singularName": singular, "namespaced": v1 == JOB_KIND, "verbs": VERBS}
    return {"resources": [kind]}


def _group(name: str, version: str) -> Found:
    return {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}


def _owner(api_version: str, kind: str, metadata: Found) -> Found:
    return {"apiVersion": api_version, "kind": kind, "name": metadata["name"], "uid": metadata["uid"]}


def _put_in(found: Found, news: Mapping[str, Any]) -> None:
    for name, value in news.items():
        if isinstance(value, dict):
            _put_in(found.setdefault(name, {}), value)
        else:
            found[name] = value


def _take_out(found: Found, old: Mapping[str, Any]) -> None:
    for name, value in old.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            _take_out(found[name], value)
        else:
            found.pop(name, None)


@contextmanager
def served(fake: FakeApiserver) -> Iterator[ApiClient]:
    """The server on a free port, and a client of it, for as long as the block lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    configuration = Configuration()
    configuration.host, configuration.connection_pool_maxsize = f"http://127.0.0.1:{server.server_port}", 32
    client = ApiClient(configuration)
    try:
        yield client
    finally:
        fake.ended = True
        client.rest_client.pool_manager.clear()
        server.shutdown()
        server.server_close()
        thread.join()


def kubeconfig_of(client: ApiClient, folder: Path) -> Path:
    """A file by which other processes find the server of ``client``."""
    cluster = {"name": "c", "cluster": {"server": client.configuration.host}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    user = {"name": "u", "user": {"token": "secret"}}
    document = {"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "c"}
    path = folder / "kubeconfig"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **document}))
    return path


def _handler(fake: FakeApiserver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are sent apart, and the client would acknowledge 40 ms later

        def do(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            call = Call(
                method=self.command,
                place=_place(parts.path),
                query={name: values[0] for name, values in parse_qs(parts.query).items()},
                body=json.loads(self.rfile.read(length)) if length else None,
                content_type=self.headers.get("Content-Type", ""),
            )
            try:
                if not call.place[0]:
                    self._say(200, json.dumps(fake.discovery(call, parts.path)))
                elif "watch" in call.query:
                    self._stream(call, fake.begin_watch(call))
                else:
                    self._say(200, json.dumps(fake.answer(call)))
            except RefusedError as refused:
                self._say(refused.status, json.dumps(refused.document))

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = do  # noqa: N815, the base class's names

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def _stream(self, call: Call, error: Found | None) -> None:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            plural, namespace, _, _ = call.place
            if error is not None:
                self.wfile.write(json.dumps({"type": "ERROR", "object": error}).encode() + b"\n")
                return
            try:
                for each in fake.changes(plural, namespace, int(call.query["resourceVersion"])):
                    self.wfile.write(json.dumps(each).encode() + b"\n")
                    self.wfile.flush()
            except OSError:
                pass  # the watcher has gone

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _place(path: str) -> tuple[str, str, str, str]:
    """Plural, namespace, name and subresource of a path of the API."""
    parts = path.strip("/").split("/")
    rest = (parts[2:] if parts[0] == "api" else parts[3:]) or [""]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource, *_ = [*rest, "", ""]
    return plural, namespace, name, subresource
