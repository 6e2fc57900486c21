"""The parts of the copiers that meet torch and Triton, as far as they go without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.device.cpu import PageCopier, host_arrays
from kvtier.device.layout import DeviceLayout
from kvtier.device.records import RecordParts
from kvtier.record.record import part_sum

pytestmark = pytest.mark.vllm


def said_by(program: str, folder: Path | None = None, *, interpreted: bool = True) -> list[str]:
    """What a process of its own prints, whose kernels are interpreted or built."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    environment.pop("TRITON_INTERPRET", None)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.splitlines()


_KERNELS = """
import numpy as np
import torch
from kvtier.device.cuda import kernels
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.device.cuda.staging_buffers import references_of
from kvtier.record.record import part_sum, pieces_of, sum_of

rng = np.random.default_rng(0)
pools = [rng.integers(0, 256, (24, size + pad), dtype=np.uint8)
         for size, pad in ((24, 0), (9000, 8), (140_008, 0), (4096, 64))]
tensors = tuple(
    DeviceTensor(pool.ctypes.data, 24, pool.strides[0], pool.shape[1]) for pool in pools
)
refs = (PageRef(0, 24), PageRef(1, 8992), PageRef(2, 140_008), PageRef(3, 4096))
layout = DeviceLayout(tensors, (refs,), 3)
references = references_of(layout, 0, torch.from_numpy)
here = torch.zeros(12, dtype=torch.int64)
away, back = rng.permutation(24).reshape(2, 4, 3).astype(np.int64)
back[0, 0] = back[3, 2] = -1
part = layout.part_bytes[0]
buffer = torch.zeros(4 * part // 8, dtype=torch.int64)
kernels.move(away.ctypes.data, here, references, buffer, (4, 3), part, 3, out=True)
parts = buffer.numpy().view(np.uint8).reshape(4, part)
for row in range(4):
    pages = [pools[ref.tensor][block, : ref.page_bytes] for ref in refs for block in away[row]]
    assert (parts[row] == np.concatenate(pages)).all()
wanted = [pool.copy() for pool in pools]
for new, old in zip(back.flat, away.flat):
    if new >= 0:
        for ref in refs:
            pool = wanted[ref.tensor]
            pool[new, : ref.page_bytes] = pool[old, : ref.page_bytes]
kernels.move(back.ctypes.data, here, references, buffer, (4, 3), part, 3, out=False)
assert all((pool == want).all() for pool, want in zip(pools, wanted))

sizes = (256, 1024, 1088, 40_000, 2 << 20, (2 << 20) + 1016, (2 << 20) + 1024, 5_000_008)
for size in (*sizes, (4 << 20) + 1016):  # the last: a piece that is longer than the one before
    data = rng.integers(0, 256, (2, size), dtype=np.uint8)
    totals = torch.zeros(kernels.totals_of(2, size), dtype=torch.int64)
    sums = torch.zeros(2 * pieces_of(size), dtype=torch.int64)
    numbers = torch.from_numpy(kernels.constants())
    words = torch.from_numpy(data).view(torch.int64)
    kernels.digest(words, numbers, totals, sums.data_ptr(), 2, size, 3)
    found = sums.numpy().view(np.uint64).reshape(2, -1).tolist()
    assert [sum_of(row) for row in found] == [part_sum(part.data) for part in data], size
assert [kernels.programs_of(many) for many in (132, 66, 24, 2)] == [8, 4, 4, 2]
"""


def test_the_kernels_move_pages_and_take_the_checksums_of_records() -> None:
    """In Triton's interpreter, which runs the same programs on the CPU."""
    pytest.importorskip("triton")
    said_by(_KERNELS)


_COMPILED = """
import re
import subprocess
from pathlib import Path
import torch
from kvtier.device.cuda import kernels
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

builds, together = {}, {"move_pages": 8, "add_blocks": 16}
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

def said(option):
    return subprocess.check_output([tool, option, "cubin"], text=True)

def used_early(lines, many):
    loads = [at for at, line in enumerate(lines) if re.search(r"@!?P[0-9] LDG", line)][-many:]
    coming = set()
    for line in lines[loads[0] : loads[-1]]:
        named = [int(number) for number in re.findall(r"\\bR([0-9]+)", line)]
        if re.search("P[0-9] LDG", line):
            coming |= {named[0], named[0] + 1}
        elif coming & {*named}:
            return line
    return None

class Launched:
    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, num_warps, **fixed):
        names, backend = self.function.arg_names, make_backend(GPUTarget("cuda", 90, 32))
        bind = create_function_from_signature(
            self.function.signature, self.function.params, backend
        )
        _, specialised, _ = bind(*arguments, num_warps=num_warps, **fixed)
        build = builds.setdefault((self.function, *fixed.values()), str(specialised))
        assert build == str(specialised), "it would be built again in the middle of a load"
        types = {
            name: "*i64" if isinstance(given, torch.Tensor) else "i64" if given >= 2**31 else "i32"
            for name, given in zip(names, arguments)
        }
        assert [*types, *fixed] == names
        source = ASTSource(
            self.function,
            types | dict.fromkeys(fixed, "constexpr"),
            constexprs={(names.index(name),): value for name, value in fixed.items()},
        )
        for generation in (75, 80, 89, 90, 100, 120):
            target = GPUTarget("cuda", generation, 32)
            built = triton.compile(source, target=target, options={"num_warps": num_warps})
            Path("cubin").write_bytes(built.asm["cubin"])
            assert "STACK:0" in said("-res-usage"), "registers go to memory"
            name = self.function.fn.__name__
            if name in together:
                early = used_early(said("-sass").splitlines(), together[name])
                assert early is None, f"waits for a word before all are on their way: {early}"
            print(name, *fixed.values(), generation)

for name in ("bring_numbers", "move_pages", "add_blocks", "finish_sums"):
    setattr(kernels, name, Launched(getattr(kernels, name)))
words, halfway = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)[1:]
assert words.data_ptr() % 16 == 0 != halfway.data_ptr() % 16
for buffer, at, shape, part_bytes, many in (
    (words, 1 << 40, (2, 4), 1 << 24, 3), (halfway, (1 << 40) + 8, (1, 1), (1 << 12) - 8, 1)
):
    references = kernels.References(torch.zeros((4, many), dtype=torch.int64), 512 * many)
    for out in (True, False):
        kernels.move(at, words, references, buffer, shape, part_bytes, 16, out=out)
    kernels.digest(buffer, words, words, at, shape[0], part_bytes, 16)
"""


def test_the_kernels_can_be_built_for_devices_that_are_not_here(tmp_path: Path) -> None:
    """The interpreter takes more than the compiler does; and numbers for which there is no register
    would be fetched from memory, which makes a kernel several times slower."""
    pytest.importorskip("triton")
    assert len(set(said_by(_COMPILED, tmp_path, interpreted=False))) == 30


_BUILT = """
import threading
import torch
from kvtier.device.cuda import kernels
import triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

def built():
    every = (kernels.bring_numbers, kernels.move_pages, kernels.add_blocks, kernels.finish_sums)
    return [len(known[0]) for each in every for known in each.device_caches.values()]

def launch(kernel, programs, *arguments, **constants):
    kernel.warmup(*arguments, grid=(programs,), **constants)
    assert built() == [1, 2, 1, 1], "it is built in the middle of a load"

triton.runtime.driver.set_active(Driver())
words = torch.zeros(64, dtype=torch.int64)
if not hasattr(triton, "AsyncCompileMode"):
    print("too old")
else:
    kernels.build(words)
    print(*built())
    references = kernels.References(torch.zeros((4, 3), dtype=torch.int64), 1536)
    for out in (True, False):
        kernels.move((1 << 40) + 8, words, references, words, (2, 4), 1 << 24, 8, launch, out=out)
    kernels.digest(words, words, words, (1 << 40) + 8, 2, (1 << 24) - 8, 8, launch)
"""


def test_what_was_built_beforehand_is_what_is_launched(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert said_by(_BUILT, tmp_path, interpreted=False)[-1] in ("1 2 1 1", "too old")


_READY = """
import tempfile
from functools import partial
from pathlib import Path
from support.device import pretend_cuda
import numpy as np
from kvtier.device.cuda import device as cuda
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.device.pinned import PinPlan
from support.tiers.cpu_regions import CONTEXT, NAMESPACE, opened
from kvtier.backends.cpu import Region

pages = np.zeros((16, 4096), np.uint8)
tensor = DeviceTensor(pages.ctypes.data, 16, 4096, 4096)
layout = DeviceLayout((tensor,), ((PageRef(0, 4096),),), 2)
with opened(Path(tempfile.mkdtemp())) as tier:
    region, pinned = Region.attach(tier.region.path), []

    def note(piece):
        region.note_pinned(0, piece)
        pinned.append(tier.region.mark.pinned(0))

    copier = cuda.open_copier(
        layout,
        region,
        NAMESPACE.digest,
        index=0,
        plan=PinPlan(
            order=region.pinning_order(),
            least_slots=2,
            note=note,
            watch=region.watch,
        ),
    )
    assert copier.make_ready(600)
    assert copier.staged
    assert copier.prepared.wait(600)
    print(pinned)
    copier.close()
    region.close()
"""


def test_a_copier_is_ready_when_its_memory_is_pinned_and_its_buffers_have_been_used() -> None:
    pytest.importorskip("triton")
    assert said_by(_READY)[-1] == "[0, 1]"


_TRIAL = """
import contextlib
import ctypes
from support.device import pretend_cuda
import numpy as np
from kvtier.device.cuda import device as cuda, kernels, staging_buffers as staging
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
import torch

inside, to = [], torch.Tensor.to

@contextlib.contextmanager
def stream(entered):
    inside.append(entered)
    yield
    inside.pop()

def moved(*arguments, **options):
    assert inside, "the default stream may be the engine's"
    return to(*arguments, **options)

torch.cuda.stream, torch.Tensor.to = stream, moved

def layout(page=4096, base=0, stride=4096):
    return DeviceLayout((DeviceTensor(base, 8, stride, page),), ((PageRef(0, page),),))

def reason(layout, batch=1 << 20):
    try:
        device = cuda.Cuda(0)
        device.stages(layout, batch, urgent=True)
        return "; ".join(type(each).__name__ for each in device.stages(layout, batch, urgent=False))
    except RuntimeError as error:
        return str(error)

def buffers(free, of):
    torch.cuda.mem_get_info = lambda device: (free, free)
    stages = cuda.Cuda(0).stages(of, 32 << 20, urgent=True)
    return f"{len(stages)} for {stages[0].rows[0]} records"

print(buffers(8 << 30, layout()))
print(buffers(512 << 20, layout()))
print(buffers(512 << 20, layout(12 << 20, stride=12 << 20)))
print(buffers(8 << 30, layout(80 << 20, stride=80 << 20)))
torch.cuda.mem_get_info = lambda device: (8 << 30, 16 << 30)

move, digest = kernels.move, kernels.digest
print(reason(layout()))
print(reason(layout(4092)))
print(reason(layout(248, 8)))
print(reason(layout(1 << 30, stride=1 << 30)))

def loses_a_word(*arguments, out):
    move(*arguments, out=out)
    if out:
        arguments[3][77] += 1
kernels.move = loses_a_word
print(reason(layout()))

def spills(*arguments, out):
    move(*arguments, out=out)
    if not out:
        ids, here, references, *others = arguments
        table = torch.clone(references.table)
        table[0] += 8
        move(ids, here, references._replace(table=table), *others, out=out)
kernels.move = spills
print(reason(layout()))

def miscounts(*arguments):
    digest(*arguments)
    ctypes.c_int64.from_address(arguments[3]).value += 1
kernels.move, kernels.digest = move, miscounts
print(reason(layout()))

def breaks(*arguments):
    raise kernels.ERRORS[-1]("out of resource")
kernels.digest = breaks
print(reason(layout()))

def is_not_executable(*arguments):
    raise ImportError("failed to map segment from shared object")
kernels.digest = is_not_executable
print(reason(layout()))
"""


def test_a_device_that_moves_or_adds_up_wrongly_stages_nothing() -> None:
    pytest.importorskip("triton")
    assert said_by(_TRIAL) == [
        "3 for 8192 records",
        "3 for 2730 records",
        "2 for 1 records",
        "2 for 1 records",
        "CudaStage; CudaStage; CudaStage",
        "pages that are not made of words of 8 bytes",
        "records of fewer than 256 bytes",
        "buffers for records of 1024 MiB do not fit into the 8192 MiB that are free on the device",
        "its kernels do not gather the right pages",
        "its kernels do not put pages where they belong",
        "its kernels do not take the right checksums",
        "a kernel for staged records failed: out of resource",
        "a kernel for staged records failed: failed to map segment from shared object",
    ]


def canonical(tensor: Any, pages: list[tuple[int, int]]) -> Any:
    """Caches over one packed tensor of bytes, as vLLM views them: (offset, size) of each page."""
    import torch

    stride = tensor.stride(0)
    views = [
        torch.as_strided(tensor, (tensor.shape[0], size), (stride, 1), at) for at, size in pages
    ]
    return SimpleNamespace(
        tensors=[
            SimpleNamespace(tensor=view, page_size_bytes=size)
            for view, (_, size) in zip(views, pages, strict=True)
        ],
        group_data_refs=[
            [
                SimpleNamespace(tensor_idx=index, page_size_bytes=size)
                for index, (_, size) in enumerate(pages)
            ]
        ],
    )


def test_torch_tensors_are_copied_in_place() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randint(-128, 127, (16, 96), dtype=torch.int8)
    before = tensor.clone()
    caches = canonical(tensor, [(0, 32), (32, 32), (64, 24)])
    layout = DeviceLayout.of_caches(caches, 2)
    assert layout.tensors[1].base == tensor.data_ptr() + 32
    copier = PageCopier(layout, host_arrays(caches))
    part = memoryview(bytearray(layout.part_bytes[0]))
    copier.gather(0, [3, 9], part)
    found = np.frombuffer(part, np.int8)
    assert (found[:32] == before[3, :32].numpy()).all()
    assert (found[32:64] == before[9, :32].numpy()).all()
    assert (found[-24:] == before[9, 64:88].numpy()).all()
    parts = RecordParts(np.frombuffer(part, np.uint8)[None], np.arange(1))
    copier.scatter(0, np.array([[12, 13]]), parts, np.array([part_sum(part)], np.uint64))
    assert (tensor[12, :88] == before[3, :88]).all()
    assert (tensor[13, :88] == before[9, :88]).all()
    assert (tensor[12, 88:] == before[12, 88:]).all()
