/* A client of k3-store in C11: one header, nothing to link. The protocol is docs/store_protocol.md.
 *
 *   struct k3_store store;
 *   if (k3_store_open(&store, "/run/k3-store/k3-store.sock", "my-engine") != 0) ... store.problem says why
 *   k3_store_lease(&store, tag, layer, experts, count);           any number of times, up to store.quota leases at
 * once while (k3_store_wait(&store, &done, -1) == 1) {               one completion after the other, in any order
 *       if (done.status == K3_STORE_OK) { use(k3_store_payload(&store, &done), done.payload_bytes);
 *                                         k3_store_release(&store, &done); } }
 *   k3_store_close(&store);
 *
 * A struct belongs to one thread at a time. Payloads may be read from any thread until they are released. When the
 * daemon goes, k3_store_wait returns -1 with `problem` set; leases are void then, open anew. Signals end no call:
 * each goes on after the handler, for what is left of its time. A struct belongs to the process that opened it: in
 * a forked child every call fails with EPERM, but for k3_store_close, which there lets go of the child's
 * descriptors and leaves the parent's leases alone. Linux only.
 */
#ifndef K3_STORE_H
#define K3_STORE_H

#ifndef _GNU_SOURCE
#error "compile with -D_GNU_SOURCE"
#endif

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define K3_STORE_VERSION 1
#define K3_STORE_MESSAGE_BYTES 65536

enum {
    K3_STORE_LEASE = 1,
    K3_STORE_RELEASE = 2,
    K3_STORE_PREFETCH = 3,
    K3_STORE_CANCEL = 4,
    K3_STORE_PIN = 5,
    K3_STORE_UNPIN = 6
};

enum {
    K3_STORE_OK = 0,
    K3_STORE_NO_SUCH_EXPERT = 1,
    K3_STORE_QUOTA = 2,
    K3_STORE_BUSY = 3,
    K3_STORE_DAMAGED = 4,
    K3_STORE_IO_ERROR = 5,
    K3_STORE_BAD_REQUEST = 6,
    K3_STORE_CLOSING = 7,
    K3_STORE_CANCELLED = 8
};

struct k3_store_request {
    uint64_t tag;
    uint8_t op, zero[3];
    uint32_t layer, expert, generation;
    uint64_t zero_too;
};

struct k3_store_completion {
    uint64_t tag;
    uint8_t op, status, source, zero;
    uint32_t layer, expert, slot, generation, file;
    uint64_t offset, payload_bytes, file_offset;
    uint32_t error, zero_too;
};

_Static_assert(sizeof(struct k3_store_request) == 32, "requests have 32 bytes");
_Static_assert(sizeof(struct k3_store_completion) == 64, "completions have 64 bytes");
_Static_assert(sizeof(_Atomic uint32_t) == 4, "indices have 4 bytes");

struct k3_store {
    int socket, request_doorbell, completion_doorbell;
    uint8_t* ring;
    const uint8_t *arena, *dense, *model; /* model: the JSON of docs/store_protocol.md section 5 */
    uint64_t ring_bytes, arena_bytes, dense_bytes, model_bytes;
    uint32_t entries, quota, request_tail, completion_head;
    pid_t process;     /* that opened it */
    char problem[256]; /* the last error, for people */
};

static inline int k3_store_fail(struct k3_store* store, const char* what) {
    snprintf(store->problem, sizeof store->problem, "%s%s%s", what, errno ? ": " : "",
             errno ? strerror(errno) : "");
    return -1;
}

/* 0 in the process that opened the store. A child has no mapping of the ring, and its parent's leases are not its
 * own. */
static inline int k3_store_check_process(struct k3_store* store) {
    if (getpid() == store->process) return 0;
    errno = EPERM;
    return k3_store_fail(store, "this store belongs to the process that opened it");
}

static inline int64_t k3_store_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static inline _Atomic uint32_t* k3_store_word(const struct k3_store* store, size_t at) {
    return (_Atomic uint32_t*)(void*)(store->ring + at);
}

/* The number of a key in a flat JSON object; 0 with errno when it is not there. Keys of a welcome are never
 * escaped. */
static inline uint64_t k3_store_number(const char* text, const char* key) {
    char wanted[40];
    snprintf(wanted, sizeof wanted, "\"%s\":", key);
    const char* at = strstr(text, wanted);
    if (at == NULL) {
        errno = EPROTO;
        return 0;
    }
    return strtoull(at + strlen(wanted), NULL, 10);
}

static inline void k3_store_close(struct k3_store* store) {
    /* A child does not have the ring: by now something else may be mapped there. */
    if (store->ring != NULL && getpid() == store->process) munmap(store->ring, store->ring_bytes);
    if (store->arena != NULL) munmap((void*)(uintptr_t)store->arena, store->arena_bytes);
    if (store->dense != NULL) munmap((void*)(uintptr_t)store->dense, store->dense_bytes);
    if (store->model != NULL) munmap((void*)(uintptr_t)store->model, store->model_bytes);
    if (store->socket >= 0) close(store->socket);
    if (store->request_doorbell >= 0) close(store->request_doorbell);
    if (store->completion_doorbell >= 0) close(store->completion_doorbell);
    store->ring = NULL;
    store->arena = store->dense = store->model = NULL;
    store->socket = store->request_doorbell = store->completion_doorbell = -1;
}

static inline const uint8_t* k3_store_map(struct k3_store* store, int fd, uint64_t bytes, int protection) {
    struct stat status;
    if (bytes == 0) return NULL;
    if (fstat(fd, &status) != 0 || (uint64_t)status.st_size < bytes) {
        k3_store_fail(store, "a shared memory is smaller than announced");
        return NULL;
    }
    void* memory = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        k3_store_fail(store, "a shared memory cannot be mapped");
        return NULL;
    }
    return memory;
}

/* Says hello and takes the answer with its six descriptors; their number, or -1. */
static inline int k3_store_shake(struct k3_store* store, const char* name, char* text, int* descriptors) {
    char hello[160];
    for (const char* c = name; *c != 0; ++c) {
        if (*c < ' ' || *c > '~' || *c == '"' || *c == '\\' || c - name >= 64) {
            errno = EINVAL;
            return k3_store_fail(store, "a name is up to 64 plain ASCII characters");
        }
    }
    int length = snprintf(hello, sizeof hello, "{\"type\":\"hello\",\"version\":%d,\"name\":\"%s\"}",
                          K3_STORE_VERSION, name);
    /* A daemon that refuses may have said why and closed before this arrives; then the answer is there all the
     * same. */
    ssize_t sent;
    do {
        sent = send(store->socket, hello, (size_t)length, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent != length && errno != EPIPE && errno != ECONNRESET) return k3_store_fail(store, "no hello");
    union {
        char bytes[CMSG_SPACE(6 * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part = {text, K3_STORE_MESSAGE_BYTES};
    struct msghdr message = {0};
    ssize_t got;
    int resets = 0; /* the first says that the daemon has closed; what it said before is there after it */
    do {
        message.msg_iov = &part, message.msg_iovlen = 1;
        message.msg_control = control.bytes, message.msg_controllen = sizeof control.bytes;
        got = recvmsg(store->socket, &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
    if (got <= 0) return k3_store_fail(store, "no welcome");
    text[got] = 0;
    int count = 0;
    for (struct cmsghdr* c = CMSG_FIRSTHDR(&message); c != NULL; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(descriptors, CMSG_DATA(c), (size_t)count * sizeof(int));
    }
    return count;
}

/* connect(2), also when signals come: an attempt that one has ended has done nothing on a Unix socket. */
static inline int k3_store_connect(int fd, const struct sockaddr_un* address) {
    int result;
    do {
        result = connect(fd, (const struct sockaddr*)address, sizeof *address);
    } while (result != 0 && errno == EINTR);
    return result;
}

/* Connects; 0, or -1 with `problem` set and nothing left open. */
static inline int k3_store_open(struct k3_store* store, const char* path, const char* name) {
    memset(store, 0, sizeof *store);
    store->process = getpid();
    store->socket = store->request_doorbell = store->completion_doorbell = -1;
    struct sockaddr_un address = {0};
    address.sun_family = AF_UNIX;
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return k3_store_fail(store, path);
    }
    strcpy(address.sun_path, path);
    store->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (store->socket < 0 || k3_store_connect(store->socket, &address) != 0) {
        k3_store_fail(store, path);
        k3_store_close(store);
        return -1;
    }
    char* text = malloc(K3_STORE_MESSAGE_BYTES + 1);
    int fds[6] = {-1, -1, -1, -1, -1, -1};
    errno = 0;
    int count = text == NULL ? k3_store_fail(store, "memory") : k3_store_shake(store, name, text, fds);
    if (count >= 0 && (count != 6 || strstr(text, "\"type\":\"welcome\"") == NULL)) {
        errno = 0;
        snprintf(store->problem, sizeof store->problem, "refused: %.200s", text);
        count = -1;
    }
    if (count == 6) {
        store->arena_bytes = k3_store_number(text, "arena_bytes");
        store->ring_bytes = k3_store_number(text, "ring_bytes");
        store->dense_bytes = k3_store_number(text, "dense_bytes");
        store->model_bytes = k3_store_number(text, "model_bytes");
        store->quota = (uint32_t)k3_store_number(text, "quota");
        store->arena = k3_store_map(store, fds[0], store->arena_bytes, PROT_READ);
        store->ring = (uint8_t*)(uintptr_t)k3_store_map(store, fds[1], store->ring_bytes, PROT_READ | PROT_WRITE);
        store->dense = k3_store_map(store, fds[2], store->dense_bytes, PROT_READ);
        store->model = k3_store_map(store, fds[3], store->model_bytes, PROT_READ);
        store->request_doorbell = fds[4];
        store->completion_doorbell = fds[5];
        fds[4] = fds[5] = -1;
    }
    for (int i = 0; i < 6; ++i) {
        if (fds[i] >= 0) close(fds[i]);
    }
    free(text);
    if (count != 6 || store->arena == NULL || store->ring == NULL || store->model == NULL) {
        k3_store_close(store);
        return -1;
    }
    memcpy(&store->entries, store->ring + 8, sizeof store->entries);
    uint64_t needed = 4096 + (uint64_t)store->entries * 96;
    int is_power = store->entries != 0 && (store->entries & (store->entries - 1)) == 0;
    if (memcmp(store->ring, "K3RING\0\1", 8) != 0 || !is_power || needed > store->ring_bytes) {
        errno = EPROTO;
        k3_store_fail(store, "this is no ring of version 1");
        k3_store_close(store);
        return -1;
    }
    if (madvise(store->ring, store->ring_bytes, MADV_DONTFORK) != 0) {
        k3_store_fail(store, "the ring cannot be kept from forked children");
        k3_store_close(store);
        return -1;
    }
    return 0;
}

/* Writes one request; 0, or -1 with EAGAIN while the ring is full. Not seen by the daemon before k3_store_publish.
 */
static inline int k3_store_put(struct k3_store* store, const struct k3_store_request* request) {
    if (k3_store_check_process(store) != 0) return -1;
    uint32_t head = atomic_load_explicit(k3_store_word(store, 128), memory_order_acquire);
    if (store->request_tail - head >= store->entries) {
        errno = EAGAIN;
        return k3_store_fail(store, "the ring is full");
    }
    size_t at = 4096 + (size_t)(store->request_tail % store->entries) * sizeof *request;
    memcpy(store->ring + at, request, sizeof *request);
    ++store->request_tail;
    return 0;
}

/* Shows the daemon what was put, and wakes it if it sleeps. */
static inline void k3_store_publish(struct k3_store* store) {
    if (k3_store_check_process(store) != 0) return;
    atomic_store_explicit(k3_store_word(store, 64), store->request_tail, memory_order_seq_cst);
    if (atomic_load_explicit(k3_store_word(store, 320), memory_order_seq_cst) == 1) {
        uint64_t one = 1;
        ssize_t ignored = write(store->request_doorbell, &one, sizeof one);
        (void)ignored; /* full means that it rings already */
    }
}

/* Asks for experts of a layer: one completion each, with `tag`, in any order. How many were asked for. */
static inline uint32_t k3_store_lease(struct k3_store* store, uint64_t tag, uint32_t layer,
                                      const uint32_t* experts, uint32_t count) {
    uint32_t asked = 0;
    struct k3_store_request request = {0};
    request.tag = tag, request.op = K3_STORE_LEASE, request.layer = layer;
    for (; asked < count; ++asked) {
        request.expert = experts[asked];
        if (k3_store_put(store, &request) != 0) break;
    }
    k3_store_publish(store);
    return asked;
}

/* Gives a granted lease back; 0, or -1 while the ring is full. */
static inline int k3_store_release(struct k3_store* store, const struct k3_store_completion* lease) {
    struct k3_store_request request = {0};
    request.op = K3_STORE_RELEASE, request.layer = lease->layer;
    request.expert = lease->slot, request.generation = lease->generation;
    if (k3_store_put(store, &request) != 0) return -1;
    k3_store_publish(store);
    return 0;
}

/* A completion that is there already: 1, or 0 for none; -1 in a forked child. */
static inline int k3_store_poll(struct k3_store* store, struct k3_store_completion* into) {
    if (k3_store_check_process(store) != 0) return -1;
    if (atomic_load_explicit(k3_store_word(store, 192), memory_order_seq_cst) == store->completion_head) return 0;
    size_t at =
        4096 + (size_t)store->entries * 32 + (size_t)(store->completion_head % store->entries) * sizeof *into;
    memcpy(into, store->ring + at, sizeof *into);
    ++store->completion_head;
    atomic_store_explicit(k3_store_word(store, 256), store->completion_head, memory_order_release);
    return 1;
}

/* Waits for a completion: 1; 0 when `timeout_ms` (-1: for ever) is over; -1 when the daemon has gone. */
static inline int k3_store_wait(struct k3_store* store, struct k3_store_completion* into, int timeout_ms) {
    const int64_t until_ms = timeout_ms < 0 ? 0 : k3_store_now_ms() + timeout_ms;
    for (;;) {
        const int there = k3_store_poll(store, into);
        if (there != 0) return there;
        int left_ms = -1;
        if (timeout_ms >= 0) {
            const int64_t left = until_ms - k3_store_now_ms();
            left_ms = left > 0 ? (int)left : 0;
        }
        atomic_store_explicit(k3_store_word(store, 384), 1, memory_order_seq_cst);
        const int found =
            k3_store_poll(store, into); /* it may have come before the daemon could see that we sleep */
        struct pollfd ears[2] = {{store->completion_doorbell, POLLIN, 0}, {store->socket, POLLIN, 0}};
        const int ready = found ? 0 : poll(ears, 2, left_ms);
        const int poll_errno = errno; /* reading the doorbell empty ends in an error of its own */
        atomic_store_explicit(k3_store_word(store, 384), 0, memory_order_relaxed);
        char rings[64];
        ssize_t got;
        do {
            got = read(store->completion_doorbell, rings, sizeof rings);
        } while (got == (ssize_t)sizeof rings || (got < 0 && errno == EINTR));
        if (found || k3_store_poll(store, into)) return 1;
        if (ready < 0 && poll_errno != EINTR) {
            errno = poll_errno;
            return k3_store_fail(store, "cannot wait");
        }
        if (ready > 0 && ears[1].revents != 0) {
            errno = 0;
            return k3_store_fail(store, "the daemon ended the connection");
        }
        if (ready == 0 && left_ms == 0) return 0;
    }
}

/* The bytes of a granted lease. */
static inline const uint8_t* k3_store_payload(const struct k3_store* store,
                                              const struct k3_store_completion* lease) {
    return store->arena + lease->offset;
}

#endif
