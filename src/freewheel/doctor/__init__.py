"""Examines any Python process from outside, and explains why it is stuck, or that it is not."""

from .dump import CannotExamineError as CannotExamineError
from .dump import read_dump as read_dump
from .examine import Examination as Examination
from .examine import Sampling as Sampling
from .examine import examine as examine
from .examine import judge as judge
from .explain import as_data as as_data
from .explain import as_text as as_text
from .find import ray_processes as ray_processes
from .findings import Certainty as Certainty
from .findings import Finding as Finding

__all__ = [
    "CannotExamineError",
    "Certainty",
    "Examination",
    "Finding",
    "Sampling",
    "as_data",
    "as_text",
    "examine",
    "judge",
    "ray_processes",
    "read_dump",
]
