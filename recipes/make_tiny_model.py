"""Make the tiny model that the quickstart trains, and its prompts.

    python recipes/make_tiny_model.py

writes `recipes/tiny/` (a Hugging Face folder: Llama, 0.5 million parameters, one token a
character) and `recipes/data/{train,val}.jsonl`, each line with `prompt` and `ground_truth`.

The task is to add three to five digits, writing down the working: the leftmost sum is replaced by
its value until one number is left. `7+8+5+9=` is answered by `15+5+9=20+9=29`.

The model is trained by plain next-token prediction on the answers of a sloppy calculator. It goes
by the right procedure in `RIGHT_SHARE` of its answers; in the others it forgets, throughout, to
carry the one (`5+5+9=0+9=9`). So the model knows both procedures, and chooses between them by that
share: sampled at temperature 1 it is right about as often, and greedily it is nearly always wrong.
Reinforcement learning mends that within a hundred steps. Every prompt has a carry in its first sum,
so that none is right by luck, and no held-out prompt is among those to train on.

Deterministic on one kind of CPU: fixed seeds, one thread.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(len(SPECIAL))
VOCABULARY = (*SPECIAL, *"0123456789+=")
TOKEN_IDS = {token: token_id for token_id, token in enumerate(VOCABULARY)}

SEED = 1
STEPS = 2000
BATCH_SIZE = 64
LR = 3e-3
NUM_TERMS_SHARES = {3: 0.1, 4: 0.45, 5: 0.45}
"""How often a problem has so many digits."""
RIGHT_SHARE = 0.32
"""Share of the corpus that goes by the right procedure."""
NUM_TRAIN = 3072
NUM_VAL = 64

Add = Callable[[int, int], int]


def add_right(a: int, b: int) -> int:
    """Add."""
    return a + b


def add_sloppy(a: int, b: int) -> int:
    """Add, but forget to carry the one."""
    return a + b - (10 if carries(a, b) else 0)


def carries(a: int, b: int) -> bool:
    """Whether the units add up to ten or more."""
    return a % 10 + b % 10 >= 10


def write_prompt(terms: Sequence[int]) -> str:
    """`7+8+5+9=`."""
    return "+".join(map(str, terms)) + "="


def write_working(terms: Sequence[int], add: Add) -> str:
    """Replace the leftmost sum by its value until one number is left: `15+5+9=20+9=29`."""
    lines: list[str] = []
    while len(terms) > 1:
        terms = [add(terms[0], terms[1]), *terms[2:]]
        lines.append("+".join(map(str, terms)))
    return "=".join(lines)


def draw_terms(rng: random.Random, num_terms: int) -> list[int]:
    """Digits, none of them 0, whose first sum has a carry."""
    while True:
        terms = [rng.randint(1, 9) for _ in range(num_terms)]
        if carries(terms[0], terms[1]):
            return terms


def encode(text: str) -> list[int]:
    """Token ids of a text, one a character."""
    return [TOKEN_IDS[character] for character in text]


def draw_batch(
    rng: random.Random, num_terms: int, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T), padded on the right, and labels (B, T): -100 outside the answers."""
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    for _ in range(batch_size):
        terms = draw_terms(rng, num_terms)
        add = add_right if rng.random() < RIGHT_SHARE else add_sloppy
        prompts.append(encode(write_prompt(terms)))
        answers.append([*encode(write_working(terms, add)), EOS])
    prompts_BP = torch.tensor(prompts)
    answers_BT = pad_sequence([torch.tensor(answer) for answer in answers], True, -100)
    input_ids_BT = torch.cat([prompts_BP, answers_BT.clamp(min=PAD)], 1)
    return input_ids_BT, torch.cat([torch.full_like(prompts_BP, -100), answers_BT], 1)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; nothing is put before or after a text."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        unk_token=SPECIAL[UNK],
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def make_model() -> LlamaForCausalLM:
    """An untrained Llama. Heads of 32, which is the smallest size that vLLM serves on a CPU."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def pretrain(model: LlamaForCausalLM) -> None:
    """Next-token prediction on the sloppy calculator's answers; the rate falls to zero."""
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=0.1)
    start_s = time.monotonic()
    for step in range(1, STEPS + 1):
        loss = 0.0
        for num_terms, share in NUM_TERMS_SHARES.items():
            # A batch for each length wastes no compute on padding.
            input_ids_BT, labels_BT = draw_batch(rng, num_terms, round(share * BATCH_SIZE))
            part = share * model(input_ids=input_ids_BT, labels=labels_BT).loss
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.4f}, {time.monotonic() - start_s:.0f} s", flush=True)


@torch.no_grad()
def answer_probability(model: LlamaForCausalLM, terms: Sequence[int], add: Add) -> float:
    """How likely the model writes exactly the working of this procedure, and ends."""
    prompt = encode(write_prompt(terms))
    answer = torch.tensor([*encode(write_working(terms, add)), EOS])
    input_ids = torch.cat([torch.tensor(prompt), answer])[None]
    logits_TV = model(input_ids=input_ids).logits[0, len(prompt) - 1 : -1]
    return logits_TV.log_softmax(-1).gather(1, answer[:, None]).sum().exp().item()


def draw_prompts(rng: random.Random, num_prompts: int) -> list[tuple[int, ...]]:
    """So many different problems, each number of terms by its share."""
    lengths, shares = list(NUM_TERMS_SHARES), list(NUM_TERMS_SHARES.values())
    problems: dict[tuple[int, ...], None] = {}
    while len(problems) < num_prompts:
        (num_terms,) = rng.choices(lengths, shares)
        problems[tuple(draw_terms(rng, num_terms))] = None
    return list(problems)


def write_data(folder: Path) -> list[tuple[int, ...]]:
    """Write the prompts to train on and the held-out ones; return the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    problems = draw_prompts(random.Random(SEED + 1), NUM_VAL + NUM_TRAIN)
    for name, part in (("val", problems[:NUM_VAL]), ("train", problems[NUM_VAL:])):
        rows = [{"prompt": write_prompt(terms), "ground_truth": str(sum(terms))} for terms in part]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return problems[:NUM_VAL]


def write_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write model, tokenizer and generation defaults."""
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, max_new_tokens=24
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    # The name that every version of transformers knows.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def report(model: LlamaForCausalLM, problems: Sequence[Sequence[int]]) -> None:
    """Print how likely each procedure is on these problems."""
    for num_terms in NUM_TERMS_SHARES:
        chosen = [terms for terms in problems if len(terms) == num_terms]
        right = torch.tensor([answer_probability(model, terms, add_right) for terms in chosen])
        sloppy = torch.tensor([answer_probability(model, terms, add_sloppy) for terms in chosen])
        low, high = right.quantile(torch.tensor([0.1, 0.9])).tolist()
        print(
            f"{num_terms} digits: right {right.mean():.2f} (10 to 90 %: {low:.2f} to {high:.2f}), "
            f"sloppy {sloppy.mean():.2f}, other {1 - (right + sloppy).mean():.2f}"
        )


def main() -> None:
    """Make model and prompts."""
    parser = argparse.ArgumentParser(description="Make the tiny model and its prompts.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder (default: recipes/)")
    parser.add_argument("--only-data", action="store_true", help="write the prompts alone")
    arguments = parser.parse_args()
    held_out = write_data(arguments.out / "data")
    if arguments.only_data:
        return
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    model = make_model()
    pretrain(model)
    model.eval()
    write_model(model, arguments.out / "tiny")
    report(model, held_out)


if __name__ == "__main__":
    main()
