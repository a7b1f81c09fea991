"""Shared by all tests."""

import os

import jax
import pytest

IS_ALL_FAST = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0") != "0"


def pytest_runtest_setup(item):
    """Compiles as users do where numbers or programs are checked for their own sake, else fast."""
    is_as_shipped = not IS_ALL_FAST and item.get_closest_marker("as_shipped") is not None
    jax.config.update("jax_disable_most_optimizations", not is_as_shipped)


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs():
    """Every compiled program holds memory maps, of which a process may have only so many."""
    yield
    jax.clear_caches()
