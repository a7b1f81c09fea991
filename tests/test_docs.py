"""The code of README and docs runs as it stands, and the contract's details hold."""

import functools
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", "docs/guide.md"]


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def placeholders(directory):
    """What a page's reader brings along: tensors of a step."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "q": normal(30, 8, 1, 9, 64),
        "k": normal(30, 8, 1, 3, 64),
        "v": normal(30, 8, 1, 3, 64),
        "new_tokens": jnp.asarray([1, 1, 0, 0, 0, 0, 0, 1]),
        "x": normal(5, 64),
        "hidden": normal(8, 1, 576),
        "prompts": [[5, 6, 7], [8, 9]],
        "key": jax.random.key(0),
        "qkv": normal(8, 1, (9 + 3 + 3) * 64),
        "model": jax.tree_util.Partial(embed_and_write, normal(100, 3, 64)),
        "token_batches": [rng.integers(0, 100, (4, 64))],
        "directory": str(directory),
    }


def embed_and_write(table, tokens, cache, plan):
    """The least that counts as a model: keys and values are the tokens' rows of a table."""
    for layer in range(cache.config.num_layers):
        cache = jaxkv.write(cache, layer, table[tokens], table[tokens], plan)
    return jnp.zeros((*tokens.shape, 100)), cache


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs(page, tmp_path):
    namespace = placeholders(tmp_path)
    found = blocks_of(page)
    assert found
    for source in found:
        exec(compile(source, page, "exec"), namespace)
    if page == "README.md":
        rng = np.random.default_rng(1)
        q, k, v = (
            jnp.asarray(rng.standard_normal((2, 8, 1, heads, 128)), jnp.float32)
            for heads in (32, 8, 8)
        )
        cache, out, granted = namespace["step"](namespace["cache"], q, k, v, jnp.ones(8, jnp.int32))
        assert granted.all() and cache.lengths.tolist() == [1] * 8
        # Each sequence sees its one token: the output is the value, as stored.
        error = out.reshape(2, 8, 1, 8, 4, 128) - v[..., None, :]
        assert float(jnp.linalg.norm(error)) < 0.1 * 2 * float(jnp.linalg.norm(v))
    if page == "docs/guide.md":
        assert namespace["granted"].all()
        chex.assert_tree_all_finite(namespace["outputs"])
        assert str(namespace["fmt"]) == "fp8k_turbo4v"
        np.testing.assert_array_equal(namespace["blocks"], [0, -1, 1])
        assert namespace["y"].shape == (8, 1, 576)
        assert (namespace["result"].lengths > 0).all()


CONFIG = jaxkv.CacheConfig(
    num_layers=2,
    num_kv_heads=1,
    head_dim=32,
    block_size=8,
    num_blocks=16,
    max_sequences=3,
    max_blocks_per_sequence=4,
    format="fp8k_turbo4v",
)


@functools.partial(jax.jit, static_argnames=("tokens", "packed"), donate_argnames="cache")
def step(cache, x, new_tokens, tokens, packed=False):
    how = {"total_tokens": tokens} if packed else {"max_new_tokens": tokens}
    cache, plan = jaxkv.reserve(cache, new_tokens, **how)
    outputs = []
    for layer in range(2):
        cache = jaxkv.write(
            cache, layer, x[:, :, :1] if not packed else x[:, :1], x[..., :1, :], plan
        )
        outputs.append(jaxkv.attend(cache, layer, x, plan, return_lse=True))
    return cache, outputs, plan


@pytest.mark.slow
def test_skipped_rows_are_zero_with_lse_minus_infinity_even_when_fed_nan():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 2, 32)), jnp.float32)
    x = x.at[0, 2:].set(jnp.nan).at[1].set(jnp.nan).at[2].set(jnp.nan)
    cache, outputs, plan = step(jaxkv.init(CONFIG), x, jnp.asarray([2, 5, 0]), 4)
    assert plan.granted.tolist() == [True, False, True]
    assert plan.refusal.tolist() == [0, 3, 0]
    assert cache.lengths.tolist() == [2, 0, 0]
    for out, lse in outputs:
        chex.assert_tree_all_finite((out, lse[0, :2]))
        assert not out[0, 2:].any() and not out[1:].any()
        assert (lse[0, 2:] == -jnp.inf).all() and (lse[1:] == -jnp.inf).all()


@pytest.mark.slow
def test_packed_rows_of_a_refused_sequence_stay_where_they_are():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 2, 32)), jnp.float32)
    cache = jaxkv.init(CONFIG)
    full = jnp.asarray([2, 40, 2])  # past capacity: larger than N
    cache, outputs, plan = step(cache, x, full, 8, packed=True)
    assert plan.granted.tolist() == [True, False, False]
    cache, outputs, plan = step(jaxkv.init(CONFIG), x, jnp.asarray([2, -1, 3]), 8, packed=True)
    assert plan.offsets.tolist() == [0, 2, 2]
    assert plan.refusal.tolist() == [0, 4, 0]
    out, _ = outputs[0]
    assert out[:5].any(axis=(1, 2)).all() and not out[5:].any()
    with pytest.raises(jaxkv.CacheError, match="bad id"):
        jaxkv.check(cache)
