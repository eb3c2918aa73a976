"""Convert a GGUF file of a Llama into a Hugging Face folder: `python -m freewheel.convert_gguf`.

A program of its own, run by `models.resolve_model`, because it needs torch and transformers and the
control plane must not load them.
"""

import sys
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

# transformers gives these no types worth checking against.
_AutoTokenizer = cast("Any", AutoTokenizer)
_Llama = cast("Any", LlamaForCausalLM)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write model (float32), tokenizer and generation defaults into `folder`, which is made."""
    tokenizer = _AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = _dequantized(gguf)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantized(gguf: Path) -> LlamaForCausalLM:
    """The model as a plain float32 one; transformers refuses to save what it read from a GGUF."""
    loaded = _Llama.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    return model


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
