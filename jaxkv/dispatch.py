"""Which implementation serves a layer: XLA everywhere, Pallas on a GPU that can."""

from __future__ import annotations

import functools
import re
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
    device = jax.devices()[0]
    # NVIDIA says "9.0"; ROCm calls its devices a gpu too and says "gfx942".
    capability = str(getattr(device, "compute_capability", None))
    if not (version := re.fullmatch(r"(\d+)\.(\d+)", capability)):
        named = f"{device.device_kind} (compute capability {capability})"
        return (f"the default device is a {named}, expected an NVIDIA GPU",)
    return _gpu_reasons(config, layer, (int(version[1]), int(version[2])))


@functools.cache
def _gpu_reasons(
    config: CacheConfig, layer: int, compute_capability: tuple[int, int]
) -> tuple[str, ...]:
    import pallas_kernels

    spec = config.layer(layer)
    reasons = pallas_kernels.unsupported_reasons(
        k_spec=spec.k,
        v_spec=spec.v,
        block_size=config.block_size,
        compute_capability=compute_capability,
    )
    reasons += pallas_kernels.write_unsupported_reasons(
        spec.k, spec.v, block_size=config.block_size
    )
    return tuple(reasons)
