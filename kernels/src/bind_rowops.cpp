// Bindings of rowops.h and expert.h. All outputs are given by the caller and may be an input.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "expert.h"
#include "rowops.h"

namespace k3 {

namespace {

int64_t extent(const In<float>& a, size_t axis) { return static_cast<int64_t>(a.shape(axis)); }

void bind_rms_norm(const In<float>& x, const In<float>& w, float eps, const Out<float>& y) {
    require(x, "x", {-1, -1});
    require(w, "w", {extent(x, 1)});
    require(y, "y", {extent(x, 0), extent(x, 1)});
    unlocked([&] { rms_norm(x.data(), extent(x, 0), extent(x, 1), w.data(), eps, y.data()); });
}

void bind_softmax(const In<float>& x, const Out<float>& y) {
    require(x, "x", {-1, -1});
    require(y, "y", {extent(x, 0), extent(x, 1)});
    if (extent(x, 1) == 0) throw nb::value_error("softmax of no columns");
    unlocked([&] { softmax(x.data(), extent(x, 0), extent(x, 1), y.data()); });
}

void bind_elementwise(const std::string& name, const In<float>& x, const Out<float>& y) {
    require(x, "x", {-1});
    require(y, "y", {extent(x, 0)});
    static const std::array<std::pair<const char*, Function>, 4> functions = {{{"exp", Function::exp},
                                                                               {"tanh", Function::tanh},
                                                                               {"sigmoid", Function::sigmoid},
                                                                               {"silu", Function::silu}}};
    for (const auto& known : functions) {
        if (name == known.first)
            return unlocked([&] { elementwise(known.second, x.data(), extent(x, 0), y.data()); });
    }
    throw nb::value_error(("no function " + name).c_str());
}

void bind_situ(const In<float>& gate, const In<float>& up, float beta, float linear_beta, const Out<float>& y) {
    require(gate, "gate", {-1});
    require(up, "up", {extent(gate, 0)});
    require(y, "y", {extent(gate, 0)});
    unlocked([&] { situ(gate.data(), up.data(), extent(gate, 0), beta, linear_beta, y.data()); });
}

void bind_gated(const In<float>& x, const In<float>& gate, const Out<float>& y) {
    require(x, "x", {-1});
    require(gate, "gate", {extent(x, 0)});
    require(y, "y", {extent(x, 0)});
    unlocked([&] { gated(x.data(), gate.data(), extent(x, 0), y.data()); });
}

int64_t bind_top_k(const In<float>& choice, const Out<int64_t>& ids) {
    require(choice, "choice", {-1, -1});
    require(ids, "ids", {extent(choice, 0), -1});
    const int64_t k = static_cast<int64_t>(ids.shape(1));
    if (k < 1 || k > extent(choice, 1)) throw nb::value_error("k must be from 1 to the number of columns");
    return unlocked([&] { return top_k(choice.data(), extent(choice, 0), extent(choice, 1), k, ids.data()); });
}

void bind_residual_mix(const std::vector<In<float>>& entries, const In<float>& weight, float eps,
                       const Out<float>& y) {
    if (entries.empty() || entries.size() > kMixMax) throw nb::value_error("a mix needs 1 to 64 entries");
    require(y, "y", {-1, -1});
    const int64_t rows = static_cast<int64_t>(y.shape(0)), columns = static_cast<int64_t>(y.shape(1));
    std::vector<const float*> pointers;
    for (const auto& entry : entries) {
        require(entry, "entry", {rows, columns});
        pointers.push_back(entry.data());
    }
    require(weight, "weight", {columns});
    unlocked([&] {
        residual_mix(pointers.data(), static_cast<int>(pointers.size()), rows, columns, weight.data(), eps,
                     y.data());
    });
}

// (packed offset, scale offset, rows, columns) of one matrix in the payload.
using Part = std::tuple<int64_t, int64_t, int64_t, int64_t>;

Matrix part_of(const In<uint8_t>& payload, const Part& part, const char* name) {
    const auto [packed, scale, rows, columns] = part;
    const int64_t size = static_cast<int64_t>(payload.shape(0));
    // Bounds without products that could overflow: rows * columns / 2 <= size.
    const bool sound = rows > 0 && columns > 0 && columns % kMxGroup == 0 && columns / 2 <= size / rows &&
                       packed >= 0 && packed <= size - rows * (columns / 2) && scale >= 0 &&
                       scale <= size - rows * (columns / kMxGroup);
    if (!sound) throw nb::value_error((std::string(name) + " does not lie inside the payload").c_str());
    return {
        .encoding = Encoding::mxfp4,
        .rows = rows,
        .columns = columns,
        .data = payload.data() + packed,
        .exponents = payload.data() + scale,
    };
}

// None; ("w1" | "w2" | "w3", row, group) of a reserved scale byte; ("input" | "hidden", row, column, value).
nb::object bind_expert_forward(const In<float>& z, const In<uint8_t>& payload, const Part& w1, const Part& w2,
                               const Part& w3, float beta, float linear_beta, bool exact, const Out<float>& y) {
    require(payload, "payload", {-1});
    const Expert expert = {
        .w1 = part_of(payload, w1, "w1"),
        .w2 = part_of(payload, w2, "w2"),
        .w3 = part_of(payload, w3, "w3"),
        .beta = beta,
        .linear_beta = linear_beta,
    };
    if (expert.w3.rows != expert.w1.rows || expert.w3.columns != expert.w1.columns ||
        expert.w2.columns != expert.w1.rows) {
        throw nb::value_error("w1, w2 and w3 do not fit together");
    }
    require(z, "z", {-1, expert.w1.columns});
    const int64_t rows = extent(z, 0);
    require(y, "y", {rows, expert.w2.rows});
    const ExpertRefusal refusal =
        unlocked([&] { return expert_forward(z.data(), rows, expert, exact, y.data()); });
    const NonFinite& place = refusal.place;
    switch (refusal.what) {
        case Refused::nothing: break;
        case Refused::input: return nb::make_tuple("input", place.row, place.column, place.value);
        case Refused::hidden: return nb::make_tuple("hidden", place.row, place.column, place.value);
        case Refused::w1: return nb::make_tuple("w1", place.row, place.column);
        case Refused::w2: return nb::make_tuple("w2", place.row, place.column);
        case Refused::w3: return nb::make_tuple("w3", place.row, place.column);
    }
    return nb::none();
}

}  // namespace

void bind_rowops(nb::module_& m) {
    m.def("rms_norm", &bind_rms_norm, nb::arg("x").noconvert(), nb::arg("w").noconvert(), nb::arg("eps"),
          nb::arg("y").noconvert());
    m.def("softmax", &bind_softmax, nb::arg("x").noconvert(), nb::arg("y").noconvert());
    m.def("elementwise", &bind_elementwise, nb::arg("name"), nb::arg("x").noconvert(), nb::arg("y").noconvert());
    m.def("situ", &bind_situ, nb::arg("gate").noconvert(), nb::arg("up").noconvert(), nb::arg("beta"),
          nb::arg("linear_beta"), nb::arg("y").noconvert());
    m.def("gated", &bind_gated, nb::arg("x").noconvert(), nb::arg("gate").noconvert(), nb::arg("y").noconvert());
    m.def("top_k", &bind_top_k, nb::arg("choice").noconvert(), nb::arg("ids").noconvert());
    m.def("residual_mix", &bind_residual_mix, nb::arg("entries").noconvert(), nb::arg("weight").noconvert(),
          nb::arg("eps"), nb::arg("y").noconvert());
    m.def("expert_forward", &bind_expert_forward, nb::arg("z").noconvert(), nb::arg("payload").noconvert(),
          nb::arg("w1"), nb::arg("w2"), nb::arg("w3"), nb::arg("beta"), nb::arg("linear_beta"), nb::arg("exact"),
          nb::arg("y").noconvert());
}

}  // namespace k3
