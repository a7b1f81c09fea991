"""Keeps the fast part of the tests small: a few of many parameters run there, all of them later."""

import pytest


def fast_only(values, fast):
    """`values` as parameters, all but those in `fast` marked slow. A tuple is several arguments."""

    def mark(value):
        arguments = value if isinstance(value, tuple) else (value,)
        return pytest.param(*arguments, marks=() if value in fast else pytest.mark.slow)

    return [mark(value) for value in values]
