// Bindings of layers.h. States are updated in place; all outputs are given by the caller.
#include "bind.h"
#include "layers.h"

namespace k3 {

namespace {

template <class Array>
int64_t extent(const Array& a, size_t axis) {
    return static_cast<int64_t>(a.shape(axis));
}

void bind_kda_step(const Out<float>& state, const In<float>& q, const In<float>& k, const In<float>& v,
                   const In<float>& g, const In<float>& beta, const Out<float>& out) {
    require(state, "state", {-1, -1, -1});
    require(q, "q", {-1, extent(state, 0), extent(state, 1)});
    const int64_t tokens = extent(q, 0), heads = extent(state, 0), key_dim = extent(state, 1),
                  value_dim = extent(state, 2);
    require(k, "k", {tokens, heads, key_dim});
    require(v, "v", {tokens, heads, value_dim});
    require(g, "g", {tokens, heads, key_dim});
    require(beta, "beta", {tokens, heads});
    require(out, "out", {tokens, heads, value_dim});
    unlocked([&] {
        kda_step({state.data(), q.data(), k.data(), v.data(), nullptr, beta.data(), out.data(), tokens, heads,
                  key_dim, value_dim},
                 g.data());
    });
}

void bind_short_conv(const Out<float>& window, const In<float>& u, const In<float>& w,
                     const Out<float>& out) {
    require(u, "u", {-1, -1});
    const int64_t tokens = extent(u, 0), channels = extent(u, 1);
    require(w, "w", {channels, -1});
    const int64_t taps = extent(w, 1);
    if (taps < 1 || taps > kTapsMax) throw nb::value_error("a short convolution has 1 to 16 taps");
    require(window, "window", {taps - 1, channels});
    require(out, "out", {tokens, channels});
    unlocked([&] { short_conv({window.data(), u.data(), w.data(), out.data(), tokens, channels, taps}); });
}

Matrix cache_of(const AnyIn& cache, const char* name) {
    require(cache, name, {-1, -1});
    const bool bf16 = cache.dtype() == nb::dtype<uint16_t>();
    if (!bf16 && cache.dtype() != nb::dtype<float>()) {
        throw nb::type_error(
            (std::string(name) + " must be float32 or uint16 (bfloat16 bit patterns)").c_str());
    }
    return {bf16 ? Encoding::BF16 : Encoding::F32,
            extent(cache, 0),
            extent(cache, 1),
            cache.data(),
            nullptr,
            nullptr};
}

void bind_latent_attention(const In<float>& q_latent, const In<float>& q_rope, const AnyIn& latent,
                           const AnyIn& rope, float scale, const Out<float>& out) {
    const Matrix c = cache_of(latent, "latent"), r = cache_of(rope, "rope");
    require(q_latent, "q_latent", {-1, -1, c.columns});
    const int64_t tokens = extent(q_latent, 0), heads = extent(q_latent, 1);
    require(q_rope, "q_rope", {tokens, heads, r.columns});
    require(out, "out", {tokens, heads, c.columns});
    if (c.rows != r.rows) throw nb::value_error("latent and rope caches differ in length");
    if (c.rows < tokens) throw nb::value_error("the caches must hold the queries' own positions");
    unlocked(
        [&] { latent_attention(q_latent.data(), q_rope.data(), tokens, heads, c, r, scale, out.data()); });
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
    m.def("kda_step", &bind_kda_step, nb::arg("state").noconvert(), nb::arg("q").noconvert(),
          nb::arg("k").noconvert(), nb::arg("v").noconvert(), nb::arg("g").noconvert(),
          nb::arg("beta").noconvert(), nb::arg("out").noconvert());
    m.def("short_conv", &bind_short_conv, nb::arg("window").noconvert(), nb::arg("u").noconvert(),
          nb::arg("w").noconvert(), nb::arg("out").noconvert());
    m.def("latent_attention", &bind_latent_attention, nb::arg("q_latent").noconvert(),
          nb::arg("q_rope").noconvert(), nb::arg("latent").noconvert(), nb::arg("rope").noconvert(),
          nb::arg("scale"), nb::arg("out").noconvert());
    m.def("absorb_query", &bind_absorb_query, nb::arg("q").noconvert(), nb::arg("encoding"),
          nb::arg("data").noconvert(), nb::arg("scales").none(), nb::arg("value_dim"),
          nb::arg("out").noconvert());
    m.def("expand_value", &bind_expand_value, nb::arg("x").noconvert(), nb::arg("encoding"),
          nb::arg("data").noconvert(), nb::arg("scales").none(), nb::arg("key_dim"),
          nb::arg("out").noconvert());
}

}  // namespace k3
