#include "expert.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "matmul.h"
#include "threads.h"

namespace k3 {

namespace {

constexpr NonFinite kNowhere{false, 0, 0, 0.0f};

// The calling thread's: activations quantized for w1 and w3, and for w2.
struct Between {
    QuantizedRows input, hidden;
};

// A working thread's: gate and up of one piece, decoded weights.
struct Piece {
    std::vector<float> gate, up, decoded;
    void room(int64_t numbers, int64_t weights) {
        gate.resize(std::max(gate.size(), static_cast<size_t>(numbers)));
        up.resize(gate.size());
        decoded.resize(std::max(decoded.size(), static_cast<size_t>(weights)));
    }
};
thread_local Piece piece_of_thread;

// Scale bytes are looked at where they are used, so that memory is read once; where it was is found
// afterwards.
ExpertRefusal refusal(const Expert& expert, Refused otherwise, const NonFinite& place) {
    const Matrix* const matrices[] = {&expert.w1, &expert.w2, &expert.w3};
    const Refused names[] = {Refused::w1, Refused::w2, Refused::w3};
    for (int i = 0; i < 3; ++i) {
        const int64_t groups = matrices[i]->columns / kMxGroup;
        const int64_t at = find_reserved(matrices[i]->exponents, matrices[i]->rows * groups);
        if (at >= 0) return {names[i], {true, at / groups, at % groups, 0.0f}};
    }
    return {otherwise, place};
}

bool reserved(const Matrix& w, int64_t begin, int64_t end) {
    const int64_t groups = w.columns / kMxGroup;
    return find_reserved(w.exponents + begin * groups, (end - begin) * groups) >= 0;
}

// Rows of the hidden layer per piece: whole groups of w2's activations, which are quantized where they arise.
int64_t hidden_grain(int64_t rows, int64_t columns) {
    return ceil_div(row_grain(rows, 2 * columns), kMxGroup) * kMxGroup;
}

ExpertRefusal with_int8(const float* z, int64_t rows, const Expert& expert, float* y) {
    static thread_local Between between;
    const Kernels& variant = kernels();
    const Matrix &w1 = expert.w1, &w2 = expert.w2, &w3 = expert.w3;
    const NonFinite place = between.input.fill(variant, Encoding::mxfp4, z, rows, w1.columns);
    if (place.found) return refusal(expert, Refused::input, place);
    between.hidden.shape(Encoding::mxfp4, rows, w2.columns);
    const Activations input = between.input.view(), hidden = between.hidden.view();
    std::atomic<bool> sound{true}, finite{true};
    const auto situ_of = [&](int64_t begin, int64_t end, Piece& piece) {
        const int64_t count = end - begin;
        piece.room(rows * count, 0);
        float *gate = piece.gate.data(), *up = piece.up.data();
        const bool good = variant.matmul_int8(input, w1, begin, end, gate, count);
        if (!variant.matmul_int8(input, w3, begin, end, up, count) || !good) sound.store(false);
        variant.situ(gate, up, rows * count, expert.beta, expert.linear_beta, gate);
        return gate;
    };
    parallel_for(w1.rows, hidden_grain(rows, w1.columns), [&](int64_t begin, int64_t end) {
        const float* h = situ_of(begin, end, piece_of_thread);
        for (int64_t s = 0; s < rows; ++s, h += end - begin) {
            if (!variant.quantize_groups(h, end - begin, s, begin / kMxGroup, hidden)) finite.store(false);
        }
    });
    if (sound.load() && finite.load()) {
        parallel_for(w2.rows, row_grain(rows, w2.columns), [&](int64_t begin, int64_t end) {
            if (!variant.matmul_int8(hidden, w2, begin, end, y + begin, w2.rows)) sound.store(false);
        });
        if (sound.load()) return {Refused::nothing, kNowhere};
    }
    const ExpertRefusal scale = refusal(expert, Refused::hidden, kNowhere);
    if (scale.what != Refused::hidden) return scale;
    // Once more and in one piece, to find it: this happens once, to a broken model.
    Piece whole;
    const float* h = situ_of(0, w1.rows, whole);
    return {Refused::hidden, find_nonfinite(Rows{Encoding::f32, w1.rows, h}, rows)};
}

ExpertRefusal with_floats(const float* z, int64_t rows, const Expert& expert, float* y) {
    static thread_local std::vector<float> between;
    const Kernels& variant = kernels();
    const Matrix &w1 = expert.w1, &w2 = expert.w2, &w3 = expert.w3;
    between.resize(std::max(between.size(), static_cast<size_t>(2 * rows * w1.rows)));
    float *const gate = between.data(), *const up = gate + rows * w1.rows;
    std::atomic<bool> sound{true};
    parallel_for(w1.rows, row_grain(rows, 2 * w1.columns), [&](int64_t begin, int64_t end) {
        Piece& piece = piece_of_thread;
        piece.room(0, kRowBlock * w1.columns);
        if (reserved(w1, begin, end) || reserved(w3, begin, end)) sound.store(false);
        variant.matmul(z, rows, w1, begin, end, gate, piece.decoded.data());
        variant.matmul(z, rows, w3, begin, end, up, piece.decoded.data());
        for (int64_t s = 0; s < rows; ++s) {
            float* own = gate + s * w1.rows + begin;
            variant.situ(own, up + s * w1.rows + begin, end - begin, expert.beta, expert.linear_beta, own);
        }
    });
    parallel_for(w2.rows, row_grain(rows, w2.columns), [&](int64_t begin, int64_t end) {
        Piece& piece = piece_of_thread;
        piece.room(0, kRowBlock * w2.columns);
        if (reserved(w2, begin, end)) sound.store(false);
        variant.matmul(gate, rows, w2, begin, end, y, piece.decoded.data());
    });
    return sound.load() ? ExpertRefusal{Refused::nothing, kNowhere} : refusal(expert, Refused::nothing, kNowhere);
}

}  // namespace

ExpertRefusal expert_forward(const float* z, int64_t rows, const Expert& expert, bool exact, float* y) {
    return exact ? with_floats(z, rows, expert, y) : with_int8(z, rows, expert, y);
}

}  // namespace k3
