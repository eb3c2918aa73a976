"""A look at a safetensors file's header: is it one that can be read safely. Needs no torch.

Format: 8 bytes with the header's length (little-endian), the header as a JSON object of tensors
with `dtype`, `shape` and `data_offsets`, then the bytes. Source: the format's own description,
https://huggingface.co/docs/safetensors#format, which also sets the limit on the header.
"""

import json
from pathlib import Path
from typing import Any, cast

MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8


def safetensors_problem(path: Path) -> str | None:
    """What is wrong with the file, in words; None if its header describes just what it holds.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            return f"its header says that it is {length} bytes long; the file has {size}"
        text = file.read(length)
    try:
        tensors = cast("dict[str, Any]", json.loads(text))
        spans = [
            cast("list[Any]", entry["data_offsets"])
            for name, entry in tensors.items()
            if name != "__metadata__"
        ]
        return _problem_of_spans(spans, size - _LENGTH_BYTES - length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its header is not that of a safetensors file: {error!r}"


def _problem_of_spans(spans: list[list[Any]], num_bytes: int) -> str | None:
    """The tensors' places have to fill the file, each byte once."""
    at = 0
    for begin, end in sorted((int(begin), int(end)) for begin, end in spans):
        if begin != at or end < begin:
            return f"its header puts a tensor at bytes {begin} to {end}, where {at} was due"
        at = end
    return None if at == num_bytes else f"its tensors have {at} bytes, the file {num_bytes}"
