"""Small caches with poison in every unused slot, and steps of every kind over them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from jaxkv import attention, sequences
from jaxkv.blocks import BlockPool
from jaxkv.codecs import Pages, encode_rows, init_pages, scatter_rows
from jaxkv.formats import Format, SideSpec
from jaxkv.sequences import Sequences, StepPlan

BLOCK_SIZE = 8
COLUMNS = 8
NUM_BLOCKS = 48
K_SCALE = np.float32(0.0625)
V_SCALE = np.float32(0.3)

# (tokens already stored, new tokens) of each sequence slot.
STEPS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "decode": ((0, 40, 17, 7, 31, 63), (1, 1, 0, 1, 1, 1)),
    "prefill": ((0, 0, 0, 0, 0, 0), (20, 3, 0, 16, 1, 24)),
    "mixed": ((0, 40, 17, 7, 31, 23), (24, 1, 0, 17, 4, 1)),
    "verify": ((15, 40, 17, 7, 31, 56), (5, 5, 0, 2, 8, 3)),
}


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a layer with its stored rows."""

    spec: SideSpec
    pages: Pages
    scale: jax.Array | None

    def rows(self) -> np.ndarray:
        return oracle.stored_rows(self.pages, self.spec, self.scale)


@functools.cache
def make_plan(step: str, *, packed: bool = False) -> StepPlan:
    """A step of `STEPS` over shuffled blocks: one token a sequence for "decode", else up to 24."""
    starts, counts = STEPS[step]
    shape = {"total_tokens": 72} if packed else {"max_new_tokens": 1 if step == "decode" else 24}
    return plan_of(starts, counts, **shape)


def plan_of(starts, counts, *, max_new_tokens=None, total_tokens=None) -> StepPlan:
    """The plan that appends `counts` to sequences that hold `starts` tokens already."""
    order = np.random.default_rng(1).permutation(NUM_BLOCKS).astype(np.int32)
    pool = dataclasses.replace(BlockPool.create(NUM_BLOCKS), free_blocks=jnp.asarray(order))
    seqs = Sequences.create(len(starts), COLUMNS)
    pool, seqs, _ = _reserve(pool, seqs, np.array(starts, np.int32), 64, None)
    return _reserve(pool, seqs, np.array(counts, np.int32), max_new_tokens, total_tokens)[2]


@functools.partial(jax.jit, static_argnums=(3, 4))
def _reserve(pool, seqs, counts, max_new_tokens, total_tokens):
    return sequences.reserve(
        pool,
        seqs,
        counts,
        block_size=BLOCK_SIZE,
        max_new_tokens=max_new_tokens,
        total_tokens=total_tokens,
    )


def live_slots(plan: StepPlan) -> np.ndarray:
    """Block * block_size + offset of every stored token."""
    slots = []
    for table, length in zip(np.asarray(plan.block_tables), np.asarray(plan.lengths)):
        position = np.arange(length)
        slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    return np.concatenate(slots)


def make_side(
    plan: StepPlan, spec: SideSpec, heads: int, *, seed=0, scale=None, values=None, unused=np.nan
) -> Side:
    """Pages that hold `values` or noise in the plan's tokens and `unused` everywhere else."""
    shape = (NUM_BLOCKS * BLOCK_SIZE, heads, spec.head_dim)
    if values is None:
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    layer_scale = None
    if spec.format.has_layer_scale:
        layer_scale = jnp.float32(1 if scale is None else scale)
    rows = np.full(shape, unused, np.float32)
    slots = live_slots(plan)
    rows[slots] = values[slots]
    return Side(spec, _store(rows, spec, layer_scale), layer_scale)


def place(plan: StepPlan, row: int, values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a pool that hold values [tokens, dim] in a sequence's slots, in all heads."""
    position = np.arange(len(values))
    table = np.asarray(plan.block_tables)[row]
    slots = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    rows = np.zeros((NUM_BLOCKS * BLOCK_SIZE, heads, values.shape[-1]), np.float32)
    rows[slots] = values[:, None]
    return rows


@functools.partial(jax.jit, static_argnames="spec")
def _store(rows, spec, layer_scale):
    pages = init_pages(NUM_BLOCKS, rows.shape[1], BLOCK_SIZE, spec)
    encoded, _ = encode_rows(rows, spec, layer_scale)
    slot = jnp.arange(rows.shape[0])
    return scatter_rows(pages, encoded, slot // BLOCK_SIZE, slot % BLOCK_SIZE)


def sides(
    plan: StepPlan, format_name: str, heads: int, head_dim: int, v_head_dim: int, **spec
) -> tuple[Side, Side]:
    """Both sides of a layer in a format, fp8 scales differing."""
    both = Format.parse(format_name)
    k = make_side(plan, SideSpec(both.k, head_dim, **spec), heads, seed=11, scale=K_SCALE)
    v = make_side(plan, SideSpec(both.v, v_head_dim, **spec), heads, seed=12, scale=V_SCALE)
    return k, v


def queries(plan: StepPlan, q_heads: int, head_dim: int, dtype=np.float32) -> jax.Array:
    """Noise, with NaN in every row that holds no query."""
    shape = (*plan.token_shape, q_heads, head_dim)
    q = np.random.default_rng(5).standard_normal(shape, np.float32)
    q[np.asarray(plan.slots) < 0] = np.nan
    return jnp.asarray(q.astype(dtype))


def attend(q, k: Side, v: Side, plan: StepPlan, **options):
    """(out, lse) of the library."""
    return attention.attend_pages(
        q,
        k.pages,
        v.pages,
        plan,
        k_spec=k.spec,
        v_spec=v.spec,
        k_scale=k.scale,
        v_scale=v.scale,
        return_lse=True,
        **options,
    )


def relative_error(got, expected) -> float:
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
