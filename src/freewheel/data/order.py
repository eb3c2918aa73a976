"""In which order the prompts are used: a cursor is a plain number, and any of them resumes exactly.

Cursor c is prompt number `c % num_prompts` of epoch `c // num_prompts`. The order of an epoch
follows from seed and epoch alone, so nothing but the cursor has to be saved.
"""

import numpy as np
import numpy.typing as npt

from freewheel.errors import DataError


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
        self._permutations: dict[int, npt.NDArray[np.int64]] = {}

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
        epoch, position = divmod(cursor, self._num_prompts)
        if not self._shuffle:
            return epoch, position
        return epoch, int(self._permutation(epoch)[position])

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._permutations:
            # Neighbours only: one epoch's end overlaps the next one's start; memory stays bounded.
            self._permutations = {
                kept: order for kept, order in self._permutations.items() if abs(kept - epoch) == 1
            }
            self._permutations[epoch] = _permute(self._num_prompts, self._seed, epoch)
        return self._permutations[epoch]


def _permute(num_prompts: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A permutation from raw bits.

    numpy promises that the stream of a bit generator never changes, but not what
    `Generator.permutation` makes of it: a resumed run must not depend on numpy's version. The index
    in the low bits makes the keys unique, so that the order does not depend on the sort either.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, epoch]))
    keys = np.asarray(bits.random_raw(num_prompts), dtype=np.uint64)
    low = np.uint64((1 << (num_prompts - 1).bit_length()) - 1)
    keys &= ~low
    keys |= np.arange(num_prompts, dtype=np.uint64)
    keys.sort()
    keys &= low
    return keys.astype(np.int64)
