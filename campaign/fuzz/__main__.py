"""The fuzzers' command line: `make fuzz`, or `python -m campaign.fuzz --help`."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path

from campaign.fuzz import answers, media, texts
from campaign.fuzz.harness import Bounds, Mutator, Target

_TRACED = 32
"""One input of so many is traced: that takes ten times as long."""
_FINDINGS_MAX = 5


def fuzz(target: Target, bounds: Bounds, inputs: int, seed: int) -> tuple[int, int, list[str]]:
    """So many inputs for one parser: how many it took, lines reached, and what was found."""
    mutator = Mutator(target.corpus, target.words, f"{seed} {target.name}")
    taken, findings = 0, []
    for data in target.corpus:
        mutator.traced(lambda data: _quiet(target, data), data)  # and imports what it needs
    bounds.begin()
    for number in range(1, inputs + 1):
        data = mutator.next()
        try:
            if number % _TRACED:
                taken += bounds.call(target.parse, data, target.typed)
            else:
                mutator.traced(lambda data: _quiet(target, data), data)
                bounds.begin()
        except Exception:
            said = traceback.format_exc(limit=-4)
            findings.append(f"{target.name}, input {number} of seed {seed}: {data[:200]!r}\n{said}")
            if len(findings) >= _FINDINGS_MAX:
                break
    return taken, mutator.lines, findings


def _quiet(target: Target, data: bytes) -> None:
    with contextlib.suppress(*target.typed):
        target.parse(data)


def main() -> int:
    """Fuzz each parser; 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="fuzz", description=sys.modules["campaign.fuzz"].__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="for each parser")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="names of parsers, with commas")
    parser.add_argument("--json", type=Path, default=None, help="where figures go")
    options = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())
    chosen = [name for name in options.only.split(",") if name]
    told, findings = [], []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # some parsers take files
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-", dir=memory) as name:
        folder = Path(name)
        groups = (media, answers, texts)
        made = [target for group in groups for target in group.targets(folder)]
        bounds = Bounds(folder)
        for target in made:
            if chosen and target.name not in chosen:
                continue
            inputs = max(1, int(options.inputs * target.share))
            began = time.monotonic()
            taken, lines, found = fuzz(target, bounds, inputs, options.seed)
            seconds = time.monotonic() - began
            findings += found
            told.append(
                {"parser": target.name, "inputs": inputs, "taken": taken, "lines": lines}
                | {"seconds": round(seconds, 1), "findings": len(found)}
            )
            print(
                f"{target.name}: {inputs:,} inputs in {seconds:.0f} s, {taken:,} taken, "
                f"{lines} lines reached, {len(found)} findings",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(told, indent=1) + "\n")
    for each in findings:
        print(f"\nFOUND in {each}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
