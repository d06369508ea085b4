/* Leases experts of one layer from k3-store and prints a checksum of each: `lease SOCKET LAYER EXPERT...`
 *
 *   cc -std=c11 -O2 -D_GNU_SOURCE -I store/include examples/c_client/lease.c -o lease
 */
#include <inttypes.h>

#include "k3_store.h"

static uint64_t fnv1a(const uint8_t* data, uint64_t bytes) {
    uint64_t hash = 14695981039346656037u;
    for (uint64_t i = 0; i < bytes; ++i) hash = (hash ^ data[i]) * 1099511628211u;
    return hash;
}

int main(int argc, char** argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: %s SOCKET LAYER EXPERT...\n", argv[0]);
        return 2;
    }
    struct k3_store store;
    if (k3_store_open(&store, argv[1], "c example") != 0) {
        fprintf(stderr, "error: %s\n", store.problem);
        return 10;
    }
    const uint32_t layer = (uint32_t)strtoul(argv[2], NULL, 10);
    const int wanted = argc - 3;
    int asked = 0, done = 0, failures = 0;
    while (done < wanted) {
        /* As many at once as the quota allows; each is given back before the next is asked for. */
        while (asked < wanted && (uint32_t)(asked - done) < store.quota) {
            const uint32_t expert = (uint32_t)strtoul(argv[3 + asked], NULL, 10);
            if (k3_store_lease(&store, 1, layer, &expert, 1) != 1) break;
            ++asked;
        }
        struct k3_store_completion lease;
        if (k3_store_wait(&store, &lease, 30000) != 1) {
            fprintf(stderr, "error: %s\n", store.problem[0] != 0 ? store.problem : "no answer");
            k3_store_close(&store);
            return 10;
        }
        ++done;
        if (lease.status != K3_STORE_OK) {
            fprintf(stderr,
                    "error: layer %" PRIu32 ", expert %" PRIu32 ": status %d, file %" PRIu32 ", offset %" PRIu64
                    ", errno %" PRIu32 "\n",
                    lease.layer, lease.expert, lease.status, lease.file, lease.file_offset, lease.error);
            ++failures;
            continue;
        }
        printf("%" PRIu32 " %" PRIu32 " %" PRIu64 " %016" PRIx64 "\n", lease.layer, lease.expert,
               lease.payload_bytes, fnv1a(k3_store_payload(&store, &lease), lease.payload_bytes));
        if (k3_store_release(&store, &lease) != 0) {
            fprintf(stderr, "error: %s\n", store.problem);
            return 10;
        }
    }
    k3_store_close(&store);
    return failures == 0 ? 0 : 1;
}
