#define _GNU_SOURCE
#include "runtime/heartbeat.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/sock_diag.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "runtime/clock.h"
#include "runtime/error.h"
#include "runtime/file.h"
#include "runtime/activity.h"
#include "runtime/process.h"
#include "runtime/spelling.h"

#ifdef USE_SODIUM
#include <sodium.h>
#endif

enum {
    KEY_BYTES = 32,
    HOST = 65,                 // bytes of a host name
    NAMED = 8,                 // the most dead ranks that a message names
    LOOK_MILLISECONDS = 10,    // between two looks at the socket
    LOOK_DATAGRAMS = 256,      // the most that one look takes
    MEETING_SECONDS = 10,      // how long each rank tries to reach rank 0 at the start
    MEETING_RATE = 10,         // how often per second
    DAEMON_SECONDS = 10,       // how long mpirun and its daemons have to exit before they are killed
    STACK_BYTES = 8 << 20      // the stack also holds the libraries' thread-local variables
};

// What rank 0 draws and tells all others through MPI.
typedef struct {
    uint8_t key[KEY_BYTES];
    uint64_t job;    // names what the first rank of each machine claims; never part of a datagram
} Secret;

// Where a rank receives datagrams, as it tells the others through MPI. The port is 0 if it has no socket.
typedef struct {
    struct sockaddr_in at;
    char host[HOST];
} Place;

typedef enum { ALIVE = 1, DEAD } Kind;

// Each rank sends ALIVE to rank 0, and rank 0 to each rank that it has heard. The text of ALIVE says what the sender's
// main thread does, that of DEAD names the dead ranks.
typedef struct {
    uint8_t code[KEY_BYTES];    // authenticates what follows
    uint64_t number;            // of the sender's datagrams, from 1; no receiver takes one twice
    int32_t kind, from, to;     // ranks
    int32_t waits;              // ALIVE: is the sender's main thread waiting for other ranks?
    double idle;                // ALIVE: for how many seconds that thread has made no progress
    char text[1024];
} Datagram;

typedef struct {
    double heard;       // when its last datagram arrived
    uint64_t number;    // of that datagram; 0 before the first
    bool waits;         // of its main thread, as in that datagram
    double idle;
    char does[128];
} Peer;

struct Heartbeat {
    double timeout, progress, interval;    // seconds; the first two may be 0
    Secret secret;
    int socket, stop[2];    // writing to stop[1] ends the thread
    pid_t parent;
    int daemon;    // a pidfd of the parent if it is mpirun or its daemon, otherwise -1
    pthread_t thread;
    Place *places;      // by rank
    Peer *peers;        // by rank; ranks other than 0 use their own entry and that of rank 0
    uint64_t sent;      // datagrams
    atomic_bool met;    // rank 0 has answered
    double woken;       // when the thread last looked at its socket
    uint64_t count;     // of the main thread's progress, by then
    uint32_t lost;      // datagrams that had come by then and that the socket had no room for
};

// ---- datagrams

#ifdef USE_SODIUM

static bool can_authenticate(void) {
    return sodium_init() >= 0;
}

static void authenticate(uint8_t *code, const void *data, size_t size, const uint8_t *key) {
    _Static_assert(KEY_BYTES == crypto_auth_KEYBYTES && KEY_BYTES == crypto_auth_BYTES, "libsodium's sizes");
    crypto_auth(code, data, size, key);
}

static bool is_authentic(const uint8_t *code, const void *data, size_t size, const uint8_t *key) {
    return crypto_auth_verify(code, data, size, key) == 0;
}

#else

// Without libsodium, datagrams carry the key itself, and only over the loopback interface, where nobody but root can
// read it.
static bool can_authenticate(void) {
    return process.local_size == process.size;
}

static void authenticate(uint8_t *code, const void *data, size_t size, const uint8_t *key) {
    (void)data, (void)size;
    memcpy(code, key, KEY_BYTES);
}

static bool is_authentic(const uint8_t *code, const void *data, size_t size, const uint8_t *key) {
    (void)data, (void)size;
    return memcmp(code, key, KEY_BYTES) == 0;
}

#endif

enum { SIGNED = offsetof(Datagram, number) };    // where the authenticated part begins

static void send_to(Heartbeat *h, int rank, Kind kind, const char *text) {
    const Peer *mine = &h->peers[process.rank];
    Datagram datagram = {.number = ++h->sent,
                         .kind = (int32_t)kind,
                         .from = process.rank,
                         .to = rank,
                         .waits = mine->waits,
                         .idle = mine->idle};
    const struct sockaddr_in *to = &h->places[rank].at;
    snprintf(datagram.text, sizeof datagram.text, "%s", text);
    size_t size = offsetof(Datagram, text) + strlen(datagram.text) + 1;
    authenticate(datagram.code, (const char *)&datagram + SIGNED, size - SIGNED, h->secret.key);
    // A datagram that cannot be sent is no different from one that is lost.
    sendto(h->socket, &datagram, size, MSG_NOSIGNAL | MSG_DONTWAIT, (const struct sockaddr *)to, sizeof *to);
}

// Not as an answer to the others' heartbeats, which may be lost in a flood of other datagrams.
static void send_heartbeats(Heartbeat *h) {
    if (process.rank != 0) send_to(h, 0, ALIVE, h->peers[process.rank].does);
    for (int r = 1; process.rank == 0 && r < process.size; r++)
        if (h->peers[r].number) send_to(h, r, ALIVE, "");
}

// ---- the end

static bool launcher_name(pid_t pid) {
    char path[64], name[64] = "";
    snprintf(path, sizeof path, "/proc/%d/comm", (int)pid);
    FILE *file = file_open_system(path);
    if (!file) return false;
    if (!fgets(name, sizeof name, file)) name[0] = 0;
    fclose(file);
    name[strcspn(name, "\n")] = 0;
    return word_place("mpirun|mpiexec|orterun|orted|prterun|prted", '|', name) >= 0;
}

// Returns a pidfd of the daemon that started this rank, or -1 if something else started it.
static int open_daemon(pid_t parent) {
#ifdef SYS_pidfd_open
    if (launcher_name(parent)) return (int)syscall(SYS_pidfd_open, parent, 0);
#endif
    return -1;
}

// Kills the daemon's children (ssh clients and any remaining ranks), then the daemon. Safe to call after a fork().
static void kill_daemon(const Heartbeat *h) {
    char path[64], children[4096];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)h->parent, (int)h->parent);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, children, sizeof children - 1);
    children[size > 0 ? size : 0] = 0;
    char *end = children;
    for (long pid; (pid = strtol(end, &end, 10)) > 0;) kill((pid_t)pid, SIGKILL);
#ifdef SYS_pidfd_send_signal
    syscall(SYS_pidfd_send_signal, h->daemon, SIGKILL, NULL, 0);
#endif
}

// mpirun and its daemons wait for each other's reports even if the machine in between is gone, for about 15 minutes,
// until TCP gives up. Therefore a child process outlives this one and kills the daemon unless it exits on its own. The
// child keeps `claim` open and closes everything else, because mpirun also waits until its pipes are closed. It is
// created with clone() rather than fork(), whose handlers may need a lock that a stuck thread holds.
static void outlive_daemon(const Heartbeat *h, int claim) {
    if (h->daemon < 0 || syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL) != 0) return;
    setsid();
    for (int fd = 0; fd < 1 << 16; fd++)
        if (fd != h->daemon && fd != claim) close(fd);
    struct pollfd daemon = {.fd = h->daemon, .events = POLLIN};
    if (poll(&daemon, 1, DAEMON_SECONDS * 1000) == 0) kill_daemon(h);
    _exit(0);
}

// Returns true for the first rank on each machine that calls this: only one process can bind to the name.
static bool claim_machine(const Heartbeat *h, int *claim) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "attn.c-heartbeat-%016" PRIx64, h->secret.job);
    *claim = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    return *claim < 0 || bind(*claim, (struct sockaddr *)&name, sizeof name) == 0;
}

typedef enum { SILENT, STUCK, DEADLOCK } Reason;

// Uses write(), because a stuck main thread may hold the lock of stderr, and waits at most one second for a blocked
// reader.
static void say_dead(const Heartbeat *h, Reason reason, const char *who) {
    static const struct {
        const char *found, *why, *flag;
    } REASONS[] = {
        [SILENT] = {"no heartbeat from", "Its machine or the network is down, or the process is suspended.",
                    "--rank-timeout"},
        [STUCK] = {"no progress of", "A file system or a GPU may no longer answer there.", "--progress-timeout"},
        [DEADLOCK] = {"all ranks wait for each other, without progress of",
                      "A message was lost, or this is a defect of the program.", "--progress-timeout"},
    };
    char text[2048];
    int length =
        snprintf(text, sizeof text,
                 "%s: %s %s for %.0f s.\n"
                 "  %s All other ranks exit now.\n"
                 "  Saved checkpoints are intact: resume with --resume, with a HOSTFILE that omits the machine\n"
                 "  if it is still down.\n"
                 "  To wait longer, set a longer %s; 0 waits forever.\n",
                 program_name, REASONS[reason].found, who, reason == SILENT ? h->timeout : h->progress,
                 REASONS[reason].why, REASONS[reason].flag);
    struct pollfd room = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&room, 1, 1000) == 1 && write(STDERR_FILENO, text, (size_t)length) < 0) return;
}

// Rank 0 tells all others. The others tell rank 0, which may only have been suspended and must exit as well.
static void tell_dead(Heartbeat *h, const char *who) {
    if (process.rank != 0) send_to(h, 0, DEAD, who);
    for (int r = 1; process.rank == 0 && r < process.size; r++) send_to(h, r, DEAD, who);
}

// Ends this process. The main thread may be stuck inside MPI, NCCL or a file system, so nothing here waits for it.
// `told` is true if another rank noticed first and has printed the message.
static _Noreturn void end_dead(Heartbeat *h, Reason reason, const char *who, bool told) {
    int claim;
    bool first = claim_machine(h, &claim);
    if (!told && (first || process.rank == 0)) say_dead(h, reason, who);
    for (int i = 0; i < 3; i++, usleep(50000)) tell_dead(h, who);
    if (first) outlive_daemon(h, claim);
    _exit(EXIT_PEER);
}

// ---- who is silent

static int peer_count(void) {
    return process.rank == 0 ? process.size : 1;
}

// The ranks that have been silent since `before`, as "rank 2 on node1, rank 3 on node1".
static void name_silent(const Heartbeat *h, double before, char *out, size_t size) {
    size_t length = 0, count = 0;
    for (int r = process.rank == 0; r < peer_count(); r++) {
        if (h->peers[r].heard > before || ++count > NAMED) continue;
        const char *between = count > 1 ? ", " : "";
        length += (size_t)snprintf(out + length, size - length, "%srank %d on %s", between, r, h->places[r].host);
    }
    if (count > NAMED) snprintf(out + length, size - length, " and %zu more", count - NAMED);
}

// The ranks of one machine fall silent within an interval or two of each other, so nearly overdue ranks are named along
// with the first.
static void check_silence(Heartbeat *h, double t) {
    double oldest = t;
    char who[900] = "";
    for (int r = process.rank == 0; r < peer_count(); r++) oldest = fmin(oldest, h->peers[r].heard);
    if (h->timeout == 0 || t - oldest < h->timeout) return;
    name_silent(h, t - h->timeout + 2 * h->interval, who, sizeof who);
    end_dead(h, SILENT, who, false);
}

// ---- whose main thread is stuck

// Notes what this rank's own main thread does, `pause` seconds after the last look. A suspended process does not age.
static void look_at_main(Heartbeat *h, double pause) {
    Peer *mine = &h->peers[process.rank];
    Activity a = activity_now();
    mine->idle = a.count == h->count ? mine->idle + fmin(pause, h->interval) : 0;
    h->count = a.count;
    mine->waits = a.waits != NULL;
    if (a.waits) snprintf(mine->does, sizeof mine->does, "in %s, %s", a.waits, a.what);
    else snprintf(mine->does, sizeof mine->does, "%s", a.what);
}

// On rank 0. A rank that waits for others makes no progress while they work, save or hang, so it counts as stuck only
// if all ranks wait. Ranks that wait for the same file system are named along with the first.
static void check_progress(Heartbeat *h) {
    double longest = 0, shortest = INFINITY;
    char who[900] = "";
    size_t length = 0, count = 0;
    for (int r = 0; r < process.size; r++) {
        const Peer *peer = &h->peers[r];
        shortest = fmin(shortest, peer->waits ? peer->idle : 0);
        if (!peer->waits) longest = fmax(longest, peer->idle);
    }
    bool deadlock = shortest >= h->progress;
    if (process.rank != 0 || h->progress == 0 || (longest < h->progress && !deadlock)) return;
    for (int r = 0; r < process.size && length < sizeof who; r++) {
        const Peer *peer = &h->peers[r];
        if (peer->waits != deadlock || peer->idle < h->progress - 2 * h->interval || ++count > NAMED) continue;
        length += (size_t)snprintf(who + length, sizeof who - length, "%srank %d on %s (%s)", count > 1 ? ", " : "", r,
                                   h->places[r].host, peer->does);
    }
    end_dead(h, deadlock ? DEADLOCK : STUCK, who, false);
}

// How many datagrams the socket has had no room for.
static uint32_t count_lost(const Heartbeat *h) {
    uint32_t values[SK_MEMINFO_VARS] = {0};
    socklen_t size = sizeof values;
    getsockopt(h->socket, SOL_SOCKET, SO_MEMINFO, values, &size);
    return values[SK_MEMINFO_DROPS];
}

// Silence says nothing about the other ranks after this process itself was suspended (a stopped job, a paused virtual
// machine), nor while somebody floods its socket.
static void forgive_deafness(Heartbeat *h, double t) {
    double pause = t - h->woken;
    uint32_t lost = count_lost(h);
    bool deaf = pause >= 3 * h->interval || lost != h->lost;
    h->woken = t;
    h->lost = lost;
    for (int r = 0; deaf && r < peer_count(); r++) h->peers[r].heard += pause;
}

// ---- the thread

static void receive(Heartbeat *h, const Datagram *datagram, double t) {
    int rank = datagram->from;
    if (datagram->to != process.rank || rank < 0 || rank >= process.size) return;
    if ((process.rank == 0) == (rank == 0)) return;
    Peer *peer = &h->peers[rank];
    bool first = !peer->number;
    if (datagram->number <= peer->number) return;
    if (datagram->kind == DEAD) end_dead(h, SILENT, datagram->text, true);
    peer->number = datagram->number;
    peer->heard = t;
    peer->waits = datagram->waits;
    peer->idle = datagram->idle;
    snprintf(peer->does, sizeof peer->does, "%.*s", (int)sizeof peer->does - 1, datagram->text);
    if (process.rank != 0) h->met = true;
    else if (first) send_to(h, rank, ALIVE, "");
}

// Takes a limited number, so that a flood takes little of a core. The others wait for the next look or are lost.
static void receive_some(Heartbeat *h, double t) {
    for (int i = 0; i < LOOK_DATAGRAMS; i++) {
        Datagram datagram;
        ssize_t size = recv(h->socket, &datagram, sizeof datagram, MSG_DONTWAIT);
        if (size < 0) return;
        if ((size_t)size <= offsetof(Datagram, text)) continue;
        if (is_authentic(datagram.code, (const char *)&datagram + SIGNED, (size_t)size - SIGNED, h->secret.key))
            receive(h, &datagram, t);
    }
}

static void *beat(void *data) {
    Heartbeat *h = data;
    double next = now();
    h->woken = next;
    for (;;) {
        struct pollfd fds[] = {{.fd = h->stop[0], .events = POLLIN}, {.fd = h->socket, .events = POLLIN}};
        poll(fds, 1, LOOK_MILLISECONDS);
        poll(fds, 2, (int)(1000 * fmax(0, next - now())) + 1);
        if (fds[0].revents) return NULL;
        double t = now();
        look_at_main(h, t - h->woken);
        forgive_deafness(h, t);
        receive_some(h, t);
        check_silence(h, t);
        check_progress(h);
        if (t < next) continue;
        send_heartbeats(h);
        next = t + (h->met || process.rank == 0 ? h->interval : fmin(h->interval, 1.0 / MEETING_RATE));
    }
}

// ---- start and stop

// Rank 0 binds the address that MPI uses. The others connect to it, and thereby bind the address from which they reach
// it, and get datagrams from rank 0 only.
static bool open_socket(Heartbeat *h, uint32_t address) {
    Place *mine = &h->places[process.rank];
    socklen_t size = sizeof mine->at;
    gethostname(mine->host, HOST - 1);
    h->socket = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (h->socket < 0 || pipe2(h->stop, O_CLOEXEC) != 0 || !address) return false;
    mine->at = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = address};
    int status = process.rank == 0 ? bind(h->socket, (struct sockaddr *)&mine->at, size)
                                   : connect(h->socket, (struct sockaddr *)&h->places[0].at, size);
    return status == 0 && getsockname(h->socket, (struct sockaddr *)&mine->at, &size) == 0;
}

// Collective. Distributes the secret and the places. Returns false if this rank cannot receive datagrams.
static bool exchange_places(Heartbeat *h) {
    const uint32_t address = process_address();
    bool ready =
        process.rank == 0 && getrandom(&h->secret, sizeof h->secret, 0) == sizeof h->secret && open_socket(h, address);
    process_broadcast(&h->secret, sizeof h->secret);
    process_broadcast(&h->places[0], sizeof h->places[0]);
    if (process.rank != 0) ready = h->places[0].at.sin_port && open_socket(h, h->places[0].at.sin_addr.s_addr);
    process_gather(h->places, sizeof *h->places);
    return ready;
}

// The new thread inherits the signal mask, so no signal is ever delivered to it.
static bool start_thread(Heartbeat *h) {
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&h->thread, &attributes, beat, h) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

static void wait_until_met(const Heartbeat *h) {
    double end = now() + MEETING_SECONDS;
    while (process.rank != 0 && !h->met && now() < end) usleep(2000);
}

static void end_thread(Heartbeat *h) {
    if (write(h->stop[1], "", 1) == 1) pthread_join(h->thread, NULL);
}

static void release(Heartbeat *h) {
    const int fds[] = {h->socket, h->stop[0], h->stop[1], h->daemon};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0) close(fds[i]);
    free(h->peers);
    free(h->places);
    free(h);
}

static void warn_apart(const Heartbeat *h, int rank) {
    const Place *center = &h->places[0];
    char address[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &center->at.sin_addr, address, sizeof address);
    if (center->at.sin_port)
        warn("rank %d on %s cannot reach rank 0 by UDP at %s, the address that MPI uses on %s,\n"
             "  so a machine that goes down will not be noticed. Allow UDP between the machines, or silence this\n"
             "  warning with --rank-timeout 0.",
             rank, h->places[rank].host, address, center->host);
    else
        warn("rank 0 on %s has no IPv4 address for heartbeats, so a machine that goes down will not be noticed.\n"
             "  MPI has no TCP connection between the machines, and the host's name only stands for loopback.\n"
             "  Give it another address there (/etc/hosts), or silence this warning with --rank-timeout 0.",
             center->host);
}

Heartbeat *heartbeat_start(int64_t timeout, int64_t progress) {
    if (process.size == 1 || (timeout == 0 && progress == 0)) return NULL;
    if (process_max_int(!can_authenticate())) {
        warn("built without libsodium (libsodium-dev), so several machines run without heartbeats (--rank-timeout).");
        return NULL;
    }
    Heartbeat *h = allocate(1, sizeof *h, "the heartbeat");
    h->peers = allocate((size_t)process.size, sizeof *h->peers, "the heartbeat");
    h->places = allocate((size_t)process.size, sizeof *h->places, "the heartbeat");
    h->timeout = (double)timeout;
    h->progress = (double)progress;
    h->interval = fmin(2, (double)(timeout && (timeout < progress || !progress) ? timeout : progress) / 20);
    h->socket = h->stop[0] = h->stop[1] = -1;
    h->parent = getppid();
    h->daemon = open_daemon(h->parent);
    bool started = exchange_places(h);
    for (int r = 0; r < process.size; r++) h->peers[r].heard = now();
    started = started && start_thread(h);
    if (started) wait_until_met(h);
    int64_t apart = process_max_int(started && (process.rank == 0 || h->met) ? -1 : process.rank);
    if (apart < 0) return h;
    warn_apart(h, (int)apart);
    if (started) end_thread(h);
    release(h);
    return NULL;
}

void heartbeat_stop(Heartbeat *heartbeat) {
    if (!heartbeat) return;
    process_barrier();    // after this, a silent rank has finished
    end_thread(heartbeat);
    release(heartbeat);
}
