"""The control plane and the command line load neither torch nor ray nor an engine."""

import subprocess
import sys

import pytest

MODULES = [
    "freewheel.control.controller",
    "freewheel.simulation.run",
    "freewheel.checkpoint",
    "freewheel.doctor",
]


@pytest.mark.parametrize("module", ["freewheel.app", "freewheel.cli.main", "freewheel.preflight"])
def test_the_process_of_the_command_line_never_loads_vllm(module):
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", MODULES)
def test_no_heavy_module_is_loaded(module):
    code = (
        f"import sys, {module}; "
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
