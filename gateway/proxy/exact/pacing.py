"""Paces an answer: what holds it back, and what collects meanwhile."""

from __future__ import annotations

import asyncio

from penstock.gateway.proxy.exact.chat_stream import Voice
from penstock.gateway.proxy.exact.generate_answer import Piece


class Tap(asyncio.Transport):
    """Holds an answer back while its client does not take it."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()

    def pause_reading(self) -> None:
        """Nothing goes on from now on."""
        self.open.clear()

    def resume_reading(self) -> None:
        """It goes on."""
        self.open.set()

    def abort(self) -> None:
        """There is nothing behind it."""


class Mouth:
    """One choice: the tokens that have come and were not sent yet."""

    def __init__(self, voice: Voice) -> None:
        self.voice = voice
        self.piece = Piece()
        self.news = asyncio.Event()
        self.over = False

    def take(self) -> Piece:
        """All that has come."""
        piece, self.piece = self.piece, Piece()
        self.news.clear()
        return piece
