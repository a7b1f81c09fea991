"""Compiles write kernels for a GPU that is not there, in a process of its own.

    python write_inspection.py ARCH < cases.json

prints one JSON list: for each case what ptxas, the PTX and the compiled module say, or the error.
One architecture per process, because the front end asks the process for its device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from pallas_kernels.inspection import lower

HERE = pathlib.Path(__file__).parent
TARGETS = HERE / "targets"


@dataclasses.dataclass(frozen=True)
class WriteCompileCase:
    """One write kernel to compile.

    Attributes:
      k: format of the keys.
      v: format of the values.
      head_dim: of both sides.
      encoding: "searched" or "reference".
      heads: KV heads.
      num_blocks: blocks of the pool.
      layers: equal layers written in one program.
      steps: trips of a loop that carries the pages through the writes.
      tokens: tokens of the step.
      dtype: of keys and values.
      rotation: as in `SideSpec`.
      rope: None, or the fused kernel with this rope style and both norms.
      rotary_dim: how many dims RoPE turns; None means all.
    """

    k: str
    v: str
    head_dim: int = 128
    encoding: str = "searched"
    heads: int = 2
    num_blocks: int = 256
    layers: int = 1
    steps: int = 1
    tokens: int = 16
    dtype: str = "bfloat16"
    rotation: str = "signs"
    rope: str | None = None
    rotary_dim: int | None = None

    @property
    def name(self) -> str:
        sides = self.k if self.k == self.v else f"{self.k}k_{self.v}v"
        fused = f" qkv {self.rope}" if self.rope else ""
        return f"{sides} {self.head_dim} {self.encoding}{fused}"


def inspect(cases: list[WriteCompileCase], arch: str, timeout: float = 900) -> list[Any]:
    """Facts about each compiled case, a dict, or the text of its error."""
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            # What comes from a cache is not compiled again, and leaves no machine code to read.
            "JAX_ENABLE_COMPILATION_CACHE": "0",
            "MOSAIC_GPU_DUMP_TO": dump,
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        process = subprocess.run(
            [sys.executable, __file__, arch, dump],
            input=json.dumps([dataclasses.asdict(case) for case in cases]),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    if process.returncode:
        raise RuntimeError(f"compiling for {arch} failed:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def _abstract(case: WriteCompileCase) -> tuple[Any, tuple[Any, ...]]:
    """The program of a case and its abstract arguments; the first is donated."""
    import jax
    import jax.numpy as jnp

    from jaxkv.codecs import pages_shapes
    from jaxkv.formats import FORMATS, SideSpec
    from pallas_kernels.paged_write import paged_write
    from pallas_kernels.qkv_write import paged_qkv_write

    specs = [
        SideSpec(FORMATS[n], case.head_dim, case.encoding, case.rotation) for n in (case.k, case.v)
    ]
    tokens, block_size, num_q_heads, dim = case.tokens, 16, 2 * case.heads, case.head_dim
    pages = [pages_shapes(case.num_blocks, case.heads, block_size, s) for s in specs]
    common = dict(k_spec=specs[0], v_spec=specs[1])

    def array(*shape: int, dtype: Any = case.dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    slots, scale = array(tokens, dtype=jnp.int32), array(dtype=jnp.float32)
    if case.rope:
        width = (num_q_heads + 2 * case.heads) * dim
        angle = array(tokens, (case.rotary_dim or dim) // 2, dtype=jnp.float32)

        def fused(pages, qkv, slots, scale, cos, sin, weight):
            return paged_qkv_write(
                qkv, *pages, slots, num_q_heads=num_q_heads, rope_style=case.rope,
                angles=(cos, sin), q_norm=weight, k_norm=weight, k_scale=scale, v_scale=scale,
                **common,
            )  # fmt: skip

        return fused, (pages, array(tokens, width), slots, scale, angle, angle, array(dim))

    def layers(pages, x_k, x_v, slots, scale):
        written = []
        for layer in pages:
            k, v, audits = paged_write(
                x_k, x_v, *layer, slots, k_scale=scale, v_scale=scale, **common
            )
            written.append((k, v, audits))
        return written

    def looped(pages, *rest):
        def step(_, carried):
            return [[k, v] for k, v, _ in layers(carried, *rest)]

        return jax.lax.fori_loop(0, case.steps, step, pages)

    x = array(tokens, case.heads, dim)
    return (looped if case.steps > 1 else layers), ([pages] * case.layers, x, x, slots, scale)


def _facts(case: WriteCompileCase, arch: str, dump: pathlib.Path) -> dict[str, Any]:
    import math

    import jax

    for old in dump.iterdir():
        old.unlink()
    program, arguments = _abstract(case)
    target = (TARGETS / f"{arch}.txtpb").read_text()
    lowered, pages = lower(program, arguments, arch, target, donate=0), arguments[0]
    compiled = lowered.compile()
    sizes = [math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(pages)]
    memory = compiled.memory_analysis()
    ptx = "\n".join(p.read_text() for p in dump.glob("*.ptx"))
    ptxas = "\n".join(p.read_text() for p in dump.glob("*.ptxas"))
    code = "\n".join(p.read_text() for p in dump.glob("*.sass_ctrl"))
    resources = "\n".join(p.read_text() for p in dump.glob("*.resources.txt"))
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", ptxas))),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas))),
        "shared_bytes": max(map(int, re.findall(r"smem_scratch_bytes=(\d+)", resources))),
        "instructions": len(re.findall(r"/\*[0-9a-f]{4,}\*/\s+\S", code)),
        "approximate": sorted(set(re.findall(r"\b(?:div|sqrt|rcp)\.(?:full|approx)\S*", ptx))),
        "ptx": {
            "ftz": ".ftz" in ptx,
            "local": ".local" in ptx,
            "wide_factors": sorted(
                set(
                    map(
                        int,
                        re.findall(r"m(?:ul|ad)\.(?:wide\.[su]32|lo\.[su]64)\s[^;]*, (\d+)", ptx),
                    )
                )
            ),
        },
        "pool_bytes": sum(sizes),
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "source": ptx if case.steps == case.layers == 1 else "",
        "lowered_kernels": lowered.as_text().count("custom_call @mosaic_gpu"),
    }


def main(arch: str, dump: str) -> None:
    answers: list[Any] = []
    for fields in json.load(sys.stdin):
        try:
            answers.append(_facts(WriteCompileCase(**fields), arch, pathlib.Path(dump)))
        except Exception as error:  # The parent decides what it means.
            answers.append(f"{type(error).__name__}: {str(error)[:2000]}")
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
