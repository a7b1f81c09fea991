"""What of `benchmarks/gpu.py` a machine without a GPU can check."""

import functools
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402


@pytest.mark.slow
@pytest.mark.full
def test_it_refuses_a_machine_without_a_gpu():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "needs an NVIDIA GPU" in done.stderr


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("path, left_out", [(None, None), ("mma", None), (None, 20)])
def test_its_oracle_agrees_with_the_interpreted_kernel(path, left_out):
    layer = gpu.make_layer("fp8", "turbo4", 1, 192, heads=1, head_dim=64, first_block=0)
    params = plgpu.InterpretGPUParams()
    options = dict(window=70, path=path, left_out=left_out, interpret=params)
    assert gpu.check_attention(layer, 2, **options) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.full)])
def test_its_check_of_writes_passes_and_can_fail(monkeypatch, fused):
    params = plgpu.InterpretGPUParams()
    run = functools.partial(
        gpu.check_write, "int8", "turbo4", head_dim=64, fused=fused, interpret=params
    )
    assert run() < 1e-3
    name = "paged_qkv_write" if fused else "paged_write"
    kernel = getattr(gpu.pallas_kernels, name)

    def off(x, *rest, **options):
        return kernel(x * 1.1, *rest, **options)

    monkeypatch.setattr(gpu.pallas_kernels, name, off)
    with pytest.raises(AssertionError, match="squared error"):
        run()


def test_timing_feeds_each_step_the_last_one():
    took = gpu.seconds(lambda q, c: q + c, jnp.zeros(4), jnp.ones(4), repeats=3)
    assert took > 0


def test_the_table_lists_decodes_and_writes():
    timings = [
        {"what": "decode bf16", "batch": 1, "context": 2048, "seconds": 2e-5, "bytes": 8e6},
        {"what": "decode fp8", "batch": 1, "context": 2048, "seconds": 1e-5, "bytes": 4e6},
        {"what": "write fp8", "batch": 1, "pool": 16, "seconds": 1e-5},
        {"batch": 64, "context": 2048, "skipped": "out of time"},
    ]
    text = gpu.table(timings, copy=4e12)
    assert "2.00" in text and "16x" in text and "10%" in text
