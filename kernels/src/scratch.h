// Memory that a thread keeps from call to call, so that no call touches fresh pages.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace k3 {

// `count` floats, aligned to cache lines, of the calling thread, one buffer per Owner (any type). They are
// the thread's until it asks again for the same Owner; what they hold is not kept when they have to grow.
template <class Owner>
float* thread_floats(size_t count) {
    struct Free {
        void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
    };
    thread_local std::unique_ptr<float[], Free> floats;
    thread_local size_t held = 0;
    if (count > held) {
        floats.reset();
        held = 0;
        floats.reset(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t{64})));
        held = count;
    }
    return floats.get();
}

}  // namespace k3
