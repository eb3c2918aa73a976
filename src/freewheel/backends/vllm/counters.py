"""vLLM's own counters, as its engine reports them after each step."""

import importlib
from typing import Any

_loggers: Any = importlib.import_module("vllm.v1.metrics.loggers")


class Counters(_loggers.StatLoggerBase):
    """Adds up what vLLM tells a stat logger. One object, used as the factory of itself."""

    def __init__(self) -> None:
        self.num_generated_tokens = 0
        self.num_prompt_tokens = 0
        self.num_preempted = 0
        self.num_running = 0
        self.kv_cache_usage = 0.0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> "Counters":
        """As the factory that vLLM asks for a logger."""
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take in one step's statistics."""
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.num_generated_tokens += iteration_stats.num_generation_tokens
            self.num_prompt_tokens += iteration_stats.num_prompt_tokens
            self.num_preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
