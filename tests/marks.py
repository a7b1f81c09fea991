"""Keeps the tests quick: a few of many parameters run everywhere, all of them later."""

import pytest


def fast_only(values, fast):
    """`values` as parameters, all but those in `fast` marked slow. A tuple is several arguments."""

    return _mark(values, fast, pytest.mark.slow)


def full_except(values, kept):
    """`values` as parameters, all but those in `kept` left to the full run."""
    return _mark(values, kept, (pytest.mark.slow, pytest.mark.full))


def _mark(values, kept, marks):
    def mark(value):
        arguments = value if isinstance(value, tuple) else (value,)
        return pytest.param(*arguments, marks=() if value in kept else marks)

    return [mark(value) for value in values]
