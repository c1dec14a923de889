"""Paces an answer: holds it back while the client is slow, and collects tokens meanwhile."""

from __future__ import annotations

import asyncio

from penstock.gateway.proxy.exact.chat_stream import Voice
from penstock.gateway.proxy.exact.generate_answer import Piece


class Tap(asyncio.Transport):
    """Holds an answer back while its client does not take it; takes the place of a connection's transport."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()

    def pause_reading(self) -> None:
        self.open.clear()

    def resume_reading(self) -> None:
        self.open.set()

    def abort(self) -> None:
        """Do nothing: there is no socket."""


class Mouth:
    """One choice: the tokens that have come and were not sent yet."""

    def __init__(self, voice: Voice) -> None:
        self.voice = voice
        self.piece = Piece()
        self.news = asyncio.Event()
        self.over = False

    def take(self) -> Piece:
        """Return and clear all tokens that have come."""
        piece, self.piece = self.piece, Piece()
        self.news.clear()
        return piece
