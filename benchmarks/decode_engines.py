"""The engines that `decode.py` compares, each in a process of its own, driven by lines of JSON.

A line in is `{"prompts": [[...], ...], "new_tokens": n}`, a line out `{"prefill_s": ...,
"decode_s": ...}`: the time until all rows have their first token, and the time of all others.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch


def settings(lengths, threads, *, enforce_eager=None):
    """Freewheel's configuration; (most prompt tokens, most new tokens, most rows)."""
    from freewheel.config.sections import Config, RolloutConfig

    prompt_tokens, new_tokens, rows = lengths
    return Config(
        rollout=RolloutConfig(
            max_prompt_length=prompt_tokens,
            max_response_length=new_tokens,
            max_num_seqs=rows,
            kv_cache_bytes=2 << 30,
            device="cpu",
            dtype="float32",
            num_threads=threads,
            enforce_eager=enforce_eager,
        )
    )


def freewheel(folder, lengths, threads, *, enforce_eager=None):
    """The embedded engine."""
    from transformers import AutoModelForCausalLM

    from freewheel.engine.loading import load_model
    from freewheel.engine.torch_engine import TorchEngine
    from freewheel.types import GenerationRequest, SamplingParams
    from freewheel.weights import pack_weights

    config = settings(lengths, threads, enforce_eager=enforce_eager)
    loaded = load_model(config, folder)
    torch.set_num_threads(loaded.num_useful_threads(threads))
    engine = TorchEngine(config, loaded.without_eos())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine.update_weights(0, pack_weights(model.named_parameters()))
    while not engine.is_settled:
        engine.settle()
    del model

    def measure(prompts, new_tokens):
        for row, prompt in enumerate(prompts):
            engine.add(
                GenerationRequest(
                    request_id=str(row),
                    prompt_token_ids=np.array(prompt, dtype=np.int32),
                    sampling=SamplingParams(max_tokens=new_tokens, seed=row),
                )
            )
        start = time.perf_counter()
        while engine.has_prefills:
            engine.step()
        middle = time.perf_counter()
        while engine.can_step:
            engine.step()
        return middle - start, time.perf_counter() - middle

    return measure


def eager(folder, lengths, threads):
    """The embedded engine without its compiled kernels."""
    return freewheel(folder, lengths, threads, enforce_eager=True)


def generate(folder, lengths, threads):
    """`generate` of transformers."""
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.set_num_threads(threads)

    class FirstToken(StoppingCriteria):
        def __init__(self):
            self.time_s = None

        def __call__(self, input_ids, scores, **kwargs):
            self.time_s = self.time_s or time.perf_counter()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def measure(prompts, new_tokens):
        prompts_BT, first = torch.tensor(prompts), FirstToken()
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompts_BT,
                attention_mask=torch.ones_like(prompts_BT),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([first]),
            )
        return first.time_s - start, time.perf_counter() - first.time_s

    return measure


def continuous(folder, lengths, threads):
    """Continuous batching of transformers. Prefill is timed by a call for one token.

    By itself it takes nearly all of the machine's memory; here it gets what the rows need.
    """
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    torch.set_num_threads(threads)
    page = 32
    batching = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=lengths[2] * (-(-(lengths[0] + lengths[1]) // page) + 1),
        max_batch_tokens=512,
    )

    def run(prompts, new_tokens):
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            eos_token_id=-1,
            pad_token_id=0,
        )
        start = time.perf_counter()
        outputs = model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=batching,
            persistent_manager=True,
            warmup=False,
        )
        elapsed_s = time.perf_counter() - start
        found = sum(len(output.generated_tokens) for output in outputs.values())
        if found != len(prompts) * new_tokens:
            raise RuntimeError(f"{found} tokens instead of {len(prompts) * new_tokens}")
        return elapsed_s

    return lambda prompts, new_tokens: apart(run, prompts, new_tokens)


def vllm(folder, lengths, threads):
    """vLLM, eager, without prefix cache. Prefill is timed by a call for one token."""
    from freewheel.backends.vllm.settings import environment

    os.environ.update(environment(settings(lengths, threads).rollout, is_cpu=True))
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=lengths[0] + lengths[1],
        max_num_seqs=lengths[2],
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
        generation_config="vllm",
        disable_log_stats=True,
    )

    def run(prompts, new_tokens):
        sampling = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - start

    return lambda prompts, new_tokens: apart(run, prompts, new_tokens)


def apart(run, prompts, new_tokens):
    """Prefill and decode times of an engine that only gives whole calls."""
    prefill_s = run(prompts, 1)
    return prefill_s, max(run(prompts, new_tokens) - prefill_s, 1e-9)


ENGINES = {
    "freewheel": freewheel,
    "eager": eager,
    "generate": generate,
    "continuous": continuous,
    "vllm": vllm,
}


def environment(name, threads):
    """Environment of an engine's process: the same for all, plus what each one's manual says."""
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "3000",
        "THP_MEM_ALLOC_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    intel = Path(sys.prefix) / "lib" / "libiomp5.so"
    if name == "vllm" and intel.exists():
        variables["LD_PRELOAD"] = str(intel)
    return os.environ | variables


def serve(name, folder, lengths, threads):
    """Answer lines of standard input. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # of transformers, about sampling settings it is given
    measure = ENGINES[name](Path(folder), lengths, threads)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        prefill_s, decode_s = measure(**json.loads(line))
        print(json.dumps({"prefill_s": prefill_s, "decode_s": decode_s}), file=answers, flush=True)


if __name__ == "__main__":
    engine, model, *numbers = sys.argv[1:]
    *limits, cores = map(int, numbers)
    serve(engine, model, limits, cores)
