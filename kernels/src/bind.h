// Array types and checks that the bindings share. Bindings only check dtype (by type), shape and contiguity
// and drop the interpreter's lock; they hold no arithmetic.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "matrix.h"

namespace k3 {

namespace nb = nanobind;

template <class T>
using In = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

// An input whose dtype is looked at later.
using AnyIn = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

inline bool is_half(const AnyIn& array) {
    const nb::dlpack::dtype half = {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    return array.dtype() == half;
}

// Runs `work` without the interpreter's lock.
template <class Work>
auto unlocked(const Work& work) {
    const nb::gil_scoped_release release;
    return work();
}

// ValueError unless `array` has exactly this shape. An extent of -1 stands for any.
template <class Array>
void require(const Array& array, const char* name, std::initializer_list<int64_t> shape) {
    bool fits = array.ndim() == shape.size();
    std::string wanted, have;
    size_t axis = 0;
    for (const int64_t extent : shape) {
        if (fits && extent >= 0 && static_cast<int64_t>(array.shape(axis)) != extent) fits = false;
        if (fits) ++axis;
        wanted += (wanted.empty() ? "" : ", ") + (extent < 0 ? std::string("any") : std::to_string(extent));
    }
    if (fits) return;
    for (size_t i = 0; i < array.ndim(); ++i) have += (i ? ", " : "") + std::to_string(array.shape(i));
    throw nb::value_error((std::string(name) + " must have shape [" + wanted + "], not [" + have + "]").c_str());
}

// A weight matrix from its arrays, checked against the encoding's rules. `data` keeps its arrays alive by
// itself.
Matrix matrix_of(const std::string& encoding, int64_t rows, int64_t columns, const AnyIn& data,
                 const nb::object& scales);

void bind_matrices(nb::module_& m);
void bind_rowops(nb::module_& m);
void bind_layers(nb::module_& m);
void bind_sha256(nb::module_& m);

}  // namespace k3
