// A token per row of logits: the arg-max, or a draw by Gumbel noise from what top-k, top-p and min-p keep. What is drawn
// is defined by `core/sampling/`; here each row takes two or three passes, and noise is made only for tokens that are
// kept.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "simd.h"

namespace octavo {

// Shared with Python: the sampling fields of rows, see `SamplingInput`. Null pointers: the batch is greedy, or has no
// filters.
struct Sampling {
    const float* temperature;  // [rows]
    const int32_t* seed;       // [rows, 2]
    const int32_t* position;   // [rows]
    const int32_t* top_k;      // [rows]
    const float* top_p;        // [rows]
    const float* min_p;        // [rows]
};

constexpr float NONE = -std::numeric_limits<float>::infinity();

// ln(x) for positive, normal x. x = 2^e × m with sqrt(1/2) <= m < sqrt(2), and ln(m) = 2 artanh((m - 1) / (m + 1)),
// whose series ends below 2^-26 of the value after five terms.
inline Vec log(Vec x) {
    const VecI bits = (VecI)x, shifted = bits - 0x3f3504f3;  // sqrt(1/2)
    const VecI exponent = shifted >> 23;
    const Vec m = (Vec)(bits - (exponent << 23)), e = __builtin_convertvector(exponent, Vec);
    const Vec f = m - 1.0f, s = f / (f + 2.0f), t = s * s;
    Vec p = splat(2.0f / 9);
    p = p * t + 2.0f / 7;
    p = p * t + 2.0f / 5;
    p = p * t + 2.0f / 3;
    // f - s × f = 2 s, but without the rounding of s in the largest term.
    return e * 0.693359375f + (f - s * (f - t * p) - e * 2.12194440e-4f);
}

// -ln(1 - u) for 0 < u < 1, precise for small u too: the rounding of 1 - u is made good (W. Kahan's method).
inline Vec exponential(Vec u) {
    const Vec w = 1.0f - u, lost = 1.0f - w;
    const VecI tiny = lost == 0.0f;
    const Vec factor = tiny ? splat(1.0f) : -log(w) / (tiny ? splat(1.0f) : lost);
    return u * factor;
}

inline Vec or_else(VecI condition, Vec a, Vec b) { return condition ? a : b; }

// Threefry-2x32 with 20 rounds (Salmon et al., SC'11) of key (a, b) and counter (c, 0): `rng.threefry2x32`.
inline void threefry(uint32_t a, uint32_t b, uint32_t c, uint32_t& x, uint32_t& y) {
    const int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const uint32_t keys[3] = {a, b, a ^ b ^ 0x1bd11bdau};
    x = c + a, y = b;
    for (int r = 0; r < 20; ++r) {
        x += y;
        y = (y << rotations[r % 8] | y >> (32 - rotations[r % 8])) ^ x;
        if (r % 4 == 3) {
            const uint32_t n = uint32_t(r / 4 + 1);
            x += keys[n % 3];
            y += keys[(n + 1) % 3] + n;
        }
    }
}

// The noise of `rng.gumbel` for one row.
struct Noise {
    uint32_t key_0, key_1;

    Noise(const int32_t* seed, int32_t position) {
        threefry(uint32_t(seed[0]), uint32_t(seed[1]), uint32_t(position), key_0, key_1);
    }

    // Of tokens first, first + 1, ...
    Vec get(uint32_t first) const {
        VecU h;
        for (int i = 0; i < LANES; ++i) h[i] = uint32_t(i);
        h = (h + first) * 0x9e3779b9u + key_0;
        h ^= h >> 16;
        h *= 0x7feb352du;
        h ^= VecU{} + key_1;
        h ^= h >> 15;
        h *= 0x846ca68bu;
        h ^= h >> 16;
        const Vec high = __builtin_convertvector((VecI)(h >> 16), Vec) * 0x1p-16f;
        const Vec low = (__builtin_convertvector((VecI)(h & 0xffffu), Vec) + 0.5f) * 0x1p-32f;
        return -log(exponential(min(high + low, splat(1.0f - 0x1p-24f))));
    }
};

// The largest score so far and the first token that has it.
struct Best {
    Vec score = splat(NONE);
    VecI token{};
    VecI at;

    Best() {
        for (int i = 0; i < LANES; ++i) at[i] = i;
    }
    // Of tokens first, first + 1, ..., in rising order.
    void add(Vec s, int first) {
        const VecI better = s > score;
        score = or_else(better, s, score);
        token = better ? at + first : token;
    }
    int result() const {
        int best = 0;
        for (int i = 1; i < LANES; ++i)
            if (score[i] > score[best] || (score[i] == score[best] && token[i] < token[best])) best = i;
        return score[best] > NONE ? token[best] : 0;
    }
};

// The floats in their order as integers, and back: `filters.threshold`.
inline int32_t code_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits >= 0 ? bits : -(bits & 0x7fffffff);
}
inline float float_of(int32_t code) {
    uint32_t bits = code >= 0 ? uint32_t(code) : uint32_t(-code) | 0x80000000u;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Sum of `values` where `x` is at least t. n is a multiple of LANES. Always in the same order, so less never sums to more.
inline float sum_from(const float* x, const float* values, int n, float t) {
    Vec sums[2] = {};
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int v = 0; v < 2; ++v)
            sums[v] += or_else(load(x + i + v * LANES) >= t, load(values + i + v * LANES), Vec{});
    for (; i < n; i += LANES) sums[0] += or_else(load(x + i) >= t, load(values + i), Vec{});
    return sum(sums[0] + sums[1]);
}

inline int count_from(const float* x, int n, float t) {
    VecI count{};
    for (int i = 0; i < n; i += LANES) count -= load(x + i) >= t;
    int total = 0;
    for (int i = 0; i < LANES; ++i) total += count[i];
    return total;
}

// The largest number of [low, high] for which a decreasing property holds; it holds for low.
template <class F>
inline float largest(float low, float high, const F& holds) {
    int64_t a = code_of(low), b = int64_t(code_of(high)) + 1;
    while (b - a > 1) {
        const int64_t middle = (a + b) >> 1;
        (holds(float_of(int32_t(middle))) ? a : b) = middle;
    }
    return float_of(int32_t(a));
}

// The least logit of a row that is kept, as `filters.threshold` has it. x [n] in float32, padded to whole vectors with
// -infinity; its largest is 0, or none is finite.
class Filter {
public:
    float threshold(const float* x, int n, int top_k, float top_p, float min_p) {
        const float lowest = std::numeric_limits<float>::lowest();
        float least = min_p > 0 ? std::log(min_p) : lowest;
        if (top_k > 0 || top_p < 1) {
            const int whole = (n + LANES - 1) / LANES * LANES;
            weights_.resize(whole);
            Vec sums{};
            for (int i = 0; i < whole; i += LANES) {
                const Vec w = exp(load(x + i));
                store(&weights_[i], w);
                sums += w;
            }
            const float all = sum(sums);
            near(x, whole);
            float by_rank = lowest;
            if (top_k > 0) {
                auto enough = [&](const float* values, int count) {
                    return [=](float t) { return count_from(values, count, t) >= top_k; };
                };
                by_rank = search(enough(near_.data(), kept_), enough(x, whole));
            }
            least = std::max(least, by_rank);
            if (top_p < 1) {
                const float mass = by_rank > CUT ? sum_from(near_.data(), near_weights_.data(), kept_, by_rank)
                                   : by_rank > lowest ? sum_from(x, weights_.data(), whole, by_rank) : all;
                const float wanted = top_p * mass;
                auto enough = [&](const float* values, const float* weights, int count) {
                    return [=](float t) { return sum_from(values, weights, count, t) >= wanted; };
                };
                least = std::max(least, search(enough(near_.data(), near_weights_.data(), kept_),
                                               enough(x, weights_.data(), whole)));
            }
        }
        return least;
    }

private:
    // Tokens that are so much less likely than the likeliest are rarely kept: the search leaves them out if it can.
    static constexpr float CUT = -16.0f;

    // The largest t that holds: among what is above the cut, if it is there.
    template <class Near, class All>
    static float search(const Near& near, const All& all) {
        const float lowest = std::numeric_limits<float>::lowest();
        if (near(CUT)) return largest(CUT, 0.0f, near);
        return all(lowest) ? largest(lowest, CUT, all) : lowest;
    }

    // What is not below the cut, and its weights.
    void near(const float* x, int n) {
        near_.resize(n + LANES);
        near_weights_.resize(n + LANES);
        kept_ = 0;
        for (int i = 0; i < n; i += 4 * LANES) {
            Vec most = load(x + i);
            for (int j = i + LANES; j < std::min(i + 4 * LANES, n); j += LANES) most = max(most, load(x + j));
            if (!(highest(most) >= CUT)) continue;
            for (int j = i; j < std::min(i + 4 * LANES, n); ++j) {
                near_[kept_] = x[j];
                near_weights_[kept_] = weights_[j];
                kept_ += x[j] >= CUT;
            }
        }
        for (; kept_ % LANES; ++kept_) near_[kept_] = NONE, near_weights_[kept_] = 0;
    }

    std::vector<float> weights_, near_, near_weights_;
    int kept_ = 0;
};

inline float peak_of(const float* logits, int n) {
    Vec most = splat(NONE);
    int i = 0;
    for (; i + LANES <= n; i += LANES) most = max(load(logits + i), most);
    float peak = highest(most);
    for (; i < n; ++i) peak = logits[i] > peak ? logits[i] : peak;
    return peak;
}

inline int argmax(const float* logits, int n) {
    Best best;
    int i = 0;
    for (; i + LANES <= n; i += LANES) best.add(load(logits + i), i);
    int token = best.result();
    for (; i < n; ++i)
        if (logits[i] > logits[token]) token = i;
    return token;
}

// The token of row r.
inline int draw(const Sampling& s, int r, const float* logits, int n) {
    if (!s.temperature || !(s.temperature[r] > 0)) return argmax(logits, n);
    thread_local std::vector<float> scores;
    thread_local Filter filter;
    const int whole = (n + LANES - 1) / LANES * LANES;
    scores.resize(whole);
    const float peak = peak_of(logits, n), zero = std::isfinite(peak) ? peak : 0.0f;
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(&scores[i], (load(logits + i) - zero) / s.temperature[r]);
    for (; i < n; ++i) scores[i] = (logits[i] - zero) / s.temperature[r];
    for (; i < whole; ++i) scores[i] = NONE;
    const float least = s.top_k && std::isfinite(peak)
        ? filter.threshold(scores.data(), n, s.top_k[r], s.top_p[r], s.min_p[r]) : NONE;
    // Where rounding left nothing, the largest stays.
    const float kept = least > 0 ? 0 : least;
    const Noise noise(s.seed + 2 * r, s.position[r]);
    Best best;
    for (int first = 0; first < whole; first += 4 * LANES) {
        const int last = std::min(first + 4 * LANES, whole);
        if (kept > NONE) {
            Vec most = splat(NONE);
            for (i = first; i < last; i += LANES) most = max(load(&scores[i]), most);
            if (!(highest(most) >= kept)) continue;
        }
        for (i = first; i < last; i += LANES) {
            const Vec x = load(&scores[i]);
            best.add(or_else(x >= kept, x + noise.get(uint32_t(i)), splat(NONE)), i);
        }
    }
    return best.result();
}

}  // namespace octavo
