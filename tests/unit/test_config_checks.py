import pytest

from freewheel.config import check_config, load_config
from freewheel.config.checks import declared_cpus
from freewheel.errors import ConfigError

BASE = ("data.train_files=train.jsonl", "model.path=model")
HELD_OUT = (*BASE, "data.val_files=val.jsonl")


def check(*overrides, base=HELD_OUT, purpose="train"):
    check_config(load_config(None, [*base, *overrides]), purpose=purpose)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("actor.strategy=fsdp2",),
        ("actor.strategy=fsdp2", "actor.world_size=8"),
        ("async_training.staleness_threshold=0", "async_training.partial_rollout=true"),
        ("async_training.staleness_threshold=2.5", "async_training.max_staleness=3"),
        ("rollout.engine=vllm", "rollout.device=cpu"),
        ("rollout.engine=vllm", "rollout.tensor_parallel_size=2", "rollout.num_gpus=2"),
        ("rollout.engine=vllm", "rollout.weight_transfer=nixl"),
        ("rollout.num_gpus=0.5",),
        ("validation.mode=dedicated", "validation.dedicated_replicas=2"),
        ("validation.mode=exclusive",),
        ("async_training.parallel_validate_and_rollout=false",),
        ("validation.share=0.5",),
        ("validation.temperature=0",),
        ("validation.temperature=0", "validation.n=2", "rollout.environment=my.code:Env"),
        ("rollout.reward=my.code:score",),
        ("rollout.min_group_size=2",),
        ("rollout.retries={over_long_prompt: 0}",),
        ("actor.optim.lr_scheduler_type=cosine",),
        ("trainer.resume_mode=auto", "trainer.run_dir=runs/x"),
        ("ray.num_cpus=2.1",),
        ("trainer.test_freq=5",),
        ("health.train_step_timeout_s=7200",),
        ("health.train_step_timeout_s=7200", "health.stall_timeout_s=7245"),
        ("rollout.timeout_s=7200", "validation.timeout_s=7200"),
        ("health.stall_timeout_s=null",),
        ("health.loop_blocked_s=60",),
    ],
)
def test_accepted(overrides):
    check(*overrides)


def test_without_held_out_prompts_the_defaults_are_accepted():
    check(base=BASE)


def test_a_long_rollout_is_no_matter_when_nothing_is_validated():
    check("rollout.timeout_s=7200", base=BASE)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("data.train_files=",), ["data.train_files", "required"]),
        (("model.path=",), ["model.path", "required"]),
        (("data.train_files=[a, '']",), ["data.train_files", "empty name"]),
        (("data.prompt_key=",), ["data.prompt_key"]),
        (("rollout.n=1",), ["rollout.n = 1", 'algorithm.adv_estimator = "grpo"']),
        (("rollout.min_group_size=9",), ["rollout.min_group_size = 9", "rollout.n = 8"]),
        (("rollout.min_group_size=1",), ["rollout.min_group_size = 1", "at least 2"]),
        (("rollout.retries.bad_prompt=1",), ["rollout.retries.bad_prompt = 1", "allowed: 0"]),
        (("rollout.temperature=0",), ["rollout.temperature = 0", "rollout.n = 8"]),
        (("rollout.top_k=1",), ["rollout.top_k = 1", "rollout.n = 8"]),
        (("rollout.min_p=1",), ["rollout.min_p = 1", "rollout.n = 8"]),
        (("validation.temperature=0", "validation.n=4"), ["validation.n = 4"]),
        (("rollout.reward=exact",), ['rollout.reward = "exact"', "exact_match", "module:function"]),
        (("rollout.environment=my.code",), ["rollout.environment", "module:Class"]),
        (("rollout.tensor_parallel_size=2", "rollout.num_gpus=2"), ['rollout.engine = "torch"']),
        (("rollout.weight_transfer=nixl",), ['rollout.engine = "torch"', "object store"]),
        (
            ("rollout.weight_transfer=nixl", "rollout.engine=vllm", "model.lora_rank=4"),
            ["model.lora_rank = 4", "object store"],
        ),
        (
            ("rollout.engine=vllm", "rollout.tensor_parallel_size=4"),
            ["rollout.num_gpus = 1.0", "rollout.tensor_parallel_size = 4"],
        ),
        (("rollout.num_gpus=1.5",), ["rollout.num_gpus = 1.5"]),
        (("rollout.num_gpus=0", "rollout.device=cuda"), ["rollout.num_gpus = 0"]),
        (("actor.world_size=2",), ['actor.strategy = "single"', "actor.world_size = 2"]),
        (
            ("actor.strategy=fsdp2", "actor.world_size=64", "actor.ppo_mini_batch_size=4"),
            ["actor.world_size = 64", "actor.ppo_mini_batch_size = 4", "rollout.n = 8"],
        ),
        (("actor.ppo_max_token_len=1000",), ["actor.ppo_max_token_len = 1000", "1024 tokens"]),
        (
            ("actor.optim.lr_scheduler_type=linear", "algorithm.filter_groups=true"),
            ["actor.optim.lr_scheduler_type", "trainer.total_training_steps"],
        ),
        (
            ("actor.optim.lr_warmup_steps=10", "trainer.total_training_steps=10"),
            ["actor.optim.lr_warmup_steps = 10", "10 optimizer steps in 10 trainer steps"],
        ),
        (
            ("async_training.staleness_threshold=1.5", "async_training.max_staleness=1"),
            ["async_training.max_staleness = 1", "async_training.staleness_threshold = 1.5", "2"],
        ),
        (("validation.share=0.5", "validation.mode=exclusive"), ["validation.share", "exclusive"]),
        (("validation.dedicated_replicas=2",), ["validation.dedicated_replicas = 2", "parallel"]),
        (
            ("validation.mode=parallel", "async_training.parallel_validate_and_rollout=false"),
            ["validation.mode", "async_training.parallel_validate_and_rollout = false"],
        ),
        (("data.val_files=", "trainer.test_freq=5"), ["trainer.test_freq = 5", "data.val_files"]),
        (("data.val_files=", "validation.mode=dedicated"), ["validation.mode", "data.val_files"]),
        (
            ("rollout.timeout_s=30",),
            ["rollout.reward_timeout_s = 60", "rollout.timeout_s = 30"],
        ),
        (
            ("validation.trial_timeout_s=20",),
            ["rollout.reward_timeout_s = 60", "validation.trial_timeout_s = 20"],
        ),
        (
            ("validation.timeout_s=300",),
            ["rollout.timeout_s = 600", "validation.timeout_s = 300"],
        ),
        (("health.stall_timeout_s=3600",), ["health.stall_timeout_s = 3600", "3645 s", "null"]),
        (
            ("health.train_step_timeout_s=7200", "health.stall_timeout_s=7200"),
            ["health.stall_timeout_s = 7200", "7245 s"],
        ),
        (
            ("health.startup_timeout_s=4000", "health.stall_timeout_s=4600"),
            ["health.stall_timeout_s = 4600", "4645 s"],
        ),
        (
            ("health.checkpoint_timeout_s=4000", "health.stall_timeout_s=4600"),
            ["health.stall_timeout_s = 4600", "4645 s"],
        ),
        (
            ("rollout.timeout_s=7200", "validation.timeout_s=7200", "health.stall_timeout_s=7200"),
            ["health.stall_timeout_s = 7200", "7245 s"],
        ),
        (
            (
                "validation.trial_timeout_s=7200",
                "validation.timeout_s=7200",
                "health.stall_timeout_s=7200",
            ),
            ["health.stall_timeout_s = 7200", "7245 s"],
        ),
        (
            ("health.loop_blocked_s=61",),
            ["health.loop_blocked_s = 61", "health.loop_blocked_end_s = 60"],
        ),
        (("trainer.seed=-1",), ["trainer.seed = -1"]),
        (("trainer.run_dir=",), ["trainer.run_dir"]),
        (("trainer.run_dir=runs/{nme}",), ["trainer.run_dir", "{experiment_name}, {time}"]),
        (("trainer.run_dir=runs/{",), ["trainer.run_dir"]),
        (("trainer.resume_mode=auto",), ["trainer.resume_mode", "trainer.run_dir"]),
        (("data.train_max_samples=10",), ["data.train_max_samples = 10", "16 groups"]),
        (("ray.num_cpus=2",), ["ray.num_cpus = 2", "2.1 CPUs"]),
        (("ray.num_cpus=4", "ray.address=auto"), ["ray.num_cpus = 4", "ray.address"]),
    ],
)
def test_refused(overrides, named):
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    text = str(caught.value)
    assert "\n" not in text, "one problem, one line"
    assert all(part in text for part in named), text


def test_all_combinations_are_named_at_once():
    with pytest.raises(ConfigError, match="3 problems") as caught:
        check("rollout.n=1", "actor.world_size=2", "trainer.seed=-1")
    assert len(str(caught.value).splitlines()) == 4


def test_validation_alone_needs_held_out_prompts_only():
    check("data.train_files=", purpose="validate")
    with pytest.raises(ConfigError, match=r"data\.val_files is not set"):
        check("data.val_files=", purpose="validate")


def test_declared_cpus_counts_dedicated_replicas():
    config = load_config(None, ["validation.mode=dedicated", "rollout.replicas=3"])
    assert declared_cpus(config) == pytest.approx(3 + 1 + 1 + 0.1)


def test_the_stall_limit_follows_the_other_limits():
    assert load_config(None, list(HELD_OUT)).stall_timeout_s == 3600 + 3 * 15
    config = load_config(None, [*HELD_OUT, "health.train_step_timeout_s=60"])
    assert config.stall_timeout_s == 1800 + 600 + 3 * 15
    config = load_config(None, [*HELD_OUT, "health.stall_timeout_s=9000"])
    assert config.stall_timeout_s == 9000
