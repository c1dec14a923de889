"""What `penstock prompts discover` registers."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.shell import Shell
from fakes.tape import Tape

from penstock.gateway.cli import prompts
from penstock.gateway.client.console import Failure
from penstock.gateway.model.template import Template
from penstock.gateway.prompts.induce import FEWEST, Proposal

FOUND: list[tuple[Proposal, str | None]] = [
    (Proposal(Template((f"You are {who}. ", ""), ("rest",)), 20, 1.0, {}, None, who), None) for who in ("one", "two")
]


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_number_that_is_not_shown_registers_nothing(number: int) -> None:
    assert prompts._chosen(FOUND, 2) is FOUND[1][0]
    with pytest.raises(Failure, match=f"--number: {number} is not 1 to 2"):
        prompts._chosen(FOUND, number)


def test_who_ends_the_questions_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    prompts._offer("http://127.0.0.1:9", FOUND, "ann")


async def test_half_of_a_surrogate_pair_is_shown(
    start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """What JavaScript makes of a text that it cuts in the middle of a character."""
    gateway = await start_gateway(upstreams(openai=provider.openai_url))
    for number in range(FEWEST):
        said = f'"You are the order desk of Acme. Be brief. Customer: {number} \\ud83d"'
        body = f'{{"model":"m","messages":[{{"role":"system","content":{said}}},{{"role":"user","content":"hi"}}]}}'
        async with http.post(
            f"{gateway.openai(f'r{number}')}/chat/completions", data=body, headers={"Content-Type": "application/json"}
        ) as answer:
            _ = await answer.read()
    await Tape(gateway.url, http).written()
    found = await Shell(gateway.url, tmp_path).run("prompts", "discover", "--json")
    assert (found.code, found.err) == (0, "")
    assert "\\ud83d" in found.text
