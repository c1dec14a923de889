"""Named keys that open calls and nothing else, and their budgets."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from fakes.budgets import CHAT, budget, call, world
from fakes.mistakes import tells

from penstock.gateway.traffic.calls.admission import key_hash, make_key


def keyed(name: str, role: str = "call") -> tuple[str, str]:
    """A named key, and what penstock.toml keeps of it."""
    key = make_key()
    return key, f'[[key]]\nname = "{name}"\nrole = "{role}"\nsha256 = "{key_hash(key)}"\n'


async def test_teams_have_keys_for_calls_with_budgets_of_their_own(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "the admin key")
    (a, kept_a), (b, kept_b), (reader, kept_reader) = keyed("team-a"), keyed("team-b"), keyed("ann", "read")
    budgets = budget(name="teams", per="key", limit=2), budget(name="a", per="key", only=["team-a"], limit=1)
    more = "require_token = true\n" + kept_a + kept_b + kept_reader
    async with world(tmp_path, *budgets, more=more) as (gateway, provider):
        assert [(await call(http, gateway, key=key)).status for key in (a, a, b, b, b)] == [200, 429, 200, 200, 429]
        for seen in provider.log:
            assert seen.header("authorization") is None, "it goes to nobody"
        assert [(await call(http, gateway, key=key)).status for key in ("", "pst_key_" + "x" * 43)] == [401, 401]
        foreign = await call(http, gateway, key="sk-foreign")
        assert tells(foreign.message, "an agent token, or a key for calls, is needed", "penstock key NAME --role call")
        wrong = await call(http, gateway, key=reader)
        assert tells(wrong.message, "key 'ann'", "role 'read'", "'call'")
        assert [(await call(http, gateway, key="the admin key")).status for _ in range(3)] == [200] * 3
        for path in ("/api/budgets", "/api/rollouts", "/metrics"):
            async with http.get(gateway.url + path, headers={"authorization": f"Bearer {a}"}) as answer:
                assert answer.status == 403
                assert "nothing of the control API" in await answer.text()
        headers = {"authorization": f"Bearer {reader}"}
        async with http.get(gateway.url + "/api/budgets?budget=teams", headers=headers) as answer:
            found = (await answer.json())["budgets"]
        assert [(one["of"], one["used"]) for one in found] == [("team-b", 2), ("team-a", 1)]
        assert not [path for path in gateway.data.rglob("*") if path.is_file() and a.encode() in path.read_bytes()]
        assert a not in gateway.log


async def test_a_key_for_calls_goes_beside_the_providers_own(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    key, kept = keyed("team-a")
    async with world(tmp_path, budget(per="key", limit=1), more=kept) as (gateway, provider):
        headers = {"authorization": "Bearer sk-theirs", "x-penstock-token": key}
        url = gateway.openai("r") + "/chat/completions"
        for status in (200, 429):
            async with http.post(url, json=CHAT, headers=headers) as answer:
                assert answer.status == status
        assert provider.log[0].header("authorization") == "Bearer sk-theirs"
        assert provider.log[0].header("x-penstock-token") is None
        async with http.get(gateway.url + "/api/rollouts", headers={"authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 403, "nor without an admin key"
        url = f"{gateway.url}/rollout/r/attempt/a1/rewards"
        async with http.post(url, json={"value": 1.0}, headers={"authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 403
            assert tells(await answer.text(), "key 'team-a'", "nothing else")
