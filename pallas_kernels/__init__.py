"""GPU kernels (Pallas, Mosaic GPU) for paged, quantized KV caches.

They know arrays and static numbers, never a cache object.
"""

from pallas_kernels.paged_attention import paged_attention, unsupported_reasons
from pallas_kernels.paged_write import WriteTuning, paged_write, write_unsupported_reasons
from pallas_kernels.qkv_write import paged_qkv_write, qkv_unsupported_reasons
from pallas_kernels.row_blocks import LeftOut

__all__ = [
    "LeftOut",
    "WriteTuning",
    "paged_attention",
    "paged_qkv_write",
    "paged_write",
    "qkv_unsupported_reasons",
    "unsupported_reasons",
    "write_unsupported_reasons",
]
