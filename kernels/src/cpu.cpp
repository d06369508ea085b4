#include "cpu.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

namespace k3 {

namespace {

// Whole CPUs of a quota, 0 for "no limit" and for anything that is not two positive numbers.
int whole_cpus(double quota, double period) {
    if (!(quota > 0) || !(period > 0)) return 0;
    const double cpus = std::min(quota / period, 1e6);
    const int whole = static_cast<int>(cpus);
    return std::max(1, whole + (cpus > whole ? 1 : 0));
}

int quota_v2(const std::string& folder) {
    std::ifstream file(folder + "/cpu.max");
    double quota = 0, period = 0;
    return file >> quota >> period ? whole_cpus(quota, period) : 0;  // "max 100000" does not parse: no limit
}

int quota_v1(const std::string& folder) {
    std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
    double quota = 0, period = 0;
    return quota_file >> quota && period_file >> period ? whole_cpus(quota, period) : 0;  // -1 is no limit
}

int smaller(int a, int b) { return a == 0 ? b : b == 0 ? a : std::min(a, b); }

// The smallest quota of root/path and every folder above it up to root. Inside a container without a cgroup
// namespace the path is the host's and not visible: then the walk ends at the mount, which is the own group.
template <class Quota>
int smallest(const std::string& root, std::string path, const Quota& quota) {
    int limit = 0;
    while (true) {
        limit = smaller(limit, quota(root + path));
        if (path.empty()) return limit;
        const size_t slash = path.rfind('/');
        path = slash == std::string::npos ? "" : path.substr(0, slash);
    }
}

bool names_cpu(const std::string& controllers) {
    std::stringstream list(controllers);
    for (std::string name; std::getline(list, name, ',');) {
        if (name == "cpu") return true;
    }
    return false;
}

}  // namespace

CpuMask::CpuMask() {
    // The mask may be wider than cpu_set_t on large machines: grow until the kernel accepts the size.
    for (size_t cpus = 1024; cpus <= 1 << 20 && count_ == 0; cpus *= 2) {
        bits_.assign(cpus / (8 * sizeof(unsigned long)), 0);
        const size_t bytes = CPU_ALLOC_SIZE(cpus);
        auto* const set = reinterpret_cast<cpu_set_t*>(bits_.data());
        if (sched_getaffinity(0, bytes, set) == 0) count_ = CPU_COUNT_S(bytes, set);
    }
    if (count_ > 0) return;
    bits_.clear();
    count_ = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
}

void CpuMask::give_to(pthread_t thread, int except) const {
    if (bits_.empty()) return;
    std::vector<unsigned long> bits = bits_;
    const size_t bytes = bits.size() * sizeof(unsigned long);
    auto* const set = reinterpret_cast<cpu_set_t*>(bits.data());
    if (except >= 0 && count_ > 1) CPU_CLR_S(except, bytes, set);
    pthread_setaffinity_np(thread, bytes, set);
}

int affinity_cpus() { return CpuMask().count(); }

int quota_cpus(const std::string& cgroup_file, const std::string& root) {
    std::ifstream file(cgroup_file);
    int limit = 0;
    for (std::string line; std::getline(file, line);) {  // "id:controllers:/path"
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        std::string path = line.substr(second + 1);
        if (path == "/") path.clear();
        if (controllers.empty()) {
            limit = smaller(limit, smallest(root, path, quota_v2));
            limit = smaller(limit, smallest(root + "/unified", path, quota_v2));
        } else if (names_cpu(controllers)) {
            limit = smaller(limit, smallest(root + "/" + controllers, path, quota_v1));
            if (controllers != "cpu") limit = smaller(limit, smallest(root + "/cpu", path, quota_v1));
        }
    }
    return limit;
}

int usable_cpus() {
    return std::max(1, smaller(affinity_cpus(), quota_cpus("/proc/self/cgroup", "/sys/fs/cgroup")));
}

}  // namespace k3
