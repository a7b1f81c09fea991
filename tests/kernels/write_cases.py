"""Random caches for the write kernels, and the codec's answer to the same write."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv import codecs
from jaxkv.codecs import Audit, Pages
from jaxkv.formats import FORMATS, GROUP_SIZE, SideSpec
from pallas_kernels.paged_write import paged_write

RACES = plgpu.InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class WriteCase:
    """One write into pages full of random bytes."""

    k: SideSpec
    v: SideSpec
    x_k: jax.Array
    x_v: jax.Array
    slots: jax.Array
    k_pages: Pages
    v_pages: Pages
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    def run(self, interpret=RACES) -> tuple[Pages, Pages, tuple[Audit, Audit]]:
        return paged_write(
            self.x_k,
            self.x_v,
            self.k_pages,
            self.v_pages,
            self.slots,
            k_spec=self.k,
            v_spec=self.v,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            interpret=interpret,
        )

    def expected(self) -> tuple[Pages, Pages, tuple[Audit, Audit]]:
        sides = (
            (self.x_k, self.k, self.k_pages, self.k_scale),
            (self.x_v, self.v, self.v_pages, self.v_scale),
        )
        pages, audits = zip(*(self._side(*side) for side in sides))
        return pages[0], pages[1], audits

    def _side(self, x, spec, pages, scale):
        rows, audit = codecs.encode_rows(x, spec, scale)
        skipped = self.slots < 0
        blocks = jnp.where(skipped, pages.num_blocks, self.slots // pages.block_size)
        offsets = jnp.where(skipped, 0, self.slots % pages.block_size)
        audit = jax.tree.map(lambda a: jnp.where(skipped[:, None], 0, a), audit)
        return codecs.scatter_rows(pages, rows, blocks, offsets), audit


def side(name: str, head_dim: int, encoding="searched", rotation="signs") -> SideSpec:
    return SideSpec(FORMATS[name], head_dim, encoding, rotation)


def random_pages(
    rng: np.random.Generator, spec: SideSpec, heads: int, block_size: int, num_blocks: int = 4
) -> Pages:
    """Pages of random bytes, so that a stray store shows."""

    def leaf(s: jax.ShapeDtypeStruct) -> jax.Array:
        raw = rng.bytes(int(np.prod(s.shape)) * s.dtype.itemsize)
        return jnp.asarray(np.frombuffer(raw, s.dtype).reshape(s.shape))

    return jax.tree.map(leaf, codecs.pages_shapes(num_blocks, heads, block_size, spec))


def make_case(
    k: SideSpec,
    v: SideSpec,
    *,
    tokens: int = 19,
    heads: int = 2,
    block_size: int = 16,
    dtype=jnp.float32,
    seed: int = 0,
    amplitude: float = 1.0,
    num_blocks: int = 4,
) -> WriteCase:
    rng = np.random.default_rng(seed)
    slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int32)
    slots[rng.integers(tokens)] = -1

    def heads_of(spec: SideSpec) -> jax.Array:
        x = rng.standard_normal((tokens, heads, spec.head_dim)) * amplitude
        # A spread of magnitudes, zeros and outliers.
        x *= np.exp(rng.standard_normal((tokens, heads, 1)))
        x[3, 0, :GROUP_SIZE] = 0
        x[4, :, 5] *= 40
        return jnp.asarray(x, dtype)

    scales = [
        jnp.float32(s) if spec.format.scale == "layer_f32" else None
        for spec, s in ((k, 0.013), (v, 0.21))
    ]
    return WriteCase(
        k,
        v,
        heads_of(k),
        heads_of(v),
        jnp.asarray(slots),
        random_pages(rng, k, heads, block_size, num_blocks),
        random_pages(rng, v, heads, block_size, num_blocks),
        *scales,
    )


def bytes_of(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def assert_bytes_equal(got: Pages, expected: Pages) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(bytes_of(a), bytes_of(b))


def group_scales(pages: Pages, spec: SideSpec) -> np.ndarray:
    """E4M3 bytes [blocks, heads, block_size, groups]."""
    words = np.swapaxes(np.asarray(pages.scales), -1, -2)
    return np.ascontiguousarray(words).view(np.uint8)
