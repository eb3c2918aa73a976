"""`freewheel checkpoints`: listed, verified, exported; and that nothing reads pickles."""

import ast
import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from freewheel.checkpoint import FileCheckpointStore
from freewheel.cli.main import main
from freewheel.config import Config, source
from freewheel.run_folder import RunFolder
from freewheel.trainer import state
from freewheel.trainer.core import TrainerCore
from tests.unit.checkpoint_state import control_state
from tests.unit.trainer_models import llama_config, make_groups, save_model
from tests.unit.trainer_runs import make_config, step

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> TrainerCore:
    core = TrainerCore(
        make_config(), save_model(tmp_path_factory.mktemp("model")), total_optimizer_steps=20
    )
    core.start(None)
    return core


@pytest.fixture(scope="module")
def whole(core: TrainerCore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2; the core has the weights of step 2."""
    folder = RunFolder.create(tmp_path_factory.mktemp("runs") / "run", Config())

    async def write(number: int) -> None:
        store = FileCheckpointStore(folder.checkpoints_path, keep=2)
        core.copy_state(number)
        aside = await store.begin(number)
        core.write_state(number, aside, make_groups(1))
        await store.commit(number, control_state(number))

    for number in (1, 2):
        step(core, number, make_groups(seed=number))
        asyncio.run(write(number))
    folder.close()
    return folder.path


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run", symlinks=True)


def damage(run_dir: Path) -> None:
    """Other content of the same size."""
    path = run_dir / "checkpoints/step_000002/trainer/optimizer.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_they_are_listed(run_dir, capsys):
    assert main(["checkpoints", str(run_dir)]) == 0
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["step", "version", "size", "written", "state"]
    assert re.fullmatch(r" +1 +1 +\d+ kB +\S+s ago  sizes are right", first)
    assert re.fullmatch(r" +2 +2 +\d+ kB +\S+s ago  latest, sizes are right", second)
    assert main(["checkpoints", str(run_dir), "--verify"]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("latest, whole")


def test_only_verify_reads_contents(run_dir, capsys):
    damage(run_dir)
    assert main(["checkpoints", str(run_dir)]) == 0
    capsys.readouterr()
    assert main(["checkpoints", str(run_dir), "--verify"]) == 7
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.endswith("whole")
    assert "optimizer.safetensors: its content is not what was written" in second
    (run_dir / "checkpoints/step_000001/control.json").unlink()
    assert main(["checkpoints", str(run_dir)]) == 7
    assert "control.json: cannot be read" in capsys.readouterr().out


def test_as_json(run_dir, capsys):
    damage(run_dir)
    assert main(["checkpoints", str(run_dir), "--verify", "--json"]) == 7
    first, second = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (first["step"], first["policy_version"], first["problem"]) == (1, 1, None)
    assert (first["is_latest"], first["verified"]) == (False, True)
    assert first["path"] == str(run_dir / "checkpoints/step_000001")
    folder = run_dir / "checkpoints/step_000001"
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert first["num_bytes"] == sum(path.stat().st_size for path in files)
    assert second["is_latest"]
    assert "SHA-256 differs" in second["problem"]


def test_none_yet(tmp_path, capsys):
    RunFolder.create(tmp_path / "run", Config()).close()
    assert main(["checkpoints", str(tmp_path / "run")]) == 0
    assert "no checkpoint yet" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path / "run"), "--export", str(tmp_path / "out")]) == 7
    assert main(["checkpoints", str(tmp_path)]) == 2


def test_the_export_gives_the_logits_of_the_checkpoint(core, run_dir, tmp_path, capsys):
    target = tmp_path / "models" / "exported"
    assert main(["checkpoints", str(run_dir), "--export", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: model of step 2\n"
    theirs_model = AutoModelForCausalLM.from_pretrained(target)
    # The weights that the trainer had, in a model that was made without the checkpoint.
    ours_model = AutoModelForCausalLM.from_config(llama_config()).eval()
    weights = dict(state.named_weights(core._policy.model))
    missing = ours_model.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]  # tied
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        ours = ours_model(tokens).logits
        theirs = theirs_model(tokens).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert ours.std() > 0.1
    assert AutoTokenizer.from_pretrained(target).decode([5, 6]) == "w5 w6"
    assert (target / "generation_config.json").is_file()
    assert [path.name for path in target.parent.iterdir()] == ["exported"]

    assert main(["checkpoints", str(run_dir), "--export", str(tmp_path / "e1"), "--step", "1"]) == 0
    with torch.no_grad():
        earlier = AutoModelForCausalLM.from_pretrained(tmp_path / "e1")(tokens).logits
    assert (earlier - theirs).abs().max() > 1e-4


def test_an_export_overwrites_nothing_and_leaves_nothing_half(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["checkpoints", str(run_dir), "--export", str(out)]
    out.write_text("mine")
    assert main(arguments) == 2
    assert "is not a folder" in capsys.readouterr().err
    out.unlink()
    out.mkdir()
    (out / "mine").write_text("")
    assert main(arguments) == 2
    assert "is not empty" in capsys.readouterr().err
    (out / "mine").unlink()
    assert main([*arguments, "--step", "9"]) == 2
    assert "no checkpoint of step 9; there are: 1, 2" in capsys.readouterr().err
    damage(run_dir)
    assert main([*arguments, "--step", "2"]) == 7
    assert "SHA-256 differs" in capsys.readouterr().err
    assert list(out.iterdir()) == []
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "passed over a broken checkpoint" in captured.err
    assert captured.out.endswith("model of step 1\n")
    assert main(["checkpoints", str(run_dir), "--step", "1"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unsafe_reads(tree: ast.AST) -> list[str]:
    """What in a module's text can run code that a file holds."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLES:
            found.append(node.module)
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if text.endswith("torch.load") or options.get("allow_pickle") == "True":
                found.append(ast.unparse(node))
            if text in {"yaml.unsafe_load", "yaml.full_load", "eval", "exec"}:
                found.append(ast.unparse(node))
            # The configuration's own loader is a yaml.SafeLoader.
            if text == "yaml.load" and options.get("Loader") != "_Loader":
                found.append(ast.unparse(node))
    return found


def test_nothing_in_the_source_unpickles():
    bad = "import pickle\nfrom dill import x\na = torch.load(f)\nnp.load(f, allow_pickle=True)\n"
    bad += "yaml.load(text, Loader=yaml.Loader)\n"
    assert len(unsafe_reads(ast.parse(bad))) == 5
    assert issubclass(source._Loader, yaml.SafeLoader)
    paths = list(SOURCE.rglob("*.py"))
    assert len(paths) > 100
    found = {str(path): unsafe_reads(ast.parse(path.read_text())) for path in paths}
    assert {path: reads for path, reads in found.items() if reads} == {}
