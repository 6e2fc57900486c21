"""The campaign's command line: `make campaign`, or `python -m campaign --help`."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml

from campaign.children import Child, Say
from campaign.runner import Runner, write_report
from campaign.scenarios import SCENARIOS
from campaign.scenarios.kills import COMMANDS
from campaign.stacks import described, payloads
from kvtier import Stack
from kvtier.cli import app
from kvtier.testing.subject import NAMESPACE, make_keys

_BLOCKS = 8


def import_ahead(work: Callable[[], None]) -> None:
    """Import what `work` does, which runs in a child: its threads and its files stay there."""

    def tell(say: Say) -> None:
        work()
        say(f"imported {' '.join(sys.modules)}")

    child = Child(tell)
    child.wait()
    if child.told("raised"):
        raise RuntimeError(f"the first life of a campaign fails: {child.told('raised')}")
    for line in child.told("imported"):
        for name in line.split():
            with suppress(ImportError):  # some are made by others' imports, and have no file
                importlib.import_module(name)
    gc.freeze()  # else the first collection of each child copies the pages of all these


def whole_life() -> None:
    """What engines, movers and commands of a campaign do, once and briefly."""
    with tempfile.TemporaryDirectory(prefix="kvtier-campaign-") as name:
        folder = Path(name)
        config = described(folder, blocks=4 * _BLOCKS)
        keys = make_keys(_BLOCKS)
        for mode in ("process", "threads"):
            with Stack.open(config | {"mover": {"mode": mode}}, NAMESPACE) as stack:
                stack.store(payloads(keys))
                stack.settle()
                stack.load(keys)
        path = folder / "stack.yaml"
        path.write_text(yaml.safe_dump(config))
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(said, 1)
        os.dup2(said, 2)
        for text in COMMANDS.values():
            words = text.format(backup=f"file://{folder}/backup")
            app.run([*words.split(), "-c", str(path)])


def main() -> int:
    """Run or go on with a campaign; 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="campaign", description=sys.modules["campaign"].__doc__)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=10.0, help="if there are no hours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help=f"of {', '.join(SCENARIOS)}, with commas")
    parser.add_argument("--round", type=int, default=None, help="this one alone, once more")
    parser.add_argument("--folder", type=Path, default=Path("build/campaign"))
    options = parser.parse_args()
    usual = [name for name, scenario in SCENARIOS.items() if scenario.share]
    names = options.only.split(",") if options.only else usual
    if unknown := [name for name in names if name not in SCENARIOS]:
        parser.error(f"no scenario {unknown}: there are {', '.join(SCENARIOS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    import_ahead(whole_life)
    chosen = {name: SCENARIOS[name] for name in names}
    if options.round is not None:
        if len(names) != 1:
            parser.error("--round needs --only with one scenario")
        again = options.folder / "again"
        shutil.rmtree(again, ignore_errors=True)
        runner = Runner(again, options.seed, chosen)
        (scenario,) = chosen.values()
        result = runner.play(scenario, options.round)
        print(dict(sorted(result.counts.items())), *result.notes, sep="\n")
        runner.close()
        return 1 if result.findings else 0
    runner = Runner(options.folder, options.seed, chosen)
    try:
        runner.run(options.hours * 3600 or options.minutes * 60)
    except KeyboardInterrupt:
        print("\nended; the same command goes on", file=sys.stderr)
    finally:
        page = write_report(runner)
        runner.close()
    print(f"\n{page}: {len(runner.books.findings)} findings", flush=True)
    return 1 if runner.books.findings else 0


if __name__ == "__main__":
    sys.exit(main())
