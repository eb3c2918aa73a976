"""Checkpoint folders on disk: how they are written, verified, found, listed, read and exported."""

from freewheel.checkpoint.control_state import CONTROL_FORMAT as CONTROL_FORMAT
from freewheel.checkpoint.export import check_target as check_target
from freewheel.checkpoint.export import export_model as export_model
from freewheel.checkpoint.listing import Listed as Listed
from freewheel.checkpoint.listing import look_at_checkpoints as look_at_checkpoints
from freewheel.checkpoint.reader import LATEST as LATEST
from freewheel.checkpoint.reader import Checkpoint as Checkpoint
from freewheel.checkpoint.reader import find_checkpoint as find_checkpoint
from freewheel.checkpoint.reader import list_checkpoints as list_checkpoints
from freewheel.checkpoint.reader import read_checkpoint as read_checkpoint
from freewheel.checkpoint.reader import step_of as step_of
from freewheel.checkpoint.store import FileCheckpointStore as FileCheckpointStore
from freewheel.checkpoint.store import point_latest_to as point_latest_to
from freewheel.checkpoint.store import restore_replaced as restore_replaced

__all__ = [
    "CONTROL_FORMAT",
    "LATEST",
    "Checkpoint",
    "FileCheckpointStore",
    "Listed",
    "check_target",
    "export_model",
    "find_checkpoint",
    "list_checkpoints",
    "look_at_checkpoints",
    "point_latest_to",
    "read_checkpoint",
    "restore_replaced",
    "step_of",
]
