"""The first stage of a release: checks that the candidate can be sent at all. It touches no agent.

A tool's text must be one that agents are known to send: nothing else finds it in a call. A text must keep every slot of
the stable version, render, and not be empty. Weights must load on their upstream, and answer a canned prompt with
log-probabilities that are numbers. They stay loaded, so that the canary's first call does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import aiohttp

from penstock.gateway.config import UpstreamSettings
from penstock.gateway.model.release import Release
from penstock.gateway.model.resource import (
    ModelVersion,
    Resource,
    StableVersion,
    Template,
    TemplateError,
    ToolText,
    check_candidate,
    sent_by_agents,
)
from penstock.gateway.model.toml import pluralized
from penstock.gateway.releases.adapter_server import ServingError, VllmClient
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.traffic.upstreams.pool import make_transport

ResourceLookup = Callable[[str], tuple[StableVersion, list[Resource]] | None]
_UNSENT = (
    "no version of {name} is what agents send, so no call would get the candidate; "
    "`penstock resource add {name} --tool TOOL --file FILE --sent` registers the one that they send"
)
_NAMED = "; no version is known to be what agents send (--sent), so only calls that name it get the candidate"
WARM = 4
"""Requests that are sent at once before a version gets traffic."""


class CheckJob:
    """The job of the stage `draft`."""

    def __init__(
        self,
        resource: ResourceLookup,
        upstreams: Mapping[str, UpstreamSettings],
        session: Callable[[], aiohttp.ClientSession],
    ) -> None:
        """`resource` finds one by name; `upstreams` by name; `session` for requests to them."""
        self._resource = resource
        self._upstreams = upstreams
        self._session = session

    async def __call__(self, release: Release, progress: JobProgress) -> JobReport:
        """Report whether the candidate and its companions can be sent."""
        reports = {name: await self._one(release, name, progress) for name in release.resources}
        first, *others = reports.values()
        if not others:
            return first
        evidence = {name: report.evidence | {"ok": report.ok} for name, report in reports.items()}
        why = "; ".join(f"{name}: {report.why}" for name, report in reports.items())
        return JobReport(all(report.ok for report in reports.values()), why, evidence)

    async def _one(self, release: Release, name: str, progress: JobProgress) -> JobReport:
        found = self._resource(name)
        assert found is not None
        versions = {version.version: version for version in found[1]}
        stable, candidate = (
            versions[release.arm_versions("stable")[name]],
            versions[release.arm_versions("candidate")[name]],
        )
        content = candidate.read()
        if isinstance(content, ModelVersion):
            return await self._weights(content, content.name(candidate.name, candidate.version), progress)
        before = stable.template
        assert before is not None
        known = sent_by_agents(found[1])
        if not known and isinstance(content, ToolText):
            return JobReport(False, _UNSENT.format(name=name))
        report = text_report(before, content.template)
        return report if known else replace(report, why=report.why + _NAMED)

    async def _weights(self, content: ModelVersion, name: str, progress: JobProgress) -> JobReport:
        """Check the weights on each upstream that serves them; the first failure decides."""
        progress.total = len(content.upstreams) * (2 + (content.adapter is not None))
        reports: list[JobReport] = []
        for upstream in content.upstreams:
            reports.append(await self._weights_on(upstream, content, name, progress))
            if not reports[-1].ok:
                break
        last = reports[-1]
        if not last.ok or len(reports) == 1:
            return last
        return replace(last, why=f"{name} answers on upstreams {', '.join(map(repr, content.upstreams))}")

    async def _weights_on(self, name_of: str, content: ModelVersion, name: str, progress: JobProgress) -> JobReport:
        upstream = self._upstreams.get(name_of)
        if upstream is None:
            known = ", ".join(self._upstreams)
            return JobReport(False, f"upstream {name_of!r} is not configured; there are {known}")
        engine = VllmClient(self._session(), upstream.base_url, upstream.key(), make_transport(upstream).options)
        try:
            loaded = content.adapter is not None and await engine.load(name, content.adapter, content.base)
            progress.done += content.adapter is not None
            checked = await engine.check(name, numbers=content.adapter is not None)
            progress.done += 1
            seconds = await engine.warm(name, WARM)
            progress.done += 1
        except ServingError as error:
            return JobReport(False, str(error), {"trouble": error.kind, "served": name})
        evidence = {
            "served": name,
            "loaded": loaded,
            "answer_s": round(checked.seconds, 3),
            "warm_s": round(seconds, 3),
        }
        return JobReport(True, f"{name} answers on upstream {name_of!r}", evidence)


def text_report(stable: Template, candidate: Template) -> JobReport:
    """Report whether a candidate text can replace the stable one."""
    try:
        check_candidate(stable, candidate)
        text = candidate.render(dict.fromkeys(candidate.slots, "x"))
    except TemplateError as error:
        return JobReport(False, f"its slots are not those of the stable version: {error}")
    before, after = sum(map(len, stable.anchors)), sum(map(len, candidate.anchors))
    evidence = {"slots": sorted(set(candidate.slots)), "characters": after, "characters_before": before}
    if not text.strip():
        return JobReport(False, "it is empty", evidence)
    return JobReport(
        True,
        f"it keeps its {pluralized(len(candidate.slots), 'slot')} and renders; {before} characters become {after}",
        evidence,
    )
