"""What `freewheel validate` scores is fixed before anything of it is read."""

from pathlib import Path

import pytest

from freewheel import app
from freewheel.config import Config
from freewheel.control.controller import ValidateOnly
from freewheel.control.run_end import make_run_end
from freewheel.errors import ConfigError
from freewheel.run_folder import RunFolder
from tests.unit.test_resuming import make_model, write_checkpoint


@pytest.fixture
def root(tmp_path):
    """The checkpoints of a run that goes on, at step 40."""
    root = tmp_path / "run" / "checkpoints"
    write_checkpoint(root, 40)
    return root


@pytest.fixture
def scored(monkeypatch):
    """What was started: model folder, step and version, purpose; the weights are not loaded."""
    calls = []

    def run(config, folder, *, model, validate_only):
        calls.append((model, validate_only, folder.read_origin(), folder.read_config().model.path))
        return make_run_end(error=None, stop_signal=None, cut_short="", numbers={})

    monkeypatch.setattr(app, "_run", run)
    return calls


def meanwhile(monkeypatch, act):
    """Something happens as soon as the checkpoint has been read."""
    read = app.read_checkpoint

    def read_then_act(folder):
        checkpoint = read(folder)
        act()
        return checkpoint

    monkeypatch.setattr(app, "read_checkpoint", read_then_act)


def test_a_link_that_moves_on_does_not_change_what_is_scored(root, scored, monkeypatch, tmp_path):
    meanwhile(monkeypatch, lambda: write_checkpoint(root, 60))
    assert app.run_validation(Config(), str(root / "latest"), tmp_path / "out") == 0
    ((model, due, origin, recorded),) = scored
    assert (root / "latest").resolve().name == "step_000060"
    assert due == ValidateOnly(step=40, version=40)
    # The workers open this path later.
    assert model.resolve() == (root / "step_000040" / "hf").resolve()
    assert recorded == str(model)
    assert (origin.purpose, origin.target) == ("validate", str(root / "step_000040"))


def test_a_checkpoint_that_is_dropped_meanwhile_is_named(root, scored, monkeypatch, tmp_path):
    meanwhile(monkeypatch, lambda: write_checkpoint(root, 60, keep=1))
    with pytest.raises(ConfigError, match=r"no folder .*step_000040/hf"):
        app.run_validation(Config(), str(root / "latest"), tmp_path / "out")
    assert not scored
    assert not (tmp_path / "out").exists()


def test_the_home_folder_is_expanded(root, scored, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    app.run_validation(Config(), "~/run/checkpoints/step_000040", tmp_path / "out")
    assert scored[0][1] == ValidateOnly(step=40, version=40)


def test_a_link_to_a_model_is_followed_once(scored, tmp_path):
    model = make_model(tmp_path / "first")
    link: Path = tmp_path / "current"
    link.symlink_to("first")
    app.run_validation(Config(), str(link), tmp_path / "out")
    assert scored[0][:2] == (model.resolve(), ValidateOnly(step=0, version=0))


def test_the_result_is_not_resumed(root, scored, tmp_path):
    app.run_validation(Config(), str(root / "latest"), tmp_path / "out")
    with pytest.raises(ConfigError, match="holds a validation"):
        RunFolder.resume(tmp_path / "out")
