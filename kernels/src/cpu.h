// How many CPUs this process may use.
#pragma once

#include <pthread.h>

#include <string>
#include <vector>

namespace k3 {

// A set of CPUs that threads may run on, of any size. Immutable.
class CpuMask {
public:
    CpuMask();  // this thread's; of all CPUs where it cannot be had
    int count() const { return count_; }

    // Lets `thread` run on these CPUs, `except` left out unless it is the only one. Nothing happens where
    // that is not allowed: a placement is a matter of speed.
    void give_to(pthread_t thread, int except) const;

private:
    std::vector<unsigned long> bits_;  // a cpu_set_t
    int count_ = 0;
};

// CPUs in this thread's affinity mask.
int affinity_cpus();

// The CPU quota of the control groups listed in `cgroup_file` (a /proc/<pid>/cgroup), rounded up to whole
// CPUs: the smallest over the group and all its ancestors under `root` (where the cgroup file systems are
// mounted). Reads version 2 (cpu.max) and version 1 (cpu.cfs_quota_us over cpu.cfs_period_us). 0 when there
// is none.
int quota_cpus(const std::string& cgroup_file, const std::string& root);

// The smaller of the two for this process, at least 1.
int usable_cpus();

}  // namespace k3
