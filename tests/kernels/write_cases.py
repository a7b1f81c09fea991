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
from jaxkv.qkv import rms_norm, rotate_pairs
from pallas_kernels.paged_write import paged_write
from pallas_kernels.qkv_write import paged_qkv_write

# Every format on one side or the other.
COVER = (
    ("bf16", "f16"),
    ("fp8", "int8"),
    ("turbo8", "nvfp4"),
    ("turbo4", "turbo3"),
    ("turbo2", "turbo4"),
)

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
        skipped = (self.slots < 0) | (self.slots >= pages.num_blocks * pages.block_size)
        blocks = jnp.where(skipped, pages.num_blocks, self.slots // pages.block_size)
        offsets = jnp.where(skipped, 0, self.slots % pages.block_size)
        audit = jax.tree.map(lambda a: jnp.where(skipped[:, None], 0, a), audit)
        return codecs.scatter_rows(pages, rows, blocks, offsets), audit


@dataclasses.dataclass(frozen=True)
class FusedCase:
    """One fused projection to split, normalise, rotate and write."""

    k: SideSpec
    v: SideSpec
    qkv: jax.Array
    num_q_heads: int
    style: str
    angles: tuple[jax.Array, jax.Array] | None
    norms: tuple[jax.Array | None, jax.Array | None]
    slots: jax.Array
    k_pages: Pages
    v_pages: Pages
    scale: jax.Array

    @property
    def heads(self) -> int:
        return self.k_pages.data[0].shape[1]

    def run(self, interpret=RACES):
        """(q, k pages, v pages, audits) of the kernel."""
        return paged_qkv_write(
            self.qkv,
            self.k_pages,
            self.v_pages,
            self.slots,
            num_q_heads=self.num_q_heads,
            k_spec=self.k,
            v_spec=self.v,
            rope_style=self.style,
            angles=self.angles,
            q_norm=self.norms[0],
            k_norm=self.norms[1],
            k_scale=self.scale,
            v_scale=self.scale,
            interpret=interpret,
        )

    def expected(self):
        """The same from XLA's norm and RoPE and the codec; q in f32."""
        q_end = self.num_q_heads * self.k.head_dim
        k_end = q_end + self.heads * self.k.head_dim
        q = self._heads(self.qkv[:, :q_end], self.norms[0])
        written = WriteCase(
            self.k,
            self.v,
            self._heads(self.qkv[:, q_end:k_end], self.norms[1]),
            self.qkv[:, k_end:].reshape(len(self.qkv), self.heads, -1),
            self.slots,
            self.k_pages,
            self.v_pages,
            *(self.scale if s.format.has_layer_scale else None for s in (self.k, self.v)),
        )
        return q, *written.expected()

    def _heads(self, rows: jax.Array, weight: jax.Array | None) -> jax.Array:
        x = rows.reshape(len(rows), -1, self.k.head_dim).astype(jnp.float32)
        if weight is not None:
            x = rms_norm(x, weight, 1e-6)
        return x if self.angles is None else rotate_pairs(x, *self.angles, self.style)

    def check(self, got) -> None:
        """q to bf16, nearly all bytes, and every count."""
        q, *truth = self.expected()
        np.testing.assert_allclose(
            np.asarray(got[0], np.float32), np.asarray(q), rtol=2**-7, atol=2**-7
        )
        for a, b in zip(jax.tree.leaves(got[1:3]), jax.tree.leaves(truth[:2]), strict=True):
            assert (bytes_of(a) != bytes_of(b)).mean() <= 1e-3
        assert_audits_equal(got[3], truth[2])


def make_fused_case(
    k: SideSpec,
    v: SideSpec,
    style: str,
    rotary_dim: int,
    norm: bool,
    *,
    tokens: int = 11,
    heads: int = 1,
    num_q_heads: int = 2,
    num_blocks: int = 4,
) -> FusedCase:
    rng = np.random.default_rng(5)
    width = (num_q_heads + heads) * k.head_dim + heads * v.head_dim
    turns = rng.uniform(-3, 3, (tokens, rotary_dim // 2))
    angles = None
    if style != "none":
        angles = tuple(jnp.asarray(f(turns), jnp.float32) for f in (np.cos, np.sin))
    weights = [jnp.asarray(rng.uniform(0.5, 2, k.head_dim), jnp.bfloat16) for _ in range(2)]
    slots = rng.permutation(16 * num_blocks)[:tokens].astype(np.int32)
    slots[2] = -1
    return FusedCase(
        k,
        v,
        jnp.asarray(rng.standard_normal((tokens, width)), jnp.bfloat16),
        num_q_heads,
        style,
        angles,
        tuple(weights) if norm else (None, None),
        jnp.asarray(slots),
        *(random_pages(rng, s, heads, 16, num_blocks) for s in (k, v)),
        jnp.float32(0.02),
    )


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
    # One token to skip, and one slot beyond the pool.
    slots[[1, 2]] = -1, num_blocks * block_size + 3

    def heads_of(spec: SideSpec) -> jax.Array:
        x = rng.standard_normal((tokens, heads, spec.head_dim)) * amplitude
        # A spread of magnitudes, zeros and outliers.
        x *= np.exp(rng.standard_normal((tokens, heads, 1)))
        x[3, 0, :GROUP_SIZE] = 0
        x[4, :, 5] *= 40
        return jnp.asarray(x, dtype)

    scales = [
        jnp.float32(s) if spec.format.has_layer_scale else None
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


def assert_audits_equal(got, expected) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def norm_before_rounding(x: np.ndarray, spec: SideSpec) -> np.ndarray:
    """f32 scale of each group of a reference codebook, before it becomes E4M3."""
    book = spec.codebook
    groups = x.astype(np.float64).reshape(*x.shape[:-1], -1, 16)
    step = np.abs(groups).max(-1, keepdims=True) / book.top
    codes = sum((groups >= bound * step).astype(int) for bound in book.bounds)
    levels = np.asarray(book.levels)[codes]
    norm = np.sqrt((groups**2).sum(-1)) / np.sqrt((levels**2).sum(-1))
    return np.asarray(norm, np.float32)


def near_rounding_boundary(scale: np.ndarray) -> np.ndarray:
    """Where a scale lies within 4 ulp of halfway between two E4M3 numbers."""
    grid = np.arange(0x7F, dtype=np.uint8)
    values = np.asarray(codecs.floats.from_e4m3(jnp.asarray(grid)), np.float64)
    halfway = (values[1:] + values[:-1]) / 2
    nearest = np.abs(scale[..., None] - halfway).min(-1)
    return nearest <= 4 * np.spacing(scale)


def assert_reference_codes(case: WriteCase, got) -> None:
    """Codes exactly; scales too, except norms within 4 ulp of a rounding boundary."""
    expected = case.expected()
    sides = zip(got[:2], expected[:2], (case.k, case.v), (case.x_k, case.x_v))
    for pages, truth, spec, x in sides:
        if not spec.format.is_codebook:
            assert_bytes_equal(pages, truth)
            continue
        for a, b in zip(pages.data, truth.data, strict=True):
            np.testing.assert_array_equal(bytes_of(a), bytes_of(b))
        differ = group_scales(pages, spec) != group_scales(truth, spec)
        near = near_rounding_boundary(norm_before_rounding(np.asarray(x, np.float32), spec))
        for token, slot in enumerate(np.asarray(case.slots)):
            if 0 <= slot < pages.num_blocks * pages.block_size:
                block, offset = divmod(int(slot), pages.block_size)
                differ[block, :, offset] &= ~near[token]
        assert not differ.any()


def group_errors(pages, spec: SideSpec, case: WriteCase, x, scale) -> np.ndarray:
    """Relative squared error of every stored group, [tokens, heads, groups]; 0 where skipped."""
    stored = np.asarray(codecs.decode_pages(pages, spec, scale))
    target = np.asarray(codecs.rotate(x, spec))
    errors = np.zeros((*x.shape[:2], spec.num_groups))
    for token, slot in enumerate(np.asarray(case.slots)):
        if 0 <= slot < pages.num_blocks * pages.block_size:
            block, offset = divmod(int(slot), pages.block_size)
            difference = (stored[block, :, offset] - target[token]).reshape(x.shape[1], -1, 16)
            energy = (target[token].reshape(difference.shape) ** 2).sum(-1)
            errors[token] = (difference**2).sum(-1) / np.maximum(energy, 1e-30)
    return errors


def assert_groups_agree(case: WriteCase, got) -> None:
    """At most 1e-3 of the groups differ from the codec's, none in error by more than 1e-5."""
    expected = case.expected()
    sides = (
        (case.k, case.x_k, case.k_scale),
        (case.v, case.x_v, case.v_scale),
    )
    for pages, truth, (spec, x, scale) in zip(got[:2], expected[:2], sides):
        a = group_errors(pages, spec, case, x, scale)
        b = group_errors(truth, spec, case, x, scale)
        assert (a != b).mean() <= 1e-3
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
