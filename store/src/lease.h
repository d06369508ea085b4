// `Lease` and `ReadyLeases` of store/source.py and store/request_stream.py, as Python sees them, and the
// making of many leases at once.
//
// A set of 16 is made, handed out and given back for every layer of every token; as classes in Python that was
// half of a cached set's round trip. Everything here is called with the interpreter's lock, which is what guards
// it.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "layout.h"

namespace k3::store {

namespace nb = nanobind;

// What the leases of one request have in common.
struct LendTo {
    nb::set awaited;        // of the request: the experts that it has not got yet
    nb::dict views;         // (offset, payload bytes) -> view of the arena
    nb::callable view;      // makes one that is not there yet
    nb::object on_release;  // called with request, session, slot and generation
    nb::object request, session;
};

// Leases for granted completions, in their order; takes their experts from `awaited`. AssertionError for one that
// is not in there.
nb::list make_leases(const std::vector<Completion>& granted, const LendTo& to);

void bind_leases(nb::module_& m);

}  // namespace k3::store
