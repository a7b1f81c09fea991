"""Which implementation serves a layer: XLA everywhere, Pallas on a GPU that can."""

from __future__ import annotations

import functools
from typing import Literal, cast, get_args

import jax

from jaxkv.config import CacheConfig

Implementation = Literal["xla", "pallas_gpu"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


def choose_implementation(
    config: CacheConfig, implementation: str | None, *, layer: int
) -> Implementation:
    """Resolves `implementation=` for one layer.

    Args:
      config: the cache's config.
      implementation: a name, or None for the best that this device and layer allow.
      layer: which layer.

    Raises:
      ValueError: an unknown name.
      NotImplementedError: the named implementation cannot serve; the message lists the reasons.
    """
    if implementation is None:
        return "xla" if unsupported(config, "pallas_gpu", layer) else "pallas_gpu"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: got {implementation!r}, expected one of {IMPLEMENTATIONS} or None"
        )
    if reasons := unsupported(config, implementation, layer):
        raise NotImplementedError(
            f"implementation: {implementation!r} cannot serve layer {layer}: {'; '.join(reasons)}"
        )
    return cast(Implementation, implementation)


def unsupported(config: CacheConfig, implementation: str, layer: int) -> tuple[str, ...]:
    """Why an implementation cannot serve a layer on this machine's default device."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: got {implementation!r}, expected one of {IMPLEMENTATIONS}"
        )
    if implementation == "xla":
        return ()
    platform = jax.default_backend()
    if platform not in ("gpu", "cuda"):
        return (f"the default device is a {platform}, expected an NVIDIA GPU",)
    return _gpu_reasons(config, layer)


@functools.cache
def _gpu_reasons(config: CacheConfig, layer: int) -> tuple[str, ...]:
    import pallas_kernels

    spec = config.layer(layer)
    major, minor = str(jax.devices()[0].compute_capability).split(".")
    reasons = pallas_kernels.unsupported_reasons(
        k_spec=spec.k,
        v_spec=spec.v,
        block_size=config.block_size,
        compute_capability=(int(major), int(minor)),
    )
    reasons += pallas_kernels.write_unsupported_reasons(
        spec.k, spec.v, block_size=config.block_size
    )
    return tuple(reasons)
