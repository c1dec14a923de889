"""The place of a lake, a directory or a bucket: its files, and the wording of its errors.

Credentials of a bucket come from the environment, as every tool of AWS takes them. They are passed only to the store,
and masked with stars in its messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final

from penstock.gateway.tape.store.directory import sync

deltalake: Final[Any] = import_module("deltalake")
exceptions: Final[Any] = import_module("deltalake.exceptions")
pa: Final[Any] = import_module("pyarrow")
pafs: Final[Any] = import_module("pyarrow.fs")
"""Imported by name, because not all of them have types."""

_S3: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,62})(?:/(.*))?")
_TAKEN: Final = re.compile(r"%[0-9A-Fa-f]{2}|\\")
"""Characters of a path that deltalake would read as others."""
_SECRET: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_PATIENCE: Final = {"connect_timeout": "5s", "timeout": "60s", "max_retries": "3", "retry_timeout": "20s"}
"""Limits of each request. A round that fails is tried again as a whole."""
_MOST: Final = 400
"""Most characters of a store's message that are shown."""


class LakeUnusableError(Exception):
    """The place cannot be used, and trying again would not help."""


class LakeUnreachableError(Exception):
    """The place cannot be used now: a network, a disk or rights are in the way."""


class CommitConflictError(Exception):
    """Another writer has committed first."""


class LakeLocation:
    """The root of a lake."""

    def __init__(self, to: str) -> None:
        """`to`: a directory, or s3://BUCKET/PREFIX. Raises `LakeUnusableError`."""
        self.name = to
        self.options: dict[str, str] = {}
        if "://" not in to:
            self.root, self._local = str(Path(to).absolute()), True
            if taken := _TAKEN.search(self.root):
                found = f"{taken[0]!r} in it would be taken for another character"
                raise LakeUnusableError(f"--to: {self.root!r}: {found}: name another directory")
            return
        if not (match := _S3.fullmatch(to)):
            raise LakeUnusableError(f"--to: {to!r}: a lake is in a directory or in s3://BUCKET/PREFIX")
        self.root, self._local = f"s3://{match[1]}/{(match[2] or '').strip('/')}".rstrip("/"), False
        # A conditional put makes a commit happen once; without it two writers could both believe that they were first.
        self.options = {"aws_conditional_put": "etag", **_PATIENCE}
        if any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS):
            self.options["aws_allow_http"] = "true"

    @property
    def is_local(self) -> bool:
        """True if it is a directory."""
        return self._local

    def table(self, name: str) -> LakeFiles:
        return LakeFiles(self, f"{self.root}/{name}")

    def names(self) -> list[str]:
        """The names at the root. Raises `LakeUnusableError` if it is a file."""
        with self.translate_errors():
            if self._local and not os.path.exists(self.root):
                return []
            # In this order: another writer may make the directory at any time.
            if self._local and not os.path.isdir(self.root):
                raise LakeUnusableError(f"--to: {self.name} is a file; a lake is a directory")
            return [info.base_name for info in LakeFiles(self, self.root).list_files(recursive=False)]

    @contextmanager
    def translate_errors(self) -> Generator[None]:
        """Turns a store's errors into ones of one line that names the place. Raises `CommitConflictError`,
        `LakeUnreachableError`."""
        try:
            yield
        except exceptions.CommitFailedError as error:
            raise CommitConflictError(str(error)) from None
        except (OSError, exceptions.DeltaError, pa.ArrowException) as error:
            raise LakeUnreachableError(f"{self.name}: {error_text(error)}") from None


def error_text(error: Exception) -> str:
    """The message of an error in one line, without colours and secrets."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    text = re.sub(r"\s*↳?\s*\n\s*↳?\s*", ": ", text.strip())
    for name in _SECRET:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return text if len(text) <= _MOST else f"{text[:_MOST]} …"


class LakeFiles:
    """The files below one root, by their names in it."""

    def __init__(self, place: LakeLocation, root: str) -> None:
        self._place, self.uri = place, root
        if place.is_local:
            self._fs = pafs.SubTreeFileSystem(root, pafs.LocalFileSystem())
        else:
            handler = import_module("deltalake.fs").DeltaStorageHandler(root, place.options)
            self._fs = pafs.PyFileSystem(handler)

    @property
    def options(self) -> dict[str, str]:
        """The options of the store, for deltalake."""
        return self._place.options

    def list_files(self, recursive: bool = True) -> list[Any]:
        return self._fs.get_file_info(pafs.FileSelector("", recursive=recursive, allow_not_found=True))

    def names(self) -> Iterator[str]:
        """The names of all files at any depth."""
        for info in self.list_files():
            if info.type == pafs.FileType.File:
                yield info.path

    @contextmanager
    def create_file(self, name: str) -> Generator[Any]:
        """A new file to write to. It is durable afterwards, so that a commit can name it."""
        if not self._place.is_local:
            with self._fs.open_output_stream(name) as out:
                yield out
            return
        path = Path(self.uri) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            yield file
            self._make_durable(file)
        sync(path.parent)

    @staticmethod
    def _make_durable(file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def open_file(self, name: str) -> Any:
        return self._fs.open_input_file(name)

    def size(self, name: str) -> int:
        """The size of a file that was just written, in bytes. Raises `CommitConflictError` if it is gone: another
        writer has then made the commit that was to name it, and deleted it as the file of a killed writer."""
        size = self._fs.get_file_info(name).size
        if size is None:
            raise CommitConflictError(f"{name} is gone")
        return size

    def delete(self, name: str) -> None:
        """Deletes a file, if it is still there."""
        with suppress(FileNotFoundError):
            self._fs.delete_file(name)

    def sync_log(self, version: int) -> None:
        """Makes a commit survive a crash of the machine. A bucket does this itself."""
        if self._place.is_local:
            log = Path(self.uri) / "_delta_log"
            with suppress(FileNotFoundError):
                sync(log / f"{version:020d}.json")
            sync(log)
