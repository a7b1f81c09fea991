"""Randomized Hadamard rotation of heads.

Rotating spreads outliers over all elements of a head, so that a fixed Gaussian codebook fits any
head (Suresh et al., "Distributed Mean Estimation with Limited Communication", 2017; Ashkboos et
al., "QuaRot", 2024). It is written as a product with a matrix of +1 and -1: the products are
exact, sums are f32, and only the final factor 1/sqrt(n) rounds.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.formats import SideSpec


def hadamard_block(head_dim: int) -> int:
    """Size of the Hadamard blocks: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


@functools.cache
def sign_tables(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(S1, S2), int64 [head_dim] of +1 and -1: signs before and after the transform."""
    if head_dim in (256, 512):
        legacy = np.random.RandomState(42)  # the stored bytes fix the generator
        return legacy.choice([-1, 1], head_dim), legacy.choice([-1, 1], head_dim)
    rng = np.random.default_rng(42)
    return rng.choice([-1, 1], head_dim), rng.choice([-1, 1], head_dim)


@functools.cache
def rotation_matrix(head_dim: int, rotation: str) -> np.ndarray:
    """The rotation without its scale: `rotated = (x @ matrix) * rotation_factor(head_dim)`.

    Args:
      head_dim: elements of a head.
      rotation: "signs" or "hadamard".

    Returns:
      float32 [head_dim, head_dim] with entries +1, -1, and 0 outside the Hadamard blocks.
    """
    block = hadamard_block(head_dim)
    h = np.ones((1, 1), np.float32)
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    matrix = np.kron(np.eye(head_dim // block, dtype=np.float32), h)
    if rotation == "signs":
        before, after = sign_tables(head_dim)
        matrix = before[:, None] * matrix * after[None, :]
    return np.asarray(matrix, np.float32)


def rotation_factor(head_dim: int) -> np.float32:
    """1/sqrt(size of the Hadamard block)."""
    return np.float32(1 / np.sqrt(hadamard_block(head_dim)))


@functools.partial(jax.jit, static_argnames="spec")
def rotate(x: jax.Array, spec: SideSpec) -> jax.Array:
    """Rotates heads into the basis in which a side is stored.

    Args:
      x: [..., head_dim], any float dtype.
      spec: the side; nothing happens where its format is not rotated.

    Returns:
      f32 [..., head_dim].
    """
    return _product(x, spec, inverse=False)


@functools.partial(jax.jit, static_argnames="spec")
def unrotate(x: jax.Array, spec: SideSpec) -> jax.Array:
    """Inverse of `rotate`. x: [..., head_dim] in the stored basis. Returns f32."""
    return _product(x, spec, inverse=True)


def _product(x: jax.Array, spec: SideSpec, *, inverse: bool) -> jax.Array:
    x = x.astype(jnp.float32)
    if spec.rotation == "none":
        return x
    matrix = rotation_matrix(spec.head_dim, spec.rotation)
    product = jnp.matmul(x, matrix.T if inverse else matrix, precision=jax.lax.Precision.HIGHEST)
    return product * rotation_factor(spec.head_dim)
