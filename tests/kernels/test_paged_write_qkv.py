"""The fused kernel equals split, RMSNorm and RoPE in XLA followed by the codec."""

import pytest
from write_cases import make_fused_case, side

from pallas_kernels.qkv_write import qkv_unsupported_reasons

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
    fused = make_fused_case(
        side(k_name, head_dim), side(v_name, v_head_dim), style, rotary_dim, norm
    )
    fused.check(fused.run())


def test_a_rotary_dim_that_splits_groups_is_refused_by_name():
    k = side("turbo4", 128)
    reasons = qkv_unsupported_reasons(k, k, block_size=16, rope_style="half", rotary_dim=48)
    assert reasons and "rotary_dim: got 48" in reasons[0]
    assert not qkv_unsupported_reasons(k, k, block_size=16, rope_style="interleaved", rotary_dim=48)
