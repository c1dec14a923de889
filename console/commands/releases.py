"""`penstock release`: starts, follows, decides and verifies releases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.console.commands.resources import File, Flag
from penstock.console.commands.terminal import person, show, text_of
from penstock.gateway.client.console import FLAT, LOCAL, CommandError, Json, Url, validated_model, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.release import NewRelease, Release
    from penstock.gateway.model.release_policy import ReleasePolicy
    from penstock.gateway.model.resource import Audience

Agent = Annotated[str, Parameter(allow_leading_hyphen=True)]
Words = Annotated[list[str] | None, Parameter(allow_leading_hyphen=True, negative="")]
Only = Annotated[list[str] | None, Parameter(negative="")]
Who = Annotated[str | None, Parameter(help="Who decides; the name you are logged in with if not given.")]
Why = Annotated[str, Parameter(help="Why, in a sentence.")]
Name = Annotated[str, Parameter(help="A release, or a resource: its newest release.")]
LISTS = {"agent": "agents", "model": "models", "mode": "modes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOptions:
    """Options of a new release: the candidate, the calls that it applies to, and its policy."""

    candidate: str
    """The version to try."""
    policy: Path | None = None
    """What the release may do by itself: a TOML file. Without it the defaults hold."""
    only: Only = None
    """Whom it speaks to: agent=planner, model=m, mode=val or metadata.team=a; may be given several times."""
    with_: Annotated[list[str] | None, Parameter(name="--with", negative="")] = None
    """A version of another resource that is tried together with it, such as planner=v2; may be given several times."""
    who: Who = None
    why: Why = ""
    hold_split: Flag = False
    """A plain experiment: it is never promoted."""

    def new(self) -> NewRelease:
        """The request for a release that the options describe."""
        from penstock.gateway.model.release import NewRelease

        rules, only, author = _policy(self.policy, self.hold_split), _audience(self.only or []), person(self.who)
        companions = _companions(self.with_ or [])
        return validated_model(
            NewRelease,
            candidate=self.candidate,
            companions=companions,
            only=only,
            policy=rules,
            author=author,
            why=self.why,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Options of the agent of a rehearsal: its arguments, its variables and its limits."""

    workers: int = 1
    """Agents at a time, where a command is given."""
    arg: Words = None
    """An argument made of the task and put after the command, such as '{question}'; may be repeated."""
    env: Words = None
    """NAME=VALUE, one more variable of agents; may be repeated."""
    timeout: str | None = None
    """Longest run of an agent, such as 90s, 10m or 1.5h."""


AGENTS = AgentOptions()


def start(
    name: str,
    /,
    *command: Agent,
    release: Annotated[ReleaseOptions, FLAT],
    agents: Annotated[AgentOptions, FLAT] = AGENTS,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Try another version of a resource on some rollouts.

    Parameters
    ----------
    name
        Name of the resource.
    command
        An agent and its arguments, after `--`: run for the rehearsal that the policy asks for.
    """
    from penstock.console.views import releases

    new = release.new()
    if command and not new.policy.replay.closed_loop:
        raise CommandError(
            "the policy rehearses nothing, so no agent is run: give one with [replay] closed_loop = 20", 2
        )

    async def ask(client: Client) -> None:
        started = await client.start_release(name, new)
        expected = None if json else await client.forecast(started.id)
        show([started], json, lambda: releases.started(started, expected))

    with_client(gateway, ask)
    if command:
        # The runner is another package, loaded only where agents are run.
        from penstock.sidecar.run.commands import RehearseOptions, rehearse

        rehearse(name, *command, gateway=gateway, options=RehearseOptions(**asdict(agents)))


def status(release: Name, /, *, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show a release: its stage, its arms side by side, its evidence, and what it waits for."""
    from penstock.console.commands.watch import read_release
    from penstock.console.views import releases

    async def ask(client: Client) -> None:
        view, found, awaited = await read_release(client, await _named(client, release))
        show([view], json, lambda: releases.status(view, found.audit, awaited, time.time_ns()))

    with_client(gateway, ask)


def watch(release: Name, /, *, html: Path | None = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Follow a release until it ends.

    Parameters
    ----------
    html
        Write a page with its plots to this file, and keep it up to date.
    """
    from penstock.console.commands.watch import watch_release

    async def ask(client: Client) -> None:
        await watch_release(client, await _named(client, release), html, json)

    with_client(gateway, ask)


def promote(release: Name, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """Make the candidate the stable version now, whatever the evidence says."""
    _decide(release, "promote", who, why, json, gateway)


def rollback(release: Name, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """Send every new call to the stable version, also those of rollouts that are on the candidate."""
    _decide(release, "rollback", who, why, json, gateway)


def abort(release: Name, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """End a release: no new rollout gets the candidate; those that have it keep it."""
    _decide(release, "abort", who, why, json, gateway)


def hold(release: Name, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """Stop a release where it is: no new rollout takes part."""
    _decide(release, "hold", who, why, json, gateway)


def resume(release: Name, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """Go on with a release that is held."""
    _decide(release, "resume", who, why, json, gateway)


def approve(release: Name, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """Let a release leave the stage that waits for a person."""
    _decide(release, "approve", who, why, json, gateway)


def history(release: Name, /, *, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show everything that was done to a release: who, why, and the evidence."""
    from penstock.console.views import releases

    async def ask(client: Client) -> None:
        name = await _named(client, release)
        found, entries = (await client.release(name)).release, await client.audit(name)
        show(entries, json, lambda: releases.history(found, entries))

    with_client(gateway, ask)


def verify(release: Name, /, *, anchor: File = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Make every decision of a release again from the tape, and say what does not agree.

    With the variable PENSTOCK_AUDIT_KEY the signatures of the chain are checked, too.

    Parameters
    ----------
    anchor
        File with what `penstock release anchor` has printed; - is stdin. The chain must go through it.
    """
    from rich.text import Text

    from penstock.console.commands.verify import verify_release
    from penstock.console.views.table import plain
    from penstock.gateway.config import ConfigError, audit_key
    from penstock.gateway.releases.canary.verification import parse_anchors

    try:
        kept, key = None if anchor is None else parse_anchors(text_of(anchor)), audit_key()
    except ValueError as error:
        raise CommandError(f"{anchor}: {error}") from None
    except ConfigError as error:
        raise CommandError(str(error)) from None

    async def ask(client: Client) -> None:
        found = await verify_release(client, await _named(client, release), key, kept)
        show([found], json, lambda: Text("\n").join(plain(line) for line in found.problems or [found.sentence]))
        if found.problems:
            raise CommandError(f"{found.release} is not verified: {len(found.problems):,} problems")

    with_client(gateway, ask)


def anchor(*releases: str, json: Json = False, gateway: Url = LOCAL) -> None:
    """Print the ends of audit chains, to keep elsewhere: `verify --anchor` compares them later.

    Parameters
    ----------
    releases
        Releases, or resources for the newest release of each; all releases if not given.
    """
    from penstock.gateway.releases.canary.verification import anchor_of

    async def ask(client: Client) -> None:
        every = await client.releases()
        names = [await _named(client, name) for name in releases] or [one.id for one in every]
        for one in (one for name in names for one in every if one.id == name):
            found = anchor_of(one)
            print(dumps(found._asdict()) if json else found.line)

    with_client(gateway, ask)


def _decide(name: str, action: str, who: str | None, why: str, json: bool, url: str) -> None:
    from penstock.console.views import releases
    from penstock.gateway.model.base import ActionRequest

    said = validated_model(ActionRequest, who=person(who), why=why)

    async def ask(client: Client) -> None:
        release = await client.decide(await _named(client, name), action, said)
        show([release], json, lambda: releases.decided(release))

    with_client(url, ask)


async def _named(client: Client, name: str) -> str:
    """The release of this name, or the newest one of the resource of this name. Raises `CommandError` without one."""
    every: list[Release] = await client.releases()
    found = [one.id for one in every if one.id == name] or [one.id for one in every if name in one.resources]
    if not found:
        raise CommandError(
            f"there is no release {name!r}, nor one of a resource of that name; `penstock release list` lists them"
        )
    return found[0]


def _policy(path: Path | None, hold_split: bool) -> ReleasePolicy:
    from penstock.gateway.config import ConfigError
    from penstock.gateway.model.release_policy import ReleasePolicy

    try:
        policy = ReleasePolicy() if path is None else ReleasePolicy.load(path.read_text("utf-8"), str(path))
    except ConfigError as e:
        raise CommandError(str(e)) from None
    except OSError as e:
        raise CommandError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise CommandError(f"{path} is not UTF-8: byte {e.start + 1}") from None
    return policy.model_copy(update={"hold_split": True}) if hold_split else policy


def _companions(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, sign, version = word.partition("=")
        if not (name and sign and version) or name in found:
            raise CommandError(f"--with: {word!r} is not RESOURCE=VERSION, each resource once", 2)
        found[name] = version
    return found


def _audience(words: Sequence[str]) -> Audience:
    from penstock.gateway.model.resource import Audience

    fields: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        prefix, dot, rest = key.partition(".")
        if sign and key in LISTS:
            fields.setdefault(LISTS[key], []).append(value)
        elif sign and prefix == "metadata" and dot and rest and rest not in fields.get("metadata", {}):
            fields.setdefault("metadata", {})[rest] = value
        else:
            raise CommandError(
                f"--only: {word!r} is not agent=A, model=M, mode=M or metadata.KEY=VALUE, each key once", 2
            )
    return validated_model(Audience, **fields)
