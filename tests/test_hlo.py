"""What compiled steps do to the pools: nothing but updates in place."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from marks import fast_only, full_except

import jaxkv
from jaxkv.formats import FORMATS

pytestmark = pytest.mark.as_shipped

LAYERS, TOKENS = 2, 3
# No other array has so many rows.
NUM_BLOCKS = 1237


def make_cache(name, **fields):
    return jaxkv.init(
        jaxkv.CacheConfig(
            num_layers=LAYERS,
            num_kv_heads=2,
            head_dim=64,
            block_size=8,
            num_blocks=NUM_BLOCKS,
            max_sequences=2,
            max_blocks_per_sequence=4,
            format=name,
            **fields,
        )
    )


def step(cache, x):
    """Writes and attends in every layer, as a model does: x [2, T, 6, 64]."""
    cache, plan = jaxkv.reserve(cache, jnp.array([1, 1]), max_new_tokens=x.shape[1])
    for layer in range(LAYERS):
        cache = jaxkv.write(cache, layer, x[:, :, :2], x[:, :, 2:4], plan)
        x = jaxkv.attend(cache, layer, x, plan)
    return cache, x


def in_jit(cache, x):
    return step(cache, x)


def in_while_loop(cache, x):
    def body(carry):
        i, cache, x = carry
        return (i + 1, *step(cache, x))

    return jax.lax.while_loop(lambda carry: carry[0] < 4, body, (0, cache, x))


def in_scan(cache, x):
    return jax.lax.scan(lambda carry, _: (step(*carry), None), (cache, x), length=4)


PROGRAMS = {"jit": in_jit, "while_loop": in_while_loop, "scan": in_scan}


@functools.cache
def compiled(name, program, tokens):
    cache = make_cache(name)
    x = jnp.zeros((2, tokens, 6, 64))
    return jax.jit(PROGRAMS[program], donate_argnums=0).lower(cache, x).compile(), cache


def copies_of_pools(text, lead=f"{NUM_BLOCKS},"):
    """Instructions that make a pool-sized array other than by an update in place."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?\S+ = (\S+\[[\d,]*\])\S* ([a-z][a-z-]*)\(", line)
        if not match or not match[1].split("[")[1].startswith(lead):
            continue
        if match[2] in ("copy", "copy-start", "select", "broadcast", "transpose", "concatenate"):
            found.append(line.strip())
    return found


def check(name, program, tokens):
    executable, cache = compiled(name, program, tokens)
    text = executable.as_text()
    assert f"[{NUM_BLOCKS},2,8," in text
    assert copies_of_pools(text) == []
    memory = executable.memory_analysis()
    smallest_pool = min(leaf.nbytes for leaf in jax.tree.leaves(cache.layers[0].k.data))
    assert memory.temp_size_in_bytes < smallest_pool
    assert memory.alias_size_in_bytes >= cache.nbytes


@pytest.mark.parametrize(
    "name, program",
    fast_only([("bf16", "while_loop"), ("turbo3", "jit")], [("bf16", "while_loop")]),
)
def test_no_step_copies_a_pool(name, program):
    check(name, program, 1)


@pytest.mark.parametrize(
    "name", fast_only([*FORMATS, "fp8k_turbo4v"], [], ["f16", "fp8", "nvfp4", "turbo4", "turbo3"])
)
def test_no_step_copies_a_pool_in_any_format(name):
    check(name, "while_loop", 1)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["jit", "scan"])
@pytest.mark.parametrize("name", full_except(["bf16", "int8", "turbo3"], ["int8"]))
def test_no_step_copies_a_pool_in_any_loop(name, program):
    check(name, program, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "turbo4"])
def test_no_step_of_several_tokens_copies_a_pool(name):
    check(name, "while_loop", TOKENS)


@pytest.mark.slow
def test_no_step_copies_a_pool_or_its_exact_tokens():
    cache = make_cache("turbo4", exact_first=1, exact_recent=64)
    x = jnp.zeros((2, 1, 6, 64))
    program = jax.jit(in_while_loop, donate_argnums=0).lower(cache, x).compile()
    text = program.as_text()
    # The first token, 64 recent ones, the 256 of a step and 8 for trims.
    assert "bf16[2,329,2,64]" in text
    assert copies_of_pools(text) == []
    assert copies_of_pools(text, "2,329,") == []
    assert program.memory_analysis().alias_size_in_bytes >= cache.nbytes


@pytest.mark.slow
def test_no_step_of_online_calibration_copies_a_pool():
    cache = make_cache("fp8", online_calibration=jaxkv.OnlineCalibration(window=40))
    x = jnp.zeros((2, 1, 6, 64))
    program = jax.jit(in_while_loop, donate_argnums=0).lower(cache, x).compile()
    text = program.as_text()
    assert f"u8[{NUM_BLOCKS},2,8,64]" in text
    assert copies_of_pools(text) == []
    assert program.memory_analysis().alias_size_in_bytes >= cache.nbytes
