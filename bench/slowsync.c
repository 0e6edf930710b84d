/* Every sync takes SLOWSYNC_MS longer, as on a network disk. Built and preloaded by the harness:
 *   cc -shared -fPIC -O2 -o slowsync.so slowsync.c -ldl
 * The delay comes before the real call, so that what is late is also what is durable. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

static void wait_first(void)
{
    const char *text = getenv("SLOWSYNC_MS");
    long ms = text ? atol(text) : 5;
    struct timespec pause = { ms / 1000, (ms % 1000) * 1000000L };
    nanosleep(&pause, NULL);
}

#define SLOW(name)                                             \
    int name(int fd)                                           \
    {                                                          \
        static int (*real)(int);                               \
        if (!real)                                             \
            real = (int (*)(int))dlsym(RTLD_NEXT, #name);      \
        wait_first();                                          \
        return real(fd);                                       \
    }

SLOW(fdatasync)
SLOW(fsync)
SLOW(syncfs)
