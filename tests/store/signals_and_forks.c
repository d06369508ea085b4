/* For test_c_client.py: the C client under a rain of signals, and after a fork.
 *
 *   signals SOCKET SIGNAL RESTART     a signal every 2 ms, while nothing comes (300 ms), while a lease is awaited,
 * and while 30 connections are opened fork SOCKET                       every call in a child fails; the parent's
 * lease stays
 */
#include <signal.h>
#include <sys/wait.h>

#include "k3_store.h"

static volatile sig_atomic_t heard;

static void hear(int number) {
    (void)number;
    ++heard;
}

#define MUST(holds)                                                                                 \
    do {                                                                                            \
        if (!(holds)) {                                                                             \
            fprintf(stderr, "line %d: %s; errno %d, %s\n", __LINE__, #holds, errno, store.problem); \
            return 1;                                                                               \
        }                                                                                           \
    } while (0)

static int signals(const char* path, int number, int restart) {
    struct k3_store store = {0};
    struct k3_store_completion done;
    struct sigaction action = {0};
    action.sa_handler = hear;
    action.sa_flags = restart ? SA_RESTART : 0;
    MUST(sigaction(number, &action, NULL) == 0);
    struct sigevent event = {0};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = number;
    timer_t timer;
    MUST(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    const struct itimerspec often = {{0, 2000000}, {0, 2000000}};
    MUST(timer_settime(timer, 0, &often, NULL) == 0);

    MUST(k3_store_open(&store, path, "signals") == 0);
    const int64_t began_ms = k3_store_now_ms();
    MUST(k3_store_wait(&store, &done, 300) == 0);
    MUST(k3_store_now_ms() - began_ms >= 299);
    MUST(heard > 2);
    const uint32_t expert = 2;
    MUST(k3_store_lease(&store, 1, 1, &expert, 1) == 1);
    printf("asked\n"); /* the drive is let go now */
    fflush(stdout);
    MUST(k3_store_wait(&store, &done, -1) == 1);
    MUST(done.status == K3_STORE_OK && done.expert == expert);
    k3_store_close(&store);
    for (int i = 0; i < 30; ++i) {
        MUST(k3_store_open(&store, path, "signals") == 0);
        k3_store_close(&store);
    }
    printf("signals %d\n", (int)heard);
    return 0;
}

static int in_child(struct k3_store store, struct k3_store_completion lease) {
    struct k3_store_completion done;
    const uint32_t expert = 0;
    struct k3_store_request request = {0};
    MUST(k3_store_release(&store, &lease) == -1 && errno == EPERM);
    MUST(k3_store_lease(&store, 1, 1, &expert, 1) == 0);
    MUST(k3_store_put(&store, &request) == -1);
    k3_store_publish(&store);
    MUST(k3_store_poll(&store, &done) == -1);
    MUST(k3_store_wait(&store, &done, 1000) == -1);
    MUST(strstr(store.problem, "belongs to the process") != NULL);
    k3_store_close(&store);
    return 0;
}

static int forks(const char* path) {
    struct k3_store store = {0};
    struct k3_store_completion lease, done;
    const uint32_t expert = 2, other = 3;
    MUST(k3_store_open(&store, path, "forks") == 0);
    MUST(k3_store_lease(&store, 1, 1, &expert, 1) == 1);
    MUST(k3_store_wait(&store, &lease, -1) == 1 && lease.status == K3_STORE_OK);
    const pid_t child = fork();
    if (child == 0) _exit(in_child(store, lease));
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    MUST(k3_store_lease(&store, 2, 1, &other, 1) == 1);
    MUST(k3_store_wait(&store, &done, -1) == 1 && done.status == K3_STORE_OK && done.expert == other);
    printf("forked\n"); /* two leases are held now */
    fflush(stdout);
    MUST(getchar() == '\n');
    MUST(k3_store_release(&store, &lease) == 0 && k3_store_release(&store, &done) == 0);
    k3_store_close(&store);
    return 0;
}

int main(int argc, char** argv) {
    if (argc == 5 && strcmp(argv[1], "signals") == 0) return signals(argv[2], atoi(argv[3]), atoi(argv[4]));
    if (argc == 3 && strcmp(argv[1], "fork") == 0) return forks(argv[2]);
    return 2;
}
