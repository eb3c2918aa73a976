"""What a pattern says when it has recognised itself: a finding, with its evidence."""

from dataclasses import dataclass
from enum import StrEnum

from freewheel.doctor.stacks import Frame


class Certainty(StrEnum):
    """How sure a finding is."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"

    def lowered(self) -> "Certainty":
        """One step less sure."""
        return Certainty.LIKELY if self is Certainty.CERTAIN else Certainty.POSSIBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a process.

    Attributes:
        pattern: stable name of the pattern.
        certainty: how sure it is.
        pid: the process.
        title: one sentence, naming the actor or program and the thread.
        thread: name and number of the thread, or None if it concerns the process.
        evidence: the frame that shows it, or None where a fact of the kernel does.
        caller: the first frame of the user's own code below the evidence.
        entry: the outermost frame of the user's code on that thread, if it is another one.
        holder: the frame of another thread that holds what this one waits for.
        why: what happens, in a sentence or two, with the observations it rests on.
        remedy: what to do.
    """

    pattern: str
    certainty: Certainty
    pid: int
    title: str
    why: str
    remedy: str
    thread: str | None = None
    evidence: Frame | None = None
    caller: Frame | None = None
    entry: Frame | None = None
    holder: Frame | None = None
