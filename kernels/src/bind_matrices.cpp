// Bindings of quantize.h and matmul.h. All outputs are given by the caller.
#include <algorithm>
#include <atomic>

#include "bind.h"
#include "matmul.h"
#include "quantize.h"
#include "threads.h"
#include "variant.h"

namespace k3 {

namespace {

template <class T>
const T* typed(const AnyIn& array, const char* name) {
    if (array.dtype() != nb::dtype<T>())
        throw nb::type_error((std::string(name) + " has the wrong dtype").c_str());
    return static_cast<const T*>(array.data());
}

Rows rows_of(const AnyIn& w) {
    require(w, "w", {-1, -1});
    const int64_t columns = static_cast<int64_t>(w.shape(1));
    if (w.dtype() == nb::dtype<uint16_t>()) return {Encoding::bf16, columns, w.data()};
    if (is_half(w)) return {Encoding::f16, columns, w.data()};
    if (w.dtype() == nb::dtype<float>()) return {Encoding::f32, columns, w.data()};
    throw nb::type_error("w must be uint16 (bfloat16 bit patterns), float16 or float32");
}

// None, or (row, column, value) of the first value that is not finite.
nb::object place_of(const NonFinite& place) {
    return place.found ? nb::object(nb::make_tuple(place.row, place.column, place.value)) : nb::none();
}

nb::object bind_quantize_int8(const AnyIn& w, const Out<uint8_t>& q, const Out<float>& scales) {
    const Rows view = rows_of(w);
    const int64_t rows = static_cast<int64_t>(w.shape(0));
    require(q, "q", {rows, view.columns});
    require(scales, "scales", {rows});
    return place_of(unlocked([&] {
        return quantize_int8(view, rows, q.data(), scales.data()) ? NonFinite{} : find_nonfinite(view, rows);
    }));
}

nb::object bind_quantize_int4(const AnyIn& w, const Out<uint8_t>& q, const Out<float>& scales) {
    const Rows view = rows_of(w);
    const int64_t rows = static_cast<int64_t>(w.shape(0));
    require(q, "q", {rows, ceil_div(view.columns, 2)});
    require(scales, "scales", {rows, ceil_div(view.columns, kInt4Group)});
    return place_of(unlocked([&] {
        return quantize_int4(view, rows, q.data(), scales.data()) ? NonFinite{} : find_nonfinite(view, rows);
    }));
}

// out = w as float32 [rows, columns]. MXFP4: -1, or the index of the first scale byte that is 255 (then
// nothing is done).
int64_t bind_decode(const std::string& encoding, const AnyIn& data, const nb::object& scales,
                    const Out<float>& out) {
    require(out, "out", {-1, -1});
    const Matrix w =
        matrix_of(encoding, static_cast<int64_t>(out.shape(0)), static_cast<int64_t>(out.shape(1)), data, scales);
    return unlocked([&] {
        const int64_t reserved =
            w.encoding == Encoding::mxfp4 ? find_reserved(w.exponents, w.rows * (w.columns / kMxGroup)) : -1;
        if (reserved < 0) decode(w, out.data());
        return reserved;
    });
}

// y = x w^T. None, or the place of a value of x that is not finite (only when not exact).
nb::object bind_matmul(const In<float>& x, const std::string& encoding, const AnyIn& data,
                       const nb::object& scales, const Out<float>& y, bool exact) {
    require(x, "x", {-1, -1});
    const int64_t rows = static_cast<int64_t>(x.shape(0)), columns = static_cast<int64_t>(x.shape(1));
    require(y, "y", {rows, -1});
    const Matrix w = matrix_of(encoding, static_cast<int64_t>(y.shape(1)), columns, data, scales);
    if (w.encoding == Encoding::mxfp4) throw nb::value_error("MXFP4 matrices are multiplied by expert_forward");
    const bool integers = !exact && (w.encoding == Encoding::int8 || w.encoding == Encoding::int4);
    return place_of(unlocked([&] {
        if (!integers) {
            matmul_exact(x.data(), rows, w, y.data());
            return NonFinite{};
        }
        return matmul_int8(x.data(), rows, w, y.data());
    }));
}

int64_t bind_first_difference(const In<uint8_t>& a, const In<uint8_t>& b) {
    require(a, "a", {-1});
    require(b, "b", {static_cast<int64_t>(a.shape(0))});
    return unlocked([&] { return first_difference(a.data(), b.data(), static_cast<int64_t>(a.shape(0))); });
}

// int8 multiplications done by all threads together in `rounds` turns of a loop each.
int64_t bind_probe_dots(int64_t rounds) {
    return unlocked([&] {
        std::atomic<int64_t> done{0};
        parallel_for(get_threads(), 1, [&](int64_t begin, int64_t end) {
            int32_t unused;
            for (; begin < end; ++begin) done += kernels().probe_dots(rounds, &unused);
        });
        return done.load();
    });
}

// Reads every byte of `data`, each thread a part of its own.
int64_t bind_probe_read(const In<uint8_t>& data) {
    require(data, "data", {-1});
    const int64_t bytes = static_cast<int64_t>(data.shape(0)), piece = ceil_div(bytes, get_threads());
    return unlocked([&] {
        std::atomic<int64_t> seen{0};
        parallel_for(get_threads(), 1, [&](int64_t begin, int64_t end) {
            for (; begin < end; ++begin) {
                const int64_t at = std::min(bytes, begin * piece);
                seen += kernels().probe_read(data.data() + at, std::min(piece, bytes - at));
            }
        });
        return seen.load();
    });
}

}  // namespace

Matrix matrix_of(const std::string& encoding, int64_t rows, int64_t columns, const AnyIn& data,
                 const nb::object& scales) {
    const auto floats = [&](std::initializer_list<int64_t> shape) {
        const auto array = nb::cast<In<float>>(scales);
        require(array, "scales", shape);
        return array.data();
    };
    if (encoding == "bf16") {
        require(data, "data", {rows, columns});
        return {
            .encoding = Encoding::bf16, .rows = rows, .columns = columns, .data = typed<uint16_t>(data, "data")};
    }
    if (encoding == "f16") {
        require(data, "data", {rows, columns});
        if (!is_half(data)) throw nb::type_error("data has the wrong dtype");
        return {.encoding = Encoding::f16, .rows = rows, .columns = columns, .data = data.data()};
    }
    if (encoding == "f32") {
        require(data, "data", {rows, columns});
        return {.encoding = Encoding::f32, .rows = rows, .columns = columns, .data = typed<float>(data, "data")};
    }
    if (encoding == "int8") {
        require(data, "data", {rows, columns});
        return {
            .encoding = Encoding::int8,
            .rows = rows,
            .columns = columns,
            .data = typed<uint8_t>(data, "data"),
            .scales = floats({rows}),
        };
    }
    if (encoding == "int4") {
        require(data, "data", {rows, ceil_div(columns, 2)});
        return {
            .encoding = Encoding::int4,
            .rows = rows,
            .columns = columns,
            .data = typed<uint8_t>(data, "data"),
            .scales = floats({rows, ceil_div(columns, kInt4Group)}),
        };
    }
    if (encoding == "mxfp4") {
        if (columns % kMxGroup != 0) throw nb::value_error("MXFP4 columns must be a multiple of 32");
        require(data, "data", {rows, columns / 2});
        const auto array = nb::cast<In<uint8_t>>(scales);
        require(array, "scales", {rows, columns / kMxGroup});
        return {
            .encoding = Encoding::mxfp4,
            .rows = rows,
            .columns = columns,
            .data = typed<uint8_t>(data, "data"),
            .exponents = array.data(),
        };
    }
    throw nb::value_error(("unknown encoding " + encoding).c_str());
}

void bind_matrices(nb::module_& m) {
    m.def("quantize_int8", &bind_quantize_int8, nb::arg("w").noconvert(), nb::arg("q").noconvert(),
          nb::arg("scales").noconvert());
    m.def("quantize_int4", &bind_quantize_int4, nb::arg("w").noconvert(), nb::arg("q").noconvert(),
          nb::arg("scales").noconvert());
    m.def("decode", &bind_decode, nb::arg("encoding"), nb::arg("data").noconvert(), nb::arg("scales").none(),
          nb::arg("out").noconvert());
    m.def("matmul", &bind_matmul, nb::arg("x").noconvert(), nb::arg("encoding"), nb::arg("data").noconvert(),
          nb::arg("scales").none(), nb::arg("y").noconvert(), nb::arg("exact"));
    m.def("probe_dots", &bind_probe_dots, nb::arg("rounds"));
    m.def("probe_read", &bind_probe_read, nb::arg("data").noconvert());
    m.def("first_difference", &bind_first_difference, nb::arg("a").noconvert(), nb::arg("b").noconvert());
}

}  // namespace k3
