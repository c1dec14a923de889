/* load: calls a gateway over loopback and measures it; prints one JSON object.
 *
 *   load --port N --path /v1/chat/completions --corpus FILE --connections N --seconds S [--warm S]
 *        [--rate N] [--calls N] [--stagger S] [--own] [--run NAME] [--accept TYPE] [--header 'K: V']... [--bytes N]
 *        [--events N]
 *
 * Closed loop: every connection sends its next call when the last is answered. With --rate the calls are sent on a fixed
 * schedule over the connections that are free, and latency counts from the scheduled time, so that a stall is not hidden.
 * Calls come from 64 rollouts that take turns, each a conversation of the corpus told step by step; one that is told is
 * replaced by a fresh rollout. With --own each connection tells rollouts of its own, as an agent does that keeps its
 * connection; otherwise a rollout's calls come over whichever is free. "{r}" in the path is the rollout's id; the digits
 * of "Task 00000000" at the beginning of a body are replaced by a number that no other rollout of any run has: no two
 * tell the same conversation.
 * An answer is right when its status is 200, its framing complete, its body --bytes long and its events --events in number.
 * Digits after a '#' are the sender's CLOCK_MONOTONIC: the event's age on arrival is its hold-up.
 * Calls that start and events that come in the first --warm seconds are not sampled. */
#include "wire.h"

#include <getopt.h>

#define ROLLOUTS 64
#define DRAIN (15 * SECOND)
#define GIVE_UP 50
#define TASK 8
#define PARTS 5

struct rollout {
    uint32_t conversation, step, serial;
};

struct connection {
    int fd;
    bool busy, blocked;
    struct message in;
    char head[2048], task[TASK + 1];
    struct iovec out[PARTS];
    size_t sent, scanned;
    uint32_t events, rollout;
    int64_t from;
};

struct samples {
    uint32_t *list; /* tenths of a microsecond */
    size_t count, size;
};

static struct {
    int port, connections, rate, events;
    long bytes, calls;
    double seconds, warm, stagger;
    bool own;
    const char *path, *corpus, *run, *accept;
    char headers[1024];
} want = {.connections = 1, .path = "/v1/chat/completions", .run = "r", .accept = "application/json", .seconds = 1e9};

static struct {
    uint32_t conversations, steps;
    struct iovec tail;
    const char **text;
    const uint32_t **ranges;
    size_t task;   /* where the task's number stands in every body; 0 for nowhere */
    uint32_t tasks; /* the first of this run */
} corpus;

/* Rollouts that wait for their turn: all in the first line, or those of each connection in its own. */
struct line {
    uint32_t waiting[ROLLOUTS], from, count;
};

static struct rollout rollouts[ROLLOUTS];
static struct line lines[ROLLOUTS];
static uint32_t serial;
static struct connection *connections, **idle;
static int idle_count, epoll, timer, busy;
static struct samples latency, holdup;
static int64_t begin, sample_from, finish, last_done;
static long scheduled, started, calls, events, errors, errors_in_row;
static char first_error[256];

static void sample(struct samples *s, int64_t ns) {
    if (s->count == s->size) {
        s->size = s->size ? s->size * 2 : 65536;
        s->list = realloc(s->list, s->size * sizeof *s->list);
    }
    s->list[s->count++] = ns < 0 ? 0 : ns / 100 > UINT32_MAX ? UINT32_MAX : (uint32_t)(ns / 100);
}

static void read_corpus(void) {
    size_t size;
    const char *at = slurp(want.corpus, &size);
    const uint32_t *head = (const uint32_t *)at;
    corpus.conversations = head[0], corpus.steps = head[1];
    corpus.text = calloc(head[0], sizeof *corpus.text);
    corpus.ranges = calloc(head[0], sizeof *corpus.ranges);
    at += 12;
    for (uint32_t i = 0; i < corpus.conversations; i++) {
        const uint32_t *ranges = (const uint32_t *)(at + 4);
        corpus.ranges[i] = ranges;
        corpus.text[i] = (const char *)(ranges + 2 * corpus.steps);
        at += *(const uint32_t *)at;
    }
    corpus.tail = (struct iovec){(char *)at, head[2]};
    const uint32_t *first = corpus.ranges[0];
    const char *slot = memmem(corpus.text[0] + first[0], first[1] - first[0], "Task 00000000", 13);
    corpus.tasks = now_ns() / 10000 % 100000000;
    corpus.task = slot ? slot + 5 - (corpus.text[0] + first[0]) : 0;
}

static void fresh(uint32_t i, uint32_t step) {
    rollouts[i] = (struct rollout){serial % corpus.conversations, step, serial};
    serial++;
}

static struct line *line_of(uint32_t rollout) {
    return &lines[want.own ? rollout % want.connections : 0];
}

static void wait_turn(uint32_t i) {
    struct line *line = line_of(i);
    line->waiting[(line->from + line->count++) % ROLLOUTS] = i;
}

static uint32_t next_turn(const struct connection *c) {
    struct line *line = line_of(c - connections);
    uint32_t i = line->waiting[line->from];
    line->from = (line->from + 1) % ROLLOUTS;
    line->count--;
    return i;
}

static void watch(struct connection *c, int op, uint32_t interest) {
    struct epoll_event event = {.events = interest, .data.ptr = c};
    if (epoll_ctl(epoll, op, c->fd, &event) < 0) die("epoll_ctl");
}

static void dial(struct connection *c) {
    c->fd = loopback(want.port, false);
    c->blocked = false;
    c->in.used = c->in.raw = 0;
    message_next(&c->in);
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
}

/* The body in its parts: before the task's number, the number, after it, the tail. */
static void write_body(struct connection *c, const struct rollout *r) {
    const uint32_t *range = corpus.ranges[r->conversation] + 2 * r->step;
    char *text = (char *)corpus.text[r->conversation] + range[0];
    size_t size = range[1] - range[0], number = corpus.task ? TASK : 0;
    snprintf(c->task, sizeof c->task, "%0*u", TASK, (corpus.tasks + r->serial) % 100000000);
    c->out[1] = (struct iovec){text, corpus.task};
    c->out[2] = (struct iovec){c->task, number};
    c->out[3] = (struct iovec){text + corpus.task + number, size - corpus.task - number};
    c->out[4] = corpus.tail;
}

static size_t length_of(const struct connection *c) {
    size_t length = 0;
    for (int i = 1; i < PARTS; i++) length += c->out[i].iov_len;
    return length;
}

static void write_head(struct connection *c, const struct rollout *r) {
    char path[512];
    const char *slot = strstr(want.path, "{r}");
    if (slot) snprintf(path, sizeof path, "%.*s%s-%06u%s", (int)(slot - want.path), want.path, want.run, r->serial, slot + 3);
    else snprintf(path, sizeof path, "%s", want.path);
    int length = snprintf(c->head, sizeof c->head,
                          "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: %s\r\nContent-Type: application/json\r\n"
                          "User-Agent: OpenAI/Python 3.52.0\r\n%sContent-Length: %zu\r\n\r\n",
                          path, want.port, want.accept, want.headers, length_of(c));
    c->out[0] = (struct iovec){c->head, length};
}

static void send_rest(struct connection *c) {
    struct iovec rest[PARTS];
    int count = 0;
    size_t skip = c->sent, total = 0;
    for (int i = 0; i < PARTS; i++) {
        size_t gone = skip < c->out[i].iov_len ? skip : c->out[i].iov_len;
        skip -= gone;
        total += c->out[i].iov_len;
        if (gone < c->out[i].iov_len) rest[count++] = (struct iovec){(char *)c->out[i].iov_base + gone, c->out[i].iov_len - gone};
    }
    ssize_t sent = count ? writev(c->fd, rest, count) : 0;
    bool blocked = sent < 0 || c->sent + sent < total;
    if (sent > 0) c->sent += sent;
    if (blocked != c->blocked) watch(c, EPOLL_CTL_MOD, blocked ? EPOLLIN | EPOLLOUT : EPOLLIN);
    c->blocked = blocked;
}

static void call(struct connection *c, int64_t from) {
    if (c->fd < 0) dial(c);
    c->rollout = next_turn(c);
    struct rollout *r = &rollouts[c->rollout];
    write_body(c, r);
    write_head(c, r);
    c->sent = c->scanned = c->events = 0;
    c->from = from;
    c->busy = true;
    busy++, started++;
    send_rest(c);
}

static bool over(int64_t now) {
    return now >= finish || (want.calls && started >= want.calls) || errors_in_row >= GIVE_UP;
}

/* Calls whose time has come, over the connections that are free; says when to look again, 0 for not at all. */
static int64_t due(int64_t now) {
    int64_t gap = want.rate ? SECOND / want.rate : (int64_t)(want.stagger * SECOND) / want.connections;
    long limit = want.rate ? INT64_MAX : want.connections;
    while (scheduled < limit && idle_count && !over(now)) {
        int64_t at = begin + scheduled * gap;
        if (at > now) return at;
        scheduled++;
        call(idle[--idle_count], want.rate ? at : now);
    }
    return 0;
}

static void release(struct connection *c) {
    c->busy = false;
    busy--;
    struct rollout *r = &rollouts[c->rollout];
    if (++r->step == corpus.steps) fresh(c->rollout, 0);
    wait_turn(c->rollout);
    last_done = now_ns();
    if (want.rate || over(last_done)) idle[idle_count++] = c;
    else call(c, last_done);
}

static void hang_up(struct connection *c) {
    close(c->fd);
    c->fd = -1;
}

static void fail(struct connection *c, const char *why) {
    if (!first_error[0]) {
        int shown = c->in.used < 160 ? (int)c->in.used : 160;
        snprintf(first_error, sizeof first_error, "%s: %.*s", why, shown, c->in.data ? c->in.data : "");
        for (char *at = first_error; *at; at++)
            if (*at < ' ' || *at == '"' || *at == '\\') *at = ' ';
    }
    errors++, errors_in_row++;
    hang_up(c);
    release(c);
}

static void scan(struct connection *c, int64_t now) {
    const char *body = c->in.data + c->in.head, *end = c->in.data + c->in.body;
    for (const char *at = body + c->scanned; (at = memchr(at, '#', end - at)); at++) {
        bool stamped = at + 1 < end && at[1] >= '0' && at[1] <= '9';
        if (c->in.state != DONE && (at + 1 == end || (stamped && end - at <= DIGITS))) {
            c->scanned = at - body;
            return;
        }
        int64_t then = 0;
        for (int i = 1; stamped && i <= DIGITS; i++) then = then * 10 + (at[i] - '0');
        if (then && now >= sample_from && now < finish) sample(&holdup, now - then);
        c->events++;
    }
    c->scanned = end - body;
}

static void done(struct connection *c, int64_t now) {
    struct message *in = &c->in;
    size_t length = in->body - in->head;
    const char *close_after = header(in, "connection: close");
    if (strncmp(in->data + 9, "200", 3)) return fail(c, "status");
    if (want.bytes && length != (size_t)want.bytes) return fail(c, "bytes");
    if (want.events && c->events != (uint32_t)want.events) return fail(c, "events");
    if (want.events && !memmem(in->data + in->body - 32, 32, "[DONE]", 6)) return fail(c, "no [DONE]");
    calls++, events += c->events, errors_in_row = 0;
    if (c->from >= sample_from) sample(&latency, now - c->from);
    message_next(in);
    if (close_after) hang_up(c);
    release(c);
}

static void serve(struct connection *c, uint32_t ready) {
    if (ready & EPOLLOUT) send_rest(c);
    if (!(ready & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t got = message_read(&c->in, c->fd);
    if (got < 0 && errno == EAGAIN) return;
    if (!c->busy) return hang_up(c);
    if (got <= 0) return fail(c, "connection closed");
    int64_t now = now_ns();
    if (want.events) scan(c, now);
    if (c->in.state == DONE) done(c, now);
    else if (c->in.state == BROKEN) fail(c, "framing");
}

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void print_samples(const char *name, struct samples *s) {
    if (!s->count) return (void)printf(", \"%s\": null", name);
    qsort(s->list, s->count, sizeof *s->list, ascending);
    printf(", \"%s\": {\"count\": %zu, \"p50\": %.1f, \"p90\": %.1f, \"p99\": %.1f, \"max\": %.1f}", name, s->count,
           s->list[s->count / 2] / 10., s->list[s->count * 9 / 10] / 10., s->list[s->count * 99 / 100] / 10.,
           s->list[s->count - 1] / 10.);
}

static void report(void) {
    errors += busy;
    if (busy && !first_error[0]) snprintf(first_error, sizeof first_error, "%d calls not answered in time", busy);
    double lasted = last_done > begin ? (last_done - begin) / 1e9 : 1e-9;
    printf("{\"calls\": %ld, \"events\": %ld, \"errors\": %ld, \"error\": \"%s\", \"rollouts\": %u, \"per_second\": %.1f", calls,
           events, errors, first_error, serial, calls / lasted);
    print_samples("latency_us", &latency);
    print_samples("holdup_us", &holdup);
    printf("}\n");
}

static void options(int count, char **arguments) {
    static const struct option names[] = {
        {"port", 1, 0, 'p'},  {"path", 1, 0, 'P'}, {"corpus", 1, 0, 'c'}, {"connections", 1, 0, 'n'}, {"seconds", 1, 0, 's'},
        {"warm", 1, 0, 'w'},  {"rate", 1, 0, 'r'}, {"calls", 1, 0, 'N'},  {"stagger", 1, 0, 'g'},     {"run", 1, 0, 'R'},
        {"header", 1, 0, 'h'}, {"bytes", 1, 0, 'b'}, {"events", 1, 0, 'e'},
        {"accept", 1, 0, 'a'}, {"own", 0, 0, 'o'}, {0}};
    for (int o; (o = getopt_long(count, arguments, "", names, NULL)) != -1;) {
        size_t used = strlen(want.headers);
        if (o == 'p') want.port = atoi(optarg);
        else if (o == 'P') want.path = optarg;
        else if (o == 'c') want.corpus = optarg;
        else if (o == 'n') want.connections = atoi(optarg);
        else if (o == 's') want.seconds = atof(optarg);
        else if (o == 'w') want.warm = atof(optarg);
        else if (o == 'r') want.rate = atoi(optarg);
        else if (o == 'N') want.calls = atol(optarg);
        else if (o == 'g') want.stagger = atof(optarg);
        else if (o == 'R') want.run = optarg;
        else if (o == 'h') snprintf(want.headers + used, sizeof want.headers - used, "%s\r\n", optarg);
        else if (o == 'b') want.bytes = atol(optarg);
        else if (o == 'e') want.events = atoi(optarg);
        else if (o == 'a') want.accept = optarg;
        else if (o == 'o') want.own = true;
        else exit(2);
    }
    bool fits = want.connections > 0 && want.connections <= ROLLOUTS;
    if (want.port && want.corpus && fits) return;
    fprintf(stderr, "load: needs --port, --corpus and 1 to 64 --connections\n");
    exit(2);
}

static void prepare(void) {
    read_corpus();
    epoll = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &event);
    connections = calloc(want.connections, sizeof *connections);
    idle = calloc(want.connections, sizeof *idle);
    for (int i = 0; i < want.connections; i++) {
        dial(&connections[i]);
        idle[idle_count++] = &connections[i];
    }
    /* Rollouts begin in the middle of their conversations, so that they do not all end together. */
    for (uint32_t i = 0; i < ROLLOUTS; i++) fresh(i, i * corpus.steps / ROLLOUTS), wait_turn(i);
    begin = now_ns();
    sample_from = begin + (int64_t)(want.warm * SECOND);
    finish = sample_from + (int64_t)(want.seconds * SECOND);
}

int main(int count, char **arguments) {
    options(count, arguments);
    prepare();
    int64_t stop = finish + DRAIN;
    for (struct epoll_event ready[128];;) {
        int64_t now = now_ns(), next = due(now);
        if ((over(now) && !busy) || now > stop) break;
        arm(timer, next ? next : over(now) ? stop : finish);
        int n = epoll_wait(epoll, ready, 128, -1);
        for (int i = 0; i < n; i++)
            if (ready[i].data.ptr) serve(ready[i].data.ptr, ready[i].events);
    }
    report();
    return 0;
}
