import pytest

from freewheel.config import load_config
from freewheel.plan import ProcessPlan, build_plan, render_plan

BASE = ("data.train_files=t.jsonl", "model.path=m")
DAPO = (
    *BASE,
    "data.val_files=v.parquet",
    "rollout.engine=vllm",
    "rollout.replicas=4",
    "rollout.tensor_parallel_size=2",
    "rollout.num_gpus=2",
    "rollout.device=cuda",
    "rollout.n=16",
    "actor.strategy=fsdp2",
    "actor.world_size=8",
    "actor.device=cuda",
    "actor.ppo_mini_batch_size=32",
    "async_training.require_batches=4",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.staleness_threshold=0.5",
    "trainer.total_training_steps=400",
    "trainer.test_freq=20",
    "trainer.save_freq=30",
)


def plan_of(*overrides, **sizes):
    return build_plan(load_config(None, [*BASE, *overrides]), **sizes)


def test_processes_of_a_large_run_add_up():
    plan = plan_of(*DAPO)
    assert plan.processes == (
        ProcessPlan(role="rollout replica", count=4, num_cpus=1.0, num_gpus=2.0),
        ProcessPlan(role="trainer rank", count=8, num_cpus=1.0, num_gpus=1.0),
        ProcessPlan(role="rollout worker", count=1, num_cpus=0.1, num_gpus=0.0),
    )
    assert plan.num_gpus == 16
    assert plan.num_cpus == pytest.approx(12.1)


def test_dedicated_replicas_are_processes_of_their_own():
    plan = plan_of("validation.mode=dedicated", "validation.dedicated_replicas=2")
    assert [(p.role, p.count) for p in plan.processes[:2]] == [
        ("rollout replica", 1),
        ("validation replica", 2),
    ]


def test_text_shows_the_arithmetic_and_what_is_due():
    text = render_plan(plan_of(*DAPO, num_train_prompts=17_000, num_val_prompts=30))
    for part in (
        "4 x rollout replica",
        "1 CPU, 2 GPU each; engine vllm, tensor parallel 2",
        "12.1 CPU, 16 GPU; Ray: a cluster of our own",
        "128 = require_batches 4 x ppo_mini_batch_size 32; 2048 samples",
        "512 = 128 x trigger_parameter_sync_step 4",
        "768 = (1 + staleness_threshold 0.5) x 512",
        "1 version = staleness_threshold 0.5, rounded up",
        "400 (about 3 epochs",
        "every 4 steps (100 in all)",
        "every 30 steps, and at the end (14 in all)",
        "version 0 while training starts; every 20 steps (20 in all); mode parallel",
        "30 prompts x 1 trials",
        "asynchronous with stale samples, with partial rollouts",
    ):
        assert part in text, part


def test_steps_follow_from_the_prompts():
    plan = plan_of("trainer.total_epochs=3", num_train_prompts=100)
    assert plan.total_steps == 19, "300 prompts in steps of 16, the last one smaller"
    assert not plan.is_exact
    assert "at most 19" in render_plan(plan)
    assert plan_of().total_steps is None
    assert "as 1 epochs give" in render_plan(plan_of())


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        (("async_training.staleness_threshold=0",), "on-policy"),
        (
            ("async_training.staleness_threshold=0", "async_training.require_batches=2"),
            "stream off-policy",
        ),
        (("async_training.partial_rollout=false",), "without partial rollouts"),
    ],
)
def test_the_mode_is_named(overrides, mode):
    assert mode in render_plan(plan_of(*overrides))


def test_without_held_out_prompts_there_is_no_validation():
    assert "none: data.val_files is not set" in render_plan(plan_of())


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (("rollout.replicas=100",), "some replicas never work"),
        (("rollout.max_num_seqs=4",), "rollout.max_num_seqs = 4"),
        (
            ("trainer.test_freq=1", "async_training.trigger_parameter_sync_step=4"),
            "same version is validated more than once",
        ),
    ],
)
def test_odd_settings_are_pointed_out(overrides, warning):
    assert any(warning in text for text in plan_of(*overrides).warnings)
    assert not plan_of().warnings
