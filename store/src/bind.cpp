// The module: checks of Python's arguments and the interpreter's lock. Everything else is in the classes it binds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>

#include "bind.h"
#include "client_ring.h"
#include "lease.h"
#include "server.h"
#include "xxh3.h"

namespace k3::store {
namespace {

using nb::arg;
using Pair = std::pair<uint32_t, uint32_t>;

Key key_of(const Pair& pair) { return {pair.first, pair.second}; }
Pair pair_of(Key key) { return {key.layer, key.expert}; }

std::vector<Key> keys_of(const std::vector<Pair>& pairs) {
    std::vector<Key> keys;
    for (const Pair& pair : pairs) keys.push_back(key_of(pair));
    return keys;
}

// Calls `told` (None: nobody) with how much is reserved, and lets a signal end it. For a thread without the lock.
ReserveProgress progress_to(const nb::object& told) {
    return [told](uint64_t done_bytes) {
        const nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (!told.is_none()) told(done_bytes);
    };
}

nb::bytes digest_of(nb::handle data) {
    const Buffer buffer(data);
    uint8_t digest[16];
    unlocked([&] { xxh3_128(buffer.data(), buffer.size(), digest); });
    return nb::bytes(reinterpret_cast<const char*>(digest), sizeof digest);
}

// For tests: the digest of data that arrives in steps, each the number of bytes that are there by then.
nb::bytes digest_in_steps(nb::handle data, const std::vector<size_t>& steps) {
    const Buffer buffer(data);
    Xxh3Stream stream(buffer.data(), buffer.size());
    for (const size_t arrived : steps) stream.advance(std::min(arrived, buffer.size()));
    uint8_t digest[16];
    stream.finish(digest);
    return nb::bytes(reinterpret_cast<const char*>(digest), sizeof digest);
}

// Server

std::unique_ptr<Server> make_server(uint64_t slot_bytes, uint32_t slots, const std::string& policy,
                                    const std::vector<Pair>& pins, uint32_t io_depth, uint32_t checkers,
                                    const std::string& verify, uint32_t max_clients, uint32_t quota,
                                    uint32_t entries, uint32_t open_files, const nb::object& on_reserved) {
    ServerOptions options;
    options.slot_bytes = slot_bytes, options.slots = slots;
    options.policy = policy, options.pins = keys_of(pins);
    options.reader.depth = io_depth, options.reader.checkers = checkers;
    options.verify = verify_of(verify);
    options.max_clients = max_clients, options.quota = quota, options.entries = entries;
    options.open_files = open_files;
    const ReserveProgress progress = progress_to(on_reserved);
    return unlocked([&] { return std::make_unique<Server>(options, progress); });
}

void set_layer(Server& server, uint32_t layer, uint64_t payload_bytes, const std::vector<uint32_t>& pieces,
               nb::handle records) {
    const Buffer buffer(records);
    if (buffer.size() % sizeof(Record) != 0) throw nb::value_error("records are 48 bytes each");
    std::vector<Record> list(buffer.size() / sizeof(Record));
    if (!list.empty()) std::memcpy(list.data(), buffer.data(), buffer.size());
    unlocked([&] { server.set_layer(layer, payload_bytes, pieces, std::move(list)); });
}

nb::tuple add_client(Server& server, const std::string& name) {
    NewClient made = unlocked([&] { return server.add_client(name); });
    return nb::make_tuple(made.id, made.ring.release(), made.request_doorbell.release(),
                          made.completion_doorbell.release());
}

nb::dict client_stats(const ClientStats& c) {
    nb::dict d;
    d["id"] = c.id, d["name"] = c.name, d["leases"] = c.leases, d["waiting"] = c.waiting;
    d["leased_bytes"] = c.leased_bytes, d["prefetching"] = c.prefetching, d["pinned"] = c.pinned;
    d["granted"] = c.granted, d["errors"] = c.errors, d["refused"] = c.refused;
    d["stale_releases"] = c.stale_releases, d["requests"] = c.requests, d["dropped"] = c.dropped;
    return d;
}

nb::dict drive_stats(const DriveStats& r) {
    nb::dict d;
    d["reads"] = r.reads, d["read_bytes"] = r.read_bytes, d["read_ns"] = r.read_ns, d["busy_ns"] = r.busy_ns;
    d["queued"] = r.queued, d["in_flight"] = r.in_flight, d["oldest_read_ns"] = r.oldest_read_ns,
    d["errors"] = r.errors, d["re_reads"] = r.re_reads;
    d["damaged"] = r.damaged, d["direct"] = r.direct;
    d["read_classes"] = nb::cast(r.read_classes);
    return d;
}

nb::dict stats(Server& server) {
    const ServerStats s = unlocked([&] { return server.stats(); });
    nb::dict d, cache, slots;
    nb::list roots, clients;
    cache["hits"] = s.hits, cache["misses"] = s.misses, cache["joined"] = s.joined;
    cache["prefetched"] = s.prefetched, cache["prefetch_hits"] = s.prefetch_hits;
    cache["prefetch_wasted"] = s.prefetch_wasted, cache["evictions"] = s.evictions;
    slots["free"] = s.slots.free, slots["filling"] = s.slots.filling;
    slots["held"] = s.slots.held, slots["cached"] = s.slots.cached;
    for (const DriveStats& drive : s.drives) roots.append(drive_stats(drive));
    for (const ClientStats& client : s.clients) clients.append(client_stats(client));
    d["cache"] = cache, d["slots"] = slots, d["roots"] = roots, d["clients"] = clients;
    d["stale_releases"] = s.stale_releases, d["refused"] = s.refused, d["failed"] = s.failed;
    d["checked_bytes"] = s.checked_bytes, d["check_ns"] = s.check_ns, d["faults"] = s.faults;
    d["warming"] = s.warming, d["pinned"] = s.pinned, d["pin_slots"] = s.pin_slots;
    d["prefetch_slots"] = s.prefetch_slots, d["unused_prefetches"] = s.unused_prefetches;
    d["reading"] = s.flights, d["unwanted"] = s.unwanted_flights, d["waiting_for_slot"] = s.waiting_for_slot;
    d["call_off_steps"] = s.call_off_steps;
    d["open_files"] = s.open_files;
    d["read_bounds_ns"] = nb::cast(std::vector<uint64_t>(std::begin(kReadBoundsNs), std::end(kReadBoundsNs)));
    return d;
}

// A mapping of a memfd as a buffer.
struct PyMapping {
    Mapping map;
    bool writable;
};

int mapping_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    const PyMapping* py = nb::inst_ptr<PyMapping>(self);
    return PyBuffer_FillInfo(view, self, py->map.data(), static_cast<Py_ssize_t>(py->map.bytes()),
                             py->writable ? 0 : 1, flags);
}

PyType_Slot mapping_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(mapping_getbuffer)}, {0, nullptr}};

void bind_memory(nb::module_& m) {
    nb::class_<PyMapping>(m, "SharedMapping", nb::type_slots(mapping_slots))
        .def(
            "__init__",
            [](PyMapping* self, int fd, uint64_t bytes, bool writable) {
                new (self) PyMapping{Mapping(fd, bytes, writable, "shared memory"), writable};
            },
            arg("fd"), arg("size_bytes"), arg("writable"));
    m.def("make_memfd", [](const std::string& name) { return make_memfd(name).release(); }, arg("name"));
    m.def(
        "touches_guarded",
        [](int fd, uint64_t bytes) {
            const Mapping map(fd, bytes, true, "memory to be touched");
            const BusGuard guard(map.data(), bytes);
            for (uint64_t at = 0; at < bytes; at += kPage) *static_cast<volatile uint8_t*>(map.data() + at) = 1;
            return guard.tripped();
        },
        arg("fd"), arg("size_bytes"));
    m.def(
        "reserve",
        [](int fd, uint64_t bytes, const std::string& name, const nb::object& on_reserved) {
            const ReserveProgress progress = progress_to(on_reserved);
            return unlocked([&] { return reserve(fd, bytes, name, progress); });
        },
        arg("fd"), arg("size_bytes"), arg("name"), arg("on_reserved").none());
}

// ClientRing. Its mappings live as long as any buffer that was taken from it, also after close().

struct PyRing {
    std::shared_ptr<ClientRing> ring;
    ClientRing& open() const {
        if (!ring) throw nb::value_error("the ring was closed");
        return *ring;
    }
};

int ring_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    const PyRing* py = nb::inst_ptr<PyRing>(self);
    if (!py->ring) {
        PyErr_SetString(PyExc_ValueError, "the ring was closed");
        return -1;
    }
    const ClientRing& ring = *py->ring;
    const int made = PyBuffer_FillInfo(view, self, const_cast<uint8_t*>(ring.arena()),
                                       static_cast<Py_ssize_t>(ring.arena_bytes()), 1, flags);
    if (made == 0) view->internal = new std::shared_ptr<ClientRing>(py->ring);
    return made;
}

void ring_releasebuffer(PyObject*, Py_buffer* view) {
    delete static_cast<std::shared_ptr<ClientRing>*>(view->internal);
}

PyType_Slot ring_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(ring_getbuffer)},
                            {Py_bf_releasebuffer, reinterpret_cast<void*>(ring_releasebuffer)},
                            {0, nullptr}};

uint32_t ring_submit(const PyRing& py, uint64_t tag, uint8_t op, uint32_t layer,
                     const std::vector<uint32_t>& experts) {
    if (op < static_cast<uint8_t>(Op::lease) || op > static_cast<uint8_t>(Op::unpin) ||
        op == static_cast<uint8_t>(Op::release)) {
        throw nb::value_error("op must be 1, 3, 4, 5 or 6");
    }
    return py.open().submit(tag, static_cast<Op>(op), layer, experts.data(),
                            static_cast<uint32_t>(experts.size()));
}

uint32_t ring_release(const PyRing& py, const std::vector<uint32_t>& slots,
                      const std::vector<uint32_t>& generations) {
    if (slots.size() != generations.size()) throw nb::value_error("as many generations as slots");
    return py.open().release(slots.data(), generations.data(), static_cast<uint32_t>(slots.size()));
}

nb::list ring_poll(const PyRing& py, uint32_t most) {
    constexpr uint32_t kMost = 256;
    Completion completions[kMost];
    const uint32_t count = py.open().poll(completions, std::min(most, kMost));
    nb::list list;
    for (uint32_t i = 0; i < count; ++i) list.append(completions[i]);
    return list;
}

// Leases of one tag and source that were granted one after the other.
struct Grants {
    std::vector<Completion> completions;  // at least one
};

// Takes completions as a client that leases sets wants them: runs of granted leases, and everything else as it is.
nb::tuple ring_take(const PyRing& py) {
    constexpr uint32_t kMost = 256;
    Completion completions[kMost];
    const uint32_t count = py.open().poll(completions, kMost);
    nb::list granted, others;
    for (uint32_t i = 0; i < count;) {
        const Completion& first = completions[i];
        const auto is_grant = [&](const Completion& c) {
            return c.op == static_cast<uint8_t>(Op::lease) && c.status == static_cast<uint8_t>(Status::ok) &&
                   c.tag == first.tag && c.source == first.source;
        };
        if (!is_grant(first)) {
            others.append(first);
            ++i;
            continue;
        }
        const uint32_t begin = i;
        while (i < count && is_grant(completions[i])) ++i;
        granted.append(Grants{std::vector<Completion>(completions + begin, completions + i)});
    }
    return nb::make_tuple(granted, others);
}

nb::list slots_of(const Grants& grants) {
    nb::list list;
    for (const Completion& c : grants.completions) list.append(nb::make_tuple(c.expert, c.slot, c.generation));
    return list;
}

uint64_t bytes_of(const Grants& grants) {
    uint64_t sum = 0;
    for (const Completion& c : grants.completions) sum += c.payload_bytes;
    return sum;
}

// ValueError for what is no time. What is longer than a century is as long as for ever, infinity too.
int64_t nanoseconds_of(double seconds) {
    if (std::isnan(seconds)) throw nb::value_error("a time in seconds, not NaN");
    constexpr double kMost = 4e9;
    return static_cast<int64_t>(std::min(std::max(seconds, 0.0), kMost) * 1e9);
}

std::string ring_wait(const PyRing& py, std::optional<double> timeout_s, int other_fd) {
    static const char* const words[] = {"completions", "closed", "other", "timeout", ""};
    py.open();
    const std::shared_ptr<ClientRing> ring = py.ring;  // stays mapped also when another thread closes it now
    const uint64_t began_ns = now_ns();
    const int64_t timeout_ns = timeout_s ? nanoseconds_of(*timeout_s) : 0;
    while (true) {
        int64_t left_ns = -1;
        if (timeout_s) left_ns = std::max<int64_t>(0, timeout_ns - static_cast<int64_t>(now_ns() - began_ns));
        const ClientRing::Woken woken = unlocked([&] { return ring->wait(left_ns, other_fd); });
        if (woken != ClientRing::Woken::interrupted) return words[static_cast<int>(woken)];
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

void bind_server(nb::module_& m) {
    nb::class_<Server>(m, "Server")
        .def(nb::new_(&make_server), nb::kw_only(), arg("slot_bytes"), arg("slots"), arg("policy"), arg("pins"),
             arg("io_depth"), arg("checkers"), arg("verify"), arg("max_clients"), arg("quota"), arg("entries"),
             arg("open_files"), arg("on_reserved").none())
        .def("add_file", &Server::add_file, arg("root"), arg("path"), arg("direct"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("set_layer", &set_layer, arg("layer"), arg("payload_bytes"), arg("pieces"), arg("records"))
        .def("start", &Server::start, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("arena_fd", &Server::arena_fd)
        .def_prop_ro("arena_bytes", &Server::arena_bytes)
        .def_prop_ro("arena_huge_bytes", &Server::arena_huge_bytes)
        .def_prop_ro("events_fd", &Server::events_fd)
        .def("add_client", &add_client, arg("name"))
        .def("remove_client", &Server::remove_client, arg("client"), nb::call_guard<nb::gil_scoped_release>())
        .def("violations", &Server::violations, nb::call_guard<nb::gil_scoped_release>())
        .def("stats", &stats)
        .def("warm", &Server::warm, arg("layer"), arg("experts"), nb::call_guard<nb::gil_scoped_release>())
        .def("pin", &Server::pin, arg("layer"), arg("experts"), nb::call_guard<nb::gil_scoped_release>())
        .def("unpin", nb::overload_cast<uint32_t, const std::vector<uint32_t>&>(&Server::unpin), arg("layer"),
             arg("experts"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "inject",
            [](Server& server, const std::string& kind, int64_t file, uint64_t begin, uint64_t end, int64_t times,
               double probability, uint64_t argument, uint64_t seed) {
                server.inject(fault_rule(kind, file, begin, end, times, probability, argument), seed);
            },
            arg("kind"), nb::kw_only(), arg("file"), arg("begin"), arg("end"), arg("times"), arg("probability"),
            arg("argument"), arg("seed"))
        .def("clear_faults", &Server::clear_faults)
        .def("resume_stalls", &Server::resume_stalls)
        .def("throttle", &Server::throttle, arg("root"), arg("bytes_per_s"))
        .def(
            "drain",
            [](Server& server, double timeout_s) {
                const uint64_t timeout_ns = static_cast<uint64_t>(nanoseconds_of(timeout_s));
                return unlocked([&] { return server.drain(timeout_ns); });
            },
            arg("timeout_s"))
        .def("close", &Server::close, nb::call_guard<nb::gil_scoped_release>());
}

void bind_client(nb::module_& m) {
    nb::class_<Completion>(m, "Completion")
        .def_ro("tag", &Completion::tag)
        .def_ro("op", &Completion::op)
        .def_ro("status", &Completion::status)
        .def_ro("source", &Completion::source)
        .def_ro("layer", &Completion::layer)
        .def_ro("expert", &Completion::expert)
        .def_ro("slot", &Completion::slot)
        .def_ro("generation", &Completion::generation)
        .def_ro("file", &Completion::file)
        .def_ro("offset", &Completion::offset)
        .def_ro("payload_bytes", &Completion::payload_bytes)
        .def_ro("file_offset", &Completion::file_offset)
        .def_ro("error", &Completion::error);
    nb::class_<Grants>(m, "Grants")
        .def_prop_ro("tag", [](const Grants& grants) { return grants.completions.front().tag; })
        .def_prop_ro("source", [](const Grants& grants) { return grants.completions.front().source; })
        .def_prop_ro("payload_bytes", &bytes_of)
        .def("__len__", [](const Grants& grants) { return grants.completions.size(); })
        .def("slots", &slots_of)
        .def(
            "lend",
            [](const Grants& grants, nb::set awaited, nb::dict views, nb::callable view, nb::object on_release,
               nb::object request, nb::object session) {
                return make_leases(grants.completions,
                                   {std::move(awaited), std::move(views), std::move(view), std::move(on_release),
                                    std::move(request), std::move(session)});
            },
            arg("awaited"), arg("views"), arg("view"), arg("on_release"), arg("request"), arg("session"));
    nb::class_<PyRing>(m, "ClientRing", nb::type_slots(ring_slots))
        .def(
            "__init__",
            [](PyRing* self, int ring_fd, int arena_fd, uint64_t arena_bytes, int request_doorbell,
               int completion_doorbell) {
                new (self) PyRing{std::make_shared<ClientRing>(ring_fd, arena_fd, arena_bytes, request_doorbell,
                                                               completion_doorbell)};
            },
            arg("ring_fd"), arg("arena_fd"), arg("arena_bytes"), arg("request_doorbell"),
            arg("completion_doorbell"))
        .def("submit", &ring_submit, arg("tag"), arg("op"), arg("layer"), arg("experts"))
        .def("release", &ring_release, arg("slots"), arg("generations"))
        .def("poll", &ring_poll, arg("most"))
        .def("take", &ring_take)
        .def("wait", &ring_wait, arg("timeout_s").none(), arg("other_fd"))
        .def_prop_ro("closed_by_daemon", [](const PyRing& py) { return py.open().closed(); })
        .def_prop_ro("entries", [](const PyRing& py) { return py.open().entries(); })
        .def("close", [](PyRing& py) { py.ring.reset(); });
}

void bind_policy(nb::module_& m) {
    nb::class_<Policy>(m, "Policy")
        .def(nb::new_(
                 [](const std::string& name, uint64_t capacity, const LayerCounts& counts,
                    const std::vector<Pair>& pins) { return make_policy(name, capacity, counts, keys_of(pins)); }),
             arg("name"), arg("capacity"), arg("layer_counts"), arg("pins") = std::vector<Pair>{})
        .def(
            "access", [](Policy& p, uint32_t layer, uint32_t expert) { return p.access({layer, expert}); },
            arg("layer"), arg("expert"))
        .def(
            "insert",
            [](Policy& p, uint32_t layer, uint32_t expert) {
                std::vector<Key> evicted;
                if (!p.insert({layer, expert}, evicted)) {
                    throw std::runtime_error("every expert in the policy is held: there is no room for one more");
                }
                std::vector<Pair> pairs;
                for (const Key& key : evicted) pairs.push_back(pair_of(key));
                return pairs;
            },
            arg("layer"), arg("expert"))
        .def("evict_one",
             [](Policy& p) {
                 Key key;
                 return p.evict_one(key) ? std::optional<Pair>(pair_of(key)) : std::nullopt;
             })
        .def(
            "hold", [](Policy& p, uint32_t layer, uint32_t expert) { p.hold({layer, expert}); }, arg("layer"),
            arg("expert"))
        .def(
            "unhold", [](Policy& p, uint32_t layer, uint32_t expert) { p.unhold({layer, expert}); }, arg("layer"),
            arg("expert"))
        .def(
            "remove", [](Policy& p, uint32_t layer, uint32_t expert) { p.remove({layer, expert}); }, arg("layer"),
            arg("expert"))
        .def(
            "contains",
            [](const Policy& p, uint32_t layer, uint32_t expert) { return p.contains({layer, expert}); },
            arg("layer"), arg("expert"))
        .def(
            "held", [](const Policy& p, uint32_t layer, uint32_t expert) { return p.held({layer, expert}); },
            arg("layer"), arg("expert"))
        .def("__len__", &Policy::size)
        .def_prop_ro("capacity", &Policy::capacity);
    m.def("policy_names", [] {
        nb::list names;
        for (const std::string& name : policy_names()) names.append(name);
        return nb::tuple(names);
    });
    m.def(
        "divide", [](uint64_t slots, const LayerCounts& counts) { return divide(slots, counts); }, arg("slots"),
        arg("layer_counts"));
}

// Every constant of layout.h, for the comparison with store/protocol/ring_layout.py.
nb::dict layout() {
    nb::dict d;
    d["magic"] = nb::bytes(kMagic, sizeof kMagic);
    d["request_bytes"] = sizeof(Request), d["completion_bytes"] = sizeof(Completion),
    d["header_bytes"] = sizeof(RingHeader);
    d["requests_at"] = kRequestsAt, d["completions_at"] = completions_at(kDefaultEntries);
    d["ring_bytes"] = ring_bytes(kDefaultEntries), d["default_entries"] = kDefaultEntries;
    d["entries_max"] = kEntriesMax, d["clients_max"] = kClientsMax, d["slots_max"] = kSlotsMax;
    d["chunk_bytes"] = kChunkBytes;
#define K3_AT(type, member) d[#type "." #member] = offsetof(type, member)
    K3_AT(RingHeader, magic), K3_AT(RingHeader, entries), K3_AT(RingHeader, request_tail);
    K3_AT(RingHeader, request_head), K3_AT(RingHeader, completion_tail), K3_AT(RingHeader, completion_head);
    K3_AT(RingHeader, daemon_asleep), K3_AT(RingHeader, client_asleep), K3_AT(RingHeader, state);
    K3_AT(Request, tag), K3_AT(Request, op), K3_AT(Request, layer), K3_AT(Request, expert),
        K3_AT(Request, generation);
    K3_AT(Completion, tag), K3_AT(Completion, op), K3_AT(Completion, status), K3_AT(Completion, source);
    K3_AT(Completion, layer), K3_AT(Completion, expert), K3_AT(Completion, slot), K3_AT(Completion, generation);
    K3_AT(Completion, file), K3_AT(Completion, offset), K3_AT(Completion, payload_bytes);
    K3_AT(Completion, file_offset), K3_AT(Completion, error);
#undef K3_AT
    return d;
}

}  // namespace
}  // namespace k3::store

NB_MODULE(_store, m) {
    using namespace k3::store;
    nb::set_leak_warnings(false);  // a process may end with a source open, as with a file
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const std::system_error& error) {
            const nb::tuple what = nb::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, what.ptr());
        }
    });
    m.def("xxh3_128", &digest_of, nb::arg("data"));
    m.def("xxh3_128_in_steps", &digest_in_steps, nb::arg("data"), nb::arg("steps"));
    m.def("xxh3_variant", &xxh3_variant);
    m.def("set_xxh3_variant", &set_xxh3_variant, nb::arg("name"));
    m.def("layout", &layout);
    bind_memory(m);
    bind_policy(m);
    bind_server(m);
    bind_leases(m);
    bind_client(m);
    bind_lending(m);
}
