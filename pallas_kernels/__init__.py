"""GPU kernels (Pallas, Mosaic GPU) for paged, quantized KV caches.

They know arrays and static numbers, never a cache object.
"""

from pallas_kernels.paged_attention import paged_attention, unsupported_reasons

__all__ = ["paged_attention", "unsupported_reasons"]
