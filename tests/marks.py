"""Keeps the tests quick: a few of many parameters run everywhere, all of them later."""

import pytest


def fast_only(values, fast, daily=None):
    """`values` as parameters, all but those in `fast` marked slow. A tuple is several arguments.

    With `daily`, those in neither are left to the full run.
    """
    if daily is not None:
        slow = {p.values: p.marks for p in _mark(daily, fast, pytest.mark.slow)}
        rest = _mark(values, (*fast, *daily), (pytest.mark.slow, pytest.mark.full))
        return [pytest.param(*p.values, marks=slow.get(p.values, p.marks)) for p in rest]

    return _mark(values, fast, pytest.mark.slow)


def full_except(values, kept):
    """`values` as parameters, all but those in `kept` left to the full run."""
    return _mark(values, kept, (pytest.mark.slow, pytest.mark.full))


def _mark(values, kept, marks):
    def mark(value):
        arguments = value if isinstance(value, tuple) else (value,)
        return pytest.param(*arguments, marks=() if value in kept else marks)

    return [mark(value) for value in values]
