/* mock: an upstream that answers at once, from memory.
 *
 *   mock DIR        listens on a free loopback port and prints it
 *
 * The model a request names picks the script: bench-chat (DIR/chat), bench-burst (DIR/burst) or bench-paced (DIR/paced).
 * A script holds variants, used in turn; a variant is a list of parts, each sent with one write. chat and burst send all
 * parts at once; paced sends one part every 5 ms and stamps CLOCK_MONOTONIC into the 19 digits after each '#'.
 * Streams start at evenly spread phases within the 5 ms, as independent streams would.
 * Any GET answers {"answered": N}: the calls that were answered in full, so that a gateway's hidden retries show. */
#include "wire.h"

#define STEP (5 * SECOND / 1000)
#define EVENTS 256

struct part {
    char *data;
    size_t size;
    char *stamp;
};

struct script {
    uint32_t variants, parts, turn;
    struct part *list;
};

struct client {
    int fd, place;
    struct message in;
    char *out;
    size_t out_size, out_used;
    struct script *script;
    uint32_t variant, part;
    int64_t due;
};

static struct script chat, burst, paced;
static struct client **streams;
static int streaming, capacity, epoll, timer;
static uint64_t answered, started;

static void load(struct script *s, const char *folder, const char *name) {
    char path[4096];
    size_t size;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    char *at = slurp(path, &size);
    memcpy(&s->variants, at, 4);
    memcpy(&s->parts, at + 4, 4);
    s->list = calloc((size_t)s->variants * s->parts, sizeof *s->list);
    at += 8;
    for (size_t i = 0; i < (size_t)s->variants * s->parts; i++) {
        uint32_t length;
        memcpy(&length, at, 4);
        char *mark = memchr(at + 4, '#', length);
        s->list[i] = (struct part){at + 4, length, mark ? mark + 1 : NULL};
        at += 4 + length;
    }
}

static void watch(struct client *c, int op, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(epoll, op, c->fd, &event) < 0) die("epoll_ctl");
}

static void keep(struct client *c, const char *data, size_t size) {
    if (c->out_used + size > c->out_size) {
        c->out_size = (c->out_used + size) * 2;
        c->out = realloc(c->out, c->out_size);
    }
    memcpy(c->out + c->out_used, data, size);
    c->out_used += size;
    watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
}

static void put(struct client *c, const char *data, size_t size) {
    ssize_t sent = c->out_used ? 0 : send(c->fd, data, size, MSG_NOSIGNAL);
    if (sent < 0) sent = errno == EAGAIN ? 0 : (ssize_t)size;
    if ((size_t)sent < size) keep(c, data + sent, size - sent);
}

static void flush(struct client *c) {
    ssize_t sent = send(c->fd, c->out, c->out_used, MSG_NOSIGNAL);
    if (sent <= 0) return;
    c->out_used -= sent;
    memmove(c->out, c->out + sent, c->out_used);
    if (!c->out_used) watch(c, EPOLL_CTL_MOD, EPOLLIN);
}

static void stamp(char *digits) {
    int64_t at = now_ns();
    for (int i = DIGITS - 1; i >= 0; i--, at /= 10) digits[i] = '0' + at % 10;
}

static struct part *part_of(struct client *c) {
    return &c->script->list[(size_t)c->variant * c->script->parts + c->part];
}

static void stream_off(struct client *c) {
    if (c->place < 0) return;
    streams[c->place] = streams[--streaming];
    streams[c->place]->place = c->place;
    c->place = -1;
}

static void stream_on(struct client *c) {
    if (streaming == capacity) streams = realloc(streams, sizeof *streams * (capacity = capacity ? capacity * 2 : 64));
    /* The golden ratio spreads any number of phases evenly. */
    double turns = ++started * 0.6180339887498949;
    c->due = now_ns() + (int64_t)((turns - (uint64_t)turns) * STEP);
    c->place = streaming;
    streams[streaming++] = c;
}

static void answer(struct client *c, struct script *script) {
    c->script = script;
    c->variant = script->turn++ % script->variants;
    c->part = 0;
    if (script == &paced) return stream_on(c);
    for (; c->part < script->parts; c->part++) put(c, part_of(c)->data, part_of(c)->size);
    answered++;
}

/* One part of every stream that is due; returns when the next is. */
static int64_t pace(void) {
    int64_t next = INT64_MAX, now = now_ns();
    for (int i = streaming - 1; i >= 0; i--) {
        struct client *c = streams[i];
        if (c->due <= now) {
            struct part *part = part_of(c);
            if (part->stamp) stamp(part->stamp);
            put(c, part->data, part->size);
            c->due += STEP;
            if (++c->part == c->script->parts) {
                answered++;
                stream_off(c);
                continue;
            }
        }
        if (c->due < next) next = c->due;
    }
    return next;
}

static void respond(struct client *c) {
    char text[256], body[64];
    const char *model = memmem(c->in.data + c->in.head, c->in.body - c->in.head, "bench-", 6);
    if (model) return answer(c, model[6] == 'c' ? &chat : model[6] == 'b' ? &burst : &paced);
    int length = snprintf(body, sizeof body, "{\"answered\": %llu}", (unsigned long long)answered);
    length = snprintf(text, sizeof text,
                      "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", length, body);
    put(c, text, length);
}

static void hang_up(struct client *c) {
    stream_off(c);
    close(c->fd);
    free(c->in.data);
    free(c->out);
    free(c);
}

static void serve(struct client *c, uint32_t events) {
    if (events & EPOLLOUT && c->out_used) flush(c);
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t got = message_read(&c->in, c->fd);
    if (got == 0 || (got < 0 && errno != EAGAIN) || c->in.state == BROKEN) return hang_up(c);
    while (c->in.state == DONE) {
        respond(c);
        message_next(&c->in);
        message_advance(&c->in);
    }
}

static void welcome(int listener) {
    int fd, on = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct client *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->place = -1;
        watch(c, EPOLL_CTL_ADD, EPOLLIN);
    }
}

static void announce(int listener) {
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    getsockname(listener, (struct sockaddr *)&at, &size);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
}

int main(int count, char **arguments) {
    if (count != 2) return fprintf(stderr, "usage: mock DIR\n"), 2;
    load(&chat, arguments[1], "chat");
    load(&burst, arguments[1], "burst");
    load(&paced, arguments[1], "paced");
    struct client listener = {.fd = loopback(0, true)}, clock = {0};
    epoll = epoll_create1(EPOLL_CLOEXEC);
    clock.fd = timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    watch(&listener, EPOLL_CTL_ADD, EPOLLIN);
    watch(&clock, EPOLL_CTL_ADD, EPOLLIN | EPOLLET);
    announce(listener.fd);
    for (struct epoll_event events[EVENTS];;) {
        int ready = epoll_wait(epoll, events, EVENTS, -1);
        for (int i = 0; i < ready; i++) {
            struct client *c = events[i].data.ptr;
            if (c == &listener) welcome(c->fd);
            else if (c != &clock) serve(c, events[i].events);
        }
        if (streaming) {
            int64_t next = pace();
            if (next < INT64_MAX) arm(timer, next);
        }
    }
}
