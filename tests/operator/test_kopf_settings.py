"""kopf retries forever, and stores nothing anywhere."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import kopf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.operator import handlers
from penstock.operator.kopf_settings import Backoffs, NoDiffBase, NoProgress, configure

JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner), max_leaves=6
)


def body_of(generation: int, spec: Any, status: Any) -> kopf.Body:
    raw: Any = {"metadata": {"generation": generation}, "spec": spec, "status": status}
    return kopf.Body(raw)


def test_every_call_has_all_backoffs() -> None:
    backoffs = Backoffs()
    for _ in range(2):
        assert list(itertools.islice(backoffs, 7)) == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert not hasattr(backoffs, "__len__")  # kopf would count the attempts


def test_settings_of_kopf() -> None:
    settings = kopf.OperatorSettings()
    configure(settings)
    assert settings.scanning.disabled
    assert settings.peering.standalone
    assert not settings.posting.enabled
    assert isinstance(settings.networking.error_backoffs, Backoffs)
    duration = settings.watching.server_timeout
    assert isinstance(duration, int), "kopf sends it as it is, and the apiserver reads an integer"
    assert settings.watching.inactivity_timeout > duration


@given(JSON, JSON, st.integers(), st.booleans())
def test_only_the_generation_is_compared(spec: Any, status: Any, generation: int, is_changed: bool) -> None:
    storage: kopf.DiffBaseStorage = NoDiffBase()
    first = body_of(generation, spec, {})
    second = body_of(generation + is_changed, {}, status)
    assert (storage.build(body=first) == storage.build(body=second)) is not is_changed
    assert storage.fetch(body=first) is None


def test_nothing_is_stored() -> None:
    body, patch = body_of(1, {}, {}), kopf.Patch()
    NoDiffBase().store(body=body, patch=patch, essence={"spec": 1})
    progress: kopf.ProgressStorage = NoProgress()
    record: Any = {"retries": 1}
    key: Any = "a"
    progress.store(key=key, record=record, body=body, patch=patch)
    progress.purge(key=key, body=body, patch=patch)
    progress.touch(body=body, patch=patch, value="now")
    assert not patch
    assert progress.fetch(key=key, body=body) is None
    essence: Any = {"spec": 1}
    assert progress.clear(essence=essence) == essence


def test_no_handler_needs_a_finalizer() -> None:
    """Handlers of the operator only watch: none changes, spawns or admits anything."""
    assert handlers.enqueue is not None
    registry = kopf.get_default_registry()
    watching = [handler.id for handler in registry._watching.get_all_handlers()]
    assert watching == ["enqueue"]
    for kind in (registry._changing, registry._spawning, registry._webhooks, registry._indexing):
        assert not list(kind.get_all_handlers())


@pytest.mark.parametrize("kind", ["MODIFIED", "DELETED", None])
def test_an_event_goes_to_the_controller(kind: str | None) -> None:
    observed: list[tuple[str | None, Any]] = []
    feed = type("Feed", (), {"observe": lambda self, *event: observed.append(event)})()
    memo = kopf.Memo(controller=type("Controller", (), {"jobs": feed})())
    enqueue: Any = handlers.enqueue
    asyncio.run(enqueue(event={"type": kind, "object": {"spec": {}}}, memo=memo))
    assert observed == [(kind, {"spec": {}})]
