"""Lines of the log: one each, of any text, and without keys."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.known_secrets import NO_SECRETS, own_secrets
from penstock.gateway.model.settings import LogSettings
from penstock.gateway.wire.http.log import JsonFormatter, TextFormatter, fatal_exit

KEY = 'own "key" \\ 0123\n4567'
"""One that no encoding leaves as it is."""
SHAPED = "sk-proj-0123456789abcdef"
values = st.none() | st.booleans() | st.integers() | st.text()


def record(message: str, *words: Any, error: BaseException | None = None, **fields: Any) -> logging.LogRecord:
    about = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("penstock.x", logging.ERROR, "x.py", 1, message, words, about)
    made.fields = fields
    return made


def raised(message: str) -> Exception:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


@given(st.text(), st.text(), st.dictionaries(st.sampled_from(["a.b", "c"]), values))
def test_a_line_is_one_object_whatever_is_said(message: str, why: str, fields: dict[str, Any]) -> None:
    line = JsonFormatter(NO_SECRETS).format(record("%s", message, error=raised(why), **fields))
    assert line.splitlines() == [line]
    assert line.isascii()
    told = json.loads(line)
    assert list(told)[:4] == ["@timestamp", "log.level", "log.logger", "message"]
    assert told["log.level"] == "error"
    assert told["error.type"] == "ValueError"
    assert told["error.stack_trace"].startswith("Traceback (most recent call last):\n")
    assert {name: told[name] for name in fields} == fields


@given(st.text(), st.text())
def test_neither_format_has_a_key(before: str, after: str) -> None:
    said = f"{before}{KEY} {SHAPED} {after}"
    told = record("%s", said, error=raised(said), name=f"x{KEY}")
    lines = [TextFormatter(own_secrets([KEY])).format(told), JsonFormatter(own_secrets([KEY])).format(told)]
    for line in (*lines, *map(str, json.loads(lines[1]).values())):
        assert KEY not in line
        assert json.dumps(KEY)[1:-1] not in line
        assert SHAPED not in line


def test_what_is_said_stays() -> None:
    assert TextFormatter(own_secrets([KEY]), "%(levelname)s %(message)s").format(
        record("refused: %s", f"HTTP 401: {KEY}")
    ) == (f"ERROR refused: HTTP 401: {'*' * len(KEY)}")
    told = json.loads(JsonFormatter(own_secrets([KEY])).format(record("refused: %s", f"HTTP 401: {KEY}")))
    assert told["message"] == f"refused: HTTP 401: {'*' * len(KEY)}"


def test_fields_cannot_be_taken_for_lines_or_others_of_their_kind() -> None:
    made = record("call ok", a="m 1", b="m\nERROR forged c=2", c="gpt-5:x", d=7, e={"p": "v1"}, f='a"b=')
    line = TextFormatter(NO_SECRETS, "%(message)s").format(made)
    assert line == r'call ok a="m 1" b="m\nERROR forged c=2" c=gpt-5:x d=7 e={"p": "v1"} f="a\"b="'


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_gateway_that_cannot_start_says_so_in_its_format(form: Any, capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(NO_SECRETS))
    logger = logging.getLogger("penstock.app")
    logger.addHandler(handler)
    try:
        said = fatal_exit(LogSettings(format=form), "penstock: the disk is gone").code
    finally:
        logger.removeHandler(handler)
    lines = capsys.readouterr().err.splitlines()
    if form == "text":
        assert (said, lines) == ("penstock: the disk is gone", [])
    else:
        assert (said, [json.loads(line)["message"] for line in lines]) == (1, ["penstock: the disk is gone"])
