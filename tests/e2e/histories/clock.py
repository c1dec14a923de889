"""The wall clock of a process and of those that it starts, set from outside: a few lines of C, compiled when needed.

Only what says what time it is changes (`CLOCK_REALTIME`, `time`, `gettimeofday`). The monotonic clock does not, as it
does not when somebody sets the clock of a machine.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;

__attribute__((constructor)) static void map(void) {
    const char *path = getenv("HISTORIES_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) offset = page;
    if (fd >= 0) close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, clock, at);
    if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


def compiler() -> str | None:
    """What compiles it; None where there is nothing."""
    return shutil.which("cc") or shutil.which("gcc")


class Clock:
    """A clock that is right, until it is set."""

    def __init__(self, home: Path) -> None:
        found = compiler()
        assert found is not None, "there is no C compiler"
        self._file, library = home / "clock", home / "clock.so"
        self.set(0)
        command = [found, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library)]
        _ = subprocess.run(command, input=SOURCE.encode(), check=True)
        self.env = {"LD_PRELOAD": str(library), "HISTORIES_CLOCK": str(self._file)}
        """Variables of a process that has this clock."""

    def set(self, seconds: int) -> None:
        """So far from the true time, at once, for whoever has it."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            _ = file.write(seconds.to_bytes(8, "little", signed=True))
