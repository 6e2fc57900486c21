"""Commands that are killed at random instants, and run again."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from campaign.children import Child, Say
from campaign.round import Round, Scenario
from campaign.stacks import described, payloads, wrong_in
from kvtier import Stack
from kvtier.cli import app
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey

_BLOCKS = 96
_KILLS = 120
_LONGEST_S = 0.08
COMMANDS = {
    "verify": "verify --repair",
    "gc": "gc",
    "snapshot": "snapshot --to {backup}",
    "prewarm": "prewarm",
    "restore": "prewarm --from {backup}",
    "clear": "clear --tier nvme --yes",
    "ls": "ls",
    "du": "du",
}
_FINISH = ("clear", "gc", "prewarm", "verify", "snapshot", "restore")


class Commands(Scenario):
    name = "commands"
    about = (
        "Commands that copy, mend and remove are killed by SIGKILL at random instants on a folder "
        "and a store. What they were not told to remove stays there with its right bytes, and each "
        "command works when run again."
    )

    def play(self, round: Round) -> None:
        stack = round.folder / "stack.yaml"
        config = described(round.folder, blocks=4 * _BLOCKS)
        stack.write_text(yaml.safe_dump(config))
        keys = make_keys(_BLOCKS)
        with Stack.open(config, NAMESPACE) as opened:
            opened.store(payloads(keys))
            assert opened.settle()
        words = {"backup": f"file://{round.folder}/backup"}
        _finish(round, stack, "snapshot", words)
        for _ in range(_KILLS):
            name = round.dice.choice(list(COMMANDS))
            child = _run(stack, name, words)
            child.listen(round.dice.uniform(0, _LONGEST_S))
            child.kill()
            round.counts["kills" if child.wait() < 0 else "ended before the kill"] += 1
            round.counts[f"begun: {name}"] += 1
        _judge(round, keys)
        for name in _FINISH:
            _finish(round, stack, name, words)
        _judge(round, keys)


def _run(stack: Path, name: str, words: dict[str, str]) -> Child:
    text = COMMANDS[name].format(**words)

    def work(say: Say) -> None:
        out = os.open(stack.with_name("said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        say(f"ended {app.run([*text.split(), '-c', str(stack)])}")

    return Child(work)


def _finish(round: Round, stack: Path, name: str, words: dict[str, str]) -> None:
    """To its end, as if nothing had happened before."""
    child = _run(stack, name, words)
    child.wait()
    round.counts["run to their end"] += 1
    said = stack.with_name("said").read_text(errors="replace")
    text = f"{name} ended with {child.told('ended')}: {child.told('raised')} {said[-2000:]}"
    round.check(child.told("ended") == ["0"], text)


def _judge(round: Round, keys: list[BlockKey]) -> None:
    """The store has all blocks; the folder has right ones."""
    for tiers, whole in ((("nvme",), False), (("object",), True)):
        for host in round.folder.glob("host*/*"):
            host.unlink()
        config = described(round.folder, blocks=4 * _BLOCKS)
        config["tiers"] = [each for each in config["tiers"] if each["kind"] in ("cpu", *tiers)]
        with Stack.open(config, NAMESPACE) as stack:
            found = stack.load(keys)
        round.counts["blocks proved"] += len(found)
        round.check(not wrong_in(found), f"wrong bytes in {tiers}: {wrong_in(found)}")
        if whole:
            round.check(len(found) == len(keys), f"{len(keys) - len(found)} blocks left {tiers}")
