// What the files that bind classes share: Python's buffers, words for values, and the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "faults.h"
#include "reader.h"

namespace k3::store {

namespace nb = nanobind;

// Runs `work` without the interpreter's lock.
template <class Work>
auto unlocked(const Work& work) {
    const nb::gil_scoped_release release;
    return work();
}

// The bytes of any object with a contiguous buffer.
class Buffer {
public:
    explicit Buffer(nb::handle object, int flags = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_;
};

template <class Value>
Value chosen(const std::string& name, const char* what,
             std::initializer_list<std::pair<const char*, Value>> choices) {
    std::string known;
    for (const auto& [word, value] : choices) {
        if (name == word) return value;
        known += (known.empty() ? "" : ", ") + std::string(word);
    }
    throw nb::value_error((std::string(what) + " must be one of " + known + ", not " + name).c_str());
}

inline Verify verify_of(const std::string& name) {
    return chosen<Verify>(name, "verify",
                          {{"always", Verify::always}, {"first", Verify::first}, {"never", Verify::never}});
}

inline FaultRule fault_rule(const std::string& kind, int64_t file, uint64_t begin, uint64_t end, int64_t times,
                            double probability, uint64_t argument) {
    FaultRule rule;
    rule.kind = chosen<FaultKind>(kind, "kind",
                                  {{"error", FaultKind::error},
                                   {"short", FaultKind::shorten},
                                   {"flip", FaultKind::flip},
                                   {"stall", FaultKind::stall}});
    rule.file = file, rule.begin = begin, rule.end = end, rule.times = times;
    rule.probability = probability, rule.argument = argument;
    return rule;
}

void bind_lending(nb::module_& m);

}  // namespace k3::store
