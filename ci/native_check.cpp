// Checks the CPU kernels by themselves, without Python: for processors that are only there as an emulator, and under
// sanitizers. Products of every format against float64, attention against float64, draws against the arg-max.
//
//   g++ -std=c++20 -O2 -fno-math-errno -pthread ci/native_check.cpp -o native_check && ./native_check
//
// `ci/native_check.sh` does this for the processors that can be emulated.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "../backends/cpu/native/api.cpp"

namespace {

std::mt19937 random_bits(1);
int failures = 0;

float normal() { return std::normal_distribution<float>()(random_bits); }

std::vector<float> normals(size_t n) {
    std::vector<float> out(n);
    for (float& x : out) x = normal();
    return out;
}

void expect(bool good, const char* what, double error, double bound) {
    if (good) return;
    ++failures;
    std::printf("FAILED %s: off by %g, %g allowed\n", what, error, bound);
}

// A packed matrix and its memory.
struct Packed {
    Packed(Engine* e, int32_t format, int n, int k, int group) : weight{format, n, k, group, nullptr, nullptr, nullptr} {
        data.resize(size_t(octavo_data_bytes(&weight)) / 4 + 16);
        scales.resize(size_t(octavo_scale_bytes(&weight)) / 2 + 16);
        weight.data = data.data(), weight.scales = scales.data();
        auto source = normals(size_t(n) * k);
        octavo_pack(e, &weight, 0, 0, n, source.data(), F32);
        std::vector<int32_t> ids(n);
        for (int i = 0; i < n; ++i) ids[i] = i;
        values.resize(source.size());
        octavo_rows(e, &weight, ids.data(), n, values.data());
    }
    Weight weight;
    std::vector<uint32_t> data;
    std::vector<uint16_t> scales;
    std::vector<float> values;
};

void check_products(Engine* e) {
    const char* names[] = {"float32", "bfloat16", "float16", "int8", "uint4"};
    for (int format = F32; format <= UINT4; ++format)
        for (auto [n, k, group] : {std::array{33, 96, 32}, {200, 288, 288}, {7, 64, 16}, {129, 1536, 32}}) {
            Packed packed(e, format, n, k, format >= INT8 ? group : k);
            for (int m : {1, 2, 3, 5, 8, 13, 29, 130}) {
                auto a = normals(size_t(m) * k);
                std::vector<float> out(size_t(m) * n + 16, -1234.0f);
                octavo_linear(e, &packed.weight, a.data(), m, out.data());
                // Activations of 8 or 16 bits err by a part of their size in each of k products.
                const int bits = octavo_activation_bits(&packed.weight);
                const double bound = std::sqrt(double(k)) * (bits == 32 ? 2e-5 : 0.06);
                double worst = 0;
                for (int r = 0; r < m; ++r)
                    for (int c = 0; c < n; ++c) {
                        double sum = 0;
                        for (int i = 0; i < k; ++i) sum += double(a[r * k + i]) * packed.values[size_t(c) * k + i];
                        worst = std::max(worst, std::fabs(sum - out[size_t(r) * n + c]));
                    }
                expect(worst < bound, names[format], worst, bound);
                for (size_t i = size_t(m) * n; i < out.size(); ++i) expect(out[i] == -1234.0f, "beyond the result", out[i], 0);
            }
        }
}

template <class T>
void check_attention(Engine* e, int32_t format, double tolerance) {
    const int heads = 6, kv_heads = 2, dims = 20, size = 16, length = 700, queries = 45, window = 300;
    const int blocks = (length + size - 1) / size, wide = padded(dims);
    const Model model{heads * dims, heads, kv_heads, dims, 0, 0, 1e-5f, 0.3f};
    std::vector<T> keys(size_t(blocks + 1) * kv_heads * head_numbers<T>(dims, size)),
        values(size_t(blocks + 1) * kv_heads * head_numbers<T>(wide, size));
    const Cache cache{format, kv_heads, dims, size, keys.data(), values.data()};
    auto k = normals(size_t(length) * kv_heads * dims), v = normals(k.size()), q = normals(size_t(queries) * heads * dims);
    std::vector<int32_t> slots(length), table(blocks), start{0, queries}, lengths{length};
    for (int i = 0; i < blocks; ++i) table[i] = blocks - i;
    for (int i = 0; i < length; ++i) slots[i] = table[i / size] * size + i % size;
    octavo_write_cache(e, &cache, slots.data(), length, k.data(), v.data());
    const Step step{queries, 1, blocks, start.data(), lengths.data(), table.data(), slots.data(), nullptr, nullptr};
    std::vector<float> out(q.size());
    octavo_plan(e, &model, &step, size, window);
    octavo_attention(e, &model, &step, &cache, window, q.data(), out.data());
    double worst = 0;
    for (int t = 0; t < queries; ++t)
        for (int h = 0; h < heads; ++h) {
            const int position = length - queries + t, low = std::max(0, position - window + 1), kv = h / 3;
            std::vector<double> weights, result(dims);
            double total = 0;
            for (int j = low; j <= position; ++j) {
                double score = 0;
                for (int d = 0; d < dims; ++d)
                    score += double(q[(size_t(t) * heads + h) * dims + d]) * k[(size_t(j) * kv_heads + kv) * dims + d];
                weights.push_back(std::exp(score * model.scale));
                total += weights.back();
            }
            for (int j = low; j <= position; ++j)
                for (int d = 0; d < dims; ++d)
                    result[d] += weights[j - low] / total * v[(size_t(j) * kv_heads + kv) * dims + d];
            for (int d = 0; d < dims; ++d)
                worst = std::max(worst, std::fabs(result[d] - out[(size_t(t) * heads + h) * dims + d]));
        }
    expect(worst < tolerance, "attention", worst, tolerance);
}

void check_draws(Engine* e) {
    const int rows = 5, n = 1003;
    auto logits = normals(size_t(rows) * n);
    std::vector<float> temperature(rows, 0.7f), top_p(rows, 0.5f), min_p(rows, 0.0f);
    std::vector<int32_t> seed(2 * rows), position(rows), top_k(rows, 1), tokens(rows);
    for (int turn = 0; turn < 2; ++turn) {  // greedy, then the only token that top-k keeps
        Sampling sampling{};
        if (turn) sampling = {temperature.data(), seed.data(), position.data(), top_k.data(), top_p.data(), min_p.data()};
        octavo_draw(e, &sampling, logits.data(), n, rows, n, tokens.data());
        for (int r = 0; r < rows; ++r) {
            const float* row = &logits[size_t(r) * n];
            expect(tokens[r] == std::max_element(row, row + n) - row, "draw", tokens[r], 0);
        }
    }
    // The mean of standard Gumbel noise is Euler's constant, its variance pi²/6.
    std::vector<float> noise(size_t(rows) * n);
    for (int r = 0; r < rows; ++r) seed[2 * r] = r;
    octavo_gumbel(e, seed.data(), position.data(), rows, n, noise.data());
    double mean = 0;
    for (float x : noise) mean += x / double(noise.size());
    const double bound = 4 * 1.28 / std::sqrt(double(noise.size()));
    expect(std::fabs(mean - 0.5772) < bound, "noise", mean - 0.5772, bound);
}

}  // namespace

int main() {
    Engine* e = octavo_create(3, 100);
    check_products(e);
    check_attention<float>(e, F32, 1e-5);
    check_attention<Bf16>(e, BF16, 0.02);
    check_attention<F16Bits>(e, F16, 0.003);
    check_attention<int8_t>(e, INT8, 0.03);
    check_draws(e);
    octavo_destroy(e);
    std::printf("%d lanes: %s\n", LANES, failures ? "failed" : "all as it should be");
    return failures != 0;
}
