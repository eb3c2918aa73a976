"""The data: prompts from files, Hugging Face folders and generators, and the order they come in.

Importing this package loads numpy alone; pyarrow, `datasets` and `reasoning_gym` are imported when
a source of their kind is opened.
"""

from freewheel.data.check import check_data as check_data
from freewheel.data.dataset import PromptDataset as PromptDataset
from freewheel.data.dataset import open_dataset as open_dataset
from freewheel.data.order import PromptOrder as PromptOrder
from freewheel.data.records import PromptRecord as PromptRecord

__all__ = ["PromptDataset", "PromptOrder", "PromptRecord", "check_data", "open_dataset"]
