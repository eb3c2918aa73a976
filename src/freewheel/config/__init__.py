"""The configuration: sections, loading, checks, reference."""

from freewheel.config.checks import check_config as check_config
from freewheel.config.load import dump_config as dump_config
from freewheel.config.load import load_config as load_config
from freewheel.config.sections import Config as Config

__all__ = ["Config", "check_config", "dump_config", "load_config"]
