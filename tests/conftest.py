"""Shared by all tests."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs():
    """Every compiled program holds memory maps, of which a process may have only so many."""
    yield
    jax.clear_caches()
