"""Messages of exceptions in one line, and the parts of config errors."""

from __future__ import annotations

import pytest

from gdpo_nemo.utils.errors import ConfigError, first_line, message_line


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


@pytest.mark.parametrize(
    "text, key, problem",
    [
        ("gdpo.beta: must be at least 0", "gdpo.beta", "must be at least 0"),
        ("/tmp/rows.jsonl:3: not valid JSON: ends early", "/tmp/rows.jsonl:3", "not valid JSON: ends early"),
        ("the runs have no rewards: use --metric", "", "the runs have no rewards: use --metric"),
        ("no access token", "", "no access token"),
    ],
)
def test_config_error_knows_its_key_and_is_the_problem_of_an_outer_key(text, key, problem):
    error = ConfigError(text)
    assert (error.key, error.problem) == (key, problem)
    outer = error.within("env.math")
    assert (outer.key, outer.problem, str(outer)) == ("env.math", text, f"env.math: {text}")
