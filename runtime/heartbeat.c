#define _GNU_SOURCE
#include "runtime/heartbeat.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <math.h>
#include <net/if.h>
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
#include <time.h>
#include <unistd.h>

#include "runtime/clock.h"
#include "runtime/error.h"
#include "runtime/process.h"

enum {
    ADDRESSES = 32,          // the most addresses of rank 0 that are tried
    HOST = 65,               // bytes of a host name
    NAMED = 8,               // the most dead ranks that a message names
    MEETING_SECONDS = 10,    // how long each rank tries to reach rank 0 at the start
    DAEMON_SECONDS = 10,     // how long mpirun and its daemons have to exit before they are killed
    STACK_BYTES = 8 << 20    // the stack also holds the libraries' thread-local variables
};

// Where to reach rank 0, as it tells all others through MPI. A machine may have several networks, so all addresses are
// tried.
typedef struct {
    uint64_t job;     // random, drawn by rank 0; tells our datagrams from those of other jobs
    uint16_t port;    // in network byte order, like the addresses
    int32_t count;    // number of addresses; 0 if rank 0 has no socket
    uint32_t addresses[ADDRESSES];
    char host[HOST];
} Center;

typedef enum { ALIVE = 1, DEAD } Kind;

// Each rank sends ALIVE with its host name to rank 0, which echoes it. The text of DEAD names the dead ranks.
typedef struct {
    uint64_t job;
    int32_t kind, rank;    // of the sender
    int32_t address;       // which of rank 0's addresses an ALIVE was sent to
    char text[1024];
} Datagram;

typedef struct {
    struct sockaddr_in at;
    double heard;    // when its last datagram arrived
    char host[HOST];
} Peer;

struct Heartbeat {
    double timeout, interval;    // seconds
    Center center;
    int socket, stop[2];    // writing to stop[1] ends the thread
    pid_t parent;
    int daemon;    // a pidfd of the parent if it is mpirun or its daemon, otherwise -1
    pthread_t thread;
    char host[HOST];    // of this rank
    Peer *peers;        // by rank; ranks other than 0 only use the entry of rank 0
    int address;        // the index of the address of rank 0 that answered last; -1 if none has
    atomic_bool met;    // rank 0 has answered
    double woken;       // when the thread last checked its socket
};

// ---- datagrams

static void send_to(const Heartbeat *h, const struct sockaddr_in *to, Kind kind, int address, const char *text) {
    Datagram datagram = {.job = h->center.job, .kind = (int32_t)kind, .rank = process.rank, .address = address};
    snprintf(datagram.text, sizeof datagram.text, "%s", text);
    size_t size = offsetof(Datagram, text) + strlen(datagram.text) + 1;
    // A datagram that cannot be sent is no different from one that is lost.
    sendto(h->socket, &datagram, size, MSG_NOSIGNAL | MSG_DONTWAIT, (const struct sockaddr *)to, sizeof *to);
}

static void send_to_center(const Heartbeat *h, Kind kind, int address, const char *text) {
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = h->center.port, .sin_addr.s_addr = h->center.addresses[address]};
    send_to(h, &to, kind, address, text);
}

// Sends ALIVE to every address of rank 0 until one answers, then only to that one, until it stops answering.
static void send_heartbeat(const Heartbeat *h, double t) {
    if (process.rank == 0) return;
    bool answered = h->address >= 0 && t - h->peers[0].heard < 3 * h->interval;
    for (int i = 0; i < h->center.count; i++)
        if (!answered || i == h->address) send_to_center(h, ALIVE, i, h->host);
}

// ---- the end

static bool launcher_name(pid_t pid) {
    static const char *const names[] = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", NULL};
    char path[64], name[64] = "";
    snprintf(path, sizeof path, "/proc/%d/comm", (int)pid);
    FILE *file = fopen(path, "r");
    if (!file) return false;
    if (!fgets(name, sizeof name, file)) name[0] = 0;
    fclose(file);
    name[strcspn(name, "\n")] = 0;
    for (const char *const *known = names; *known; known++)
        if (!strcmp(name, *known)) return true;
    return false;
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
    snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "attn.c-heartbeat-%016" PRIx64, h->center.job);
    *claim = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    return *claim < 0 || bind(*claim, (struct sockaddr *)&name, sizeof name) == 0;
}

// Uses write(), because a stuck main thread may hold the lock of stderr, and waits at most one second for a blocked
// reader.
static void say_dead(const Heartbeat *h, const char *who) {
    char text[2048];
    int length =
        snprintf(text, sizeof text,
                 "%s: no heartbeat from %s for %.0f s.\n"
                 "  Its machine or the network is down, or the process is suspended. All other ranks exit now.\n"
                 "  Saved checkpoints are intact: resume with --resume, with a HOSTFILE that omits the machine\n"
                 "  if it is still down.\n"
                 "  To wait longer, set a longer --rank-timeout; 0 waits forever.\n",
                 program_name, who, h->timeout);
    struct pollfd room = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&room, 1, 1000) == 1 && write(STDERR_FILENO, text, (size_t)length) < 0) return;
}

// Rank 0 tells all others. The others tell rank 0, which may only have been suspended and must exit as well.
static void tell_dead(const Heartbeat *h, const char *who) {
    if (process.rank != 0) send_to_center(h, DEAD, h->address, who);
    for (int r = 1; process.rank == 0 && r < process.size; r++) send_to(h, &h->peers[r].at, DEAD, 0, who);
}

// Ends this process. The main thread may be stuck inside MPI, NCCL or a file system, so nothing here waits for it.
// `told` is true if another rank noticed first and has printed the message.
static _Noreturn void end_dead(const Heartbeat *h, const char *who, bool told) {
    int claim;
    bool first = claim_machine(h, &claim);
    if (!told && (first || process.rank == 0)) say_dead(h, who);
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
        length += (size_t)snprintf(out + length, size - length, "%srank %d on %s", between, r, h->peers[r].host);
    }
    if (count > NAMED) snprintf(out + length, size - length, " and %zu more", count - NAMED);
}

// The ranks of one machine fall silent within an interval or two of each other, so nearly overdue ranks are named along
// with the first.
static void check_silence(const Heartbeat *h, double t) {
    double oldest = t;
    char who[900] = "";
    for (int r = process.rank == 0; r < peer_count(); r++) oldest = fmin(oldest, h->peers[r].heard);
    if (t - oldest < h->timeout) return;
    name_silent(h, t - h->timeout + 2 * h->interval, who, sizeof who);
    end_dead(h, who, false);
}

// After this process itself was suspended (a stopped job, a paused virtual machine), silence says nothing about the
// other ranks.
static void forgive_own_pause(Heartbeat *h, double t) {
    double pause = t - h->woken;
    h->woken = t;
    if (pause < 3 * h->interval) return;
    for (int r = 0; r < peer_count(); r++) h->peers[r].heard += pause;
}

// ---- the thread

static void receive(Heartbeat *h, const Datagram *datagram, const struct sockaddr_in *from, double t) {
    int rank = datagram->rank;
    if (datagram->job != h->center.job || rank < 0 || rank >= process.size || rank == process.rank) return;
    if (process.rank != 0 && rank != 0) return;
    if (datagram->kind == DEAD) end_dead(h, datagram->text, true);
    Peer *peer = &h->peers[rank];
    peer->heard = t;
    if (process.rank == 0) {
        peer->at = *from;
        snprintf(peer->host, sizeof peer->host, "%.*s", HOST - 1, datagram->text);
        send_to(h, from, ALIVE, datagram->address, "");
    } else if (datagram->address >= 0 && datagram->address < h->center.count) {
        h->address = datagram->address;
        h->met = true;
    }
}

static void receive_all(Heartbeat *h, double t) {
    Datagram datagram;
    struct sockaddr_in from;
    for (;;) {
        socklen_t length = sizeof from;
        const size_t room = sizeof datagram - 1;
        ssize_t size = recvfrom(h->socket, &datagram, room, MSG_DONTWAIT, (struct sockaddr *)&from, &length);
        if (size < 0 && errno == EINTR) continue;
        if (size < 0) return;
        if ((size_t)size <= offsetof(Datagram, text)) continue;
        ((char *)&datagram)[size] = 0;
        receive(h, &datagram, &from, t);
    }
}

static void *beat(void *data) {
    Heartbeat *h = data;
    double next = now();
    h->woken = next;
    for (;;) {
        struct pollfd fds[] = {{.fd = h->socket, .events = POLLIN}, {.fd = h->stop[0], .events = POLLIN}};
        poll(fds, 2, (int)(1000 * fmax(0, next - now())) + 1);
        if (fds[1].revents) return NULL;
        double t = now();
        forgive_own_pause(h, t);
        receive_all(h, t);
        check_silence(h, t);
        if (t < next) continue;
        send_heartbeat(h, t);
        next = t + h->interval;
    }
}

// ---- start and stop

// Finds the IPv4 addresses of this machine. The loopback address comes last: it only serves ranks on the same machine.
static int find_addresses(uint32_t *addresses) {
    struct ifaddrs *all = NULL;
    int count = 0;
    if (getifaddrs(&all) != 0) return 0;
    for (int loopback = 0; loopback < 2; loopback++) {
        for (const struct ifaddrs *i = all; i && count < ADDRESSES; i = i->ifa_next) {
            if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP)) continue;
            if (!(i->ifa_flags & IFF_LOOPBACK) == !loopback)
                addresses[count++] = ((const struct sockaddr_in *)i->ifa_addr)->sin_addr.s_addr;
        }
    }
    freeifaddrs(all);
    return count;
}

static bool open_sockets(Heartbeat *h) {
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t length = sizeof any;
    if (pipe2(h->stop, O_CLOEXEC) != 0) return false;
    h->socket = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    return h->socket >= 0 && bind(h->socket, (struct sockaddr *)&any, sizeof any) == 0 &&
           getsockname(h->socket, (struct sockaddr *)&any, &length) == 0 && (h->center.port = any.sin_port);
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
    free(h);
}

// Fills in what rank 0 broadcasts to the others.
static void prepare_center(Heartbeat *h, bool ready) {
    Center *center = &h->center;
    if (getrandom(&center->job, sizeof center->job, GRND_NONBLOCK) != sizeof center->job)
        center->job = (uint64_t)getpid() << 32 ^ (uint64_t)time(NULL);
    center->count = ready ? find_addresses(center->addresses) : 0;
    memcpy(center->host, h->host, HOST);
}

Heartbeat *heartbeat_start(int64_t timeout) {
    if (process.size == 1 || timeout == 0) return NULL;
    Heartbeat *h = calloc(1, sizeof *h);
    if (h) h->peers = calloc((size_t)process.size, sizeof *h->peers);
    if (!h || !h->peers) fail(EXIT_RESOURCE, "out of memory for the heartbeat of %d ranks.", process.size);
    h->timeout = (double)timeout;
    h->interval = fmin(2, h->timeout / 20);
    h->socket = h->stop[0] = h->stop[1] = h->address = -1;
    h->parent = getppid();
    h->daemon = open_daemon(h->parent);
    gethostname(h->host, HOST - 1);
    bool started = open_sockets(h);
    if (process.rank == 0) prepare_center(h, started);
    process_broadcast(&h->center, sizeof h->center);
    for (int r = 0; r < process.size; r++) h->peers[r].heard = now();
    memcpy(h->peers[0].host, h->center.host, HOST);
    started = started && start_thread(h);
    if (started) wait_until_met(h);
    int64_t apart = process_max_int(started && (process.rank == 0 || h->met) ? -1 : process.rank);
    if (apart < 0) return h;
    warn("rank %d %s, so a machine that goes down will not be noticed.\n"
         "  Allow UDP between the machines (rank 0 is on %s), or silence this warning with --rank-timeout 0.",
         (int)apart, apart == 0 ? "cannot start its heartbeat thread" : "cannot reach rank 0 by UDP", h->center.host);
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
