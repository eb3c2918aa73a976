"""How a run began: when, where, and what for; kept in its folder as `origin.json`."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from freewheel.config.checks import Purpose
from freewheel.errors import RecordError
from freewheel.files import dump_json, write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """See the module's docstring.

    Attributes:
        time_origin: when it started first, in seconds since the epoch.
        host: where.
        purpose: `train`, or `validate`: a validation by hand, which is not resumed.
        target: what a validation scores.
    """

    time_origin: float
    host: str = ""
    purpose: Purpose = "train"
    target: str = ""

    @classmethod
    def read(cls, path: Path) -> "Origin":
        """Read the file.

        Raises:
            RecordError: it is damaged.
        """
        try:
            return _ADAPTER.validate_json(path.read_bytes())
        except ValidationError as error:
            raise RecordError(f"{path} does not say how the run began: {error}") from error

    def write(self, path: Path) -> None:
        """Write the file. Blocks until it is on disk."""
        write_atomic(path, dump_json(self) + "\n")

    def validate_command(self, run_dir: Path) -> str:
        """What scores the same once more, by the configuration in the folder of the validation."""
        return f"freewheel validate {self.target} --run {run_dir}"


_ADAPTER = TypeAdapter(Origin)
