import json
import os
import subprocess
import sys
import types

import pytest

import freewheel
from freewheel.cli import recipes, train
from freewheel.cli.main import main
from freewheel.config import load_config
from freewheel.errors import StalledError
from freewheel.preflight import Findings, check_inputs, look
from freewheel.run_folder import RunFolder
from freewheel.status import RunStatus

PYTHONPATH = os.pathsep.join(sys.path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A current folder with data, a model's folder and a recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    for name, count in (("train", 40), ("val", 5)):
        rows = [json.dumps({"prompt": f"{i}?", "ground_truth": str(i)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    (tmp_path / "recipe.yaml").write_text(
        "# A recipe for tests.\n"
        "data: {train_files: train.jsonl, val_files: val.jsonl}\n"
        "model.path: model\n"
        "trainer.run_dir: runs/here\n"
    )
    return tmp_path


@pytest.fixture
def app(monkeypatch):
    """`freewheel.app` as it is called; set `result` to what it does."""
    calls = []
    module = types.SimpleNamespace(calls=calls, result=0)

    def note(name):
        def run(*arguments, **options):
            calls.append((name, arguments, options))
            if isinstance(module.result, BaseException):
                raise module.result
            return module.result

        return run

    module.run_training, module.run_validation = note("training"), note("validation")
    monkeypatch.setitem(sys.modules, "freewheel.app", module)
    return module


def test_train_starts_the_run(place, app):
    app.result = 7
    assert main(["train", "recipe.yaml", "rollout.n=4"]) == 7
    ((_, (config, run_dir), options),) = app.calls
    assert config.rollout.n == 4
    assert str(run_dir) == "runs/here"
    assert options == {"resume": False, "from_step": None, "schedule_steps": 3}


def test_overrides_may_stand_behind_options(place, app, capsys):
    assert main(["train", "recipe.yaml", "rollout.n=4", "--dry-run", "rollout.n=6"]) == 0
    assert "6 rollouts of each" in capsys.readouterr().out
    assert not app.calls


def test_dry_run_prints_the_plan(place, app, capsys):
    assert main(["train", "recipe.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "24 = (1 + staleness_threshold 0.5) x 16" in out
    assert "at most 3 = 40 prompts x 1 epochs / 16 groups" in out
    assert "5 prompts x 1 trials" in out
    assert "warning" not in out
    assert not (place / "runs").exists()


def test_dry_run_warns_of_what_is_missing_here_and_train_refuses(place, app, capsys):
    arguments = ["recipe.yaml", "data.train_files=gone.parquet", "model.path=gone"]
    assert main(["train", *arguments, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("warning: not on this machine") == 2
    assert "gone.parquet does not exist" in out
    assert main(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: 2 problems")
    assert not app.calls


def test_a_missing_column_is_an_error_in_a_dry_run_too(place, app, capsys):
    assert main(["train", "recipe.yaml", "data.prompt_key=question", "--dry-run"]) == 2
    assert "question" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "recipe.yaml", "rollout.nn=3"], "nearest valid key: rollout.n"),
        (["train", "recipe.yaml", "rollout.n=three"], "an integer, at least 1"),
        (["train", "recipe.yaml", "rollout.n=1"], "rollout.n must be at least 2"),
        (["train", "gone.yaml"], "recipe gone.yaml: no such file"),
        (["train", "model"], "is a folder"),
        (["resume", "gone"], "gone: no such folder"),
        (["resume", "model"], "is not a run folder"),
        (["status", "model"], "is not a run folder"),
        (["validate", "model"], "does not lie in a run folder"),
        (["validate", "gone", "recipe.yaml"], "gone: no such folder"),
        (["validate", "model", "recipe.yaml", "--run", "x"], "give one of them"),
        (["validate", "model", "recipe.yaml", "other.yaml"], "more than one recipe"),
        (["recipes", "--copy", "gone"], "no shipped recipe"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(place, app, capsys, arguments, text):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not app.calls


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["train", "r", "--lr=3"]])
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_errors_and_interrupts_become_exit_codes(place, app, capsys):
    app.result = StalledError("replica 3: no token for 120 s")
    assert main(["train", "recipe.yaml"]) == 4
    assert capsys.readouterr().err == "error: replica 3: no token for 120 s\n"
    app.result = KeyboardInterrupt()
    assert main(["train", "recipe.yaml"]) == 130
    app.result = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["train", "recipe.yaml"])


def make_run(place, *overrides):
    config = load_config(place / "recipe.yaml", overrides)
    return RunFolder.create(place / "runs" / "here", config)


def test_train_refuses_a_folder_that_holds_a_run(place, app, capsys):
    make_run(place).close()
    assert main(["train", "recipe.yaml"]) == 2
    assert "holds a run" in capsys.readouterr().err
    assert main(["train", "recipe.yaml", "trainer.resume_mode=auto"]) == 0
    assert app.calls[0][2] == {"resume": True, "from_step": None, "schedule_steps": 3}


def test_resume_takes_the_runs_configuration(place, app):
    make_run(place, "rollout.n=5").close()
    assert main(["resume", "runs/here", "trainer.total_training_steps=9"]) == 0
    ((_, (config, run_dir), options),) = app.calls
    assert config.rollout.n == 5
    assert config.trainer.total_training_steps == 9
    assert str(run_dir) == "runs/here"
    assert options == {"resume": True, "from_step": None, "schedule_steps": 9}
    assert main(["resume", "runs/here", "--from", "20", "rollout.n=3"]) == 0
    ((config, _), options) = app.calls[1][1:]
    assert (config.rollout.n, options["from_step"]) == (3, 20)


@pytest.mark.parametrize(
    "arguments", [["resume", "runs/here"], ["train", "recipe.yaml", "trainer.resume_mode=auto"]]
)
def test_a_validation_is_not_resumed_but_can_be_done_again(place, app, capsys, arguments):
    config = load_config(place / "recipe.yaml")
    target = str(place / "model")
    folder = RunFolder.create(place / "runs/here", config, purpose="validate", target=target)
    folder.close()
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "holds a validation, which is not resumed" in err
    assert not app.calls
    advised = err.partition("freewheel ")[2].split()
    assert main(advised) == 0
    ((name, (_, scored, _), _),) = app.calls
    assert (name, scored) == ("validation", target)


@pytest.mark.parametrize(
    "arguments", [["resume", "runs/here"], ["train", "recipe.yaml", "trainer.resume_mode=auto"]]
)
def test_a_run_that_is_complete_is_told_so_and_nothing_starts(place, app, capsys, arguments):
    total = "trainer.total_training_steps=9"
    folder = make_run(place, total)
    folder.write_summary({"status": "completed", "steps": 9})
    folder.close()
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    more = [] if arguments[0] == "resume" else [total]
    assert main([*arguments, *more]) == 0
    assert capsys.readouterr().out == (
        "runs/here: the run is complete (9 of 9 steps); raise trainer.total_training_steps to go "
        "on\n"
    )
    assert not app.calls
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == before
    assert main([*arguments, "trainer.total_training_steps=12"]) == 0
    assert len(app.calls) == 1


def test_validate_by_recipe_by_run_and_by_place(place, app):
    make_run(place, "rollout.n=5").close()
    checkpoint = place / "runs" / "here" / "checkpoints" / "step_000020"
    checkpoint.mkdir(parents=True)
    assert main(["validate", "model", "recipe.yaml", "validation.n=2"]) == 0
    assert main(["validate", "model", "--run", "runs/here", "--out", "result"]) == 0
    assert main(["validate", str(checkpoint)]) == 0
    by_recipe, by_run, by_place = (arguments for _, arguments, _ in app.calls)
    assert by_recipe[0].validation.n == 2
    assert by_recipe[1] == "model"
    assert by_recipe[2].name.startswith("validate-run-")
    assert by_run[0].rollout.n == 5
    assert str(by_run[2]) == "result"
    assert by_place[0].rollout.n == 5


def test_validate_needs_no_training_prompts(place, app):
    assert main(["validate", "model", "recipe.yaml", "data.train_files=", "model.path="]) == 0
    assert app.calls[0][1][0].model.path == str(place / "model")


def test_validate_needs_nothing_that_only_training_needs(place, app):
    """Neither the schedule's end, nor a group, nor enough prompts for a step."""
    only = ["actor.optim.lr_scheduler_type=cosine", "algorithm.filter_groups=true"]
    few = ["rollout.n=1", "data.train_max_samples=2", "actor.optim.lr_warmup_steps=50"]
    assert main(["validate", "model", "recipe.yaml", *only, *few]) == 0
    assert len(app.calls) == 1


LINEAR = "actor.optim.lr_scheduler_type=linear"


def test_a_schedule_without_steps_runs_over_the_epochs(place, app):
    assert main(["train", "recipe.yaml", LINEAR, "trainer.total_epochs=2"]) == 0
    assert app.calls[0][2]["schedule_steps"] == 5  # 2 x 40 prompts, 16 a step


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_warm_up_longer_than_the_epochs_is_refused(place, app, capsys, dry):
    assert main(["train", "recipe.yaml", LINEAR, "actor.optim.lr_warmup_steps=3", *dry]) == 2
    assert "3 optimizer steps in 3 trainer steps) ends within" in capsys.readouterr().err
    assert not app.calls


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_schedule_whose_end_is_unknown_is_refused(place, app, capsys, dry, monkeypatch):
    unknown = Findings(num_val_prompts=5)
    monkeypatch.setattr(train, "check_inputs", lambda config, purpose="train": unknown)
    assert main(["train", "recipe.yaml", LINEAR, *dry]) == 2
    assert "set trainer.total_training_steps" in capsys.readouterr().err
    assert not app.calls
    by_key = "actor.optim.total_training_steps=30"
    assert main(["train", "recipe.yaml", LINEAR, by_key, *dry]) == 0


def test_status_tells_running_ended_and_lost(place, capsys):
    folder = make_run(place)
    folder.write_status(RunStatus(phase="running", step=4, total_steps=9))
    assert main(["status", "runs/here"]) == 0
    out = capsys.readouterr().out
    assert "runs/here: running" in out
    assert "step 4/9" in out
    folder.close()
    main(["status", "runs/here"])
    assert "lost: no process holds it" in capsys.readouterr().out
    summary = {
        "status": "completed",
        "exit_code": 0,
        "cause": None,
        "steps": 9,
        "policy_version": 9,
        "wall_s": 5.0,
        "samples": {"issued": 1},
        "trainer_wait_s": {"samples": 1.0},
    }
    folder.write_summary(summary)
    assert main(["status", "runs/here", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "completed"
    assert found["status"]["step"] == 4
    assert found["summary"] == summary


def test_status_of_a_run_whose_lock_cannot_be_looked_at(place, capsys, monkeypatch):
    folder = make_run(place)
    folder.close()
    monkeypatch.setattr(RunFolder, "lock_state", lambda self: "unknown")
    folder.write_status(RunStatus(phase="running", step=4))
    main(["status", "runs/here", "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "running"
    head = json.loads(folder.status_path.read_text())
    folder.status_path.write_text(json.dumps({**head, "updated": 5.0, "host": "node7"}))
    main(["status", "runs/here"])
    out = capsys.readouterr().out
    assert "runs/here: unknown: its lock cannot be looked at" in out
    assert f"ago from process {os.getpid()} on node7" in out
    main(["status", "runs/here", "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "unknown"


def test_recipes_are_listed_found_and_copied(place, monkeypatch, capsys, app):
    shipped = place / "shipped"
    shipped.mkdir()
    (place / "recipe.yaml").rename(shipped / "toy.yaml")
    monkeypatch.setattr(recipes, "recipes_folder", lambda: shipped)
    assert main(["recipes"]) == 0
    assert capsys.readouterr().out == f"toy  A recipe for tests.\n     {shipped / 'toy.yaml'}\n"
    assert main(["train", "toy", "--dry-run"]) == 0
    assert main(["train", "toi"]) == 2
    assert "nearest: toy" in capsys.readouterr().err
    assert main(["recipes", "--copy", "toy"]) == 0
    assert (place / "toy.yaml").read_text() == (shipped / "toy.yaml").read_text()
    assert main(["recipes", "--copy", "toy"]) == 2


def test_inputs_are_counted_in_a_process_of_their_own(place):
    config = load_config(place / "recipe.yaml", ["data.train_max_samples=30"])
    findings = check_inputs(config)
    assert findings == look(config)
    assert (findings.num_train_prompts, findings.num_val_prompts) == (30, 5)
    assert not findings.missing + findings.problems + findings.warnings


def run_module(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        **options,
    )


def test_module_tells_its_version_and_its_errors(tmp_path):
    run = run_module("-m", "freewheel", "--version", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, f"freewheel {freewheel.__version__}\n")
    run = run_module("-m", "freewheel", "train", "nothing.yaml", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: recipe nothing.yaml")
    assert "Traceback" not in run.stderr


def test_the_command_line_loads_nothing_heavy():
    run = run_module(
        "-c",
        "import sys, freewheel.cli.main; "
        "print([m for m in ('torch', 'ray', 'transformers', 'vllm', "
        "'tensorflow', 'pyarrow', 'datasets', 'reasoning_gym', 'wandb') if m in sys.modules])",
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
