#include "variant.h"

#include <atomic>
#include <cstring>

#ifdef K3_HAVE_avxvnni
#include <cpuid.h>
#endif
#ifdef K3_HAVE_neondot
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace k3 {

#define K3_DECLARE(name)        \
    namespace name {            \
    extern const Kernels table; \
    }
K3_DECLARE(baseline)
#ifdef K3_HAVE_avx2
K3_DECLARE(avx2)
#endif
#ifdef K3_HAVE_avxvnni
K3_DECLARE(avxvnni)
#endif
#ifdef K3_HAVE_avx512
K3_DECLARE(avx512)
#endif
#ifdef K3_HAVE_avx512vnni
K3_DECLARE(avx512vnni)
#endif
#ifdef K3_HAVE_neondot
K3_DECLARE(neondot)
#endif

namespace {

struct Found {
    const Kernels* tables[5];
    int count;
};

Found find() {
    Found found = {{&baseline::table}, 1};
#ifdef K3_HAVE_avx2
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return found;
    found.tables[found.count++] = &avx2::table;
#ifdef K3_HAVE_avxvnni
    unsigned eax = 0, ebx, ecx, edx;  // leaf 7.1; older compilers know no name for this bit
    if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4) != 0)
        found.tables[found.count++] = &avxvnni::table;
#endif
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (!avx512) return found;
#ifdef K3_HAVE_avx512
    found.tables[found.count++] = &avx512::table;
#endif
#ifdef K3_HAVE_avx512vnni
    if (__builtin_cpu_supports("avx512vnni")) found.tables[found.count++] = &avx512vnni::table;
#endif
#endif
#ifdef K3_HAVE_neondot
    if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) found.tables[found.count++] = &neondot::table;
#endif
    return found;
}

const Found& found() {
    static const Found once = find();
    return once;
}

std::atomic<const Kernels*> active{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* table = active.load(std::memory_order_acquire);
    return table != nullptr ? *table : *found().tables[found().count - 1];
}

int variant_count() { return found().count; }

const char* variant_name(int index) { return found().tables[index]->name; }

bool set_variant(const char* name) {
    for (int i = 0; i < found().count; ++i) {
        if (std::strcmp(found().tables[i]->name, name) == 0) {
            active.store(found().tables[i], std::memory_order_release);
            return true;
        }
    }
    return false;
}

}  // namespace k3
