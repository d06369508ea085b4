// Makes recorded calls of the kernels again, with every variant that is built in and on 1, 2 and 3 threads,
// and compares all bytes with the recorded ones. Built with the sanitizers by test_sanitized.py, which writes
// the calls:
//
//   call NAME RETURNED           what the binding returned, see `returned` there
//   text WORD | number N | real X | none
//   array TYPE EXTENT...         then its bytes before the call and its bytes after it
//   end
//
// Arguments are those of the bindings (kernels/src/bind_*.cpp), lists and tuples with their length before
// them. Every array lies in a block of its own, of exactly its size. Ends with 1 at the first call that
// differs.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "expert.h"
#include "layers.h"
#include "matmul.h"
#include "quantize.h"
#include "rowops.h"
#include "sha256.h"
#include "threads.h"
#include "variant.h"

namespace {

using namespace k3;

[[noreturn]] void fail(const std::string& what) {
    std::cerr << what << std::endl;
    std::exit(1);
}

struct Argument {
    std::string word;  // of a text; the type of an array
    int64_t number = 0;
    float real = 0;
    std::vector<int64_t> shape;
    std::vector<char> before, after;
    std::unique_ptr<char[]> block;

    void renew() {
        block.reset(new char[before.size()]);
        std::copy(before.begin(), before.end(), block.get());
    }
};

// A recorded call, and what the kernels are given of it, in the order of the bindings.
class Call {
public:
    std::string name, returned;
    std::vector<Argument> arguments;

    void renew() {
        next_ = 0;
        for (Argument& argument : arguments) argument.renew();
    }

    const Argument& next() { return arguments.at(next_++); }
    int64_t number() { return next().number; }
    float real() { return next().real; }
    const std::string& text() { return next().word; }
    template <class T>
    T* array() {
        return reinterpret_cast<T*>(next().block.get());
    }
    float* floats() { return array<float>(); }
    int64_t extent(size_t argument, size_t axis) const { return arguments.at(argument).shape.at(axis); }

    // Encoding, data and scales of a matrix.
    Matrix matrix(int64_t rows, int64_t columns) {
        static const std::map<std::string, Encoding> encodings = {
            {"bf16", Encoding::bf16}, {"f16", Encoding::f16},   {"f32", Encoding::f32},
            {"int8", Encoding::int8}, {"int4", Encoding::int4}, {"mxfp4", Encoding::mxfp4}};
        Matrix w = {.encoding = encodings.at(text()), .rows = rows, .columns = columns, .data = array<char>()};
        const char* scales = array<char>();
        if (w.encoding == Encoding::mxfp4)
            w.exponents = reinterpret_cast<const uint8_t*>(scales);
        else
            w.scales = reinterpret_cast<const float*>(scales);
        return w;
    }

private:
    size_t next_ = 0;
};

std::string words(std::initializer_list<int64_t> numbers) {
    std::string all;
    for (const int64_t number : numbers) all += (all.empty() ? "" : ",") + std::to_string(number);
    return all;
}

std::string place_of(const NonFinite& place) { return place.found ? words({place.row, place.column}) : "-"; }

std::string quantized(Call& c, bool (*quantize)(const Rows&, int64_t, uint8_t*, float*)) {
    const Argument& w = c.next();
    const Encoding encoding = w.word == "uint16"    ? Encoding::bf16
                              : w.word == "float16" ? Encoding::f16
                                                    : Encoding::f32;
    const Rows rows = {encoding, w.shape[1], w.block.get()};
    uint8_t* q = c.array<uint8_t>();
    return quantize(rows, w.shape[0], q, c.floats()) ? "-" : place_of(find_nonfinite(rows, w.shape[0]));
}

std::string decoded(Call& c) {
    const Matrix w = c.matrix(c.extent(3, 0), c.extent(3, 1));
    const int64_t reserved =
        w.encoding == Encoding::mxfp4 ? find_reserved(w.exponents, w.rows * (w.columns / kMxGroup)) : -1;
    if (reserved < 0) decode(w, c.floats());
    return words({reserved});
}

std::string multiplied(Call& c) {
    const int64_t rows = c.extent(0, 0), columns = c.extent(0, 1);
    const float* x = c.floats();
    const Matrix w = c.matrix(c.extent(4, 1), columns);
    float* y = c.floats();
    const bool integers = w.encoding == Encoding::int8 || w.encoding == Encoding::int4;
    if (c.number() == 0 && integers) return place_of(matmul_int8(x, rows, w, y));
    matmul_exact(x, rows, w, y);
    return "-";
}

std::string mixed(Call& c) {
    std::vector<const float*> entries(c.number());
    const int64_t rows = c.extent(1, 0), columns = c.extent(1, 1);
    for (const float*& entry : entries) entry = c.floats();
    const float* weight = c.floats();
    const float eps = c.real();
    residual_mix(entries.data(), static_cast<int>(entries.size()), rows, columns, weight, eps, c.floats());
    return "-";
}

std::string function(Call& c) {
    static const std::map<std::string, Function> functions = {{"exp", Function::exp},
                                                              {"tanh", Function::tanh},
                                                              {"sigmoid", Function::sigmoid},
                                                              {"silu", Function::silu}};
    const Function chosen = functions.at(c.text());
    const float* x = c.floats();
    elementwise(chosen, x, c.extent(1, 0), c.floats());
    return "-";
}

Matrix part_of(Call& c, const uint8_t* payload) {
    if (c.number() != 4) fail("a part is four numbers");
    const int64_t packed = c.number(), scale = c.number(), rows = c.number(), columns = c.number();
    return {
        .encoding = Encoding::mxfp4,
        .rows = rows,
        .columns = columns,
        .data = payload + packed,
        .exponents = payload + scale,
    };
}

std::string expert(Call& c) {
    const int64_t rows = c.extent(0, 0);
    const float* z = c.floats();
    const uint8_t* payload = c.array<uint8_t>();
    Expert e{};
    e.w1 = part_of(c, payload);
    e.w2 = part_of(c, payload);
    e.w3 = part_of(c, payload);
    e.beta = c.real();
    e.linear_beta = c.real();
    const bool exact = c.number() != 0;
    const ExpertRefusal refusal = expert_forward(z, rows, e, exact, c.floats());
    static const char* const names[] = {"-", "input", "hidden", "w1", "w2", "w3"};
    const std::string name = names[static_cast<int>(refusal.what)];
    return name == "-" ? name : name + "," + words({refusal.place.row, refusal.place.column});
}

std::string kda(Call& c) {
    KdaHeads a{};
    a.tokens = c.extent(0, 0);
    a.heads = c.extent(7, 0);
    a.dim = c.extent(7, 1);
    a.taps = c.extent(8, 1);
    for (const float** rows : {&a.q, &a.k, &a.v, &a.f, &a.b, &a.g}) *rows = c.floats();
    a.windows = c.floats();
    a.memory = c.floats();
    for (const float** vector : {&a.conv, &a.a_log, &a.dt_bias, &a.norm}) *vector = c.floats();
    for (float* setting : {&a.lower_bound, &a.l2_eps, &a.query_scale, &a.norm_eps}) *setting = c.real();
    a.out = c.floats();
    kda_heads(a);
    return "-";
}

std::string attended(Call& c) {
    const int64_t tokens = c.extent(0, 0), heads = c.extent(0, 1);
    const float* q_latent = c.floats();
    const float* q_rope = c.floats();
    const Argument& latent = c.next();
    const Argument& rope = c.next();
    const CacheType type = latent.word == "float32"   ? CacheType::f32
                           : latent.word == "float16" ? CacheType::f16
                                                      : CacheType::bf16;
    const LatentCache cache = {
        .type = type,
        .latent = latent.block.get(),
        .rope = rope.block.get(),
        .rows = latent.shape[0],
        .latent_width = latent.shape[1],
        .rope_width = rope.shape[1],
    };
    const float scale = c.real();
    latent_attention(q_latent, q_rope, tokens, heads, cache, scale, c.floats());
    return "-";
}

// absorb_query and expand_value: a head has `own` rows (columns of the first array or of the result) and
// `other` more.
std::string projected(Call& c, bool absorb) {
    const int64_t tokens = c.extent(0, 0), heads = c.extent(0, 1);
    const int64_t own = absorb ? c.extent(0, 2) : c.extent(5, 2), other = c.arguments.at(4).number;
    const float* x = c.floats();
    const Matrix w = c.matrix(heads * (own + other), absorb ? c.extent(5, 2) : c.extent(0, 2));
    c.number();
    float* out = c.floats();
    if (absorb)
        absorb_query(x, tokens, heads, own, other, w, out);
    else
        expand_value(x, tokens, heads, other, own, w, out);
    return "-";
}

std::string simple(Call& c) {
    const std::string& name = c.name;
    if (name == "first_difference") {
        const uint8_t* a = c.array<uint8_t>();
        return words({first_difference(a, c.array<uint8_t>(), c.extent(0, 0))});
    }
    const float* x = c.floats();
    if (name == "softmax") {
        softmax(x, c.extent(0, 0), c.extent(0, 1), c.floats());
    } else if (name == "top_k") {
        return words({top_k(x, c.extent(0, 0), c.extent(0, 1), c.extent(1, 1), c.array<int64_t>())});
    } else if (name == "gated") {
        const float* gate = c.floats();
        gated(x, gate, c.extent(0, 0), c.floats());
    } else if (name == "situ") {
        const float* up = c.floats();
        const float beta = c.real(), linear_beta = c.real();
        situ(x, up, c.extent(0, 0), beta, linear_beta, c.floats());
    } else if (name == "rms_norm") {
        const float* w = c.floats();
        const float eps = c.real();
        rms_norm(x, c.extent(0, 0), c.extent(0, 1), w, eps, c.floats());
    } else {
        fail("no kernel " + name);
    }
    return "-";
}

// Messages in three pieces each, all messages at once; with SHA instructions, where there are any, and without.
std::string hashed(Call& c) {
    const int count = static_cast<int>(c.number());
    std::vector<const uint8_t*> begins;
    std::vector<int64_t> sizes;
    for (int i = 0; i < count; ++i) {
        const Argument& message = c.next();
        begins.push_back(reinterpret_cast<const uint8_t*>(message.block.get()));
        sizes.push_back(message.shape[0]);
    }
    uint8_t* const digests = c.array<uint8_t>();
    for (const bool instructions : {true, false}) {
        want_sha_instructions(instructions);
        std::vector<Sha256> messages(static_cast<size_t>(count));
        for (int piece = 0; piece < 3; ++piece) {
            std::vector<Sha256*> whose;
            std::vector<const uint8_t*> from;
            std::vector<int64_t> nbytes;
            for (size_t i = 0; i < messages.size(); ++i) {
                const int64_t begin = sizes[i] * piece / 3, end = sizes[i] * (piece + 1) / 3;
                whose.push_back(&messages[i]);
                from.push_back(begins[i] + begin);
                nbytes.push_back(end - begin);
            }
            sha256_update(whose.data(), from.data(), nbytes.data(), count);
        }
        for (int i = 0; i < count; ++i) {
            uint8_t digest[32];
            sha256_digest(messages[static_cast<size_t>(i)], digest);
            if (instructions)
                std::memcpy(digests + 32 * i, digest, 32);
            else if (std::memcmp(digests + 32 * i, digest, 32) != 0)
                return "another digest without SHA instructions";
        }
    }
    want_sha_instructions(true);
    return "-";
}

std::string run(Call& c) {
    static const std::map<std::string, std::function<std::string(Call&)>> kernels_of = {
        {"quantize_int8", [](Call& call) { return quantized(call, &quantize_int8); }},
        {"quantize_int4", [](Call& call) { return quantized(call, &quantize_int4); }},
        {"decode", decoded},
        {"matmul", multiplied},
        {"residual_mix", mixed},
        {"sha256", hashed},
        {"elementwise", function},
        {"expert_forward", expert},
        {"kda_heads", kda},
        {"latent_attention", attended},
        {"absorb_query", [](Call& call) { return projected(call, true); }},
        {"expand_value", [](Call& call) { return projected(call, false); }}};
    const auto found = kernels_of.find(c.name);
    return found == kernels_of.end() ? simple(c) : found->second(c);
}

// Equal bytes; as in conftest.py any NaN equals any NaN.
bool same(const Argument& argument) {
    if (std::equal(argument.after.begin(), argument.after.end(), argument.block.get())) return true;
    if (argument.word != "float32") return false;
    for (size_t at = 0; at < argument.after.size(); at += sizeof(float)) {
        float have, want;
        std::memcpy(&have, argument.block.get() + at, sizeof have);
        std::memcpy(&want, argument.after.data() + at, sizeof want);
        const bool both_nan = have != have && want != want;
        if (!both_nan && std::memcmp(&have, &want, sizeof have) != 0) return false;
    }
    return true;
}

void check(Call& call, int64_t number) {
    for (int variant = 0; variant < variant_count(); ++variant) {
        set_variant(variant_name(variant));
        for (int threads = 1; threads <= 3; ++threads) {
            set_threads(threads);
            call.renew();
            const std::string where = "call " + std::to_string(number) + ", " + call.name + ", " +
                                      variant_name(variant) + " on " + std::to_string(threads) + " threads";
            const std::string returned = run(call);
            if (returned != call.returned) fail(where + ": returned " + returned + ", not " + call.returned);
            if (returned != "-" && returned != "-1") continue;  // refused: what it wrote is undefined
            for (size_t at = 0; at < call.arguments.size(); ++at) {
                if (!same(call.arguments[at])) fail(where + ": other bytes in argument " + std::to_string(at));
            }
        }
    }
}

Argument read_argument(std::istream& file, std::istringstream& line, const std::string& kind) {
    Argument argument;
    if (kind == "text") line >> argument.word;
    if (kind == "number") line >> argument.number;
    if (kind == "real") line >> argument.real;
    if (kind != "array") return argument;
    line >> argument.word;
    size_t bytes = argument.word == "uint8"                                  ? 1
                   : argument.word == "uint16" || argument.word == "float16" ? 2
                   : argument.word == "float32"                              ? 4
                                                                             : 8;
    for (int64_t extent; line >> extent;) {
        argument.shape.push_back(extent);
        bytes *= static_cast<size_t>(extent);
    }
    for (std::vector<char>* state : {&argument.before, &argument.after}) {
        state->resize(bytes);
        file.read(state->data(), static_cast<std::streamsize>(bytes));
    }
    return argument;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) fail("replay CALLS");
    std::ifstream file(argv[1], std::ios::binary);
    Call call;
    int64_t calls = 0;
    for (std::string text; std::getline(file, text);) {
        std::istringstream line(text);
        std::string kind;
        line >> kind;
        if (kind == "call") {
            call = Call();
            line >> call.name >> call.returned;
        } else if (kind == "end") {
            check(call, calls++);
        } else {
            call.arguments.push_back(read_argument(file, line, kind));
        }
    }
    std::cout << calls << " calls with";
    for (int variant = 0; variant < variant_count(); ++variant) std::cout << " " << variant_name(variant);
    std::cout << std::endl;
}
