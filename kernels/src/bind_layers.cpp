// Bindings of layers.h. States are updated in place; all outputs are given by the caller.
#include <utility>

#include "bind.h"
#include "layers.h"

namespace k3 {

namespace {

template <class Array>
int64_t extent(const Array& a, size_t axis) {
    return static_cast<int64_t>(a.shape(axis));
}

void bind_kda_heads(const In<float>& q, const In<float>& k, const In<float>& v, const In<float>& f,
                    const In<float>& b, const In<float>& g, const Out<float>& windows, const Out<float>& memory,
                    const In<float>& conv, const In<float>& a_log, const In<float>& dt_bias, const In<float>& norm,
                    float lower_bound, float l2_eps, float query_scale, float norm_eps, const Out<float>& out) {
    require(memory, "memory", {-1, -1, -1});
    const int64_t heads = extent(memory, 0), dim = extent(memory, 1), width = heads * dim;
    require(memory, "memory", {heads, dim, dim});
    require(q, "q", {-1, width});
    const int64_t tokens = extent(q, 0);
    const std::pair<const In<float>*, const char*> rows[] = {{&k, "k"}, {&v, "v"}, {&f, "f"}, {&g, "g"}};
    for (const auto& row : rows) require(*row.first, row.second, {tokens, width});
    require(b, "b", {tokens, heads});
    require(conv, "conv", {3, -1, width});
    const int64_t taps = extent(conv, 1);
    if (taps < 1 || taps > kTapsMax) throw nb::value_error("a short convolution has 1 to 16 taps");
    require(windows, "windows", {3, taps - 1, width});
    require(a_log, "a_log", {heads});
    require(dt_bias, "dt_bias", {width});
    require(norm, "norm", {dim});
    require(out, "out", {tokens, width});
    unlocked([&] {
        kda_heads({
            .q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .f = f.data(),
            .b = b.data(),
            .g = g.data(),
            .conv = conv.data(),
            .a_log = a_log.data(),
            .dt_bias = dt_bias.data(),
            .norm = norm.data(),
            .windows = windows.data(),
            .memory = memory.data(),
            .out = out.data(),
            .lower_bound = lower_bound,
            .l2_eps = l2_eps,
            .query_scale = query_scale,
            .norm_eps = norm_eps,
            .tokens = tokens,
            .heads = heads,
            .dim = dim,
            .taps = taps,
        });
    });
}

CacheType cache_type(const AnyIn& cache, const char* name) {
    require(cache, name, {-1, -1});
    if (cache.dtype() == nb::dtype<float>()) return CacheType::f32;
    if (cache.dtype() == nb::dtype<uint16_t>()) return CacheType::bf16;
    if (is_half(cache)) return CacheType::f16;
    throw nb::type_error(
        (std::string(name) + " must be float32, float16 or uint16 (bfloat16 bit patterns)").c_str());
}

void bind_latent_attention(const In<float>& q_latent, const In<float>& q_rope, const AnyIn& latent,
                           const AnyIn& rope, float scale, const Out<float>& out) {
    const CacheType type = cache_type(latent, "latent");
    if (cache_type(rope, "rope") != type) throw nb::type_error("latent and rope caches differ in type");
    const LatentCache cache = {
        .type = type,
        .latent = latent.data(),
        .rope = rope.data(),
        .rows = extent(latent, 0),
        .latent_width = extent(latent, 1),
        .rope_width = extent(rope, 1),
    };
    require(q_latent, "q_latent", {-1, -1, cache.latent_width});
    const int64_t tokens = extent(q_latent, 0), heads = extent(q_latent, 1);
    require(q_rope, "q_rope", {tokens, heads, cache.rope_width});
    require(out, "out", {tokens, heads, cache.latent_width});
    if (extent(rope, 0) != cache.rows) throw nb::value_error("latent and rope caches differ in length");
    if (cache.rows < tokens) throw nb::value_error("the caches must hold the queries' own positions");
    unlocked([&] { latent_attention(q_latent.data(), q_rope.data(), tokens, heads, cache, scale, out.data()); });
}

void bind_absorb_query(const In<float>& q, const std::string& encoding, const AnyIn& data,
                       const nb::object& scales, int64_t value_dim, const Out<float>& out) {
    require(q, "q", {-1, -1, -1});
    const int64_t tokens = extent(q, 0), heads = extent(q, 1), key_dim = extent(q, 2);
    require(out, "out", {tokens, heads, -1});
    if (value_dim < 0) throw nb::value_error("value_dim is negative");
    const Matrix w = matrix_of(encoding, heads * (key_dim + value_dim), extent(out, 2), data, scales);
    unlocked([&] { absorb_query(q.data(), tokens, heads, key_dim, value_dim, w, out.data()); });
}

void bind_expand_value(const In<float>& x, const std::string& encoding, const AnyIn& data,
                       const nb::object& scales, int64_t key_dim, const Out<float>& out) {
    require(x, "x", {-1, -1, -1});
    const int64_t tokens = extent(x, 0), heads = extent(x, 1);
    require(out, "out", {tokens, heads, -1});
    const int64_t value_dim = extent(out, 2);
    if (key_dim < 0) throw nb::value_error("key_dim is negative");
    const Matrix w = matrix_of(encoding, heads * (key_dim + value_dim), extent(x, 2), data, scales);
    unlocked([&] { expand_value(x.data(), tokens, heads, key_dim, value_dim, w, out.data()); });
}

}  // namespace

void bind_layers(nb::module_& m) {
    m.def("kda_heads", &bind_kda_heads, nb::arg("q").noconvert(), nb::arg("k").noconvert(),
          nb::arg("v").noconvert(), nb::arg("f").noconvert(), nb::arg("b").noconvert(), nb::arg("g").noconvert(),
          nb::arg("windows").noconvert(), nb::arg("memory").noconvert(), nb::arg("conv").noconvert(),
          nb::arg("a_log").noconvert(), nb::arg("dt_bias").noconvert(), nb::arg("norm").noconvert(),
          nb::arg("lower_bound"), nb::arg("l2_eps"), nb::arg("query_scale"), nb::arg("norm_eps"),
          nb::arg("out").noconvert());
    m.def("latent_attention", &bind_latent_attention, nb::arg("q_latent").noconvert(),
          nb::arg("q_rope").noconvert(), nb::arg("latent").noconvert(), nb::arg("rope").noconvert(),
          nb::arg("scale"), nb::arg("out").noconvert());
    m.def("absorb_query", &bind_absorb_query, nb::arg("q").noconvert(), nb::arg("encoding"),
          nb::arg("data").noconvert(), nb::arg("scales").none(), nb::arg("value_dim"), nb::arg("out").noconvert());
    m.def("expand_value", &bind_expand_value, nb::arg("x").noconvert(), nb::arg("encoding"),
          nb::arg("data").noconvert(), nb::arg("scales").none(), nb::arg("key_dim"), nb::arg("out").noconvert());
}

}  // namespace k3
