// A small pool of threads that stay, for splitting one call's rows.
//
// Work is split over rows of the output only, and every row is computed alone: neither the number of threads
// nor who takes which piece can change a bit. One call at a time uses the pool; a call that finds it busy
// (several Python threads) does all of its work on its own thread, so calls never wait for each other.
//
// After fork() the child starts with an empty pool and makes its own threads on first use; a call that was
// running in the parent's other threads is not continued. Threads are never joined at exit: they only ever
// wait.
#pragma once

#include <cstdint>
#include <functional>

namespace k3 {

constexpr int kThreadsMax = 1024;

// Calls work(begin, end) for pieces that cover [0, count), each a multiple of `grain` long except the last.
// `work` runs on several threads at once; the first exception it throws is thrown here after all have
// stopped. Floating point runs with round-to-nearest and without flushing subnormal numbers, whatever the
// caller set.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

// Threads that a call may use, the calling one included. The default is usable_cpus() (cpu.h), taken on first
// use.
int get_threads();

// 1 <= n <= kThreadsMax. Waits for a running call to end.
void set_threads(int n);

}  // namespace k3
