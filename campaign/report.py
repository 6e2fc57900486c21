"""What a campaign proved, as Markdown for people and as JSON for programs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from campaign.round import Scenario
from campaign.runner import Books, Runner


def write(runner: Runner) -> Path:
    """Both files, beside the books; the path of the Markdown."""
    folder, books = runner.folder, runner.books
    (folder / "report.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(books), indent=1) + b"\n"
    )
    page = folder / "report.md"
    page.write_text(_markdown(books, list(runner.scenarios.values())))
    return page


def _markdown(books: Books, scenarios: list[Scenario]) -> str:
    lines = [
        f"# Campaign with seed {books.seed}",
        "",
        f"Begun {books.begun}; {books.seconds / 3600:.2f} hours of rounds. "
        + "; ".join(books.versions)
        + ".",
        "",
        f"**Findings: {len(books.findings)}.**",
        "",
    ]
    for one in books.findings:
        again = f"make campaign SEED={books.seed} ONLY={one.scenario} ROUND={one.round}"
        lines += [f"- `{again}`", "", "```text", one.text.rstrip(), "```", ""]
    for scenario in scenarios:
        tally = books.tallies.get(scenario.name)
        if tally is None:
            continue
        minutes = max(tally.seconds / 60, 1e-9)
        lines += [
            f"## {scenario.name}",
            "",
            scenario.about,
            "",
            f"{tally.rounds} rounds in {minutes:.1f} minutes.",
            "",
            "| what | count | a minute |",
            "|---|---|---|",
        ]
        lines += [
            f"| {what} | {count:,} | {count / minutes:,.0f} |"
            for what, count in sorted(tally.counts.items())
        ]
        lines.append("")
        lines += [f"- {note}" for note in tally.notes]
        lines.append("")
    return "\n".join(lines)
