"""The compiled write kernels, run by the PTX emulator, store the codec's bytes.

This sees what the Pallas interpreter does not: register layouts, barriers, alignment, the
instructions that the compiler chose. Warps run in two orders, so that a missing barrier shows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ptx_emulator import Cta, Instruction, Memory, Warp, run_kernel
from write_cases import (
    COVER,
    FusedCase,
    WriteCase,
    assert_audits_equal,
    assert_groups_agree,
    assert_reference_codes,
    make_case,
    make_fused_case,
    side,
)
from write_inspection import WriteCompileCase, inspect

from jaxkv.codecs import Audit
from pallas_kernels.inspection import can_compile
from pallas_kernels.write.side import unpack_audit
from pallas_kernels.write.tiles import Tile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_compile(), reason="needs the cuda-compile group"),
]

ORDERS = ((0, 1, 2, 3), (3, 1, 0, 2))
TOKENS, HEADS, BLOCKS = 19, 2, 4


def compile_case(k: str, v: str, head_dim: int, encoding: str, rotation: str) -> WriteCompileCase:
    return WriteCompileCase(
        k, v, head_dim, encoding, HEADS, BLOCKS, tokens=TOKENS, dtype="float32", rotation=rotation
    )


REFERENCE = [compile_case(*names, 128, "reference", "none") for names in COVER]
# The first two pairs neither rotate nor search: at 128 they are the kernels above.
SEARCHED = [
    compile_case(*names, head_dim, "searched", "signs")
    for names in COVER
    for head_dim in (64, 128, 256)
    if head_dim != 128 or names not in COVER[:2]
]


@pytest.fixture(scope="module")
def hopper(once):
    cases = REFERENCE + SEARCHED
    return dict(zip(cases, once("write_ptx", lambda: inspect(cases, "sm_90a"))))


def emulate(case: WriteCase, source: str, order) -> tuple:
    """Runs one compiled write; parameters come in the order in which its body meets them."""
    tile = Tile(case.k.head_dim)
    padded = -(-TOKENS // tile.tokens) * tile.tokens

    def pad(x, fill=0):
        x = np.asarray(x)
        return np.concatenate([x, np.full((padded - TOKENS, *x.shape[1:]), fill, x.dtype)])

    buffers, roles = [], []
    for x, pages, scale in (
        (case.x_k, case.k_pages, case.k_scale),
        (case.x_v, case.v_pages, case.v_scale),
    ):
        own = [("x", pad(x))]
        own += [("scale", np.asarray(scale).reshape(1))] if scale is not None else []
        own += [("slots", pad(case.slots, -1))] if not buffers else []
        own += [("audit", np.full((HEADS, padded), -7, np.int32))]
        own += [("page", np.asarray(leaf)) for leaf in jax.tree.leaves(pages)]
        roles += [role for role, _ in own]
        buffers += [buffer for _, buffer in own]
    grid = (HEADS, 2 * padded // tile.tokens, 1)
    after = run_kernel(source, buffers, grid, order)
    pages = [jnp.asarray(b) for role, b in zip(roles, after) if role == "page"]
    k_leaves = len(jax.tree.leaves(case.k_pages))
    new = [
        jax.tree.unflatten(jax.tree.structure(old), leaves)
        for old, leaves in (
            (case.k_pages, pages[:k_leaves]),
            (case.v_pages, pages[k_leaves:]),
        )
    ]
    words = [b for role, b in zip(roles, after) if role == "audit"]
    audits: list[Audit] = [unpack_audit(jnp.asarray(word)[:, :TOKENS]) for word in words]
    return new[0], new[1], tuple(audits)


def emulate_fused(case: FusedCase, source: str, order) -> tuple:
    """Runs one compiled fused write of bf16 rows with angles and both norms."""
    tile = Tile(case.k.head_dim)
    tokens = len(case.qkv)
    padded = -(-tokens // tile.tokens) * tile.tokens

    def pad(x, fill=0.0):
        x = np.asarray(x)
        return np.concatenate([x, np.full((padded - tokens, *x.shape[1:]), fill, x.dtype)])

    angles = [pad(table) for table in case.angles]
    if case.style == "interleaved":
        rest = case.k.head_dim // 2 - angles[0].shape[1]
        angles = [
            np.pad(table, ((0, 0), (0, rest)), constant_values=value)
            for table, value in zip(angles, (1.0, 0.0))
        ]
    q = np.zeros((padded, case.num_q_heads, case.k.head_dim), jnp.bfloat16)
    weights = [np.asarray(weight) for weight in case.norms]
    buffers = [("qkv", pad(case.qkv)), ("norm", weights[0])]
    buffers += [("angle", table) for table in angles] + [("q", q), ("norm", weights[1])]
    for spec, pages, first in ((case.k, case.k_pages, True), (case.v, case.v_pages, False)):
        if spec.format.has_layer_scale:
            buffers.append(("scale", np.asarray(case.scale).reshape(1)))
        if first:
            buffers.append(("slots", pad(case.slots, -1)))
        buffers.append(("audit", np.full((case.heads, padded), -7, np.int32)))
        buffers += [("page", np.asarray(leaf)) for leaf in jax.tree.leaves(pages)]
    grid = (case.num_q_heads + 2 * case.heads, padded // tile.tokens, 1)
    after = run_kernel(source, [buffer for _, buffer in buffers], grid, order)
    named = [(role, jnp.asarray(b)) for (role, _), b in zip(buffers, after)]
    pages = jax.tree.unflatten(
        jax.tree.structure((case.k_pages, case.v_pages)), [b for role, b in named if role == "page"]
    )
    audits = tuple(unpack_audit(b[:, :tokens]) for role, b in named if role == "audit")
    (q,) = (b for role, b in named if role == "q")
    return q[:tokens], *pages, audits


FUSED = [
    WriteCompileCase("turbo4", "turbo3", rope="half", rotary_dim=64, heads=1, num_blocks=BLOCKS),
    WriteCompileCase("turbo8", "fp8", rope="interleaved", heads=1, num_blocks=BLOCKS),
    WriteCompileCase("int8", "nvfp4", 64, rope="half", heads=1, num_blocks=BLOCKS),
]


def test_compiled_fused_writes_are_the_separate_steps():
    for compiled, facts in zip(FUSED, inspect(FUSED, "sm_90a")):
        dim = compiled.head_dim
        case = make_fused_case(
            side(compiled.k, dim),
            side(compiled.v, dim),
            compiled.rope,
            compiled.rotary_dim or dim,
            norm=True,
            tokens=compiled.tokens,
            num_blocks=BLOCKS,
        )
        for order in ORDERS:
            case.check(emulate_fused(case, facts["source"], order))


def data_of(compiled: WriteCompileCase) -> WriteCase:
    specs = [
        side(name, compiled.head_dim, compiled.encoding, compiled.rotation)
        for name in (compiled.k, compiled.v)
    ]
    return make_case(*specs, tokens=TOKENS, heads=HEADS, num_blocks=BLOCKS)


@pytest.mark.parametrize("order", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("compiled", REFERENCE, ids=lambda c: c.name)
def test_compiled_reference_codes_are_the_codecs(hopper, compiled, order):
    case = data_of(compiled)
    got = emulate(case, hopper[compiled]["source"], ORDERS[order])
    assert_reference_codes(case, got)
    assert_audits_equal(got[2], case.expected()[2])


@pytest.mark.parametrize("order", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(c, marks=() if c.head_dim == 128 else pytest.mark.full, id=c.name)
        for c in SEARCHED
    ],
)
def test_compiled_rotated_and_searched_groups_are_the_codecs(hopper, compiled, order):
    case = data_of(compiled)
    got = emulate(case, hopper[compiled]["source"], ORDERS[order])
    assert_groups_agree(case, got)
    assert_audits_equal(got[2], case.expected()[2])


@pytest.mark.parametrize("compiled", REFERENCE[3:], ids=lambda c: c.name)
def test_compiled_values_that_do_not_fit_are_counted(hopper, compiled):
    case = data_of(compiled)
    x = np.array(case.x_k)
    x[0, 0, 7], x[1, 1, 20], x[5], x[6] = np.nan, np.inf, 1e6, 1e-5
    case = dataclasses.replace(case, x_k=jnp.asarray(x))
    got = emulate(case, hopper[compiled]["source"], ORDERS[1])
    assert_audits_equal(got[2], case.expected()[2])


def test_the_portable_form_computes_the_same():
    compiled = compile_case("turbo4", "turbo8", 128, "searched", "signs")
    (facts,) = inspect([compiled], "sm_80")
    case = data_of(compiled)
    for order in ORDERS:
        assert_groups_agree(case, emulate(case, facts["source"], order))


def test_the_emulator_sees_a_missing_barrier(hopper):
    compiled = REFERENCE[3]
    source = hopper[compiled]["source"]
    assert source.count(", 128;")
    without = source.replace("bar.sync", "// bar.sync")
    with pytest.raises(AssertionError, match="read before it was written"):
        emulate(data_of(compiled), without, ORDERS[0])


@pytest.mark.parametrize(
    ("type_", "value", "start", "length", "field"),
    [
        ("u32", 0xDEADBEEF, 8, 8, 0xBE),
        ("u32", 0xDEADBEEF, 0, 32, 0xDEADBEEF),
        ("u32", 0xDEADBEEF, 28, 8, 0xD),
        ("u32", 0xDEADBEEF, 4, 0, 0),
        ("s32", 0x00000080, 4, 4, 0xFFFFFFF8),
        ("s32", 0x00000070, 4, 4, 0x7),
        ("s32", 0x80000000, 28, 8, 0xFFFFFFF8),
    ],
)
def test_the_emulator_extracts_bit_fields_as_the_manual_says(type_, value, start, length, field):
    warp = Warp(Cta([], {}, Memory([]), (0, 0, 0)), 0)
    extract = Instruction(f"bfe.{type_} %d, {value}, {start}, {length}")
    warp._bfe(extract, np.ones(32, bool))
    assert set(warp.registers["%d"].tolist()) == {field}
