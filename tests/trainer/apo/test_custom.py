"""`penstock train custom`: an algorithm of somebody else's, by the command, with a real gateway and a real runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.formats import Failure
from fakes.mistakes import tells
from fakes.process import Gateway, running, upstreams
from fakes.provider import Provider
from fakes.shell import Done, Shell

from examples.demo.model import DemoAnswer
from penstock.gateway.client.client import Client
from penstock.gateway.model.resource import NewVersion

# A guard against hanging only: a dozen agents, each a process, on a machine that may be slow.
pytestmark = pytest.mark.timeout(300)
PROMPT = "You answer customers of a shop."
AGENT = f"""
import json, os, sys, urllib.request
question = json.load(sys.stdin)["question"]
messages = [{{"role": "system", "content": {PROMPT!r}}}, {{"role": "user", "content": question}}]
asked = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({{"model": "m", "messages": messages}}).encode(),
    {{"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
)
said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
print(json.dumps({{"reward": float(said == "a polite answer")}}))
"""
WAYS = ("You reply to a shop's customers.", "Politely answer the customers of a shop.", "Answer customers.")
CONFIG = 'prompt = "shop"\nmodel = "writer"\ncount = 3\n'
FUNCTION = "examples.paraphrases:best_of"


class Model:
    """Writes paraphrases, and answers politely where its system prompt says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails_after: int | None = None
        self._written = 0

    def __call__(self, request: dict[str, Any]) -> DemoAnswer | Failure:
        self.asked.append(request["model"])
        if self.fails_after is not None and len(self.asked) > self.fails_after:
            return Failure(500)
        if request["model"] == "writer":
            self._written += 1
            return DemoAnswer(WAYS[(self._written - 1) % len(WAYS)])
        return DemoAnswer("a polite answer" if "Politely" in request["messages"][0]["content"] else "an answer")


@pytest.fixture
async def shell(gateway: Gateway, tmp_path: Path) -> Shell:
    """A folder with a configuration, tasks and an agent whose prompt the gateway knows."""
    (tmp_path / "custom.toml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"question": f"Where is {n}?"}) + "\n" for n in range(3)))
    (tmp_path / "agent.py").write_text(AGENT)
    async with Client(gateway.url) as client:
        await client.add_version("shop", NewVersion(kind="prompt", content={"text": PROMPT, "sent": True}))
    made = Shell(gateway.url, tmp_path)
    made.patience = 100.0
    made.env["OPENAI_API_KEY"] = "sk-mine"
    return made


async def train(shell: Shell, function: str = FUNCTION, *more: str) -> Done:
    """The command, with a runner beside."""
    words = (function, "custom.toml", "--tasks", "tasks.jsonl", "--agent", "python agent.py", *more)
    return await shell.run("train", "custom", *words)


async def test_the_algorithm_of_the_documentation_finds_the_best_paraphrase_and_runs_nothing_twice(
    shell: Shell, gateway: Gateway, provider: Provider
) -> None:
    provider.script = model = Model()
    done = await train(shell, FUNCTION, "--name", "words")
    assert done.code == 0, done.err
    async with Client(gateway.url) as client:
        run = await client.run("words")
        (made,) = run.made
        view = await client.resource("shop")
        points = [point async for point in client.points("words")]
        events = [event.text async for event in client.run_events("words")]
    texts = {one.version: one.content["text"] for one in view.versions}
    expected = {"prompt": "shop", "model": "writer", "count": 3}
    assert (run.kind, run.status, run.config) == ("custom", "succeeded", expected)
    assert texts[made.version] == WAYS[1]
    assert view.stable.version != made.version
    assert [point.values for point in points] == [{"reward": 0.0}, {"reward": 0.0}, {"reward": 1.0}, {"reward": 0.0}]
    assert any(f"shop@{made.version} is the best of 4: 1.000" in event for event in events)
    assert (model.asked.count("writer"), model.asked.count("m")) == (3, 12)
    again = await train(shell, FUNCTION, "--name", "words")
    assert again.code == 0, again.err
    assert len(model.asked) == 15


BAD = """
from penstock.gateway.model.queue import RolloutSpec

async def nameless(run):
    await run.run([RolloutSpec(input=1)])

async def slotless(run):
    await run.add("slots", "no slot")

async def idle(run):
    await run.tell("nothing to do")

async def wrong(run):
    raise ZeroDivisionError("a bug")

async def half(run):
    await run.add("slots", "Order {order} \\ud83d.")

async def asks_half(run):
    await run.tell((await run.ask("writer", "half a \\ud83d")).text + " \\ud83d")

def plain(run):
    pass
"""


WRONG = {
    "bad:nameless": (1, "each rollout needs a name (id), so that it is found again after a crash"),
    "bad:slotless": (1, "slots: missing {order}"),
    "bad:half": (1, "slots: the text has half a character, which cannot be sent"),
    "bad:asks_half": (0, "an answer to half a "),
    "bad:idle": (0, "nothing to do"),
    "bad:wrong": (1, "ZeroDivisionError: a bug"),
    "bad:plain": (2, "function: bad:plain is not a function that is defined with `async def`"),
    "bad": (2, "function: 'bad' is not module:function"),
    "bad:none": (2, "function: 'bad' has no 'none'"),
}


async def test_what_is_wrong_is_said(shell: Shell, gateway: Gateway, provider: Provider) -> None:
    provider.script = lambda asked: DemoAnswer(f"an answer to {asked['messages'][0]['content']}")
    (shell.folder / "bad.py").write_text(BAD)
    async with Client(gateway.url) as client:
        await client.add_version("slots", NewVersion(kind="prompt", content={"text": "Order {order}.", "sent": True}))
    for number, (function, (code, message)) in enumerate(WRONG.items()):
        done = await shell.run("train", "custom", function, "--name", f"wrong-{number}")
        assert (done.code, message in done.err) == (code, True), (function, done.err)


REFUSED = """
from penstock.gateway.model.toml import ConfigError

async def refused(run):
    for asked in (
        run.tell(""),
        run.tell("aloud", "loud"),
        run.point(-1, {"reward": 1.0}),
        run.point(1, {}),
        run.point(1, {"reward": "much"}),
        run.made("two words", "v1"),
        run.add("slots", "Order {order}!", "n" * 4001),
        run.text("weights"),
        run.add("weights", "a text"),
        run.ask("", "a question"),
    ):
        try:
            await asked
        except ConfigError as error:
            await run.tell(f"<{error}>")
    await run.tell("t" * 5000)
    await run.tell("")
"""


async def test_a_value_that_cannot_be_is_a_sentence(shell: Shell, gateway: Gateway) -> None:
    (shell.folder / "refused.py").write_text(REFUSED)
    async with Client(gateway.url) as client:
        await client.add_version("slots", NewVersion(kind="prompt", content={"text": "Order {order}.", "sent": True}))
        await client.add_version("weights", NewVersion(kind="model", content={"upstream": "fake-openai", "base": "w"}))
        done = await shell.run("train", "custom", "refused:refused")
        events = [event.text async for event in client.run_events("custom")]
        run = await client.run("custom")
    assert (done.code, "Traceback" in done.err, run.step) == (1, False, None), done.err
    assert tells(done.err.splitlines()[-1], "tell: text: ''", "1 character")
    assert [text for text in reversed(events) if text.startswith("<")] == [
        "<tell: text: '' is not text of 1 character or more>",
        "<tell: level: 'loud' is not 'info', 'warning' or 'error'>",
        "<point: step: -1 is not 0 or more>",
        "<point: values: it has 0 items, not 1 or more>",
        "<point: values.reward: 'much' is not a number>",
        "<made: name: 'two words' is not an id: up to 128 letters, digits and . _ ->",
        f"<add: note: '{'n' * 59}… is not text of 4,000 characters or less>",
        "<weights: it is a model, which has no text; name a prompt or a tool>",
        "<weights: it is a model, which has no text; name a prompt or a tool>",
        "<ask: model: '' is not text of 1 character or more>",
    ]
    assert "t" * 4000 in events


async def test_without_a_runner_it_says_so(shell: Shell) -> None:
    (shell.folder / "late.py").write_text(
        "from penstock.gateway.model.queue import RolloutSpec\n\n"
        "async def late(run):\n    await run.run([RolloutSpec(id='late', input=1)], timeout_s=0.2)\n"
    )
    done = await shell.run("train", "custom", "late:late")
    assert done.code == 1
    assert tells(done.err, "none of 1 rollouts", "0.2 s", "penstock run --watch --mode train")


async def test_an_agent_that_is_no_command_line_is_said(shell: Shell) -> None:
    done = await shell.run("train", "custom", FUNCTION, "custom.toml", "--agent", "python 'agent.py")
    assert (done.code, "is no command line: No closing quotation" in done.err) == (2, True), done.err
    assert "Traceback" not in done.err


async def test_a_question_that_is_asked_twice_at_once_is_paid_once(shell: Shell, provider: Provider) -> None:
    (shell.folder / "twice.py").write_text(
        "import asyncio\n\nasync def twice(run):\n"
        "    one, other, third = await asyncio.gather(*(run.ask('writer', 'q', number) for number in (0, 0, 1)))\n"
        "    await run.tell(f'{one.text == other.text} {one.text == third.text}')\n"
    )
    provider.script = model = Model()
    done = await shell.run("train", "custom", "twice:twice")
    assert (done.code, "True False" in done.err) == (0, True), done.err
    assert model.asked == ["writer"] * 2


async def test_a_day_in_the_configuration_is_the_same_day_when_the_run_goes_on(shell: Shell) -> None:
    (shell.folder / "bad.py").write_text(BAD)
    (shell.folder / "days.toml").write_text("since = 2026-01-01\nat = 10:00:00\nlimit = inf\n")
    for _ in range(2):
        done = await shell.run("train", "custom", "bad:idle", "days.toml")
        assert (done.code, "not what the run was started with" in done.err) == (0, False), done.err


@pytest.mark.slow
async def test_a_model_is_asked_by_the_socket_of_the_gateway(tmp_path: Path, provider: Provider) -> None:
    path = tmp_path / "gateway.sock"
    (tmp_path / "asks.py").write_text("async def asks(run):\n    await run.tell((await run.ask('writer', 'q')).text)\n")
    provider.script = [DemoAnswer("by a socket")]
    async with running(tmp_path / "home", f'socket = "{path}"\n' + upstreams(openai=provider.openai_url)):
        done = await Shell(f"unix:{path}", tmp_path).run("train", "custom", "asks:asks")
    assert (done.code, "by a socket" in done.err) == (0, True), done.err
