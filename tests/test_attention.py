"""Attention over pages: every format, path and option against the oracle."""

from __future__ import annotations

import dataclasses
import functools

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from marks import fast_only, full_except

from jaxkv import attention, attention_xla
from jaxkv.attention_xla import KeyRange, Queries
from jaxkv.formats import FORMATS, PAIR_NAMES, SideSpec

pytestmark = pytest.mark.as_shipped

OPTIONS = {
    "none": {},
    "window": {"window": 11},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 11, "soft_cap": 2.0, "sinks": True, "scale": 0.3},
}
OPTION_NAMES = ("none", "window", "soft_cap", "sinks")
GROUPS = (1, 3, 4, 7, 8)
# Every pair with an option and a group, so that pairs of these three meet.
PAIR_CASES = [
    (name, OPTION_NAMES[i % 4], GROUPS[i % 5])
    for i, name in enumerate((*PAIR_NAMES, "int8k_nvfp4v", "turbo2k_f16v"))
]
SHAPE = {"heads": 2, "head_dim": 64, "v_head_dim": 64}
# The fast tests share shapes, for the sake of compile time; these join them in `make test`.
slow = pytest.mark.slow


def others_slow(fast, *others):
    """Parameters of which only the first also belongs to the fast tests."""
    return [fast, *(pytest.param(x, marks=slow) for x in others)]


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Tiles and chunks so small that every loop takes several trips."""
    patch = pytest.MonkeyPatch()
    patch.setattr(attention_xla, "_CHUNK_TOKENS", 2 * cases.BLOCK_SIZE)
    patch.setattr(attention_xla, "_TILE_TOKENS", 8)
    jax.clear_caches()
    yield
    patch.undo()
    jax.clear_caches()


def check(name, step, option, group, *, packed=False, dtype=np.float32, spec=None, **shape):
    """Compares out, lse, padding and dtype with the oracle's."""
    shape = SHAPE | shape
    plan = cases.make_plan(step, packed=packed)
    k, v = cases.sides(plan, name, **shape, **(spec or {}))
    q_heads = shape["heads"] * group
    q = cases.queries(plan, q_heads, shape["head_dim"], dtype)
    options = dict(OPTIONS[option])
    if "sinks" in options:
        options["sinks"] = np.linspace(-2, 3, q_heads, dtype=np.float32)
    out, lse = cases.attend(q, k, v, plan, **options)
    expected, expected_lse = oracle.attend(q, k.rows(), v.rows(), plan, **options)
    live = np.asarray(plan.slots) >= 0
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    out, lse = np.asarray(out.astype(jnp.float32)), np.asarray(lse)
    assert not out[~live].any() and (lse[~live] == -np.inf).all()
    assert cases.relative_error(out, expected) < (1e-5 if dtype == np.float32 else 3e-3)
    np.testing.assert_allclose(lse[live], expected_lse[live], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", fast_only(FORMATS, ["bf16", "fp8", "turbo4"]))
def test_every_format_decodes_in_attention_as_its_codec_does(name):
    check(name, "decode", "none", 3)


@pytest.mark.parametrize("name", others_slow("f16", "turbo3", "fp8"))
def test_prefill_decode_and_verification_mix_in_one_step(name):
    check(name, "mixed", "all", 3)


@pytest.mark.parametrize("name", others_slow("bf16", "turbo2"))
def test_packed_step(name):
    check(name, "mixed", "none", 3, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTION_NAMES)
@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("name", fast_only(FORMATS, [], ["fp8", "turbo3"]))
def test_options_on_every_format(name, step, option):
    check(name, step, option, 4)


@pytest.mark.full
@pytest.mark.parametrize("step", cases.STEPS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("option", OPTION_NAMES)
@pytest.mark.parametrize("name", FORMATS)
def test_full_cross(name, option, group, step):
    check(name, step, option, group)


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("step", ["decode", "prefill", "mixed", "verify"])
@pytest.mark.parametrize("name, option, group", PAIR_CASES)
def test_pairs_pairwise(name, option, group, step, packed):
    check(name, step, option, group, packed=packed, head_dim=64, v_head_dim=32)


@pytest.mark.parametrize("name", others_slow("fp8k_turbo4v", "turbo3k_turbo8v"))
def test_a_pair_decodes_each_side_by_its_own_format(name):
    check(name, "decode", "none", 3, v_head_dim=96)


@pytest.mark.slow
@pytest.mark.parametrize("step", full_except(["decode", "mixed"], ["mixed"]))
@pytest.mark.parametrize("name", ["turbo4k_bf16v", "bf16k_turbo4v"])
@pytest.mark.parametrize("rotation", ["signs", "hadamard"])
def test_each_side_is_rotated_on_its_own(name, step, rotation):
    check(name, step, "none", 3, spec={"rotation": rotation}, v_head_dim=80)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["turbo4", "turbo3", "turbo2", "nvfp4"])
def test_reference_encoding(name):
    check(name, "decode", "none", 3, spec={"encoding": "reference"})


@pytest.mark.slow
@pytest.mark.parametrize("group", full_except([1, 5, 6, 24, 71], [1, 5, 71]))
@pytest.mark.parametrize("heads", full_except([1, 3], [3]))
def test_any_group_ratio(heads, group):
    check("bf16", "decode", "none", group, heads=heads)


@pytest.mark.slow
@pytest.mark.parametrize("name", full_except(["turbo4", "turbo3"], ["turbo3"]))
@pytest.mark.parametrize("dims", [(16, 32), (80, 96), (112, 128), (192, 256), (512, 64)])
def test_any_head_dim(name, dims):
    check(name, "decode", "none", 2, head_dim=dims[0], v_head_dim=dims[1])


@pytest.mark.parametrize("name", others_slow("turbo4", "bf16"))
@pytest.mark.parametrize("dtype", others_slow(jnp.bfloat16, jnp.float16))
def test_half_precision_queries(name, dtype):
    check(name, "decode", "none", 3, dtype=dtype)


def counting_sides(plan, row, length, *, unused):
    """Keys of zeros, so that all weigh the same, and values that count the tokens of one row."""
    spec = SideSpec(FORMATS["bf16"], 64)
    values = np.repeat(np.arange(length, dtype=np.float32)[:, None], 64, 1)
    k = cases.make_side(plan, spec, 2, values=np.zeros((384, 2, 64), np.float32), unused=unused)
    v = cases.make_side(plan, spec, 2, values=cases.place(plan, row, values, 2), unused=unused)
    return k, v


@pytest.mark.parametrize("unused", [np.nan, 0.0])
def test_causal_mask_is_aligned_with_the_end_and_future_slots_hold_no_keys(unused):
    plan = cases.make_plan("mixed")
    k, v = counting_sides(plan, 3, 24, unused=unused)
    out, lse = cases.attend(jnp.ones((*plan.token_shape, 6, 64)), k, v, plan)
    position = 7 + np.arange(17)
    np.testing.assert_allclose(out[3, :17, 0, 0], position / 2, rtol=1e-6)
    np.testing.assert_allclose(lse[3, :17, 0], np.log(position + 1), rtol=1e-6)


@pytest.mark.parametrize("name", ["bf16", "int8", "fp8", "turbo8", "turbo4"])
def test_unused_slots_change_nothing_whatever_they_hold(name):
    plan = cases.make_plan("decode")
    q = cases.queries(plan, 6, 64)
    results = []
    for unused in (np.nan, 0.0):
        spec = SideSpec(FORMATS[name], 64)
        k, v = (
            cases.make_side(plan, spec, 2, seed=seed, scale=0.3, unused=unused) for seed in (1, 2)
        )
        results.append(cases.attend(q, k, v, plan))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("name", others_slow("bf16", "turbo4", "int8", "fp8", "turbo8"))
@pytest.mark.parametrize("window", others_slow(None, 6))
def test_a_nan_token_reaches_the_queries_that_see_it_and_no_others(name, side, window):
    plan = cases.make_plan("mixed")
    good = cases.make_side(plan, SideSpec(FORMATS[name], 64), 2, seed=1)
    table = np.asarray(plan.block_tables)[3]
    values = np.random.default_rng(1).standard_normal((384, 2, 64)).astype(np.float32)
    values[table[1] * cases.BLOCK_SIZE + 4, 1, 5] = np.nan
    bad = cases.make_side(plan, SideSpec(FORMATS[name], 64), 2, values=values)
    q = jnp.nan_to_num(cases.queries(plan, 6, 64))
    k, v = (bad, good) if side == "k" else (good, bad)
    out = np.isnan(np.asarray(cases.attend(q, k, v, plan, window=window)[0])).any(-1)
    # Position 12 of sequence 3, whose queries stand at 7 and on, in the second KV head.
    expected = np.zeros(out.shape, bool)
    expected[3, 12 - 7 : 17 if window is None else 12 - 7 + window, 3:] = True
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_a_sequence_does_not_depend_on_its_batch(step):
    plan = cases.make_plan(step)
    k, v = cases.sides(plan, "turbo4", **SHAPE)
    q = cases.queries(plan, 6, 64)
    out, lse = cases.attend(q, k, v, plan)
    for row in (1, 3):
        alone = np.arange(len(plan.starts)) == row
        counts = jnp.where(alone, plan.new_tokens, 0)
        other, other_lse = cases.attend(q, k, v, dataclasses.replace(plan, new_tokens=counts))
        np.testing.assert_array_equal(other[row], out[row])
        np.testing.assert_array_equal(other_lse[row], lse[row])
        assert not np.asarray(other[~alone]).any()


@pytest.mark.parametrize("name", others_slow("bf16", "turbo3"))
def test_verifying_tokens_equals_decoding_them_one_at_a_time(name):
    starts, counts = cases.STEPS["verify"]
    plan = cases.make_plan("verify")
    k, v = cases.sides(plan, name, **SHAPE)
    q = cases.queries(plan, 6, 64)
    out, _ = cases.attend(q, k, v, plan)
    for token in range(max(counts)):
        new = np.array([int(token < n) for n in counts], np.int32)
        single = dataclasses.replace(
            cases.make_plan("decode"),
            block_tables=plan.block_tables,
            starts=jnp.array(starts, jnp.int32) + token,
            new_tokens=jnp.array(new),
        )
        one, _ = cases.attend(q[:, token : token + 1], k, v, single)
        np.testing.assert_allclose(one[new == 1, 0], out[new == 1, token], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window, trips", [(None, 64), (1, 1), (16, 2), (100, 8)])
def test_a_window_bounds_what_is_read(window, trips):
    kernel = attention_xla._Kernel(
        k_spec=SideSpec(FORMATS["bf16"], 64),
        v_spec=SideSpec(FORMATS["bf16"], 64),
        kv_heads=2,
        q_heads=2,
        block_size=16,
        columns=64,
        keys=KeyRange(window=window),
        q_parts=2,
        p_parts=2,
    )
    walk = kernel.walk(1)
    low = jnp.int32(0 if window is None else 1024 - window)
    assert int(walk.trips(low, jnp.int32(1024))[1]) * walk.tokens <= 16 * trips


def test_parts_of_a_long_block_cover_every_key_once():
    walk = attention_xla._Walk(block_size=88, tokens=32, parts=3)
    first, count = walk.trips(jnp.int32(70), jnp.int32(200))
    keys = np.concatenate(
        [walk.trip(first, jnp.int32(i), jnp.array([2, 0, 1]))[1] for i in range(int(count))]
    )
    keys = keys[keys != attention_xla._NO_KEY]
    assert len(set(keys.tolist())) == len(keys)
    assert set(range(70, 200)) <= set(keys.tolist())


@pytest.mark.slow
def test_merged_partials_equal_the_whole():
    plan = cases.make_plan("decode")
    k, v = cases.sides(plan, "bf16", **SHAPE)
    q = cases.queries(plan, 6, 64)
    sinks = np.linspace(-1, 2, 6, dtype=np.float32)
    expected, expected_lse = oracle.attend(q, k.rows(), v.rows(), plan, sinks=sinks)
    queries = Queries(plan.block_tables, plan.starts, plan.new_tokens, plan.offsets, 1)

    def part(**keys):
        return jax.jit(
            functools.partial(
                attention_xla.partial_attention,
                k_spec=k.spec,
                v_spec=v.spec,
                keys=KeyRange(**keys),
            )
        )(q[:, 0], k.pages, v.pages, queries, scale=jnp.float32(0.125))

    parts = [part(window=9), part(distance=9)]
    out, lse = attention.merge_partials(parts, sinks)
    assert cases.relative_error(out, expected[:, 0]) < 1e-5
    np.testing.assert_allclose(lse, expected_lse[:, 0], rtol=1e-5)
    # Without the first keys, a query that has no others that far away sees none.
    out, lse = part(first=9, distance=9)
    sees = (np.asarray(plan.starts) >= 9 + 9) & (np.asarray(plan.new_tokens) > 0)
    np.testing.assert_array_equal(np.asarray(lse) > -np.inf, np.repeat(sees[:, None], 6, 1))
    assert not np.asarray(out)[~sees].any()


def test_blocks_that_are_elsewhere_are_not_read():
    plan = cases.make_plan("decode")
    k, v = counting_sides(plan, 1, 41, unused=0.0)
    tables = plan.block_tables.at[1, 1].set(-7)
    q = jnp.ones((*plan.token_shape, 6, 64))
    out, lse = cases.attend(q, k, v, dataclasses.replace(plan, block_tables=tables))
    kept = np.r_[0:8, 16:41]
    np.testing.assert_allclose(out[1, 0, 0, 0], kept.mean(), rtol=1e-6)
    np.testing.assert_allclose(lse[1, 0, 0], np.log(len(kept)), rtol=1e-6)


@pytest.mark.slow
def test_flat_attention_over_a_long_context_keeps_its_mass():
    block_size, columns = 64, 256
    spec = SideSpec(FORMATS["bf16"], 16)
    length = block_size * columns
    values = np.random.default_rng(0).integers(-8, 9, (columns, 1, block_size, 16))
    pages = cases.Pages((jnp.zeros((columns, 1, block_size, 16), jnp.bfloat16),), None)
    filled = cases.Pages((jnp.asarray(values, jnp.bfloat16),), None)
    queries = Queries(
        jnp.arange(columns)[None], jnp.array([length - 1]), jnp.array([1]), jnp.array([0]), 1
    )
    out, lse = jax.jit(
        lambda q: attention_xla.partial_attention(
            q, pages, filled, queries, k_spec=spec, v_spec=spec, scale=jnp.float32(1)
        )
    )(jnp.ones((1, 2, 16)))
    np.testing.assert_allclose(out[0, 0], values.mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(lse, np.log(length), rtol=1e-6)


BAD = {
    "rank": (dict(q=jnp.ones((6, 6, 64))), ValueError, r"q: got shape \[6, 6, 64\], expected"),
    "tokens": (dict(q=jnp.ones((6, 2, 6, 64))), ValueError, r"expected \[6, 1, q_heads, 64\]"),
    "head_dim": (dict(q=jnp.ones((6, 1, 6, 32))), ValueError, r"q: got shape"),
    "group": (dict(q=jnp.ones((6, 1, 5, 64))), ValueError, "got 5 query heads, .* 2 KV heads"),
    "dtype": (dict(q=jnp.ones((6, 1, 6, 64), int)), TypeError, "q: got int32, expected a float"),
    "window": (dict(window=0), ValueError, "window: got 0, expected at least 1"),
    "window kind": (dict(window=2.0), TypeError, "window: got 2.0, expected a static int"),
    "soft cap": (dict(soft_cap=-1.0), ValueError, "soft_cap: got -1.0, expected a positive"),
    "scale": (dict(scale=jnp.ones(3)), TypeError, r"scale: got float32\[3\], expected a real"),
    "sinks": (dict(sinks=jnp.ones(5)), ValueError, r"sinks: got shape \[5\], expected \[6\]"),
    "implementation": (dict(implementation="cuda"), ValueError, "implementation: got 'cuda'"),
    "pages": (dict(k_spec=SideSpec(FORMATS["fp8"], 64)), ValueError, "k_pages: got .* fp8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    changed, error, message = BAD[case]
    plan = cases.make_plan("decode")
    spec = SideSpec(FORMATS["bf16"], 64)
    pages = cases.init_pages(cases.NUM_BLOCKS, 2, cases.BLOCK_SIZE, spec)
    arguments = dict(q=jnp.ones((6, 1, 6, 64)), k_spec=spec, v_spec=spec) | changed
    with pytest.raises(error, match=message):
        attention.attend_pages(arguments.pop("q"), pages, pages, plan, **arguments)


def test_equal_layers_share_one_trace():
    plan = cases.make_plan("decode")
    k, v = cases.sides(plan, "bf16", **SHAPE)
    q = cases.queries(plan, 6, 64)
    attention._attend_xla.clear_cache()

    @jax.jit
    def layers(q):
        for _ in range(4):
            q, _ = cases.attend(q, k, v, plan)
        return q

    text = layers.lower(q).as_text()
    assert text.count("func.func private @_attend_xla") == 1
