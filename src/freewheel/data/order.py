"""In which order the prompts are used: a cursor is a plain number, and any of them resumes exactly.

Cursor c is prompt number `c % num_prompts` of epoch `c // num_prompts`. The order of an epoch
follows from seed and epoch alone, so nothing but the cursor has to be saved.

The permutation is computed place by place, not as an array: ten million prompts would hold up the
event loop for seconds at each epoch and fill the control plane's memory. It is a generalized
Feistel network over pairs (l, r) with l < a = ceil(sqrt(n)) and r < b = ceil(n / a), n prompts; a
place that lands at n or beyond is sent on until it lands below (cycle walking), which keeps it a
bijection and is rare, as a * b - n < a. Source: Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002.
"""

import hashlib
import math

from freewheel.errors import DataError

_ROUNDS = 12
"""Even for a handful of prompts all orders are about equally likely, as a test checks."""


class PromptOrder:
    """A seeded permutation of the prompts for each epoch.

    Args:
        num_prompts: prompts in the data, at least 1.
        seed: of the permutations.
        shuffle: false keeps the order of the data in every epoch.

    Raises:
        DataError: there is no prompt.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool) -> None:
        if num_prompts < 1:
            raise DataError(f"no prompts to order: num_prompts is {num_prompts}, at least 1 wanted")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._num_left = math.isqrt(num_prompts - 1) + 1
        self._num_right = -(-num_prompts // self._num_left)

    @property
    def num_prompts(self) -> int:
        """Prompts in one epoch."""
        return self._num_prompts

    def prompt_at(self, cursor: int) -> tuple[int, int]:
        """The prompt at a cursor.

        Args:
            cursor: prompts issued before it, over all epochs; 0 or more.

        Returns:
            (epoch, prompt index).
        """
        if cursor < 0:
            raise ValueError(f"cursor {cursor} is below 0")
        epoch, place = divmod(cursor, self._num_prompts)
        if not self._shuffle:
            return epoch, place
        key = f"{self._seed}/{epoch}/".encode()
        place = self._scramble(place, key)
        while place >= self._num_prompts:
            place = self._scramble(place, key)
        return epoch, place

    def _scramble(self, place: int, key: bytes) -> int:
        """One pass of the network; each round is undone by subtracting what it added."""
        left, right = divmod(place, self._num_right)
        for number in range(0, _ROUNDS, 2):
            left = (left + _draw(key, number, right)) % self._num_left
            right = (right + _draw(key, number + 1, left)) % self._num_right
        return left * self._num_right + right


def _draw(key: bytes, number: int, half: int) -> int:
    """64 bits from the key, the number of the round and the half that it leaves as it is."""
    text = key + b"%d/%d" % (number, half)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
