// `Lending` for Python: checks of arguments, waiting without the interpreter's lock, and signals.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "bind.h"
#include "lending.h"

namespace k3::store {
namespace {

using nb::arg;

// How long a wait lasts before signals are looked for.
constexpr uint64_t kSliceNs = 50'000'000;

struct PyRequest {
    Lending::RequestPtr request;
};

// Failures are handed to Python as values: what they say is made into an error there.
struct PyFailure {
    std::shared_ptr<const LoanFailure> failure;
};

// Why a request is refused a place: everything is held by others.
struct NoRoom {
    uint64_t held, all;
};

class PyLending {
public:
    PyLending(const LendingOptions& options, nb::handle memory) : memory_(memory, PyBUF_WRITABLE) {
        if (memory_.size() < options.slot_bytes * options.slots) {
            throw nb::value_error("the memory is smaller than its slots");
        }
        lending_ = std::make_unique<Lending>(options, memory_.data());
    }
    ~PyLending() {
        if (lending_->is_inherited()) {
            (void)lending_.release();  // threads that it does not have would be waited for
            return;
        }
        unlocked([this] { lending_.reset(); });
    }
    PyLending(const PyLending&) = delete;
    PyLending& operator=(const PyLending&) = delete;

    // For giving back, which does nothing in a forked child.
    Lending* mine() const { return lending_->is_inherited() ? nullptr : lending_.get(); }
    // For asking.
    Lending& here() const {
        if (lending_->is_inherited()) throw nb::value_error("experts cannot be asked for in a forked process");
        return *lending_;
    }

private:
    Buffer memory_;
    std::unique_ptr<Lending> lending_;
};

PyLending* make_lending(nb::handle memory, uint64_t slot_bytes, uint32_t slots, uint32_t working_slots,
                        uint32_t prefetch_slots, const std::string& policy, const LayerCounts& layer_counts,
                        const std::string& verify, uint32_t threads, uint32_t checkers, uint64_t chunk_bytes,
                        bool direct, uint32_t open_files, double patience_s) {
    LendingOptions options;
    options.slot_bytes = slot_bytes, options.slots = slots;
    options.working_slots = working_slots, options.prefetch_slots = prefetch_slots;
    options.policy = policy, options.counts = layer_counts;
    options.verify = verify_of(verify);
    options.reader.depth = threads, options.reader.checkers = checkers;
    options.reader.background = std::max(1u, threads - 1);  // one is left for what is asked for meanwhile
    options.chunk_bytes = chunk_bytes, options.direct = direct, options.open_files = open_files;
    options.patience_ns = static_cast<uint64_t>(std::min(std::max(patience_s, 0.0), 4e9) * 1e9);
    return new PyLending(options, memory);
}

// Where one piece of an expert lies, as Python says it: file, offset, payload and stored bytes, digest or None.
Record record_of(nb::handle piece, bool& has_digest) {
    const nb::tuple fields = nb::cast<nb::tuple>(piece);
    Record record{};
    record.file = nb::cast<uint32_t>(fields[0]);
    record.offset = nb::cast<uint64_t>(fields[1]);
    record.payload_bytes = nb::cast<uint64_t>(fields[2]);
    record.stored_bytes = nb::cast<uint64_t>(fields[3]);
    has_digest = !fields[4].is_none();
    if (has_digest) {
        const Buffer digest(fields[4]);
        if (digest.size() != sizeof record.digest) throw nb::value_error("a digest has 16 bytes");
        std::memcpy(record.digest, digest.data(), sizeof record.digest);
    }
    return record;
}

void place(const PyLending& py, uint32_t layer, uint32_t expert, uint64_t payload_bytes, const nb::list& pieces) {
    std::vector<Record> records;
    std::vector<bool> has_digest;
    for (nb::handle piece : pieces) {
        bool has = false;
        records.push_back(record_of(piece, has));
        has_digest.push_back(has);
    }
    py.here().place({layer, expert}, payload_bytes, std::move(records), std::move(has_digest));
}

// Calls `step` with how long it may wait until it does not say `waiting`. At first not at all, with the
// interpreter's lock: what is ready costs no change of threads.
template <class Step>
Lending::Outcome in_slices(const Step& step) {
    Lending::Outcome outcome = step(0);
    while (outcome == Lending::Outcome::waiting) {
        outcome = unlocked([&] { return step(kSliceNs); });
        if (outcome == Lending::Outcome::waiting && PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    if (outcome == Lending::Outcome::closed) throw nb::value_error("the source was closed");
    return outcome;
}

nb::object no_room(const Lending& lending) {
    return nb::cast(NoRoom{lending.held_tickets(), lending.all_tickets()});
}

nb::object lending_request(const PyLending& py, uint32_t layer, const std::vector<uint32_t>& experts) {
    Lending& lending = py.here();
    const Lending::RequestPtr request = lending.request(layer, experts);
    try {
        const auto outcome = in_slices([&](uint64_t slice_ns) { return lending.admit(request, slice_ns); });
        if (outcome == Lending::Outcome::no_room) return no_room(lending);
    } catch (...) {
        lending.give_up(request);
        throw;
    }
    return nb::cast(PyRequest{request});
}

nb::object lending_next(const PyLending& py, const PyRequest& asked) {
    Lending& lending = py.here();
    Loan loan{};
    std::shared_ptr<const LoanFailure> failure;
    const Lending::RequestPtr request = asked.request;
    const auto outcome =
        in_slices([&](uint64_t slice_ns) { return lending.next(request, slice_ns, loan, failure); });
    if (outcome == Lending::Outcome::over) return nb::none();
    if (outcome == Lending::Outcome::no_room) return no_room(lending);
    if (failure) return nb::cast(PyFailure{failure});
    return nb::make_tuple(loan.layer, loan.expert, loan.slot, loan.at, loan.payload_bytes);
}

nb::dict lending_stats(const PyLending& py) {
    nb::dict d;
    const Lending* const lending = py.mine();
    const LendingStats s = lending != nullptr ? lending->stats() : LendingStats{};
    d["hits"] = s.hits, d["joined"] = s.joined, d["misses"] = s.misses, d["evictions"] = s.evictions;
    d["retries"] = s.retries, d["reads"] = s.reads, d["read_bytes"] = s.read_bytes, d["read_ns"] = s.read_ns;
    d["prefetched"] = s.prefetched, d["prefetch_hits"] = s.prefetch_hits, d["wait_ns"] = s.wait_ns;
    d["checked_bytes"] = s.checked_bytes, d["unchecked_bytes"] = s.unchecked_bytes;
    d["open_files"] = s.open_files;
    return d;
}

nb::list opened(const PyLending& py) {
    nb::list list;
    const Lending* const lending = py.mine();
    if (lending == nullptr) return list;
    for (const auto& [file, direct] : lending->stats().opened) list.append(nb::make_tuple(file, direct));
    return list;
}

nb::bytes bytes_of(const uint8_t (&digest)[16]) {
    return nb::bytes(reinterpret_cast<const char*>(digest), sizeof digest);
}

void bind_failure(nb::module_& m) {
    nb::class_<PyFailure>(m, "LoanFailure")
        .def_prop_ro("layer", [](const PyFailure& f) { return f.failure->key.layer; })
        .def_prop_ro("expert", [](const PyFailure& f) { return f.failure->key.expert; })
        .def_prop_ro("is_damage", [](const PyFailure& f) { return f.failure->status == Status::damaged; })
        .def_prop_ro("error", [](const PyFailure& f) { return f.failure->error; })
        .def_prop_ro("is_open", [](const PyFailure& f) { return f.failure->is_open; })
        .def_prop_ro("offset", [](const PyFailure& f) { return f.failure->offset; })
        .def_prop_ro("file", [](const PyFailure& f) { return f.failure->record.file; })
        .def_prop_ro("extent_offset", [](const PyFailure& f) { return f.failure->record.offset; })
        .def_prop_ro("stored_bytes", [](const PyFailure& f) { return f.failure->record.stored_bytes; })
        .def_prop_ro("digest", [](const PyFailure& f) { return bytes_of(f.failure->record.digest); })
        .def_prop_ro("found", [](const PyFailure& f) { return bytes_of(f.failure->found); });
    nb::class_<NoRoom>(m, "NoRoom").def_ro("held", &NoRoom::held).def_ro("all", &NoRoom::all);
    nb::class_<PyRequest>(m, "LoanRequest");
}

}  // namespace

void bind_lending(nb::module_& m) {
    bind_failure(m);
    nb::class_<PyLending>(m, "Lending")
        .def(nb::new_(&make_lending), nb::kw_only(), arg("memory"), arg("slot_bytes"), arg("slots"),
             arg("working_slots"), arg("prefetch_slots"), arg("policy"), arg("layer_counts"), arg("verify"),
             arg("threads"), arg("checkers"), arg("chunk_bytes"), arg("direct"), arg("open_files"),
             arg("patience_s"))
        .def(
            "add_file",
            [](const PyLending& py, const nb::bytes& path) {
                return py.here().add_file(std::string(path.c_str(), path.size()));
            },
            arg("path"))
        .def("place", &place, arg("layer"), arg("expert"), arg("payload_bytes"), arg("pieces"))
        .def("request", &lending_request, arg("layer"), arg("experts"))
        .def("next", &lending_next, arg("request"))
        .def(
            "release",
            [](const PyLending& py, const PyRequest& request, uint32_t slot) {
                if (Lending* const lending = py.mine()) lending->release(request.request, slot);
            },
            arg("request"), arg("slot"))
        .def(
            "give_up",
            [](const PyLending& py, const PyRequest& request) {
                if (Lending* const lending = py.mine()) lending->give_up(request.request);
            },
            arg("request"))
        .def(
            "prefetch",
            [](const PyLending& py, uint32_t layer, const std::vector<uint32_t>& experts) {
                const uint64_t hint = py.here().prefetch(layer, experts);
                if (hint == 0) throw nb::value_error("the source was closed");
                return hint;
            },
            arg("layer"), arg("experts"))
        .def(
            "take_back",
            [](const PyLending& py, uint64_t hint) {
                if (Lending* const lending = py.mine()) lending->take_back(hint);
            },
            arg("hint"))
        .def("stats", &lending_stats)
        .def("opened", &opened)
        .def_prop_ro("refused_direct", [](const PyLending& py) { return py.here().refused_direct(); })
        .def("close",
             [](const PyLending& py) {
                 Lending* const lending = py.mine();
                 if (lending != nullptr) unlocked([&] { lending->close(); });
             })
        .def(
            "inject",
            [](const PyLending& py, const std::string& kind, int64_t file, uint64_t begin, uint64_t end,
               int64_t times, double probability, uint64_t argument, uint64_t seed) {
                py.here().faults().add(fault_rule(kind, file, begin, end, times, probability, argument), seed);
            },
            arg("kind"), nb::kw_only(), arg("file"), arg("begin"), arg("end"), arg("times"), arg("probability"),
            arg("argument"), arg("seed"))
        .def("clear_faults", [](const PyLending& py) { py.here().faults().clear(); })
        .def("resume_stalls", [](const PyLending& py) { py.here().faults().resume(); })
        .def_prop_ro("fired", [](const PyLending& py) { return py.here().faults().fired(); })
        .def_prop_ro("struck", [](const PyLending& py) {
            nb::list list;
            for (const auto& [file, offset] : py.here().faults().struck())
                list.append(nb::make_tuple(file, offset));
            return list;
        });
}

}  // namespace k3::store
