"""References to the published versions that someone still needs.

The newest version is always kept; an older one for as long as a validation holds it. Dropping the
last reference frees the memory where the weights lie.
"""

from collections import Counter

from freewheel.errors import InvariantError
from freewheel.types import Weights


class WeightStore:
    """Published weights by version."""

    def __init__(self) -> None:
        self._weights: dict[int, Weights] = {}
        self._holds: Counter[int] = Counter()
        self._latest: Weights | None = None

    @property
    def latest(self) -> Weights | None:
        """The newest version, None before the first publication."""
        return self._latest

    def add(self, weights: Weights) -> None:
        """Publish a version newer than all before."""
        if self._latest is not None and weights.version <= self._latest.version:
            raise InvariantError(
                f"version {weights.version} is published after version {self._latest.version}"
            )
        self._weights[weights.version] = weights
        self._latest = weights
        self._drop_unneeded()

    def add_held(self, weights: Weights) -> None:
        """Take back an older version that is held; the newest one stays what it is."""
        if not self.is_held(weights.version):
            raise InvariantError(f"version {weights.version} is taken back but nobody holds it")
        self._weights[weights.version] = weights

    def is_held(self, version: int) -> bool:
        """True if someone needs this version, whether its weights are here or not."""
        return self._holds[version] > 0

    def has(self, version: int) -> bool:
        """True if the weights of this version are kept."""
        return version in self._weights

    def renew(self, weights: Weights) -> None:
        """Take new references to a version that is kept; the old ones may lead nowhere."""
        if weights.version in self._weights:
            self._weights[weights.version] = weights
        if self._latest is not None and self._latest.version == weights.version:
            self._latest = weights

    def get(self, version: int) -> Weights:
        """The weights of a version that is the newest or held."""
        if version not in self._weights:
            raise InvariantError(
                f"weights of version {version} are gone; kept: {sorted(self._weights)}"
            )
        return self._weights[version]

    def hold(self, version: int) -> None:
        """Keep a version until it is released as often as it was held."""
        self._holds[version] += 1

    def release(self, version: int) -> None:
        """End one hold."""
        if self._holds[version] <= 0:
            raise InvariantError(f"version {version} is released but not held")
        self._holds[version] -= 1
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        newest = -1 if self._latest is None else self._latest.version
        for version in [v for v in self._weights if v != newest and self._holds[v] == 0]:
            del self._weights[version]
            del self._holds[version]
