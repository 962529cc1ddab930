"""The one line that is left of somebody else's exception."""

from __future__ import annotations

import pytest

from gdpo_nemo.utils.errors import first_line, message_line


@pytest.mark.parametrize(
    "error, message, named",
    [
        (ValueError("\n  first\nsecond"), "first", "ValueError: first"),
        (EOFError(), "EOFError", "EOFError"),
        (OSError(" \n"), "OSError", "OSError"),
    ],
)
def test_an_exception_is_one_line_even_without_a_message(error, message, named):
    assert (message_line(error), first_line(error)) == (message, named)
