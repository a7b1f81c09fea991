"""What the compiler makes of the kernels, on a machine without a GPU.

The CUDA plugin compiles for a described target; Mosaic GPU dumps what ptxas reports and the
machine code. Needs the `cuda-compile` dependency group. One architecture per process, because
the front end asks the process for its device: `inspect_cases` starts one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.formats import Encoding

CAPABILITIES = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100a": (10, 0)}
_SHARED_PER_SM = 228 * 1024
_REGISTERS_PER_SM = 65536
_THREADS_PER_CTA = 128
_RESERVED_SHARED = 1024


@dataclasses.dataclass(frozen=True)
class Report:
    """What one compiled kernel costs.

    Attributes:
      registers: of a thread.
      spill_bytes: stored and loaded by register spills.
      shared_bytes: of a CTA.
      loop_instructions: machine instructions of the longest loop, every branch inside counted.
      instructions: of the whole kernel.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    loop_instructions: int
    instructions: int

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that fit a Hopper SM by registers and shared memory."""
        per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = _REGISTERS_PER_SM // (per_warp * _THREADS_PER_CTA // 32)
        return min(by_registers, _SHARED_PER_SM // (self.shared_bytes + _RESERVED_SHARED))


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention kernel to compile.

    Attributes:
      k: format of the keys.
      v: format of the values.
      head_dim: of both sides.
      block_size: tokens of a block.
      tokens: query tokens of a sequence.
      group: query heads of a KV head.
      encoding: "searched" or "reference".
      path: "wgmma" or "mma"; None leaves it to the default tuning.
      window: keys that a query sees, or None.
      soft_cap: bound of the scores, or None.
      num_blocks: blocks of the pool.
      left_out: whether first and recent keys are read from elsewhere.
    """

    k: str
    v: str
    head_dim: int = 128
    block_size: int = 64
    tokens: int = 1
    group: int = 4
    encoding: Encoding = "searched"
    path: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    num_blocks: int = 256
    left_out: bool = False

    @property
    def name(self) -> str:
        """A readable key: the fields that differ from the defaults."""
        sides = self.k if self.k == self.v else f"{self.k}k_{self.v}v"
        rest = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)[3:]
            if getattr(self, f.name) != f.default
        ]
        return " ".join([sides, f"head_dim={self.head_dim}", *rest])

    @property
    def tile_bytes(self) -> int:
        """Bytes that 64 tokens of both sides occupy."""
        from jaxkv.formats import FORMATS

        elements = 64 * self.head_dim
        return sum(
            f.data_bytes(elements) + f.scale_bytes(elements, self.head_dim)
            for f in (FORMATS[self.k], FORMATS[self.v])
        )


def can_compile() -> bool:
    """Whether the CUDA plugin, its assembler and a disassembler are installed."""
    # Looking for a module inside a package that is missing raises.
    has_plugin = importlib.util.find_spec("jax_plugins") is not None and (
        importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    )
    return has_plugin and _cuda_root() is not None


def inspect_cases(
    cases: Sequence[Case], arch: str, target: pathlib.Path, timeout: float = 600
) -> list[Report | str]:
    """Compiles kernels for an architecture in a process of their own.

    Args:
      cases: what to compile.
      arch: "sm_80", "sm_90a" or "sm_100a".
      target: the target's description, a text protocol buffer.
      timeout: seconds for all of them.

    Returns:
      A report for each case, or the error's text where it does not compile.

    Raises:
      RuntimeError: the process itself failed.
    """
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            # What comes from a cache is not compiled again, and leaves no machine code to read.
            "JAX_ENABLE_COMPILATION_CACHE": "0",
            "MOSAIC_GPU_CUDA_ROOT": str(_cuda_root()),
            "MOSAIC_GPU_DUMP_TO": dump,
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_DUMP_SASS": "1",
        }
        request = json.dumps([dataclasses.asdict(case) for case in cases])
        process = subprocess.run(
            [sys.executable, "-m", "pallas_kernels.inspection", arch, str(target), dump],
            input=request,
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    if process.returncode:
        raise RuntimeError(f"compiling for {arch} failed:\n{process.stderr[-4000:]}")
    answers = json.loads(process.stdout.splitlines()[-1])
    return [a if isinstance(a, str) else Report(**a) for a in answers]


def _cuda_root() -> pathlib.Path | None:
    """The directory whose bin/ holds the tools of the cuda-compile group."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        root = pathlib.Path(place) / "cu13"
        if all((root / "bin" / tool).exists() for tool in ("ptxas", "nvdisasm")):
            return root
    return None


def parse_machine_code(text: str) -> tuple[int, int]:
    """(instructions of the main loop, instructions) of a disassembled kernel.

    The main loop is the shortest backward jump over the most matrix multiplies: retries of waits
    lie behind the kernel's end and jump back over everything.
    """
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    multiplies: list[int] = []
    count = 0
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*);?", line):
            if jump := re.search(r"\bBRA.*?`\((\.L_x_\d+)\)", instruction[1]):
                jumps.append((count, jump[1]))
            if re.search(r"\b(HGMMA|QGMMA|HMMA)\b", instruction[1]):
                multiplies.append(count)
            count += 1
    loops = [(labels[to], at) for at, to in jumps if labels.get(to, count) <= at]

    def work(loop: tuple[int, int]) -> tuple[int, int]:
        return sum(loop[0] <= m <= loop[1] for m in multiplies), loop[0] - loop[1]

    first, last = max(loops, key=work, default=(0, -1))
    return last - first + 1, count


def read_report(dump: pathlib.Path, stem: str) -> Report:
    """The report of one dumped kernel."""
    ptxas = (dump / f"{stem}.ptxas").read_text()
    registers = re.search(r"Used (\d+) registers", ptxas)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas)
    resources = (dump / f"{stem}.resources.txt").read_text()
    shared = re.search(r"smem_scratch_bytes=(\d+)", resources)
    assert registers and shared, ptxas
    loop, total = parse_machine_code((dump / f"{stem}.sass_ctrl").read_text())
    return Report(int(registers[1]), sum(map(int, spills)), int(shared[1]), loop, total)


def lower(
    function: Callable[..., Any],
    arguments: Any,
    arch: str,
    target: str,
    donate: int | tuple[int, ...] = (),
) -> Any:
    """Lowers a function of abstract arguments for a described target, in this process.

    Args:
      function: takes `arguments` unpacked.
      arguments: a tuple of pytrees of `jax.ShapeDtypeStruct`.
      arch: a key of `CAPABILITIES`.
      target: the target's description.
      donate: which arguments are donated.

    Returns:
      The `jax.stages.Lowered`.
    """
    import jax
    from jax.experimental import topologies
    from jax.experimental.mosaic.gpu import utils

    # Without a device the front end would assume one; it asks this function.
    utils._infer_arch = lambda: CAPABILITIES[arch]
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donate).lower(*placed)


def attention_case(case: Case) -> tuple[Callable[..., Any], Any]:
    """The function of a case and its abstract arguments."""
    import jax
    import jax.numpy as jnp

    from jaxkv.codecs import pages_shapes
    from jaxkv.formats import FORMATS, SideSpec
    from pallas_kernels.paged_attention import paged_attention
    from pallas_kernels.row_blocks import LeftOut
    from pallas_kernels.sides import Side
    from pallas_kernels.tuning import default_tuning

    k_spec, v_spec = (
        SideSpec(FORMATS[name], case.head_dim, case.encoding) for name in (case.k, case.v)
    )
    heads, sequences, columns = 8, 4, 2048 // case.block_size
    tuning = None
    if case.path is not None:
        k_side, v_side = Side(k_spec, case.block_size), Side(v_spec, case.block_size)
        path: Any = case.path
        tuning = default_tuning(k_side, v_side, case.tokens * case.group, path)
    i32 = jnp.int32
    q_shape = (sequences, case.tokens, heads * case.group, case.head_dim)
    arguments: tuple[Any, ...] = (
        jax.ShapeDtypeStruct(q_shape, jnp.bfloat16),
        pages_shapes(case.num_blocks, heads, case.block_size, k_spec),
        pages_shapes(case.num_blocks, heads, case.block_size, v_spec),
        jax.ShapeDtypeStruct((sequences, columns), i32),
        jax.ShapeDtypeStruct((sequences,), i32),
        jax.ShapeDtypeStruct((sequences,), i32),
    )
    if case.left_out:
        arguments = (*arguments, *[jax.ShapeDtypeStruct((sequences,), i32)] * 2)

    def call(*arrays: Any) -> Any:
        return paged_attention(
            *arrays[:6],
            left_out=LeftOut(arrays[6], arrays[7], 64) if case.left_out else None,
            k_spec=k_spec,
            v_spec=v_spec,
            scale=case.head_dim**-0.5,
            window=case.window,
            soft_cap=case.soft_cap,
            tuning=tuning,
        )

    return call, arguments


def _worker(arch: str, target: str, dump: str) -> None:
    """Compiles the cases on standard input and prints a JSON list of reports or errors."""
    directory = pathlib.Path(dump)
    answers: list[Any] = []
    for fields in json.load(sys.stdin):
        before = {p.name for p in directory.iterdir()}
        try:
            function, arguments = attention_case(Case(**fields))
            lower(function, arguments, arch, pathlib.Path(target).read_text()).compile()
            new = {p.name for p in directory.iterdir()} - before
            (stem,) = {name.split(".")[0] for name in new if name.endswith(".sass_ctrl")}
            answers.append(dataclasses.asdict(read_report(directory, stem)))
        except Exception as error:  # Reported to the parent, which decides what it means.
            answers.append(f"{type(error).__name__}: {str(error)[:2000]}")
    print(json.dumps(answers))


if __name__ == "__main__":
    _worker(*sys.argv[1:])
