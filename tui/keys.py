"""The key map: every key, its effect, and its screens. The help, the bottom line and the tests are made from this
table.

A key that can do nothing at the moment shows the reason. `[keys]` of the settings gives an id other keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

Group = Literal["move", "see", "find", "take", "go", "change"]
TITLES: Final[dict[Group, str]] = {
    "move": "Move", "see": "See", "find": "Find", "take": "Take along", "go": "Go to", "change": "Change (asks first)",
}  # fmt: skip


class KeyBinding(NamedTuple):
    """A row of the key map."""

    id: str
    keys: tuple[str, ...]
    does: str
    group: Group
    views: frozenset[str] | None = None
    """The screens that have the key; None for all."""

    def applies_to(self, view: str) -> bool:
        """True if a screen has the key."""
        return self.views is None or view in self.views


def _on(*views: str) -> frozenset[str]:
    return frozenset(views)


VIEW_KEYS: Final = {
    "overview": "0", "rollouts": "1", "tools": "2", "releases": "3", "resources": "4", "workers": "5", "runs": "6",
    "upstreams": "7", "log": "8", "groups": "9",
}  # fmt: skip
"""The screens with a key of their own, and that key."""

KEYS: Final = (
    KeyBinding("up", ("up", "k"), "one row up", "move"),
    KeyBinding("down", ("down", "j"), "one row down", "move"),
    KeyBinding("page_up", ("pageup", "ctrl+u"), "a page up", "move"),
    KeyBinding("page_down", ("pagedown", "ctrl+d"), "a page down", "move"),
    KeyBinding("first", ("home", "g"), "the first row", "move"),
    KeyBinding("last", ("end", "G"), "the last row that is loaded", "move"),
    KeyBinding("next_error", ("e",), "the next row that failed", "move"),
    KeyBinding("previous_error", ("E",), "the row before that failed", "move"),
    KeyBinding("open", ("enter",), "open the row, or give it the whole screen", "see"),
    KeyBinding("back", ("escape", "backspace"), "back; close what is open", "see"),
    KeyBinding("other", ("minus",), "the screen before this one", "see"),
    KeyBinding("focus", ("tab", "shift+tab"), "from rows to panes, and back", "see"),
    KeyBinding("next_pane", ("right_square_bracket", "right", "l"), "the next pane", "see"),
    KeyBinding("previous_pane", ("left_square_bracket", "left", "h"), "the pane before", "see"),
    KeyBinding("follow", ("f",), "follow what is new; moving stops it", "see"),
    KeyBinding("pause", ("p",), "stop the screen where it is, and go on", "see"),
    KeyBinding("refresh", ("r",), "ask again now", "see"),
    KeyBinding("sort", ("s",), "sort by the next column", "see"),
    KeyBinding("reverse", ("S",), "sort the other way round", "see"),
    KeyBinding("range", ("w",), "the next range of time: 15 min, 1 h, 24 h, 7 d, all", "see"),
    KeyBinding("theme", ("t",), "the next theme", "see"),
    KeyBinding("filter", ("slash",), "filter; an empty one shows all", "find"),
    KeyBinding("command", ("colon",), "go anywhere by name", "find"),
    KeyBinding("palette", ("ctrl+p",), "look for a screen, a key or a saved view by its words", "find"),
    KeyBinding("search", ("ctrl+f",), "find a text in what all calls say", "find"),
    KeyBinding("help", ("question_mark",), "these keys", "find"),
    KeyBinding("mark", ("space", "m"), "mark the row", "find"),
    KeyBinding(
        "compare",
        ("c",),
        "compare what is marked; of one rollout its group",
        "find",
        _on("rollouts", "groups", "resources", "runs"),
    ),
    KeyBinding("copy_command", ("y",), "copy the command that prints this", "take"),
    KeyBinding("copy_id", ("Y",), "copy the id of the row", "take"),
    KeyBinding("pager", ("o",), "open the pane in $PAGER", "take"),
    KeyBinding("editor", ("O",), "open the pane in $EDITOR", "take"),
    *(KeyBinding(f"go.{name}", (key,), name, "go") for name, key in VIEW_KEYS.items()),
    KeyBinding("views", ("v",), "the saved views", "go"),
    KeyBinding("save", ("V",), "save this screen's filter, columns, order and range under a name", "go"),
    KeyBinding("recall", tuple(f"f{number}" for number in range(1, 10)), "the saved view of this number", "go"),
    KeyBinding("delete_view", ("X",), "delete the saved view", "go", _on("views")),
    KeyBinding("suspend", ("ctrl+z",), "to the shell; fg comes back", "go"),
    KeyBinding("quit", ("q", "ctrl+c"), "quit", "go"),
    KeyBinding("rollout.cancel", ("C",), "stop the rollout", "change", _on("rollouts", "rollout")),
    KeyBinding("rollout.requeue", ("K",), "queue the rollout again", "change", _on("rollouts", "rollout")),
    KeyBinding("queue.pause", ("P",), "hand out no work", "change", _on("workers")),
    KeyBinding("queue.drain", ("D",), "hand out no work, send workers home", "change", _on("workers")),
    KeyBinding("queue.open", ("U",), "hand out work again", "change", _on("workers")),
    KeyBinding("release.promote", ("P",), "make the candidate stable", "change", _on("releases")),
    KeyBinding("release.rollback", ("R",), "send every new call to the stable version", "change", _on("releases")),
    KeyBinding("release.freeze", ("F",), "stop it where it is", "change", _on("releases")),
    KeyBinding("release.resume", ("U",), "go on with one that is held", "change", _on("releases")),
    KeyBinding("release.approve", ("A",), "let it leave the stage that waits for a person", "change", _on("releases")),
    KeyBinding("release.abort", ("X",), "end it; those that have the candidate keep it", "change", _on("releases")),
    KeyBinding("upstream.pause", ("P",), "let calls to it wait", "change", _on("upstreams")),
    KeyBinding("upstream.open", ("U",), "serve what waits for it", "change", _on("upstreams")),
    KeyBinding("definitions.approve", ("A",), "approve what its server lists", "change", _on("tools")),
    KeyBinding("question.allow", ("L",), "let the call that waits run", "change", _on("tools")),
    KeyBinding("question.deny", ("D",), "do not let it run", "change", _on("tools")),
)
BY_ID: Final = {key.id: key for key in KEYS}
SHOWN: Final = {
    "slash": "/", "colon": ":", "question_mark": "?", "right_square_bracket": "]", "left_square_bracket": "[",
    "minus": "-", "escape": "Esc", "enter": "Enter", "pageup": "PgUp", "pagedown": "PgDn", "home": "Home", "end": "End",
    "up": "↑", "down": "↓", "left": "←", "right": "→", "tab": "Tab", "shift+tab": "⇧Tab", "backspace": "⌫",
    "space": "Space",
}  # fmt: skip
HINTS: Final = (
    "open", "back", "filter", "range", "delete_view", "palette", "compare", "search", "sort", "mark", "command",
    "copy_command", "help", "quit",
)  # fmt: skip
"""Keys on the bottom line, after those that change something: those that do something at the moment, as many as there
is room for, the last two always."""


class KeyMap:
    """The keys of each screen, with those of the settings."""

    def __init__(self, other: Mapping[str, Sequence[str]]) -> None:
        """`other`: keys that replace those of the table, by id. Raises `ValueError` for an unknown id."""
        if unknown := sorted(set(other) - set(BY_ID)):
            raise ValueError(f"{unknown[0]!r} is the id of no key; `?` in the TUI lists them")
        self._rows = [row._replace(keys=tuple(other.get(row.id, row.keys))) for row in KEYS]

    def find(self, key: str, view: str) -> KeyBinding | None:
        """The row of a key on a screen, None when it has none; a screen's own rows precede those of all screens."""
        found = [row for row in self._rows if key in row.keys and row.applies_to(view)]
        return next((row for row in found if row.views is not None), found[0] if found else None)

    def for_view(self, view: str) -> Sequence[KeyBinding]:
        return [row for row in self._rows if row.applies_to(view)]

    def find_anywhere(self, key: str) -> KeyBinding | None:
        """The row of a key on any screen; None when no screen has it."""
        return next((row for row in self._rows if key in row.keys), None)


def key_names(row: KeyBinding) -> list[str]:
    """The names of a row's keys for people; of many the first and the last."""
    names = [name(key) for key in row.keys]
    return names if len(names) <= 4 else [f"{names[0]} … {names[-1]}"]


def name(key: str) -> str:
    """The name of a key for people."""
    return SHOWN.get(key, key.upper() if key[1:].isdigit() else key.replace("ctrl+", "^"))
