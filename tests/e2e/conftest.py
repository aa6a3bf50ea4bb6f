"""The one cluster that all tests of this folder share, and penstock on it for those that train.

Mark tests that use it ``xdist_group("cluster")``, so that one process runs them, and ``timeout(COLD_SECONDS)``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from penstock.core.lifecycle import Phase
from tests.support.cluster import Cluster, shared
from tests.support.cluster_jobs import PINNED, local_losses, small_spec, small_training, submitted
from tests.support.installed import Installed, installed
from tests.support.story import Story, story_of

MOST_STEPS = 1200
"""Of jobs whose losses are compared with the undisturbed ones."""

LAST_CHARACTERS = 6000


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with shared() as found:
        yield found


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A new one without restrictions."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def penstock_there(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The service and the operator, which see to one namespace."""
    with installed(cluster, tmp_path_factory.mktemp("installed")) as found:
        yield found


@pytest.fixture(scope="session")
def first(penstock_there: Installed) -> Story:
    """The first job, to its end. Those that follow use what it has measured."""
    with story_of(penstock_there, "first") as story:
        story.job = submitted(penstock_there, "first")
        story.job.wait_for(Phase.SUCCEEDED)
    return story


KEPT = ("first", "pinned", "sibling")
"""Jobs that more than one test is about, or whose measurement more than one uses."""


@pytest.fixture
def on(penstock_there: Installed, first: Story) -> Iterator[Installed]:
    """Where a job need not measure any more; those of a test go with it, or they would hold the nodes."""
    yield penstock_there
    jobs = [each["metadata"]["name"] for each in penstock_there.jobs()]
    if ended := [name for name in jobs if name not in KEPT]:
        penstock_there.kubectl("delete", "pj", *ended)
        penstock_there.wait_for_room(ended)


@pytest.fixture(scope="session")
def undisturbed(penstock_there: Installed, first: Story, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a pinned job that nothing happens to, as this machine has them without a cluster."""
    job = submitted(penstock_there, "pinned", parallelism=PINNED, training=small_training(2))
    job.wait_for(Phase.SUCCEEDED)
    wanted = {"training": small_training(MOST_STEPS), "checkpoint": {"everySteps": MOST_STEPS}}
    spec = small_spec(penstock_there.cluster.image, parallelism=PINNED, **wanted)
    return local_losses(penstock_there, tmp_path_factory.mktemp("undisturbed"), spec, job.run(1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the programs said goes with a failure."""
    report = yield
    found = getattr(item, "funcargs", {}).get("penstock_there")
    if report.failed and isinstance(found, Installed):
        for program in (found.operator, found.service):
            report.sections.append((f"{program.name}'s log", program.log.read_text()[-LAST_CHARACTERS:]))
    return report
