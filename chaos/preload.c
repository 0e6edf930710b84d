/* What an ordinary user can do to a node's disk and clock, switched while it runs. Built and preloaded by chaos:
 *   cc -shared -fPIC -O2 -o preload.so preload.c -ldl
 * CHAOS_CONTROL names a file of 24 bytes: int32 sync_delay_ms, int32 sync_errno, int64 clock_offset_ms; and behind them,
 * counted here, uint64 syncs: how many were completed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct control { int32_t sync_delay_ms, sync_errno; int64_t clock_offset_ms; uint64_t syncs; };
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

/* The delay comes before the real call, so that what is late is also what is durable. */
#define SYNC(name)                                                              \
    int name(int fd)                                                            \
    {                                                                           \
        static int (*real)(int);                                                \
        if (!real)                                                              \
            real = (int (*)(int))dlsym(RTLD_NEXT, #name);                       \
        if (control && control->sync_delay_ms) {                                \
            long ms = control->sync_delay_ms;                                   \
            struct timespec pause = { ms / 1000, (ms % 1000) * 1000000L };      \
            nanosleep(&pause, NULL);                                            \
        }                                                                       \
        if (control && control->sync_errno) {                                   \
            errno = control->sync_errno;                                        \
            return -1;                                                          \
        }                                                                       \
        int failed = real(fd);                                                  \
        if (control && !failed)                                                 \
            __atomic_add_fetch(&control->syncs, 1, __ATOMIC_RELEASE);           \
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
