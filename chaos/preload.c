/* What an ordinary user can do to a node's disk and clock, switched while it runs. Built and preloaded by chaos:
 *   cc -shared -fPIC -O2 -o preload.so preload.c -ldl -lpthread
 * CHAOS_CONTROL names a file that holds `struct control`. The first three fields say what to do. The others are
 * counted here: completed syncs of journal segments, and for each file of the journal how far it is synced. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FILES 16
#define ALL UINT64_MAX

struct control {
    int32_t sync_delay_ms, sync_errno;
    int64_t clock_offset_ms;
    uint64_t syncs;
    /* Bytes from `synced` on may not be on the disk; ALL: every byte is. */
    struct { uint64_t inode, synced; } files[FILES];
};
static volatile struct control *control;

__attribute__((constructor)) static void attach(void)
{
    const char *path = getenv("CHAOS_CONTROL");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *page = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED)
        control = page;
}

#define REAL(type, name, ...)                                                   \
    static type (*real)(__VA_ARGS__);                                           \
    if (!real)                                                                  \
        real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* --- how far each file of the journal is synced */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Of each file: where the first write began that no sync has covered yet. */
static uint64_t dirty[FILES];
static int next_slot;
/* Of each descriptor: what it is, until it is closed. */
enum { UNKNOWN, OTHER, JOURNAL };
static unsigned char kinds[65536];

/* The path of a file of the journal; 0 for other files. */
static int journal_path(int fd, char *path, size_t size)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    path[length < 0 ? 0 : length] = 0;
    char *group = strstr(path, "/raft/g");
    return group && strchr(group + strlen("/raft/g"), '/');
}

static int in_journal(int fd)
{
    char path[4096];
    if (!control || fd < 0 || fd >= (int)sizeof kinds)
        return 0;
    if (kinds[fd] == UNKNOWN)
        kinds[fd] = journal_path(fd, path, sizeof path) ? JOURNAL : OTHER;
    return kinds[fd] == JOURNAL;
}

/* With the lock held. */
static int slot_of(int fd)
{
    struct stat file;
    if (fstat(fd, &file))
        return -1;
    for (int i = 0; i < FILES; i++)
        if (control->files[i].inode == file.st_ino)
            return i;
    int slot = next_slot++ % FILES;
    control->files[slot].synced = 0;
    control->files[slot].inode = file.st_ino;
    dirty[slot] = 0;
    return slot;
}

/* Before a write: from here on nothing is known to be on the disk. */
static void writes(int fd, off_t offset)
{
    if (!in_journal(fd))
        return;
    pthread_mutex_lock(&lock);
    int slot = slot_of(fd);
    if (slot >= 0) {
        uint64_t at = offset;
        if (at < dirty[slot])
            dirty[slot] = at;
        if (at < control->files[slot].synced)
            control->files[slot].synced = at;
    }
    pthread_mutex_unlock(&lock);
}

/* Around a sync: what was written before it began is on the disk when it succeeded. Returns the slot. */
static int sync_begins(int fd, uint64_t *covered)
{
    int slot = -1;
    if (in_journal(fd)) {
        pthread_mutex_lock(&lock);
        slot = slot_of(fd);
        if (slot >= 0) {
            *covered = dirty[slot];
            dirty[slot] = ALL;
        }
        pthread_mutex_unlock(&lock);
    }
    return slot;
}

static void sync_ends(int fd, int slot, uint64_t covered, int failed)
{
    char path[4096];
    if (slot < 0)
        return;
    pthread_mutex_lock(&lock);
    if (!failed)
        control->files[slot].synced = dirty[slot];
    else if (covered < dirty[slot])
        dirty[slot] = covered;
    pthread_mutex_unlock(&lock);
    /* The spare segment holds no entries. */
    if (!failed && journal_path(fd, path, sizeof path) && !strstr(path, "/spare"))
        __atomic_add_fetch(&control->syncs, 1, __ATOMIC_RELEASE);
}

int close(int fd)
{
    REAL(int, "close", int);
    if (fd >= 0 && fd < (int)sizeof kinds)
        kinds[fd] = UNKNOWN;
    return real(fd);
}

#define PWRITE(name)                                                            \
    ssize_t name(int fd, const void *data, size_t size, off_t offset)           \
    {                                                                           \
        REAL(ssize_t, #name, int, const void *, size_t, off_t);                 \
        writes(fd, offset);                                                     \
        return real(fd, data, size, offset);                                    \
    }

#define PWRITEV(name)                                                           \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset)    \
    {                                                                           \
        REAL(ssize_t, #name, int, const struct iovec *, int, off_t);            \
        writes(fd, offset);                                                     \
        return real(fd, parts, count, offset);                                  \
    }

#define PWRITEV2(name)                                                          \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) \
    {                                                                           \
        REAL(ssize_t, #name, int, const struct iovec *, int, off_t, int);       \
        writes(fd, offset);                                                     \
        return real(fd, parts, count, offset, flags);                           \
    }

PWRITE(pwrite)
PWRITE(pwrite64)
PWRITEV(pwritev)
PWRITEV(pwritev64)
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

/* --- syncs that are late, or fail */

/* The delay comes before the real call, so that what is late is also what is durable. */
#define SYNC(name)                                                              \
    int name(int fd)                                                            \
    {                                                                           \
        REAL(int, #name, int);                                                  \
        if (control && control->sync_delay_ms) {                                \
            long ms = control->sync_delay_ms;                                   \
            struct timespec pause = { ms / 1000, (ms % 1000) * 1000000L };      \
            nanosleep(&pause, NULL);                                            \
        }                                                                       \
        if (control && control->sync_errno) {                                   \
            errno = control->sync_errno;                                        \
            return -1;                                                          \
        }                                                                       \
        uint64_t covered = 0;                                                   \
        int slot = sync_begins(fd, &covered);                                   \
        int failed = real(fd);                                                  \
        int error = errno;                                                      \
        sync_ends(fd, slot, covered, failed);                                   \
        errno = error;                                                          \
        return failed;                                                          \
    }

SYNC(fdatasync)
SYNC(fsync)
SYNC(syncfs)

/* The wall clock alone: real kernels never step the monotonic one. */
int clock_gettime(clockid_t which, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(which, now);
    if (!failed && control && which == CLOCK_REALTIME)
        now->tv_sec += control->clock_offset_ms / 1000;
    return failed;
}
