"""jaxkv: paged, quantized KV caches for JAX."""

from jaxkv import blocks, codecs
from jaxkv.blocks import BlockPool
from jaxkv.cache import (
    LayerPages,
    LayerView,
    PagedCache,
    attend,
    check,
    clear_faults,
    close,
    export_block,
    fork,
    import_block,
    init,
    release,
    reorder,
    report,
    reserve,
    supports,
    trace,
    trim,
    write,
)
from jaxkv.calibration import Calibration, calibrate
from jaxkv.checkpoint import load, save
from jaxkv.config import CacheConfig, LayerSpec, OnlineCalibration, boundary_formats
from jaxkv.contiguous import ContiguousCache, grow, init_contiguous
from jaxkv.faults import CacheError, FaultKind, Faults
from jaxkv.formats import Format, SideSpec, StorageFormat
from jaxkv.prefix import PrefixCache, PrefixStatistics
from jaxkv.qkv import write_qkv
from jaxkv.render import PoolPicture, render
from jaxkv.scheduler import Scheduler
from jaxkv.sequences import Refusal, StepPlan
from jaxkv.store import BlockStore
from jaxkv.swap import offload, swap_in, swap_out

__all__ = [
    "BlockPool",
    "BlockStore",
    "CacheConfig",
    "CacheError",
    "Calibration",
    "ContiguousCache",
    "FaultKind",
    "Faults",
    "Format",
    "LayerPages",
    "LayerSpec",
    "LayerView",
    "OnlineCalibration",
    "PagedCache",
    "PoolPicture",
    "PrefixCache",
    "PrefixStatistics",
    "Refusal",
    "Scheduler",
    "SideSpec",
    "StepPlan",
    "StorageFormat",
    "attend",
    "blocks",
    "boundary_formats",
    "calibrate",
    "check",
    "clear_faults",
    "close",
    "codecs",
    "export_block",
    "fork",
    "grow",
    "import_block",
    "init",
    "init_contiguous",
    "load",
    "offload",
    "release",
    "render",
    "reorder",
    "report",
    "reserve",
    "save",
    "supports",
    "swap_in",
    "swap_out",
    "trace",
    "trim",
    "write",
    "write_qkv",
]
