"""The agent of the chaos test: a few calls over plain sockets, and a journal of what it really saw.

It is started by a runner as any agent is, uses the standard library alone (it is started thousands of times), and knows
only its variables. What it writes below `CHAOS_DIR` is the truth that the tape is compared with:

    locks/ROLLOUT              held by an exclusive lock for as long as anything of the agent lives
    overlaps/ROLLOUT.ATTEMPT   somebody else held the lock: it ran twice at the same time
    journals/ROLLOUT.ATTEMPT   one line for each step: `pid N`, `asked ID`, `seen ID` (the answer was complete), `end`

A line is written before the next step is taken and outlives a kill. `CHAOS` says how the agent behaves (`plan.KINDS`).
"""

import fcntl
import os
import signal
import socket
import sys
import time

ROOT = os.environ["CHAOS_DIR"]
ROLLOUT, ATTEMPT = os.environ["PENSTOCK_ROLLOUT_ID"], os.environ["PENSTOCK_ATTEMPT_ID"]
PATIENCE_S, PAUSE_S = 20.0, 0.05


def main() -> None:
    """Runs the agent; the exit code is 0 when it has done its work."""
    kind, calls, reward = os.environ["CHAOS_KIND"], int(os.environ["CHAOS_CALLS"]), os.environ["CHAOS_REWARD"]
    journal = os.open(f"{ROOT}/journals/{ROLLOUT}.{ATTEMPT}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    os.write(journal, b"pid %d\n" % os.getpid())
    lock()
    if kind in ("stubborn", "hanging"):
        _ = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "forking":
        fork()
    for number in range(calls):
        call(journal, number)
    if kind == "hanging" and first():
        time.sleep(600)
    if kind == "broken" or (kind == "flaky" and first()):
        sys.exit(1)
    os.write(journal, b"end\n")
    print(f'{{"reward": {reward}}}', flush=True)


def lock() -> None:
    """Nobody else may be at this rollout, from here to the last breath of the last child."""
    held = os.open(f"{ROOT}/locks/{ROLLOUT}", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with open(f"{ROOT}/locks/{ROLLOUT}", "rb") as file, open(f"{ROOT}/overlaps/{ROLLOUT}.{ATTEMPT}", "wb") as out:
            out.write(file.read())
        sys.exit(3)
    os.ftruncate(held, 0)
    os.write(held, f"{ATTEMPT} pid {os.getpid()}".encode())


def fork() -> None:
    """A grandchild in a session of its own, which has the lock too."""
    if os.fork() == 0:
        os.setsid()
        _ = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)


def first() -> bool:
    """True once for each rollout."""
    try:
        os.close(os.open(f"{ROOT}/locks/{ROLLOUT}.first", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def call(journal: int, number: int) -> None:
    """One call, repeated as a client repeats it when the connection broke; each try has an id of its own."""
    until, tried = time.monotonic() + PATIENCE_S, 0
    while True:
        name = f"{ROLLOUT}.{ATTEMPT}.{number}.{tried}"
        os.write(journal, f"asked {name}\n".encode())
        if ask(name, stream=number % 2 == 0):
            os.write(journal, f"seen {name}\n".encode())
            return
        if time.monotonic() > until:
            sys.exit(4)
        tried += 1
        time.sleep(PAUSE_S)


def ask(name: str, stream: bool) -> bool:
    """Whether the answer came, and was complete."""
    host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    body = '{"model":"m","stream":%s,"user":"%s","messages":[{"role":"user","content":"Go on."}]}'
    sent = (body % ("true" if stream else "false", name)).encode()
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\nConnection: close\r\n"
    head += f"Content-Length: {len(sent)}\r\n\r\n"
    answer = b""
    try:
        with socket.create_connection((host.partition(":")[0], int(host.partition(":")[2])), PATIENCE_S) as wire:
            wire.sendall(head.encode() + sent)
            while data := wire.recv(65536):
                answer += data
    except OSError:
        return False
    return complete(answer, name)


def complete(answer: bytes, name: str) -> bool:
    """By its own framing, and with the id that was asked for."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or b'"chatcmpl-%s"' % name.encode() not in body:
        return False
    if b"chunked" in head.lower():
        return body.endswith(b"\r\n0\r\n\r\n") and b"data: [DONE]" in body
    length = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return bool(length) and len(body) == int(length[0])


if __name__ == "__main__":
    main()
