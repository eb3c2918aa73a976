"""Checkpoint folders on disk: how they are written, verified, found and read."""

from freewheel.checkpoint.reader import LATEST as LATEST
from freewheel.checkpoint.reader import Checkpoint as Checkpoint
from freewheel.checkpoint.reader import find_checkpoint as find_checkpoint
from freewheel.checkpoint.reader import list_checkpoints as list_checkpoints
from freewheel.checkpoint.reader import read_checkpoint as read_checkpoint
from freewheel.checkpoint.store import FileCheckpointStore as FileCheckpointStore

__all__ = [
    "LATEST",
    "Checkpoint",
    "FileCheckpointStore",
    "find_checkpoint",
    "list_checkpoints",
    "read_checkpoint",
]
