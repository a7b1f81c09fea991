"""Attention over pages: every format, path and option against the oracle."""

from __future__ import annotations

import attention_cases as cases
import numpy as np
import oracle
import pytest

from jaxkv import attention_xla
from jaxkv.formats import FORMATS

OPTIONS = {
    "none": {},
    "window": {"window": 11},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 11, "soft_cap": 2.0, "sinks": True, "scale": 0.3},
}


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Tiles and chunks so small that every loop takes several trips."""
    patch = pytest.MonkeyPatch()
    patch.setattr(attention_xla, "_CHUNK_ELEMENTS", 2 * cases.BLOCK_SIZE * 2 * 64)
    patch.setattr(attention_xla, "_TILE_TOKENS", 8)
    yield
    patch.undo()


def check(format_name, step, option, group, *, heads=2, head_dim=64, v_head_dim=64, packed=False):
    plan = cases.make_plan(step, 72 if packed else None)
    k, v = cases.sides(plan, format_name, heads, head_dim, v_head_dim)
    q = cases.queries(plan, heads * group, head_dim)
    options = dict(OPTIONS[option])
    if "sinks" in options:
        options["sinks"] = np.linspace(-2, 3, heads * group, dtype=np.float32)
    out, lse = cases.attend(q, k, v, plan, **options)
    expected, expected_lse = oracle.attend(q, k.rows(), v.rows(), plan, **options)
    live = np.asarray(plan.slots) >= 0
    assert not np.asarray(out)[~live].any()
    assert (np.asarray(lse)[~live] == -np.inf).all()
    exact = k.spec.format.name in ("bf16", "f16") and v.spec.format.name in ("bf16", "f16")
    assert cases.relative_error(out, expected) < (1e-5 if exact else 3e-3)
    np.testing.assert_allclose(np.asarray(lse)[live], expected_lse[live], atol=3e-3)


@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_equals_oracle(format_name, step):
    check(format_name, step, "all", 3)


@pytest.mark.parametrize("packed", [False, True])
def test_packed_equals_oracle(packed):
    check("bf16", "mixed", "none", 3, packed=packed)
