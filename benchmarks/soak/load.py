"""What `benchmarks.soak` asks its servers, and what they should have answered."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.soak.servers import Member

PROMPT_TOKENS_MAX = 1900
_FAMILIES = 60
_FAMILY_TOKENS = 1500
_ANSWER_TOKENS = 24
_LATEST_S = 60.0
_CLIENTS = 5
_CONVERSATIONS = 12
_KEPT_ANSWERS = 4096


class Reference:
    """The answers of a server without kvtier, each asked for once."""

    def __init__(self, plain: Member) -> None:
        self.plain = plain
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """What follows this prompt."""
        key = tuple(prompt)
        found = self._answers.get(key)
        if found is None:
            found = ask(self.plain, prompt)
            self.plain.requests += 1
            if len(self._answers) >= _KEPT_ANSWERS:
                self._answers.pop(next(iter(self._answers)))
            self._answers[key] = found
        return found


class Load:
    """Clients that never rest, but at the gate."""

    def __init__(self, kept: Sequence[Member], reference: Reference, seed: int, log: Path) -> None:
        self._kept = kept
        self._reference = reference
        self._seed = seed
        self._log = log
        rng = random.Random(seed)
        self._families = [rng.choices(range(256), k=_FAMILY_TOKENS) for _ in range(_FAMILIES)]
        self._talks = [self._new_talk(rng) for _ in range(_CONVERSATIONS)]
        self._gate = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._busy = 0
        self.counts: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._client, args=(number,), daemon=True)
            for number in range(_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def go(self) -> None:
        """Let the clients ask."""
        self._gate.set()

    def rest(self) -> None:
        """Let what is under way end, and nothing begin."""
        self._gate.clear()
        end = time.monotonic() + 2 * _LATEST_S
        while self._busy and time.monotonic() < end:
            time.sleep(0.02)

    def end(self) -> None:
        """For good."""
        self.rest()
        self._ended.set()
        self._gate.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)
        while True:
            self._gate.wait()
            if self._ended.is_set():
                return
            with self._lock:
                self._busy += 1
            try:
                self._turn(rng)
            finally:
                with self._lock:
                    self._busy -= 1

    def _turn(self, rng: random.Random) -> None:
        up = [member for member in self._kept if member.up]
        if not up:
            time.sleep(0.2)
            return
        member = rng.choice(up)
        chance = rng.random()
        if chance < 0.1:
            abort(member, self._prompt(rng), rng.random() ** 2)
            self.counts["aborted"] += 1
            member.requests += 1
        elif chance < 0.4:
            self._talk_on(rng, member)
        else:
            self._check(member, self._prompt(rng))

    def _prompt(self, rng: random.Random) -> list[int]:
        """Of few beginnings and few ends, so that both come again."""
        family = rng.choice(self._families)
        cut = rng.choice((300, 600, 900, 1200, _FAMILY_TOKENS))
        return [*family[:cut], *range(rng.randrange(4))]

    def _new_talk(self, rng: random.Random) -> list[int]:
        return list(rng.choice(self._families)[:256]) + rng.choices(range(256), k=40)

    def _talk_on(self, rng: random.Random, member: Member) -> None:
        """A turn of a conversation, on whichever server it happens to come to."""
        at = rng.randrange(_CONVERSATIONS)
        with self._lock:
            talk = self._talks[at]
        answer = self._check(member, talk)
        grown = [*talk, *answer, *rng.choices(range(256), k=rng.randrange(10, 200))]
        if len(grown) > PROMPT_TOKENS_MAX:
            grown = self._new_talk(rng)
        with self._lock:
            self._talks[at] = grown

    def _check(self, member: Member, prompt: Sequence[int]) -> list[int]:
        expected = self._reference.answer(prompt)
        life = member.life
        began = time.monotonic()
        try:
            found = ask(member, prompt)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if member.up and member.life == life and member.alive:
                self.counts["failed"] += 1
                self._note("failed", member, prompt, error=f"{type(error).__name__}: {error}")
            else:
                self.counts["cut off"] += 1
            return expected
        self.counts["answered"] += 1
        member.requests += 1
        member.seconds_max = max(member.seconds_max, time.monotonic() - began)
        if found != expected:
            self._explain(member, prompt, expected, found)
        return expected

    def _explain(
        self, member: Member, prompt: Sequence[int], expected: list[int], found: list[int]
    ) -> None:
        """A wrong answer: or were two tokens as likely as each other?"""
        at = next(
            (i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(found)),
        )
        margin = self._margin(prompt, at)
        kind = "ties" if margin < 1e-4 else "wrong"
        self.counts[kind] += 1
        again: list[list[int]] = []
        for each in (self._reference.plain, member):
            try:
                again.append(ask(each, prompt))
            except (OSError, http.client.HTTPException, ValueError):
                again.append([])
        self._note(
            kind, member, prompt, at=at, margin=margin, expected=expected, found=found, again=again
        )

    def _margin(self, prompt: Sequence[int], at: int) -> float:
        """How much likelier the likeliest token is than the next, there."""
        body = _body(prompt, logprobs=2, return_tokens_as_token_ids=True)
        answer = _post(self._reference.plain, body)
        top = answer["choices"][0]["logprobs"]["top_logprobs"]
        best = sorted(top[min(at, len(top) - 1)].values(), reverse=True)
        return float(best[0] - best[1]) if len(best) > 1 else float("inf")

    def _note(self, kind: str, member: Member, prompt: Sequence[int], **more: Any) -> None:
        line = {"when": time.time(), "kind": kind, "server": member.name, **more}
        with self._lock, self._log.open("a") as file:
            file.write(json.dumps({**line, "prompt": list(prompt)}) + "\n")


def _body(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    wanted = {"max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"prompt": list(prompt), "return_token_ids": True, **wanted, **more}


def _send(member: Member, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(member.url).netloc, timeout=_LATEST_S)
    named = {"model": member.model, **body}
    connection.request(
        "POST", "/v1/completions", json.dumps(named), {"Content-Type": "application/json"}
    )
    return connection


def _post(member: Member, body: dict[str, Any]) -> Any:
    connection = _send(member, body)
    try:
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {content[:300]!r}")
        return json.loads(content)
    finally:
        connection.close()


def ask(member: Member, prompt: Sequence[int]) -> list[int]:
    """The tokens with which a server continues a prompt; raises ValueError if it was cut short, as
    by a server that is told to end and drops what it has not answered."""
    (choice,) = _post(member, _body(prompt))["choices"]
    if choice["finish_reason"] != "length":
        raise ValueError(f"the answer ended by {choice['finish_reason']}")
    return list(choice["token_ids"])


def abort(member: Member, prompt: Sequence[int], seconds: float) -> None:
    """A client that goes away so long after it has asked."""
    try:
        connection = _send(member, _body(prompt, stream=True))
        time.sleep(seconds)
        connection.close()
    except OSError:
        return  # the server went first
