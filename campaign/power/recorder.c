/* Records in which order a process changes files below POWER_ROOT, into the file POWER_LOG.
 *
 * Preloaded (LD_PRELOAD) before libc. One lock is held over each call and its record, so that the
 * log is the order in which the file system saw the calls. campaign/power/recording.py reads it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define FDS 4096
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static unsigned char tracked[FDS];
static int log_fd = -1;
static char root[PATH_MAX];

struct head { uint32_t kind, name_bytes, data_bytes, pad; uint64_t inode, at; };
enum { CREATE = 1, WRITE, SIZE, SYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR };

static void raw(const void *data, size_t size) {
    while (size > 0) {
        ssize_t done = syscall(SYS_write, log_fd, data, size);
        if (done <= 0) _exit(99);
        data = (const char *)data + done;
        size -= done;
    }
}

static void start(void) {
    static int asked;
    if (asked) return;
    asked = 1;
    const char *below = getenv("POWER_ROOT"), *log = getenv("POWER_LOG");
    if (!below || !log || !realpath(below, root)) return;
    log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int ours(const char *path) {
    size_t size = strlen(root);
    return log_fd >= 0 && !strncmp(path, root, size) && (path[size] == '/' || !path[size]);
}

static void note(int kind, uint64_t inode, uint64_t at, const char *name, const void *data,
                 size_t size) {
    struct head head = {kind, name ? strlen(name) : 0, size, 0, inode, at};
    raw(&head, sizeof head);
    if (name) raw(name, head.name_bytes);
    if (size) raw(data, size);
}

static uint64_t inode_of(int fd) {
    struct stat64 found;
    return fstat64(fd, &found) ? 0 : found.st_ino;
}

static int is_tracked(int fd) { return fd >= 0 && fd < FDS && tracked[fd]; }

/* A path below a folder's descriptor, whole. */
static const char *whole(int folder, const char *path, char *into) {
    if (path[0] == '/' || folder == AT_FDCWD) return path;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t size = readlink(link, into, PATH_MAX - 1);
    if (size < 0) return path;
    snprintf(into + size, PATH_MAX - size, "/%s", path);
    return into;
}

static int opened(int folder, const char *path, int flags, int mode) {
    char into[PATH_MAX];
    start();
    const char *name = whole(folder, path, into);
    if (!ours(name)) return syscall(SYS_openat, folder, path, flags, mode);
    pthread_mutex_lock(&turn);
    int there = !syscall(SYS_faccessat, AT_FDCWD, name, F_OK);
    int fd = syscall(SYS_openat, folder, path, flags, mode), kept = errno;
    if (fd >= 0 && fd < FDS) {
        tracked[fd] = 1;
        if ((flags & O_CREAT) && !there) note(CREATE, inode_of(fd), 0, name, 0, 0);
        else if (flags & O_TRUNC) note(SIZE, inode_of(fd), 0, 0, 0, 0);
    }
    pthread_mutex_unlock(&turn);
    errno = kept;
    return fd;
}

#define OPEN(name)                                                              \
    int name(const char *path, int flags, ...) {                                \
        va_list rest; va_start(rest, flags);                                    \
        int mode = (flags & (O_CREAT | __O_TMPFILE)) ? va_arg(rest, int) : 0;   \
        va_end(rest);                                                           \
        return opened(AT_FDCWD, path, flags, mode);                             \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                            \
    int name(int folder, const char *path, int flags, ...) {                    \
        va_list rest; va_start(rest, flags);                                    \
        int mode = (flags & (O_CREAT | __O_TMPFILE)) ? va_arg(rest, int) : 0;   \
        va_end(rest);                                                           \
        return opened(folder, path, flags, mode);                               \
    }
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
    if (fd >= 0 && fd < FDS) tracked[fd] = 0;
    return syscall(SYS_close, fd);
}

static void written(int fd, uint64_t at, const struct iovec *parts, int count, ssize_t done) {
    if (done <= 0) return;
    char *joined = malloc(done), *to = joined;
    ssize_t left = done;
    for (int i = 0; i < count && left > 0; i++) {
        size_t size = parts[i].iov_len < (size_t)left ? parts[i].iov_len : (size_t)left;
        memcpy(to, parts[i].iov_base, size);
        to += size;
        left -= size;
    }
    note(WRITE, inode_of(fd), at, 0, joined, done);
    free(joined);
}

static ssize_t put(int fd, const struct iovec *parts, int count, off64_t at) {
    if (!is_tracked(fd))
        return at < 0 ? syscall(SYS_writev, fd, parts, count)
                      : syscall(SYS_pwritev, fd, parts, count, at, 0);
    pthread_mutex_lock(&turn);
    ssize_t done;
    if (at < 0) {
        done = syscall(SYS_writev, fd, parts, count);
        at = syscall(SYS_lseek, fd, 0, SEEK_CUR) - (done > 0 ? done : 0);
    } else {
        done = syscall(SYS_pwritev, fd, parts, count, at, 0);
    }
    int kept = errno;
    written(fd, at, parts, count, done);
    pthread_mutex_unlock(&turn);
    errno = kept;
    return done;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return put(fd, parts, count, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { return put(fd, parts, count, at); }
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) { return put(fd, parts, count, at); }
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) { return put(fd, parts, count, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return put(fd, parts, count, -1); }
ssize_t write(int fd, const void *data, size_t size) {
    struct iovec one = {(void *)data, size};
    return put(fd, &one, 1, -1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    struct iovec one = {(void *)data, size};
    return put(fd, &one, 1, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return pwrite(fd, data, size, at); }

static int resized(int fd, off64_t size, int only_more, long done) {
    if (done == 0 && is_tracked(fd)) {
        struct stat64 found;
        if (!only_more || (!fstat64(fd, &found) && found.st_size >= size)) note(SIZE, inode_of(fd), size, 0, 0, 0);
    }
    return done;
}

int ftruncate64(int fd, off64_t size) {
    pthread_mutex_lock(&turn);
    int done = resized(fd, size, 0, syscall(SYS_ftruncate, fd, size));
    int kept = errno;
    pthread_mutex_unlock(&turn);
    errno = kept;
    return done;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int posix_fallocate64(int fd, off64_t at, off64_t size) {
    pthread_mutex_lock(&turn);
    long done = syscall(SYS_fallocate, fd, 0, at, size);
    int error = done ? errno : 0;
    resized(fd, at + size, 1, done);
    pthread_mutex_unlock(&turn);
    return error;
}
int posix_fallocate(int fd, off_t at, off_t size) { return posix_fallocate64(fd, at, size); }

static int synced(int fd, long number) {
    pthread_mutex_lock(&turn);
    int done = syscall(number, fd), kept = errno;
    if (done == 0 && is_tracked(fd)) note(SYNC, inode_of(fd), 0, 0, 0, 0);
    pthread_mutex_unlock(&turn);
    errno = kept;
    return done;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static int named(int kind, const char *one, const char *two, long done) {
    int kept = errno;
    if (done == 0 && (ours(one) || (two && ours(two)))) {
        struct stat64 found;
        uint64_t inode = stat64(two ? two : one, &found) ? 0 : found.st_ino;
        note(kind, inode, 0, one, two, two ? strlen(two) : 0);
    }
    pthread_mutex_unlock(&turn);
    errno = kept;
    return done;
}

int renameat(int from, const char *one, int to, const char *two) {
    char first[PATH_MAX], second[PATH_MAX];
    start();
    pthread_mutex_lock(&turn);
    long done = syscall(SYS_renameat2, from, one, to, two, 0);
    return named(RENAME, whole(from, one, first), whole(to, two, second), done);
}
int rename(const char *one, const char *two) { return renameat(AT_FDCWD, one, AT_FDCWD, two); }
int linkat(int from, const char *one, int to, const char *two, int flags) {
    char first[PATH_MAX], second[PATH_MAX];
    start();
    pthread_mutex_lock(&turn);
    long done = syscall(SYS_linkat, from, one, to, two, flags);
    return named(LINK, whole(from, one, first), whole(to, two, second), done);
}
int link(const char *one, const char *two) { return linkat(AT_FDCWD, one, AT_FDCWD, two, 0); }
int unlinkat(int folder, const char *path, int flags) {
    char into[PATH_MAX];
    start();
    pthread_mutex_lock(&turn);
    long done = syscall(SYS_unlinkat, folder, path, flags);
    return named(flags & AT_REMOVEDIR ? RMDIR : UNLINK, whole(folder, path, into), 0, done);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int mkdirat(int folder, const char *path, mode_t mode) {
    char into[PATH_MAX];
    start();
    pthread_mutex_lock(&turn);
    long done = syscall(SYS_mkdirat, folder, path, mode);
    return named(MKDIR, whole(folder, path, into), 0, done);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
