"""A trainer's process that writes a checkpoint says which published versions are gone."""

import pytest
from ray.exceptions import ObjectLostError, RayActorError

from freewheel.backends.ray import actors
from freewheel.errors import TrajectoriesLostError, WeightsLostError


class Objects:
    """An object store: what it does not hold is lost."""

    def __init__(self, **held):
        self.held = held

    def get(self, refs):
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if isinstance(self.held[refs], Exception):
            raise self.held[refs]
        return self.held[refs]


class Core:
    def __init__(self):
        self.written = []

    def write_state(self, step, _folder, groups, bundles):
        self.written.append((step, groups, bundles))


LOST = ObjectLostError("00" * 28, "address", "call site")


@pytest.fixture
def writer(monkeypatch):
    """Writes with a core that only remembers, from a store with these objects."""
    actor = object.__new__(actors.TrainerActor)
    actor._trainer = Core()

    def write(held, refs=(), **objects):
        monkeypatch.setattr(actors, "_ray", Objects(**objects))
        actor._write(4, "folder", refs, held)
        return actor._trainer.written

    write.core = actor._trainer
    return write


def test_versions_that_are_there_are_written(writer):
    written = writer({1: "a", 2: "b"}, refs=["c"], a="one", b="two", c=["rows"])
    assert written == [(4, [["rows"]], {1: "one", 2: "two"})]


def test_all_versions_that_are_gone_are_named_and_nothing_is_written(writer):
    with pytest.raises(WeightsLostError, match="version 1: ObjectLostError") as lost:
        writer({1: "a", 2: "b", 3: "c"}, a=LOST, b="two", c=RayActorError())
    assert lost.value.versions == (1, 3)
    assert writer.core.written == []


def test_nothing_is_written_when_trajectories_are_gone(writer):
    with pytest.raises(TrajectoriesLostError) as lost:
        writer({1: "a"}, refs=["b", "c"], a="one", b=["rows"], c=LOST)
    assert lost.value.positions == (1,)
    assert writer.core.written == []
