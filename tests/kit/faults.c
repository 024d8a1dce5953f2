/* What a disk may do to a program, at the n-th call: loaded in front of libc (LD_PRELOAD), see faults.py.

   FAULT_CALL: write, read, fsync, rename or remove   FAULT_UNDER: only of files whose path begins with this
   FAULT_KIND: short, kill, or an error number   FAULT_AT, FAULT_TIMES: from which call on, and how many
   FAULT_COUNT: a file of 8 bytes: how many calls there were so far, in all processes together */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

static long *count;
static const char *call, *kind, *under;
static long at, times;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULT_COUNT");
    int file = path ? open(path, O_RDWR) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return;
    call = getenv("FAULT_CALL"), kind = getenv("FAULT_KIND"), under = getenv("FAULT_UNDER");
    at = atol(getenv("FAULT_AT")), times = atol(getenv("FAULT_TIMES"));
    count = found;
}

static int is_meant(const char *name, const char *path) {
    if (!count || strcmp(call, name) || strncmp(path, under, strlen(under))) return 0;
    long number = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
    if (number < at || number >= at + times) return 0;
    if (!strcmp(kind, "kill")) kill(0, SIGKILL);
    return 1;
}

static int is_meant_file(const char *name, int file) {
    char link[64], path[4096];
    if (!count || strcmp(call, name)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_meant(name, path);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define IS_SHORT (!strcmp(kind, "short"))
#define FAIL return errno = atoi(kind), -1
#define TRANSFER(name, word, parameters, whole, half)                                                                  \
    ssize_t name parameters {                                                                                          \
        REAL(name);                                                                                                    \
        if (!is_meant_file(word, file)) return real whole;                                                             \
        if (!IS_SHORT) FAIL;                                                                                           \
        return real half;                                                                                              \
    }

TRANSFER(write, "write", (int file, const void *data, size_t size), (file, data, size), (file, data, (size + 1) / 2))
TRANSFER(pwrite, "write", (int file, const void *data, size_t size, off_t place), (file, data, size, place),
         (file, data, (size + 1) / 2, place))
TRANSFER(pwrite64, "write", (int file, const void *data, size_t size, off_t place), (file, data, size, place),
         (file, data, (size + 1) / 2, place))
TRANSFER(read, "read", (int file, void *data, size_t size), (file, data, size), (file, data, (size + 1) / 2))
TRANSFER(pread, "read", (int file, void *data, size_t size, off_t place), (file, data, size, place),
         (file, data, (size + 1) / 2, place))
TRANSFER(pread64, "read", (int file, void *data, size_t size, off_t place), (file, data, size, place),
         (file, data, (size + 1) / 2, place))

#define SYNC(name)                                                                                                     \
    int name(int file) {                                                                                               \
        REAL(name);                                                                                                    \
        if (is_meant_file("fsync", file) && !IS_SHORT) FAIL;                                                           \
        return real(file);                                                                                             \
    }
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *from, const char *to) {
    REAL(rename);
    char path[4096];
    if (call && !strcmp(call, "rename")) {
        char *inside = *to == '/' || !getcwd(path, sizeof path - strlen(to) - 2) ? strcpy(path, "") : strcat(path, "/");
        if (is_meant("rename", strcat(inside, to))) FAIL;
    }
    return real(from, to);
}

static int is_meant_entry(int folder, const char *name) {
    char link[64], path[8192];
    if (!call || strcmp(call, "remove")) return 0;
    if (*name == '/') return is_meant("remove", name);
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    ssize_t size = readlink(link, path, 4096);
    if (size < 0) return 0;
    snprintf(path + size, sizeof path - size, "/%s", name);
    return is_meant("remove", path);
}

int unlink(const char *path) {
    REAL(unlink);
    if (is_meant_entry(AT_FDCWD, path)) FAIL;
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    if (is_meant_entry(folder, path)) FAIL;
    return real(folder, path, flags);
}

int rmdir(const char *path) {
    REAL(rmdir);
    if (is_meant_entry(AT_FDCWD, path)) FAIL;
    return real(path);
}
