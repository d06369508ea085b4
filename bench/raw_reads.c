// A plain loop of reads: on each root `depth` threads that do nothing but pread into a warm buffer of their own.
//
//     cc -O2 -pthread -o raw_reads raw_reads.c
//     raw_reads DEPTH ROOTS DIRECT HUGE < commands
//
// The ceiling that reads through a daemon are held against: same files, sizes, order and depth, no queue, no
// digest, no second process. Commands, one a line; the threads, the buffers (4 MiB, aligned to 2 MiB, touched
// before the first read; in huge pages when HUGE is 1) and the open files stay from turn to turn:
//
//     file PATH                     opens the next file, numbered from 0 (O_DIRECT when DIRECT is 1)
//     read ROOT FILE OFFSET BYTES   adds a read of at most 4 MiB to the turn
//     go                            does the turn; answers "SECONDS CPU_SECONDS" and forgets it
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { kBufferBytes = 4 << 20, kAlignment = 2 << 20, kRootsMax = 16, kFilesMax = 4096 };

struct read {
    int file;
    off_t offset;
    size_t bytes;
};

struct root {
    struct read* reads;
    size_t count, room;
    atomic_size_t next;
};

static struct root roots[kRootsMax];
static int files[kFilesMax];
static int huge;
static pthread_barrier_t begin, end;

static void fail(const char* what) {
    fprintf(stderr, "raw_reads: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static void* serve(void* argument) {
    struct root* root = argument;
    void* buffer = aligned_alloc(kAlignment, kBufferBytes);
    if (buffer == NULL) fail("no memory");
    if (huge) madvise(buffer, kBufferBytes, MADV_HUGEPAGE);
    memset(buffer, 0, kBufferBytes);
    while (1) {
        pthread_barrier_wait(&begin);
        for (size_t i; (i = atomic_fetch_add(&root->next, 1)) < root->count;) {
            const struct read* read = &root->reads[i];
            if (pread(files[read->file], buffer, read->bytes, read->offset) != (ssize_t)read->bytes)
                fail("short read");
        }
        pthread_barrier_wait(&end);
    }
}

static void add(struct root* root, struct read read) {
    if (read.bytes > kBufferBytes) fail("a read is larger than the buffers");
    if (root->count == root->room) {
        root->room = root->room ? 2 * root->room : 1024;
        root->reads = realloc(root->reads, root->room * sizeof *root->reads);
        if (root->reads == NULL) fail("no memory");
    }
    root->reads[root->count++] = read;
}

int main(int argc, char** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: raw_reads DEPTH ROOTS DIRECT HUGE < commands\n");
        return 2;
    }
    const int depth = atoi(argv[1]), root_count = atoi(argv[2]), direct = atoi(argv[3]);
    huge = atoi(argv[4]);
    if (depth < 1 || root_count < 1 || root_count > kRootsMax) fail("depth or roots out of range");
    pthread_barrier_init(&begin, NULL, depth * root_count + 1);
    pthread_barrier_init(&end, NULL, depth * root_count + 1);
    for (int i = 0; i < depth * root_count; ++i) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, &roots[i % root_count]) != 0) fail("no thread");
    }
    char line[8192];
    int opened = 0;
    while (fgets(line, sizeof line, stdin) != NULL) {
        struct read read;
        int root;
        long long offset;
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "file ", 5) == 0 && opened < kFilesMax) {
            files[opened] = open(line + 5, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
            if (files[opened++] < 0) fail(line + 5);
        } else if (sscanf(line, "read %d %d %lld %zu", &root, &read.file, &offset, &read.bytes) == 4 &&
                   root >= 0 && root < root_count && read.file >= 0 && read.file < opened) {
            read.offset = offset;
            add(&roots[root], read);
        } else if (strcmp(line, "go") == 0) {
            const double began = seconds(CLOCK_MONOTONIC), began_cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
            pthread_barrier_wait(&begin);
            pthread_barrier_wait(&end);
            const double took = seconds(CLOCK_MONOTONIC) - began;
            printf("%.9f %.9f\n", took, seconds(CLOCK_PROCESS_CPUTIME_ID) - began_cpu);
            fflush(stdout);
            for (int i = 0; i < root_count; ++i) roots[i].count = 0, atomic_store(&roots[i].next, 0);
        } else {
            fprintf(stderr, "raw_reads: not understood: %s\n", line);
            return 2;
        }
    }
    return 0;
}
