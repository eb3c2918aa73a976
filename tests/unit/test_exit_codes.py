"""The exit codes: each has one meaning, and the document lists them all."""

import re
from pathlib import Path

from freewheel.cli.exit_codes import exit_codes

DOCUMENT = Path(__file__).parents[2] / "docs" / "exit-codes.md"


def test_the_document_lists_exactly_the_codes_that_there_are():
    rows = re.findall(r"^\| (\d+) \| *`?(\w*)`? *\|", DOCUMENT.read_text(), re.MULTILINE)
    documented = {int(code): name for code, name in rows}
    assert sorted(documented) == sorted(exit_codes())
    for code, name in documented.items():
        if name:
            assert exit_codes()[code].startswith(f"{name}: ")
