"""How many trainer steps the learning rate's schedule runs over.

`trainer.total_training_steps` says so, or `actor.optim.total_training_steps`; else it follows from
the epochs and the number of training prompts, which only a look at the data tells.
"""

import math

from freewheel.config.sections import Config
from freewheel.errors import ConfigError


def steps_of_epochs(config: Config, num_prompts: int) -> int:
    """Most trainer steps that `trainer.total_epochs` give; fewer if groups are filtered or fail."""
    return math.ceil(num_prompts * config.trainer.total_epochs / config.groups_per_step)


def configured_steps(config: Config) -> int | None:
    """Trainer steps of the schedule where a key says so."""
    return config.actor.optim.total_training_steps or config.trainer.total_training_steps


def optimizer_steps(config: Config, trainer_steps: int) -> int:
    """Optimizer steps in so many trainer steps."""
    return trainer_steps * config.async_training.require_batches * config.actor.ppo_epochs


def warm_up_problem(config: Config, trainer_steps: int) -> str | None:
    """What is wrong with a warm-up that a run of so many trainer steps would not outlast."""
    warm_up, steps = config.actor.optim.lr_warmup_steps, optimizer_steps(config, trainer_steps)
    if warm_up == 0 or warm_up < steps:
        return None
    return (
        f"actor.optim.lr_warmup_steps = {warm_up}: the run ({steps} optimizer steps in "
        f"{trainer_steps} trainer steps) ends within the warm-up"
    )


def schedule_steps(config: Config, *, num_prompts: int | None) -> int | None:
    """Trainer steps of the schedule, found out before anything starts.

    Args:
        config: checked.
        num_prompts: training prompts; None if unknown.

    Returns:
        None if it is not known and not needed.

    Raises:
        ConfigError: a `linear` or `cosine` schedule without an end, or a warm-up beyond it.
    """
    steps = configured_steps(config)
    if steps is None and num_prompts is not None:
        steps = steps_of_epochs(config, num_prompts)
    if steps is not None:
        problem = warm_up_problem(config, steps)
        if problem is not None:
            raise ConfigError(problem)
    elif config.actor.optim.lr_scheduler_type != "constant":
        raise ConfigError(
            f"actor.optim.lr_scheduler_type = {config.actor.optim.lr_scheduler_type}: it needs the "
            "number of steps, which does not follow from trainer.total_epochs here, as the number "
            "of training prompts is not known before they are read; set "
            "trainer.total_training_steps or actor.optim.total_training_steps"
        )
    return steps
