"""A bucket as far as a lake needs one: objects, conditional puts, uploads in parts, lists. `python -m fakes.s3` prints
its port. It is a process of its own, because a lake's client holds the interpreter while it waits for an answer.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from fakes.process import PATHS

KEY, SECRET = "AKIAFAKE", "a-secret-that-nobody-may-see"
OBJECTS: dict[str, bytes] = {}
PARTS: dict[str, dict[int, bytes]] = {}
LOCK = threading.Lock()


class Bucket(BaseHTTPRequestHandler):
    """Answers for every bucket there may be."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/")

    @property
    def query(self) -> dict[str, str]:
        return {name: one[0] for name, one in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        with suppress(ConnectionError):  # a client that has read enough closes the connection
            if self.command != "HEAD":
                self.wfile.write(body)
            self.wfile.flush()

    def say_xml(self, root: str, text: str, status: int = 200) -> None:
        body = f'<?xml version="1.0"?><{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{text}</{root}>'
        self.say(status, body.encode(), Content_Type="application/xml")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def store(self, content: bytes) -> bool:
        with LOCK:
            if self.headers.get("If-None-Match") == "*" and self.key in OBJECTS:
                self.say_xml("Error", "<Code>PreconditionFailed</Code>", 412)
                return False
            OBJECTS[self.key] = content
            return True

    def do_PUT(self) -> None:
        content, asked = self.body(), self.query
        if "partNumber" in asked:
            PARTS[asked["uploadId"]][int(asked["partNumber"])] = content
        elif not self.store(content):
            return
        self.say(200, ETag=tag(content))

    def do_POST(self) -> None:
        content, asked = self.body(), self.query
        if "uploads" in asked:
            with LOCK:
                name = str(len(PARTS))
                PARTS[name] = {}
            self.say_xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        elif "uploadId" in asked:
            parts = PARTS[asked["uploadId"]]
            if self.store(b"".join(parts[at] for at in sorted(parts))):
                self.say_xml("CompleteMultipartUploadResult", f"<ETag>{tag(content)}</ETag>")
        else:  # ?delete: many at once
            bucket = self.key.partition("/")[0]
            keys = [unquote(one.partition(b"</Key>")[0].decode()) for one in content.split(b"<Key>")[1:]]
            for key in keys:
                OBJECTS.pop(f"{bucket}/{key}", None)
            self.say_xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))

    def do_GET(self) -> None:
        if "list-type" in self.query:
            self.list_objects()
            return
        content = OBJECTS.get(self.key)
        if content is None:
            self.say_xml("Error", "<Code>NoSuchKey</Code>", 404)
            return
        status, kept, extra = 200, content, dict[str, str]()
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin = int(first) if first else max(0, len(content) - int(last))
            end = min(len(content), int(last) + 1 if first and last else len(content))
            status, kept = 206, content[begin:end]
            extra["Content_Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self.say(status, kept, ETag=tag(content), Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT", **extra)

    def do_HEAD(self) -> None:
        content = OBJECTS.get(self.key)
        if content is None:
            self.say(404)
        else:
            size = str(len(content))
            self.say(200, ETag=tag(content), Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT", Content_Length=size)

    def do_DELETE(self) -> None:
        OBJECTS.pop(self.key, None)
        self.say(204)

    def list_objects(self) -> None:
        asked, bucket = self.query, self.key.strip("/")
        prefix, after, delimiter = asked.get("prefix", ""), asked.get("start-after", ""), asked.get("delimiter")
        keys = sorted(name.removeprefix(f"{bucket}/") for name in list(OBJECTS) if name.startswith(f"{bucket}/"))
        found, folders = "", dict[str, None]()
        for key in keys:
            if not key.startswith(prefix) or key <= after:
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if cut:
                folders[f"{prefix}{head}{cut}"] = None
                continue
            content = OBJECTS[f"{bucket}/{key}"]
            found += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{tag(content)}</ETag><Size>{len(content)}</Size></Contents>"
            )
        found += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders)
        self.say_xml("ListBucketResult", f"<IsTruncated>false</IsTruncated><Prefix>{quote(prefix)}</Prefix>{found}")


def tag(content: bytes) -> str:
    """The ETag of an object."""
    return f'"{hashlib.md5(content).hexdigest()}"'


@contextmanager
def bucket() -> Generator[dict[str, str]]:
    """Runs one; the variables by which it is reached."""
    env = os.environ | {"PYTHONPATH": PATHS}
    with subprocess.Popen([sys.executable, "-m", "fakes.s3"], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            yield {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(process.stdout.readline())}", "AWS_REGION": "eu-central-1",
                "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
            }  # fmt: skip
        finally:
            process.kill()


def main() -> None:
    """Serves until it is killed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
