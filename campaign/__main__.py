"""The campaign's command line: `make campaign`, or `python -m campaign --help`."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

from campaign import report
from campaign.import_ahead import import_ahead, whole_life
from campaign.runner import Runner
from campaign.scenarios import SCENARIOS


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
        page = report.write(runner)
        runner.close()
    print(f"\n{page}: {len(runner.books.findings)} findings", flush=True)
    return 1 if runner.books.findings else 0


if __name__ == "__main__":
    sys.exit(main())
