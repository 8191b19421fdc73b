/* A layer under a process's files, to be preloaded: it counts writes, renames and syncs below one folder, and
 * lets one of them fail, or signals the process there. Built and armed by faults.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, KILL, FULL, SHORT, RENAME, SYNC, INTERRUPT, TERMINATE }; /* what happens */
enum { WRITES, RENAMES, SYNCS, CALLS };                               /* to which calls */

static char under[PATH_MAX];
static atomic_int fault;
static atomic_long place, seen[CALLS], struck;

/* Arms the layer: the number-th call of the fault's kind fails (of a signal: of any kind); 0 only counts. */
void fault_arm(const char *folder, int what, long number) {
    snprintf(under, sizeof under, "%s", folder);
    place = number;
    struck = 0;
    for (int i = 0; i < CALLS; i++) seen[i] = 0;
    fault = what;
}

long fault_seen(int call) { return seen[call]; }

static int is_below(const char *path) {
    size_t length = strlen(under);
    return length && path && !strncmp(path, under, length);
}

static int is_ours(int fd) {
    char link[64], path[PATH_MAX];
    if (!under[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return is_below(path);
}

/* Counts a call; returns whether it has to fail. A full disk stays full. */
static int strikes(int call) {
    long own = ++seen[call], all = seen[WRITES] + seen[RENAMES] + seen[SYNCS];
    if (fault == KILL && all == place) raise(SIGKILL);
    if (fault == INTERRUPT && all == place) kill(getpid(), SIGINT); /* to the process, as a terminal does */
    if (fault == TERMINATE && all == place) kill(getpid(), SIGTERM);
    if (fault == FULL && call == WRITES) return struck || (own == place && (struck = 1));
    if (fault == SHORT && call == WRITES) return own == place;
    if (fault == RENAME && call == RENAMES) return own == place;
    if (fault == SYNC && call == SYNCS) return own == place;
    return 0;
}

#define REAL(name, ...) \
    static __VA_ARGS__; \
    if (!real) real = dlsym(RTLD_NEXT, name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL("write", ssize_t (*real)(int, const void *, size_t));
    if (!is_ours(fd) || !strikes(WRITES)) return real(fd, data, size);
    if (fault == SHORT) return real(fd, data, size > 1 ? size / 2 : size);
    errno = ENOSPC;
    return -1;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) {
    REAL("pwrite64", ssize_t (*real)(int, const void *, size_t, off_t));
    if (!is_ours(fd) || !strikes(WRITES)) return real(fd, data, size, at);
    if (fault == SHORT) return real(fd, data, size > 1 ? size / 2 : size, at);
    errno = ENOSPC;
    return -1;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL("writev", ssize_t (*real)(int, const struct iovec *, int));
    if (!is_ours(fd) || !strikes(WRITES)) return real(fd, parts, count);
    if (fault == SHORT) return real(fd, parts, 1);
    errno = ENOSPC;
    return -1;
}

ssize_t sendfile64(int out, int in, off_t *at, size_t size) {
    REAL("sendfile64", ssize_t (*real)(int, int, off_t *, size_t));
    if (!is_ours(out) || !strikes(WRITES)) return real(out, in, at, size);
    if (fault == SHORT) return real(out, in, at, size > 1 ? size / 2 : size);
    errno = ENOSPC;
    return -1;
}

int fsync(int fd) {
    REAL("fsync", int (*real)(int));
    if (!is_ours(fd) || !strikes(SYNCS)) return real(fd);
    errno = EIO;
    return -1;
}

int fdatasync(int fd) {
    REAL("fdatasync", int (*real)(int));
    if (!is_ours(fd) || !strikes(SYNCS)) return real(fd);
    errno = EIO;
    return -1;
}

int rename(const char *old, const char *name) {
    REAL("rename", int (*real)(const char *, const char *));
    if (!is_below(name) || !strikes(RENAMES)) return real(old, name);
    errno = EIO;
    return -1;
}

int renameat(int from, const char *old, int to, const char *name) {
    REAL("renameat", int (*real)(int, const char *, int, const char *));
    if (!is_below(name) || !strikes(RENAMES)) return real(from, old, to, name);
    errno = EIO;
    return -1;
}
