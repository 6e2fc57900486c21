"""Copies between a GPU, pinned host memory and a disk: speed, duplex, disturbance, identical bytes.

Needs torch with CUDA and this checkout: `make bench-gpu`. Contestants take turns in one run; every
figure is the median of its turns. What is known is printed and written (JSON=path) at once; a part
that fails, or takes too long, does not keep the others from running. FOLDER=path chooses the disk,
LIMIT_S=seconds the end.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.arena import LAYERS, LOAD, STORE, Arena, Unstaged, in_turns
from benchmarks.gpu.beside import disturbance
from benchmarks.gpu.disk import one_hop
from benchmarks.gpu.kernels import steps_of_a_batch
from benchmarks.gpu.parts import PART_SECONDS, answer_of, run_part
from benchmarks.gpu.timeline import timeline
from benchmarks.report import Report
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef

TURN_BYTES = 4 << 30
PAGES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 10]
IDENTITY_PAGES = 1_000_000
IDENTITY_RECORDS = 512
SECONDS = float(os.environ.get("LIMIT_S", 270.0))
"""For everything but the tests that `make bench-gpu` runs before."""


def page_sizes(torch: Any, report: Report) -> None:
    """Loads and stores beside one large copy and beside torch, for pages of many sizes."""
    plain = torch.empty(TURN_BYTES, dtype=torch.uint8, pin_memory=True)
    large = torch.empty(TURN_BYTES, dtype=torch.uint8, device="cuda")
    for page in PAGES:
        arena = Arena.even(torch, page, TURN_BYTES)
        blocks = arena.shuffled()
        index = torch.from_numpy(blocks.ids).cuda()
        shape = (LAYERS, arena.count, page)
        staging = torch.empty(shape, dtype=torch.uint8, device="cuda")
        pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        pool = arena.pool

        def synced(*actions: Callable[[], object]) -> None:
            for action in actions:
                action()
            torch.cuda.synchronize()

        part = functools.partial
        times = in_turns(
            {
                "store": part(arena.move, STORE, blocks),
                "load": part(arena.move, LOAD, blocks),
                "large to host": part(synced, part(plain.copy_, large, non_blocking=True)),
                "large to device": part(synced, part(large.copy_, plain, non_blocking=True)),
                "torch store": part(
                    synced,
                    part(torch.index_select, pool, 1, index, out=staging),
                    part(pinned.copy_, staging, non_blocking=True),
                ),
                "torch load": part(
                    synced,
                    part(staging.copy_, pinned, non_blocking=True),
                    part(pool.index_copy_, 1, index, staging),
                ),
            }
        )
        size = f"pages of {page >> 10} KiB"
        for name, baseline in (("store", "large to host"), ("load", "large to device")):
            report.add(f"{name}, {size}", arena.bytes / times[name] / 1e9, "GB/s")
            ratio = times[baseline] * arena.bytes / TURN_BYTES / times[name]
            report.at_least(f"{name}, {size}, of one large copy", ratio, "", 0.9)
            report.add(f"{name}, {size}, of torch", times[f"torch {name}"] / times[name], "times")
        for baseline in ("large to host", "large to device"):
            report.add(f"one {baseline}, {size}", TURN_BYTES / times[baseline] / 1e9, "GB/s")
        del staging, pinned, pool
        arena.close()


def unstaged(torch: Any, report: Report) -> None:
    """What copies page by page, which the host proves, reach: where staging is not possible."""
    for page in (16 << 10, 256 << 10, 2 << 20):
        arena = Arena.even(torch, page, TURN_BYTES, Unstaged(0))
        blocks = arena.shuffled()
        contestants = {
            "store": functools.partial(arena.move, STORE, blocks),
            "load": functools.partial(arena.move, LOAD, blocks),
        }
        for name, taken in in_turns(contestants, 3).items():
            speed = arena.bytes / taken / 1e9
            report.add(f"{name}, page by page, pages of {page >> 10} KiB", speed, "GB/s")
        arena.close()


def mixed_layout(torch: Any, blocks: int) -> tuple[list[Any], DeviceLayout]:
    """Two groups that share a tensor: padded pages, pages of another size, four blocks a chunk."""
    page, padding, wide_layers = 16 << 10, 512, LAYERS - LAYERS // 4
    pools = [
        torch.randint(0, 255, (blocks, page + pad), dtype=torch.uint8, device="cuda")
        for pad in [padding] * wide_layers + [0] * (LAYERS - wide_layers)
    ]
    tensors = tuple(
        DeviceTensor(pool.data_ptr(), blocks, pool.stride(0), pool.shape[1]) for pool in pools
    )
    wide = tuple(PageRef(layer, page) for layer in range(wide_layers))
    narrow = (PageRef(0, page - 8), *(PageRef(at, page // 2) for at in range(wide_layers, LAYERS)))
    return pools, DeviceLayout(tensors, (wide, narrow), 4)


def identity(torch: Any, report: Report) -> None:
    """Random pages out, and back to other blocks, from the middle of the first chunk to that of the
    last: several groups, padding, and nothing else may have changed."""
    records, per_chunk = IDENTITY_RECORDS, 4
    count = records * per_chunk
    pools, layout = mixed_layout(torch, 4 * count)
    arena = Arena(torch, pools, layout, 2 * records)
    random = np.random.default_rng(1)
    moved = wrong = touched = 0
    while moved < IDENTITY_PAGES:
        ids = random.permutation(layout.blocks[0])[: 4 * count]
        skip, end = (int(each) for each in random.integers(1, per_chunk, 2))
        end = count - end
        away, back = ids[: 2 * count], ids[2 * count :]
        arena.move(STORE, DeviceBlocks(away, [count, count], [0, 0]))
        before = [pool.clone() for pool in pools]
        left = [back[first + skip : first + end] for first in (0, count)]
        sizes = [end - skip] * 2
        arena.move(LOAD, DeviceBlocks(np.concatenate(left), sizes, [skip, skip]))
        for group, refs in enumerate(layout.groups):
            sources = torch.from_numpy(away[group * count + skip : group * count + end]).cuda()
            targets = torch.from_numpy(left[group]).cuda()
            for ref in refs:
                old, new = before[ref.tensor], pools[ref.tensor]
                wanted, found = old[sources, : ref.page_bytes], new[targets, : ref.page_bytes]
                wrong += int((wanted != found).any(dim=1).sum())
                old[targets, : ref.page_bytes] = found
                moved += len(targets)
        touched += sum(int((old != new).sum()) for old, new in zip(before, pools, strict=True))
        for pool in pools:
            pool.random_(0, 255)
    report.at_most(f"wrong pages of {moved}", wrong, "", 0)
    report.at_most("bytes changed that should not have been", touched, "", 0)
    arena.close()


def device_or_exit() -> tuple[Any, str, str]:
    """torch, the device's name and the date, which are printed, too."""
    try:
        import torch
    except ImportError:
        raise SystemExit("no torch here: PYTHON=one-that-has-it") from None

    # By another process: parts are forked, and this one may not have used CUDA by then.
    def name_of() -> str:
        return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""

    name = answer_of(name_of)
    if not name:
        raise SystemExit("no CUDA device: this benchmark measures one (docs/how_it_works/gpu.md)")
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    print(f"{name}, torch {torch.__version__}, {when} UTC, {os.cpu_count()} cores", flush=True)
    return torch, name, when


def main() -> None:
    """Run everything; tell the device and the date first, because figures mean nothing without."""
    torch, name, when = device_or_exit()
    report = Report(f"copies between {name}, pinned host memory and a disk, {when} UTC")
    disk = functools.partial(one_hop, folder=Path(os.environ.get("FOLDER", Path.cwd())))
    parts: dict[str, Callable[..., None]] = {
        "bytes": identity,
        "page sizes": page_sizes,
        "steps": steps_of_a_batch,
        "disturbance": disturbance,
        "disk": disk,
        "timeline": timeline,
        "page by page": unstaged,
    }
    failed = []
    end = time.perf_counter() + SECONDS
    for title, part in parts.items():
        began = time.perf_counter()
        limit = min(PART_SECONDS, end - began)
        measure = functools.partial(part, torch)
        whole = limit > 0 and run_part(measure, report, limit)
        print(
            f"{title}: {time.perf_counter() - began:.0f} s{'' if whole else ', FAILED'}", flush=True
        )
        if not whole:
            failed.append(title)
    report.finish()
    if failed:
        sys.exit(f"these parts failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
