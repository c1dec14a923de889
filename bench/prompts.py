"""Measures the finding, recognition and rewriting of prompts: hit rates and costs. `python -m bench.prompts`.

*Found*: of messages of five prompts, mixed, 20 of each, the share of further messages that the induced templates
recognise; every recognised message is rendered again and compared. *Cost* is CPU of finding, recognising and writing
another version together; *first* is that of a text that was not seen before, *again* that of one that was: agents
resend their prompt with every call. *Hostile* texts hold anchors, or halves of them, in their slots.

Figures are printed beside their targets and written to bench/out/prompts.json; a missed target is marked, not hidden.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

from bench import trajectories
from bench.families import FAMILIES, TEMPLATES, WORDS, Maker, filled, similar
from bench.store import HERE, Figure, report
from penstock.gateway.model.resource import Template
from penstock.gateway.releases.catalog import find_resources, write_versions
from penstock.gateway.releases.prompt_induction import PromptSample, propose
from penstock.gateway.releases.prompt_recogniser import LONG, Recogniser, RegisteredText, TemplateTree, TextMatch, match
from penstock.gateway.traffic.calls.call_request import CallAddress, CallRequest
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Facts

OUT = HERE / "out" / "prompts.json"
SEEDS = 50
HELD_OUT = 100
SIMILAR = 50
ROUNDS = 7
ANSWER = json.dumps(
    {
        "id": "c",
        "model": "gpt-4o",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 400}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 200, "completion_tokens": 100},
    }
).encode()


def measure_found() -> Iterator[Figure]:
    """Measure induction from 20 messages a prompt, over many seeds."""
    messages = told = crossed = returned = prompts = 0
    for seed in range(SEEDS):
        maker = Maker(seed)
        found = propose([PromptSample(maker.message(family)) for _ in range(20) for family in FAMILIES])
        prompts += len(found)
        recogniser = Recogniser(RegisteredText(str(at), it.template) for at, it in enumerate(found))
        whose: dict[str, str] = {}
        for family in FAMILIES:
            for _ in range(HELD_OUT):
                text = maker.message(family)
                it = recogniser.recognise(text)
                messages += 1
                if isinstance(it, TextMatch):
                    told += 1
                    returned += it.known.template.render(it.slots) == text
                    crossed += whose.setdefault(it.known.resource, family) != family
    yield Figure("prompts found of five, 20 messages each", prompts / SEEDS, "", at_least=4.95)
    yield Figure("held-out messages recognised", 100 * told / messages, "%", at_least=99)
    yield Figure("recognised as another prompt", crossed, "messages", at_most=0)
    yield Figure("recognised that come back byte for byte", 100 * returned / told, "%", at_least=100)


def measure_similar() -> Iterator[Figure]:
    """Measure templates that differ in two words."""
    rng = random.Random(5)
    told = crossed = messages = 0
    for seed in range(5):
        known = [RegisteredText(str(number), template) for number, template in enumerate(similar(SIMILAR, seed))]
        recogniser = Recogniser(known)
        for it in known * 20:
            found = recogniser.recognise(filled(it.template, rng))
            messages += 1
            told += isinstance(found, TextMatch)
            crossed += isinstance(found, TextMatch) and found.known != it
    yield Figure("50 similar templates: recognised", 100 * told / messages, "%", at_least=99)
    yield Figure("50 similar templates: as another", crossed, "messages", at_most=0)


def measure_hostile() -> Iterator[Figure]:
    """Measure the time at n, 2 n and 4 n characters; linear time doubles twice."""
    templates = similar(SIMILAR, 1, 2_000)
    tree = TemplateTree(templates)
    pieces = {
        "anchors in slots": (TEMPLATES["support"], "\nDate: \n\n## Notes\n\n\n## Rules\n"),
        "halves of an anchor": (Template(("Begin ", "a" * 90 + "b", " end"), ("x", "y")), "a"),
        "halves of a long anchor": (Template(("Begin ", "ab" * 900 + "c", " end"), ("x", "y")), "ab"),
        "beginnings of 50 similar prompts": (templates[0], templates[0].anchors[1][:LONG]),
    }
    for name, (template, piece) in pieces.items():
        look = partial(_together, tree) if template in templates else partial(match, template)
        texts = [_hostile(template, piece * (size // len(piece))) for size in (50_000, 100_000, 200_000)]
        took = [cost(partial(look, text)) for text in texts]
        for size, seconds in zip((50, 100, 200), took, strict=True):
            yield Figure(f"hostile, {name}: {size} KB", seconds * 1e6, "us")
        yield Figure(f"hostile, {name}: four times the text", took[2] / took[0], "times the time", at_most=6)


def _together(tree: TemplateTree, text: str) -> list[Template]:
    return list(tree.possible(text))


def _hostile(template: Template, filling: str) -> str:
    return template.anchors[0] + filling + template.anchors[-1]


def measure_cost() -> Iterator[Figure]:
    """Measure the cost of whole requests. The prompt has three slots."""
    for name, size, prompt, value, most in (
        ("1 KB", 1_000, 500, "today", 50),
        ("100 KB, 4 KB prompt", 100_000, 4_000, "today", 300),
        ("100 KB, 60 KB prompt", 100_000, 60_000, "today", 300),
        ("100 KB, 4 KB prompt with 90 KB in a slot", 100_000, 4_000, " ".join(WORDS * 500)[:90_000], 300),
        ("100 KB, 60 KB prompt, 漢字 in a slot", 100_000, 60_000, "今日", 300),
    ):
        for registered in (1, SIMILAR):
            templates = similar(registered, 1, prompt // 6)
            candidate = Template.parse("Changed. " + templates[0].source)
            body = request(templates[0], size, value)
            known = [RegisteredText(str(number), template) for number, template in enumerate(templates)]
            first, again, same = (
                cost(_rewriting(body, known, version, forgetting)) * 1e6
                for version, forgetting in ((candidate, True), (candidate, False), (templates[0], False))
            )
            yield Figure(f"{name}, {registered} registered: first", first, "CPU-us", at_most=most)
            yield Figure(f"{name}, {registered} registered: again", again, "CPU-us", at_most=most)
            yield Figure(f"{name}, {registered} registered: nothing to change", same, "CPU-us", at_most=most)


def measure_unused() -> Iterator[Figure]:
    """Measure calls that use no resource: the reading on the way and while recording, together."""
    for name, size, prompt in (("1 KB", 1_000, 500), ("100 KB", 100_000, 4_000)):
        [sent], [other] = similar(1, 1, prompt // 6), similar(1, 2, prompt // 6)
        body, known = request(sent, size, "today"), Recogniser([RegisteredText("0", other)])
        for what, model, recogniser in (("nothing", False, None), ("a model", True, None), ("a prompt", False, known)):
            took = cost(partial(_passing, body, model, recogniser)) * 1e6
            yield Figure(f"{name} that uses nothing, {what} registered", took, "CPU-us")


def _passing(body: bytes, model: bool, recogniser: Recogniser | None) -> Facts:
    """Do what a call does that may use a resource: find it in the body, then read the facts of its span."""
    call = CallRequest(CallAddress("r"), by_name("chat"), "/v1/chat/completions", body)
    if recogniser is not None:
        found = find_resources(body, call.dialect, recogniser)
        assert not found.uses
        call.peeked = found.asked
    if model:
        assert call.model == "gpt-4o"
    return call.dialect.facts(body, ANSWER, False, call.peeked)


def request(template: Template, size: int, date: str) -> bytes:
    """Return a chat request of about so many bytes."""
    rng = random.Random(3)
    values = {"name": "Ann", "date": date, "notes": " ".join(rng.choices(WORDS, k=5))}
    messages = [{"role": "system", "content": template.render(values)}]
    while len(json.dumps(messages)) < size - 60:
        said = " ".join(rng.choices(WORDS, k=min(60, (size - len(json.dumps(messages))) // 7)))
        messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": f'{said}.\n"{said[:9]}"'})
    return json.dumps({"model": "gpt-4o", "messages": messages}).encode()


def _rewriting(body: bytes, known: list[RegisteredText], version: Template, forgetting: bool) -> Callable[[], object]:
    dialect, recogniser = by_name("chat"), Recogniser(known)

    def rewritten() -> object:
        if forgetting:
            recogniser.forget()
        done = write_versions(body, find_resources(body, dialect, recogniser), {"0": version})
        assert done.uses
        return done

    return rewritten


def cost(what: Callable[[], object]) -> float:
    """Return seconds of CPU of one call: the best of several rounds, because others use the machine too."""
    what()
    times: list[float] = []
    for _ in range(ROUNDS):
        count, began = 0, time.process_time()
        while (took := time.process_time() - began) < 0.05:
            what()
            count += 1
        times.append(took / count)
    return min(times)


def measure_discovery() -> Iterator[Figure]:
    """Measure the time of induction, and the prompt of real agents."""
    rng = random.Random(6)
    [long] = similar(1, 2, 10_000)
    samples = [PromptSample(filled(long, rng)) for _ in range(200)]
    began = time.process_time()
    found = propose(samples)
    took = time.process_time() - began
    yield Figure("discovery in 200 messages of 60 KB", took, "s", at_most=5)
    yield Figure("discovery in 200 messages of 60 KB: coverage", 100 * found[0].coverage, "%", at_least=99)
    if trajectories.DATA.exists():
        asked = [(number, request) for number, agent in enumerate(trajectories.agents()) for request, _ in agent]
        texts = [(number, json.loads(request)["messages"][0]["content"]) for number, request in asked]
        real = propose(PromptSample(text, rollout=str(number)) for number, text in texts)
        yield Figure(f"trajectories: prompts in {len(texts)} calls", len(real), "", at_most=1, at_least=1)
        yield Figure("trajectories: coverage", 100 * real[0].coverage, "%", at_least=100)


def figures() -> Iterator[Figure]:
    """Yield all figures, as they are measured."""
    yield from measure_found()
    yield from measure_similar()
    yield from measure_hostile()
    yield from measure_cost()
    yield from measure_unused()
    yield from measure_discovery()
    if not trajectories.DATA.exists():
        print("no trajectories at ../shared/data: the figures on real traffic are left out")


if __name__ == "__main__":
    report(figures(), OUT)
