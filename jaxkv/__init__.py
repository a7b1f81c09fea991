"""jaxkv: paged, quantized KV caches for JAX."""

from jaxkv import codecs
from jaxkv.config import CacheConfig
from jaxkv.formats import Format, StorageFormat

__all__ = ["CacheConfig", "Format", "StorageFormat", "codecs"]
