/* Lets one system call of a program fail: preloaded, it stands before libc's functions and counts their calls.
 *
 * The counters and the order to strike lie in memory shared over fork, so that a parent can read what a child did.
 * `k3_shim` gives that memory; nothing fails and nothing is counted until `k3_arm`.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    OPEN,
    READ,
    PREAD,
    WRITE,
    PWRITE,
    FSYNC,
    FDATASYNC,
    RENAME,
    LINK,
    UNLINK,
    MKDIR,
    STAT,
    FSTAT,
    STATVFS,
    MMAP,
    MUNMAP,
    MSYNC,
    FTRUNCATE,
    FALLOCATE,
    FADVISE,
    CLOSE,
    FLOCK,
    FCNTL,
    OPENDIR,
    READDIR,
    MEMFD,
    SOCKET,
    BIND,
    LISTEN,
    ACCEPT,
    CONNECT,
    SENDMSG,
    RECVMSG,
    EVENTFD,
    POLL,
    EPOLL,
    THREAD,
    MADVISE,
    AFFINITY,
    SYSCALL,
    CHMOD,
    LSEEK,
    READLINK,
    RMDIR,
    PIPE,
    SOCKOPT,
    FUNCTIONS
};

struct shim {
    int function, number, struck;
    long nth;
    long counts[64];
};

static struct shim* shared;

__attribute__((constructor)) static void begin(void) {
    static void* (*real)(void*, size_t, int, int, int, off_t);
    real = dlsym(RTLD_NEXT, "mmap");
    shared = real(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

static int armed; /* this process's own: one that dies with it set leaves the others alone */

struct shim* k3_shim(void) { return shared; }
void k3_arm(int wanted) { armed = wanted; }

static int strikes(int function) {
    if (!shared || shared == MAP_FAILED || !armed) return 0;
    long n = __atomic_add_fetch(&shared->counts[function], 1, __ATOMIC_RELAXED);
    if (function != shared->function || n != shared->nth) return 0;
    shared->struck = 1;
    errno = shared->number;
    return 1;
}

#define FAILS(function, failure) \
    if (strikes(function)) return failure
#define RETURNS_NUMBER(function) \
    if (strikes(function)) return shared->number

#define REAL(name, type, ...)         \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define WRAP(function, name, type, failure, parameters, arguments, ...) \
    type name parameters {                                              \
        REAL(#name, type, __VA_ARGS__);                                 \
        FAILS(function, failure);                                       \
        return real arguments;                                          \
    }

#define WRAP_OPEN(name)                             \
    int name(const char* path, int flags, ...) {    \
        va_list rest;                               \
        va_start(rest, flags);                      \
        mode_t mode = va_arg(rest, mode_t);         \
        va_end(rest);                               \
        REAL(#name, int, const char*, int, mode_t); \
        FAILS(OPEN, -1);                            \
        return real(path, flags, mode);             \
    }
#define WRAP_OPENAT(name)                                \
    int name(int at, const char* path, int flags, ...) { \
        va_list rest;                                    \
        va_start(rest, flags);                           \
        mode_t mode = va_arg(rest, mode_t);              \
        va_end(rest);                                    \
        REAL(#name, int, int, const char*, int, mode_t); \
        FAILS(OPEN, -1);                                 \
        return real(at, path, flags, mode);              \
    }
WRAP_OPEN(open)
WRAP_OPEN(open64)
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)
WRAP(OPEN, fopen, FILE*, NULL, (const char* p, const char* m), (p, m), const char*, const char*)
WRAP(OPEN, fopen64, FILE*, NULL, (const char* p, const char* m), (p, m), const char*, const char*)

WRAP(READ, read, ssize_t, -1, (int fd, void* b, size_t n), (fd, b, n), int, void*, size_t)
WRAP(PREAD, pread, ssize_t, -1, (int fd, void* b, size_t n, off_t o), (fd, b, n, o), int, void*, size_t, off_t)
WRAP(PREAD, pread64, ssize_t, -1, (int fd, void* b, size_t n, off64_t o), (fd, b, n, o), int, void*, size_t,
     off64_t)
#define VECTOR(function, name, offset)                                                                      \
    WRAP(function, name, ssize_t, -1, (int fd, const struct iovec* v, int n, offset o), (fd, v, n, o), int, \
         const struct iovec*, int, offset)
VECTOR(PREAD, preadv, off_t)
VECTOR(PREAD, preadv64, off64_t)
VECTOR(PWRITE, pwritev, off_t)
VECTOR(PWRITE, pwritev64, off64_t)
WRAP(PREAD, preadv2, ssize_t, -1, (int fd, const struct iovec* v, int n, off_t o, int f), (fd, v, n, o, f), int,
     const struct iovec*, int, off_t, int)
WRAP(PREAD, preadv64v2, ssize_t, -1, (int fd, const struct iovec* v, int n, off64_t o, int f), (fd, v, n, o, f),
     int, const struct iovec*, int, off64_t, int)
WRAP(WRITE, write, ssize_t, -1, (int fd, const void* b, size_t n), (fd, b, n), int, const void*, size_t)
WRAP(WRITE, writev, ssize_t, -1, (int fd, const struct iovec* v, int n), (fd, v, n), int, const struct iovec*, int)
WRAP(PWRITE, pwrite, ssize_t, -1, (int fd, const void* b, size_t n, off_t o), (fd, b, n, o), int, const void*,
     size_t, off_t)
WRAP(PWRITE, pwrite64, ssize_t, -1, (int fd, const void* b, size_t n, off64_t o), (fd, b, n, o), int, const void*,
     size_t, off64_t)
WRAP(FSYNC, fsync, int, -1, (int fd), (fd), int)
WRAP(FDATASYNC, fdatasync, int, -1, (int fd), (fd), int)
WRAP(RENAME, rename, int, -1, (const char* a, const char* b), (a, b), const char*, const char*)
WRAP(RENAME, renameat, int, -1, (int f, const char* a, int g, const char* b), (f, a, g, b), int, const char*, int,
     const char*)
WRAP(LINK, link, int, -1, (const char* a, const char* b), (a, b), const char*, const char*)
WRAP(LINK, symlink, int, -1, (const char* a, const char* b), (a, b), const char*, const char*)
WRAP(LINK, linkat, int, -1, (int f, const char* a, int g, const char* b, int h), (f, a, g, b, h), int, const char*,
     int, const char*, int)
WRAP(UNLINK, unlink, int, -1, (const char* p), (p), const char*)
WRAP(UNLINK, unlinkat, int, -1, (int f, const char* p, int g), (f, p, g), int, const char*, int)
WRAP(RMDIR, rmdir, int, -1, (const char* p), (p), const char*)
WRAP(MKDIR, mkdir, int, -1, (const char* p, mode_t m), (p, m), const char*, mode_t)
#define LOOK(name, kind) \
    WRAP(STAT, name, int, -1, (const char* p, struct kind* s), (p, s), const char*, struct kind*)
LOOK(stat, stat)
LOOK(stat64, stat64)
LOOK(lstat, stat)
LOOK(lstat64, stat64)
WRAP(STAT, fstatat, int, -1, (int f, const char* p, struct stat* s, int g), (f, p, s, g), int, const char*,
     struct stat*, int)
WRAP(STAT, fstatat64, int, -1, (int f, const char* p, struct stat64* s, int g), (f, p, s, g), int, const char*,
     struct stat64*, int)
WRAP(FSTAT, fstat, int, -1, (int f, struct stat* s), (f, s), int, struct stat*)
WRAP(FSTAT, fstat64, int, -1, (int f, struct stat64* s), (f, s), int, struct stat64*)
WRAP(STATVFS, statvfs, int, -1, (const char* p, struct statvfs* s), (p, s), const char*, struct statvfs*)
WRAP(STATVFS, statvfs64, int, -1, (const char* p, struct statvfs64* s), (p, s), const char*, struct statvfs64*)

/* Python takes its own memory in anonymous mappings of 1 MiB and less: those are malloc's business. */
#define WRAP_MMAP(name, offset)                                                        \
    void* name(void* at, size_t n, int protection, int flags, int fd, offset o) {      \
        REAL(#name, void*, void*, size_t, int, int, int, offset);                      \
        if (fd >= 0 || (flags & MAP_SHARED) || n > (1 << 20)) FAILS(MMAP, MAP_FAILED); \
        return real(at, n, protection, flags, fd, o);                                  \
    }
WRAP_MMAP(mmap, off_t)
WRAP_MMAP(mmap64, off64_t)
int munmap(void* at, size_t n) {
    REAL("munmap", int, void*, size_t);
    if (n > (1 << 20)) FAILS(MUNMAP, -1);
    return real(at, n);
}
WRAP(MSYNC, msync, int, -1, (void* a, size_t n, int f), (a, n, f), void*, size_t, int)
WRAP(MADVISE, madvise, int, -1, (void* a, size_t n, int f), (a, n, f), void*, size_t, int)
WRAP(FTRUNCATE, ftruncate, int, -1, (int f, off_t n), (f, n), int, off_t)
WRAP(FTRUNCATE, ftruncate64, int, -1, (int f, off64_t n), (f, n), int, off64_t)
WRAP(FALLOCATE, fallocate, int, -1, (int f, int m, off_t o, off_t n), (f, m, o, n), int, int, off_t, off_t)
WRAP(FALLOCATE, fallocate64, int, -1, (int f, int m, off64_t o, off64_t n), (f, m, o, n), int, int, off64_t,
     off64_t)
#define NUMBERED(function, name, offset)       \
    int name(int fd, offset o, offset n) {     \
        REAL(#name, int, int, offset, offset); \
        RETURNS_NUMBER(function);              \
        return real(fd, o, n);                 \
    }
NUMBERED(FALLOCATE, posix_fallocate, off_t)
NUMBERED(FALLOCATE, posix_fallocate64, off64_t)
#define ADVISED(name, offset)                          \
    int name(int fd, offset o, offset n, int advice) { \
        REAL(#name, int, int, offset, offset, int);    \
        RETURNS_NUMBER(FADVISE);                       \
        return real(fd, o, n, advice);                 \
    }
ADVISED(posix_fadvise, off_t)
ADVISED(posix_fadvise64, off64_t)

int close(int fd) { /* the descriptor is gone, whatever close says */
    REAL("close", int, int);
    int result = real(fd);
    FAILS(CLOSE, -1);
    return result;
}
WRAP(FLOCK, flock, int, -1, (int f, int o), (f, o), int, int)
#define WRAP_FCNTL(name)                   \
    int name(int fd, int command, ...) {   \
        va_list rest;                      \
        va_start(rest, command);           \
        void* value = va_arg(rest, void*); \
        va_end(rest);                      \
        REAL(#name, int, int, int, void*); \
        FAILS(FCNTL, -1);                  \
        return real(fd, command, value);   \
    }
WRAP_FCNTL(fcntl)
WRAP_FCNTL(fcntl64)
WRAP(OPENDIR, opendir, DIR*, NULL, (const char* p), (p), const char*)
WRAP(OPENDIR, fdopendir, DIR*, NULL, (int f), (f), int)
WRAP(READDIR, readdir, struct dirent*, NULL, (DIR * d), (d), DIR*)
WRAP(READDIR, readdir64, struct dirent64*, NULL, (DIR * d), (d), DIR*)
WRAP(READLINK, readlink, ssize_t, -1, (const char* p, char* b, size_t n), (p, b, n), const char*, char*, size_t)
WRAP(LSEEK, lseek, off_t, -1, (int f, off_t o, int w), (f, o, w), int, off_t, int)
WRAP(LSEEK, lseek64, off64_t, -1, (int f, off64_t o, int w), (f, o, w), int, off64_t, int)
WRAP(CHMOD, chmod, int, -1, (const char* p, mode_t m), (p, m), const char*, mode_t)
WRAP(CHMOD, fchmod, int, -1, (int p, mode_t m), (p, m), int, mode_t)
WRAP(MEMFD, memfd_create, int, -1, (const char* n, unsigned f), (n, f), const char*, unsigned)
WRAP(PIPE, pipe2, int, -1, (int f[2], int g), (f, g), int*, int)
WRAP(SOCKET, socket, int, -1, (int a, int b, int c), (a, b, c), int, int, int)
WRAP(SOCKET, socketpair, int, -1, (int a, int b, int c, int f[2]), (a, b, c, f), int, int, int, int*)
WRAP(BIND, bind, int, -1, (int f, const struct sockaddr* a, socklen_t n), (f, a, n), int, const struct sockaddr*,
     socklen_t)
WRAP(CONNECT, connect, int, -1, (int f, const struct sockaddr* a, socklen_t n), (f, a, n), int,
     const struct sockaddr*, socklen_t)
WRAP(LISTEN, listen, int, -1, (int f, int n), (f, n), int, int)
WRAP(ACCEPT, accept4, int, -1, (int f, struct sockaddr* a, socklen_t* n, int g), (f, a, n, g), int,
     struct sockaddr*, socklen_t*, int)
WRAP(SENDMSG, sendmsg, ssize_t, -1, (int f, const struct msghdr* m, int g), (f, m, g), int, const struct msghdr*,
     int)
WRAP(SENDMSG, send, ssize_t, -1, (int f, const void* m, size_t n, int g), (f, m, n, g), int, const void*, size_t,
     int)
WRAP(RECVMSG, recvmsg, ssize_t, -1, (int f, struct msghdr* m, int g), (f, m, g), int, struct msghdr*, int)
WRAP(RECVMSG, recv, ssize_t, -1, (int f, void* m, size_t n, int g), (f, m, n, g), int, void*, size_t, int)
WRAP(SOCKOPT, setsockopt, int, -1, (int f, int a, int b, const void* v, socklen_t n), (f, a, b, v, n), int, int,
     int, const void*, socklen_t)
WRAP(SOCKOPT, getsockopt, int, -1, (int f, int a, int b, void* v, socklen_t* n), (f, a, b, v, n), int, int, int,
     void*, socklen_t*)
WRAP(EVENTFD, eventfd, int, -1, (unsigned a, int b), (a, b), unsigned, int)
WRAP(POLL, poll, int, -1, (struct pollfd * p, nfds_t n, int t), (p, n, t), struct pollfd*, nfds_t, int)
WRAP(POLL, ppoll, int, -1, (struct pollfd * p, nfds_t n, const struct timespec* t, const sigset_t* s),
     (p, n, t, s), struct pollfd*, nfds_t, const struct timespec*, const sigset_t*)
WRAP(EPOLL, epoll_create1, int, -1, (int f), (f), int)
WRAP(EPOLL, epoll_ctl, int, -1, (int f, int o, int g, struct epoll_event* e), (f, o, g, e), int, int, int,
     struct epoll_event*)
WRAP(EPOLL, epoll_wait, int, -1, (int f, struct epoll_event* e, int n, int t), (f, e, n, t), int,
     struct epoll_event*, int, int)
WRAP(AFFINITY, sched_getaffinity, int, -1, (pid_t p, size_t n, cpu_set_t* s), (p, n, s), pid_t, size_t, cpu_set_t*)
WRAP(AFFINITY, getrlimit, int, -1, (__rlimit_resource_t r, struct rlimit* l), (r, l), __rlimit_resource_t,
     struct rlimit*)
int pthread_create(pthread_t* t, const pthread_attr_t* a, void* (*f)(void*), void* x) {
    REAL("pthread_create", int, pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    RETURNS_NUMBER(THREAD);
    return real(t, a, f, x);
}
long syscall(long number, ...) {
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
    long d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    REAL("syscall", long, long, long, long, long, long, long, long);
    FAILS(SYSCALL, -1);
    return real(number, a, b, c, d, e, f);
}
