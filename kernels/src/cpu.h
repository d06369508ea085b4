// How many CPUs this process may use.
#pragma once

#include <string>

namespace k3 {

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
