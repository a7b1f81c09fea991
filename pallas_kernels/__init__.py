"""GPU kernels (Pallas, Mosaic GPU) for paged, quantized KV caches.

They know arrays and static numbers, never a cache object.
"""
