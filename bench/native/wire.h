/* What the mock upstream and the load generator share: a clock, a growing buffer that frames HTTP/1.1 messages in place
 * (content-length and chunked), and sockets without Nagle. Only as much HTTP as the benchmark's own peers speak. */
#pragma once
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define DIGITS 19

static inline void die(const char *what) {
    perror(what);
    exit(2);
}

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static inline void arm(int timer, int64_t at_ns) {
    struct itimerspec spec = {.it_value = {at_ns / SECOND, at_ns % SECOND}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &spec, NULL) < 0) die("timerfd_settime");
}

static inline int loopback(int port, bool listening) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (fd < 0) die("socket");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (!listening) {
        if (connect(fd, (struct sockaddr *)&at, sizeof at) < 0 && errno != EINPROGRESS) die("connect");
        return fd;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) < 0 || listen(fd, 1024) < 0) die("bind");
    return fd;
}

static inline char *slurp(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    struct stat info;
    if (!file || fstat(fileno(file), &info) < 0) die(path);
    char *data = malloc(info.st_size + 1);
    if (fread(data, 1, info.st_size, file) != (size_t)info.st_size) die(path);
    fclose(file);
    data[info.st_size] = 0;
    *size = info.st_size;
    return data;
}

/* A message being read. data[0, head) is the head, data[head, body) the body with the framing taken out,
 * data[raw, used) what has come but is not decoded yet. */
struct message {
    char *data;
    size_t size, used, head, body, raw;
    int64_t left;
    enum { HEAD, LENGTH, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, DONE, BROKEN } state;
};

static inline void message_next(struct message *m) {
    memmove(m->data, m->data + m->raw, m->used - m->raw);
    m->used -= m->raw;
    m->head = m->body = m->raw = 0;
    m->state = HEAD;
}

/* Value of a header, or NULL; the name comes with its colon. */
static inline const char *header(const struct message *m, const char *name) {
    size_t length = strlen(name);
    for (const char *line = m->data, *end = m->data + m->head; line < end;) {
        const char *eol = memchr(line, '\n', end - line);
        if (!eol) break;
        if ((size_t)(eol - line) > length && !strncasecmp(line, name, length)) return line + length;
        line = eol + 1;
    }
    return NULL;
}

static inline void message_head(struct message *m) {
    char *end = memmem(m->data, m->used, "\r\n\r\n", 4);
    if (!end) return;
    m->head = m->body = m->raw = end + 4 - m->data;
    const char *length = header(m, "content-length:"), *coding = header(m, "transfer-encoding:");
    m->left = length ? atoll(length) : 0;
    m->state = coding ? CHUNK_SIZE : LENGTH;
}

static inline void message_body(struct message *m) {
    size_t have = m->used - m->raw, take = (int64_t)have < m->left ? have : (size_t)m->left;
    if (m->body != m->raw) memmove(m->data + m->body, m->data + m->raw, take);
    m->body += take;
    m->raw += take;
    m->left -= take;
    if (!m->left) m->state = m->state == LENGTH ? DONE : CHUNK_END;
}

/* One line of chunked framing; false when it has not come whole. */
static inline bool message_line(struct message *m) {
    char *line = m->data + m->raw, *eol = memchr(line, '\n', m->used - m->raw);
    if (!eol) return false;
    bool empty = *line == '\r' || *line == '\n';
    if (m->state == CHUNK_SIZE) {
        char *rest;
        m->left = strtoll(line, &rest, 16);
        m->state = rest == line ? BROKEN : m->left ? CHUNK_DATA : TRAILER;
    } else if (m->state == CHUNK_END) {
        m->state = empty ? CHUNK_SIZE : BROKEN;
    } else if (empty) {
        m->state = DONE;
    }
    m->raw = eol + 1 - m->data;
    return true;
}

static inline void message_advance(struct message *m) {
    if (m->state == HEAD) message_head(m);
    while (m->state != HEAD && m->state < DONE) {
        if (m->state != LENGTH && m->state != CHUNK_DATA) {
            if (!message_line(m)) return;
        } else if (m->raw == m->used && m->left) {
            return;
        } else {
            message_body(m);
        }
    }
}

/* One read from the socket, decoded as far as it goes. As recv: 0 at the end, -1 with errno. */
static inline ssize_t message_read(struct message *m, int fd) {
    if (m->size - m->used < 65536) {
        m->size = m->size ? m->size * 2 : 131072;
        m->data = realloc(m->data, m->size);
        if (!m->data) die("realloc");
    }
    ssize_t got = recv(fd, m->data + m->used, m->size - m->used, 0);
    if (got <= 0) return got;
    m->used += got;
    message_advance(m);
    return got;
}
