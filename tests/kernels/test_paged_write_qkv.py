"""The fused kernel equals split, RMSNorm and RoPE in XLA followed by the codec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from write_cases import RACES, WriteCase, bytes_of, random_pages, side

from jaxkv.qkv import rms_norm, rotate_pairs
from pallas_kernels.qkv_write import paged_qkv_write, qkv_unsupported_reasons

TOKENS, HEADS = 11, 1


def projection(rng, k, v, num_q_heads, dtype):
    width = (num_q_heads + HEADS) * k.head_dim + HEADS * v.head_dim
    return jnp.asarray(rng.standard_normal((TOKENS, width)), dtype)


def heads_in_xla(rows, head_dim, weight, angles, style):
    x = rows.reshape(TOKENS, -1, head_dim).astype(jnp.float32)
    if weight is not None:
        x = rms_norm(x, weight, 1e-6)
    return x if angles is None else rotate_pairs(x, *angles, style)


CASES = (
    # k format, v format, head_dim, v_head_dim, style, rotary_dim, norm
    ("bf16", "turbo4", 64, 64, "half", 64, False),
    ("bf16", "fp8", 128, 128, "half", 128, True),
    ("turbo4", "turbo3", 128, 128, "half", 64, True),
    ("turbo4", "int8", 128, 64, "interleaved", 128, True),
    ("nvfp4", "turbo2", 128, 128, "interleaved", 64, False),
    ("turbo8", "turbo4", 256, 256, "none", 0, True),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_fused_write_equals_the_separate_steps(case):
    k_name, v_name, head_dim, v_head_dim, style, rotary_dim, norm = case
    rng = np.random.default_rng(5)
    k, v, num_q_heads = side(k_name, head_dim), side(v_name, v_head_dim), 2
    qkv = projection(rng, k, v, num_q_heads, jnp.bfloat16)
    turns = rng.uniform(-3, 3, (TOKENS, rotary_dim // 2))
    angles = None
    if style != "none":
        angles = tuple(jnp.asarray(f(turns), jnp.float32) for f in (np.cos, np.sin))
    norms = [jnp.asarray(rng.uniform(0.5, 2, head_dim), jnp.float32) if norm else None] * 2
    slots = rng.permutation(64)[:TOKENS].astype(np.int32)
    slots[2] = -1
    scale = jnp.float32(0.02)
    pages = [random_pages(rng, s, HEADS, 16) for s in (k, v)]

    q, k_pages, v_pages, audits = paged_qkv_write(
        qkv,
        *pages,
        jnp.asarray(slots),
        num_q_heads=num_q_heads,
        k_spec=k,
        v_spec=v,
        rope_style=style,
        angles=angles,
        q_norm=norms[0],
        k_norm=norms[1],
        k_scale=scale,
        v_scale=scale,
        interpret=RACES,
    )

    q_end = num_q_heads * head_dim
    k_end = q_end + HEADS * head_dim
    expected_q = heads_in_xla(qkv[:, :q_end], head_dim, norms[0], angles, style)
    np.testing.assert_allclose(
        np.asarray(q, np.float32), np.asarray(expected_q), rtol=2**-7, atol=2**-7
    )
    truth = WriteCase(
        k,
        v,
        heads_in_xla(qkv[:, q_end:k_end], head_dim, norms[1], angles, style),
        qkv[:, k_end:].reshape(TOKENS, HEADS, v_head_dim),
        jnp.asarray(slots),
        *pages,
        scale if k.format.scale == "layer_f32" else None,
        scale if v.format.scale == "layer_f32" else None,
    ).expected()
    for got, expected in zip(jax.tree.leaves((k_pages, v_pages)), jax.tree.leaves(truth[:2])):
        assert (bytes_of(got) != bytes_of(expected)).mean() <= 1e-3
    for got, expected in zip(jax.tree.leaves(audits), jax.tree.leaves(truth[2]), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_rotary_dim_that_splits_groups_is_refused_by_name():
    k = side("turbo4", 128)
    reasons = qkv_unsupported_reasons(k, k, block_size=16, rope_style="half", rotary_dim=48)
    assert reasons and "rotary_dim: got 48" in reasons[0]
    assert not qkv_unsupported_reasons(k, k, block_size=16, rope_style="interleaved", rotary_dim=48)
