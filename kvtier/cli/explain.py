"""`kvtier explain`: why a prompt hits or misses."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import groupby
from typing import Annotated

import msgspec
import typer

from kvtier.cli import console, options
from kvtier.cli.inspect import (
    Inspectors,
    asked_namespace,
    end_with_troubles,
    known_namespaces,
    look,
    say_two_names,
    troubles_of,
)
from kvtier.config import StackConfig, load
from kvtier.errors import KVTierError
from kvtier.types import BlockKey, MissReason, Namespace
from kvtier.vllm.identity.prompts import Prompt, chunk_keys, chunk_tokens, read_prompts
from kvtier.vllm.miss_socket import LAST, ask_engines
from kvtier.vllm.misses import KEPT, Miss

app = options.new_app()

_LISTED_AT_ONCE = 1000
"""Objects, by one request to a store."""


class Run(msgspec.Struct):
    """Neighbouring chunks that are in the same tiers."""

    first: int
    last: int
    key: str
    """Of the first of them."""
    tiers: list[str]
    retained: bool
    """Whether one of the tiers evicts them last, because somebody asked for it."""
    groups: list[int]
    """The cache groups that are there; of windowed layers only the last chunks are ever stored."""


class Answer(msgspec.Struct):
    """What one namespace has of one prompt."""

    prompt: int
    tokens: int
    namespace: str
    chunks: int
    hits: int
    """Leading chunks that can be loaded: one cache group has all of them, all have the last."""
    hit_tokens: int
    runs: list[Run]
    differs: list[str]
    """In which facts from the namespace that is asked about."""


@app.command(
    epilog="Examples: kvtier explain -c stack.yaml --prompts prompt.txt --model ./model; "
    "kvtier explain -c stack.yaml --prompts prompts.jsonl --namespace 3f2a; "
    "kvtier explain -c stack.yaml --request last"
)
def explain(
    config: options.ConfigOption,
    prompts: options.PromptsOption = None,
    request: Annotated[
        str | None,
        typer.Option(
            "--request",
            metavar="ID",
            help="Ask the running engines why this one of the last requests missed; or the last.",
        ),
    ] = None,
    model: options.ModelOption = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAMESPACE",
            help="Compare with this one; else the model's, or the one in use.",
        ),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Show the key of every chunk of a prompt and the tiers that have it, in every namespace, and
    in which facts the others differ.

    Keys are computed as vLLM computes them, with cache salts and LoRA adapters; prompts with images
    are skipped. Exit code 1 if no prompt hits.

    With --request, show what a request of a running engine has found of its prompt, and why it has
    not found more. Exit code 1 if no engine of the stack knows the request.
    """
    if (prompts is None) == (request is None):
        raise typer.BadParameter("name one of --prompts and --request", param_hint="--request")
    stack = load(config, to_write=False)
    if request is not None:
        _explain_request(stack, request, json=json)
        return
    assert prompts is not None
    inspectors = look(stack)
    known = known_namespaces(inspectors)
    if not known:
        end_with_troubles(inspectors)
        raise KVTierError("this stack holds nothing yet: there is nothing that a prompt could hit")
    asked = asked_namespace(inspectors, known, namespace, model)
    console.note("reading the prompts")
    read = read_prompts(prompts, model or known[asked].facts.get("model"))
    answers = []
    problems = {}
    for name in sorted(known, key=lambda each: each != asked):
        try:
            chunk_tokens(known[name])
        except KVTierError as error:
            problems[name] = str(error)
            continue
        kept = {key for each in inspectors for key in each.holds(name)}
        asked_for = [chunk_keys(prompt, known[name]) for prompt in read.known]
        held = _held(inspectors, name, {key for each in asked_for for keys in each for key in keys})
        for prompt, chunks in zip(read.known, asked_for, strict=True):
            answers.append(_answer(prompt, chunks, name, known, asked, held, kept))
    if json:
        rows = {"answers": answers, "problems": problems, "skipped": read.skipped}
        console.print_json({"asked": asked, **rows, "troubles": troubles_of(inspectors)})
    else:
        _show(answers, problems)
        say_two_names(known)
        read.say_skipped(console.warn)
    hit = any(answer.hits for answer in answers if answer.namespace == asked)
    end_with_troubles(inspectors, failed=not hit)


def _explain_request(stack: StackConfig, request: str, *, json: bool) -> None:
    """Show what engines say of a request, and which namespaces have what it lacked."""
    answers = [each for each in ask_engines(request) if each.stack == stack.name]
    misses = [miss for each in answers for miss in each.misses]
    if request == LAST and misses:
        last = max(misses, key=lambda miss: miss.at).request
        misses = [miss for miss in misses if miss.request == last]
    if not misses:
        raise KVTierError(
            f"no engine of the stack {stack.name!r} runs here as this user, with misses: explain"
            if not answers
            else f"none of the last {KEPT} requests of a running engine is called {request!r}: "
            "write the id of its answer, or last"
        )
    found = {miss.key: _others_that_have(stack, miss) for miss in misses}
    if json:
        rows = [msgspec.to_builtins(miss) | {"elsewhere": found[miss.key]} for miss in misses]
        console.print_json({"misses": rows})
        return
    for miss in misses:
        console.say_wrapped(f"request {miss.request}: {miss.sentence}", 2)
        for namespace, differs in found[miss.key].items():
            console.say(f"  the namespace {namespace[:12]} has it")
            for each in differs:
                console.say_wrapped(f"    differs: {each}", 6)


def _others_that_have(stack: StackConfig, miss: Miss) -> dict[str, list[str]]:
    """The namespaces that have a block of which an engine knows nothing, and how they differ from
    the engine's, if that can be told."""
    if miss.reason != MissReason.NOT_COMPUTED.label:
        return {}
    inspectors = look(stack)
    known = known_namespaces(inspectors)
    key = BlockKey(bytes.fromhex(miss.key))
    having = [name for name in known if _held(inspectors, name, {key})]
    mine = known.get(miss.namespace)
    return {
        name: [str(each) for each in mine.differences(known[name])] if mine else []
        for name in having
    }


def _held(
    inspectors: Inspectors, namespace: str, wanted: Set[BlockKey]
) -> dict[BlockKey, list[str]]:
    """The tiers that have these; all that there is may be millions."""
    held: dict[BlockKey, list[str]] = {}
    for each in inspectors:
        there = sum(part.blocks for part in each.contents.parts if part.namespace == namespace)
        few = len(wanted) * _LISTED_AT_ONCE < there  # then single ones take fewer requests
        begins = [key.hex() for key in wanted] if few else [""]
        for block in each.blocks(namespace, begins):
            if block.key in wanted and not block.quarantined:
                tiers = held.setdefault(block.key, [])
                name = f"{each.tier} {each.kind}" + f" of {block.engine}" * bool(block.engine)
                if name not in tiers:
                    tiers.append(name)
    return held


def _answer(
    prompt: Prompt,
    chunks: list[list[BlockKey]],
    name: str,
    known: Mapping[str, Namespace],
    asked: str,
    held: Mapping[BlockKey, list[str]],
    kept: Set[BlockKey],
) -> Answer:
    namespace = known[name]
    groups = [[at for at, key in enumerate(keys) if key in held] for keys in chunks]
    tiers = [list(dict.fromkeys(t for key in keys for t in held.get(key, []))) for keys in chunks]
    retained = [any(key in held and key in kept for key in keys) for keys in chunks]
    runs = []
    for (where, which, last), numbered in groupby(
        enumerate(zip(tiers, groups, retained, strict=True)), key=lambda pair: pair[1]
    ):
        span = [at for at, _ in numbered]
        runs.append(Run(span[0], span[-1], chunks[span[0]][0].hex(), where, last, which))
    hits = _hits(groups, len(namespace.group_bytes))
    differences = known[asked].differences(namespace)
    return Answer(
        prompt=prompt.number,
        tokens=len(prompt.tokens),
        namespace=name,
        chunks=len(chunks),
        hits=hits,
        hit_tokens=hits * chunk_tokens(namespace),
        runs=runs,
        differs=[str(each) for each in differences],
    )


def _hits(groups: list[list[int]], count: int) -> int:
    """How many leading chunks can be loaded. Layers with a window need only the last of them, so
    that one group must have all, and every group the last."""
    leading = 0
    for group in range(count):
        run = next((at for at, held in enumerate(groups) if group not in held), len(groups))
        leading = max(leading, run)
    while leading and len(groups[leading - 1]) < count:
        leading -= 1
    return leading


def _show(answers: list[Answer], problems: Mapping[str, str]) -> None:
    for answer in answers:
        console.say_wrapped(
            f"prompt {answer.prompt + 1}, {answer.tokens} tokens, "
            f"namespace {answer.namespace[:12]}: "
            f"{answer.hits} of {answer.chunks} chunks hit ({answer.hit_tokens} tokens)",
            2,
        )
        for run in answer.runs:
            where = ", ".join(run.tiers) or "nowhere"
            if run.tiers and any(run.groups != each.groups for each in answer.runs if each.tiers):
                where += f" (cache groups {', '.join(map(str, run.groups))})"
            where += " (retained)" if run.retained else ""
            console.say(f"  chunks {run.first}-{run.last}  {run.key[:12]}  {where}")
        if not answer.chunks:
            console.say("  it is shorter than one chunk: nothing of it is ever stored")
        for each in answer.differs:
            console.say_wrapped(f"  differs: {each}", 4)
    if any(each.startswith("tensor_parallel:") for answer in answers for each in answer.differs):
        console.say_wrapped(
            "engines of several tensor-parallel sizes share blocks if their stacks say "
            "across_degrees: true and their model allows it; else their log says why not",
            2,
        )
    for name, problem in problems.items():
        console.say_wrapped(f"namespace {name[:12]}: {problem}", 2)
