"""The calls of an agent in rehearsal: its tools are played before it gets an answer
(`gateway.traffic.trials.rehearsal`).

No such call goes upstream unchanged. The end of the answer waits until its span is on disk: an agent must not go on
from an answer that would be lost in a crash.
"""

from __future__ import annotations

import asyncio

from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.plan import plan_route, prompt_named
from penstock.gateway.traffic.trials.tool_player import RehearsalAnswer


class RehearsedCall(HttpCall):
    """A call of a rehearsal's run."""

    __slots__ = ()

    def _start(self) -> None:
        shared, call = self._shared, self._admitted
        if shared.recorder.failing is not None:
            shared.check_gap(call)
        self.record.attributes = shared.rehearsals.attributes(call.address.rollout)
        if shared.rehearsals.handles(call):
            self._announce_first(self._play)
        else:
            self._carry_out(plan_route(shared, call, self.request))

    def _play(self) -> None:
        named = prompt_named(self._admitted, self.request.headers)
        playing = asyncio.ensure_future(self._shared.rehearsals.answer(self._admitted, self.request, named))
        self.durable = True
        self._wait(playing.cancel)
        playing.add_done_callback(self._on_played)

    def _on_played(self, done: asyncio.Future[RehearsalAnswer]) -> None:
        if self._resumes():
            self.record.attributes = self._shared.rehearsals.attributes(self._admitted.address.rollout)
            self._do("rehearsed", lambda: self._answer(done.result()))

    def _answer(self, played: RehearsalAnswer) -> None:
        record, reply = self.record, played.reply
        if played.status >= 400:
            played = played.without(self.own)
            reply = played.reply
        head = played.head(self.request.keep_alive)
        record.stream, record.response_head = reply.stream, head
        record.encoding = reply.header(b"content-encoding").encode("latin-1") or None
        record.set_own_answer(played.status, reply.body)
        self._end("ok" if played.status < 400 else "error", None if played.status < 400 else f"http_{played.status}")
        self.started = True
        self._write_last(head + reply.body)
