"""Shared by the kernels' tests."""

import os
import pickle

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, compute)`: what one of the parallel test processes computes, all of them get."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def get(name, compute):
        path = root / f"{name}.pickle"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_bytes(pickle.dumps(compute()))
        return pickle.loads(path.read_bytes())

    return get
