"""The benchmark's parts give right answers and its command prints them; speed is not tested."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxkv import bench
from jaxkv.cli import app

pytestmark = pytest.mark.as_shipped

SHAPE = bench.Shape(batch=2, context=40, num_kv_heads=2, num_q_heads=4, head_dim=32, block_size=8)


def test_dense_attention_is_attention():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 2, n, 32)), jnp.float32) for n in (3, 7, 7))
    # Token-major, with the group as query heads of each KV head.
    want = jax.nn.dot_product_attention(
        q.reshape(1, 1, 6, 32), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    )
    chex.assert_trees_all_close(
        bench.dense_attention(q, k, v).reshape(1, 1, 6, 32), want, atol=1e-5
    )


@pytest.mark.slow
def test_the_filled_cache_holds_the_context():
    cache, plan = bench.filled(SHAPE.config("int8"), 40)
    assert cache.lengths.tolist() == [40, 40] and plan.starts.tolist() == [39, 39]
    assert all(bool(leaf.any()) for leaf in jax.tree.leaves(cache.layers))


def test_interleave_takes_medians_per_step():
    waits = iter([0.0, 0.0, *[0.002, 0.004] * 3])
    import time

    def run(n):
        time.sleep(next(waits))
        return 0

    cases = [bench.Case("a", run), bench.Case("b", run, per_run=2)]
    seen = []
    medians = bench.interleave(cases, rounds=3, inner=1, progress=lambda *x: seen.append(x))
    assert medians["a"] >= 0.002 and medians["b"] >= 0.002
    assert seen[-1] == (6, 6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"batch": 0}, "batch: got 0"), ({"num_q_heads": 3}, "num_q_heads: got 3")],
)
def test_bad_shapes(fields, message):
    with pytest.raises(ValueError, match=message):
        bench.Shape(**{"num_kv_heads": 2, **fields})


@pytest.mark.slow
def test_the_command_prints_a_row_per_format_and_plots(tmp_path):
    path = tmp_path / "bench.png"
    result = CliRunner().invoke(
        app,
        [
            *("bench", "--formats", "int8", "--batch", "2", "--context", "40", "--rounds", "1"),
            *("--kv-heads", "1", "--q-heads", "2", "--head-dim", "16", "--plot", str(path)),
        ],
        catch_exceptions=False,
    )
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[2][:2] == ["dense", "f32"] and rows[3][:2] == ["jax.nn", "f32"]
    assert rows[4][:2] == ["int8", "9.00"] and float(rows[4][2]) > 0
    assert any("argmin per block" in line for line in result.stdout.splitlines())
    assert path.stat().st_size > 1000
