// SHA-256: see sha256.h.
#include <type_traits>

#include "bind.h"
#include "sha256.h"

namespace k3 {
namespace {

// A message is kept in an array of the caller, so that the module has no objects of its own.
Sha256* message_in(const Out<uint64_t>& array) {
    static_assert(sizeof(Sha256) % sizeof(uint64_t) == 0 && std::is_trivially_copyable_v<Sha256>);
    require(array, "message", {sizeof(Sha256) / sizeof(uint64_t)});
    return reinterpret_cast<Sha256*>(array.data());
}

void begin(const Out<uint64_t>& message) { *message_in(message) = Sha256(); }

void digest(const Out<uint64_t>& message, const Out<uint8_t>& out) {
    require(out, "out", {32});
    sha256_digest(*message_in(message), out.data());
}

void update(const nb::list& messages, const nb::list& data) {
    const size_t count = messages.size();
    if (count != data.size()) throw nb::value_error("as many arrays are needed as messages");
    if (count > kSha256AtOnce) throw nb::value_error("too many messages in one call");
    Sha256* pointers[kSha256AtOnce];
    const uint8_t* bytes[kSha256AtOnce];
    int64_t sizes[kSha256AtOnce];
    for (size_t i = 0; i < count; ++i) {
        pointers[i] = message_in(nb::cast<Out<uint64_t>>(messages[i], false));  // the lists keep the arrays
        for (size_t before = 0; before < i; ++before) {
            if (pointers[before] == pointers[i]) throw nb::value_error("a message may be in one call only once");
        }
        const auto array = nb::cast<In<uint8_t>>(data[i], false);
        bytes[i] = array.data();
        sizes[i] = static_cast<int64_t>(array.size());
    }
    unlocked([&] { sha256_update(pointers, bytes, sizes, static_cast<int>(count)); });
}

}  // namespace

void bind_sha256(nb::module_& m) {
    m.def("sha256_begin", &begin, nb::arg("message"));
    m.def("sha256_digest", &digest, nb::arg("message"), nb::arg("out"));
    m.def("sha256_update", &update, nb::arg("messages"), nb::arg("data"));
    m.def("sha256_side_by_side", &sha256_side_by_side);
    m.def("has_sha_instructions", &has_sha_instructions);
    m.def("want_sha_instructions", &want_sha_instructions, nb::arg("wanted"));
}

}  // namespace k3
