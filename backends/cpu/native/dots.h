// Products through instructions that multiply and add within a 32-bit word: pairs of bfloat16 (AVX512-BF16), or four
// bytes (AVX512-VNNI). They want the activations in the weights' form. bfloat16 activations are rounded to bfloat16,
// sums are float32. For 8 and 4 bits a group of activations of a row is rounded to 8 bits with a scale of its own: sums
// within a group are exact integers, and float32 beyond it.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"
#include "weights.h"

namespace octavo {

// Activations [M, K] as a product takes them: float32, and, where it works with dots, words too.
struct Rows {
    const float* a;
    int64_t stride;
    const uint32_t* words = nullptr;  // [M, words_stride]
    int64_t words_stride = 0;
    const float* scales = nullptr;    // [M, groups], of 8 bits
    const int32_t* totals = nullptr;  // [M, groups]; sums of the numbers
    int groups = 0;
};

constexpr int DOT_ROWS = 6;  // of a micro-kernel for bytes: 12 registers of integers and 12 of float32

// Activations that share a scale in products with this matrix; 0: there are no dots of bytes for it.
inline int dot_group(const Weight& w) {
#if defined(__AVX512VNNI__)
    if (w.format != INT8 && w.format != UINT4) return 0;
    const int group = w.group % 32 == 0 || w.group == w.k ? 32 : w.group;
    return (group == 32 || group == 16) && w.k % group == 0 ? group : 0;
#else
    (void)w;
    return 0;
#endif
}

// Whether products with this matrix take words.
inline bool has_dots(const Weight& w) {
#if defined(__AVX512BF16__)
    if (w.format == BF16) return true;
#endif
    return dot_group(w) != 0;
}

#if defined(__AVX512BF16__)

inline void to_bf16_words(const float* a, int k, uint32_t* words) {
    auto* out = reinterpret_cast<uint16_t*>(words);
    int i = 0;
    for (; i + LANES <= k; i += LANES) {
        __m256bh narrow = _mm512_cvtneps_pbh((__m512)load(a + i));
        std::memcpy(out + i, &narrow, sizeof narrow);
    }
    for (; i < k; ++i) out[i] = float_to_bf16(a[i]);
    if (k % 2) out[k] = 0;
}

inline Vec dot(Vec sum, VecU weights, uint32_t activations) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int32_t(activations)));
}

template <int R, class Sink>
inline void dot_bf16(const Weight& w, int p, const Rows& x, int row, const Sink& sink) {
    constexpr int CHAINS = R == 1 ? 4 : R <= 3 ? 2 : 1;
    const uint32_t* a = x.words + row * x.words_stride;
    ReadBF16 panel(w, p);
    Vec sums[CHAINS][R][2] = {};
    const int count = w.blocks(2);
    int j = 0;
    auto add = [&](int chain) {
        panel.load(2 * j);
        if constexpr (R >= AHEAD_ROWS) panel.ahead();
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            sums[chain][r][0] = dot(sums[chain][r][0], panel.word_a, a[r * x.words_stride + j]);
            sums[chain][r][1] = dot(sums[chain][r][1], panel.word_b, a[r * x.words_stride + j]);
        }
        ++j;
    };
    while (j + 4 <= count)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) add(i % CHAINS);
    while (j < count) add(0);
    for (int r = 0; r < R; ++r) {
        for (int c = 1; c < CHAINS; ++c)
            for (int v = 0; v < 2; ++v) sums[0][r][v] += sums[c][r][v];
        sink(row + r, sums[0][r][0], sums[0][r][1]);
    }
}

#endif

#if defined(__AVX512VNNI__)

// The numbers of one group, their scale and their sum.
inline void to_bytes(const float* a, int group, int8_t* out, float* scale, int32_t* total) {
    Vec most{};
    for (int i = 0; i < group; i += LANES) most = max(most, max(load(a + i), -load(a + i)));
    const float peak = highest(most);
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    // Adding 1.5 × 2^23 rounds to an integer in the last bits.
    const float magic = 12582912.0f;
    VecI sums{};
    for (int i = 0; i < group; i += LANES) {
        VecI number = (VecI)(load(a + i) * inverse + magic) - 0x4b400000;
        auto narrow = __builtin_convertvector(__builtin_convertvector(number, Short), Byte);
        std::memcpy(out + i, &narrow, sizeof narrow);
        sums += number;
    }
    *scale = peak / 127.0f;
    *total = 0;
    for (int i = 0; i < LANES; ++i) *total += sums[i];
}

// The first factor's bytes are unsigned.
inline VecI dot(VecI sum, VecU weights, uint32_t activations) {
    return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(int32_t(activations)));
}

template <int R, int GROUP, class Sink>
inline void dot_int8(const Weight& w, int p, const Rows& x, int row, const Sink& sink) {
    const uint32_t* a = x.words + row * x.words_stride;
    ReadInt8 panel(w, p);
    Vec sums[R][2] = {};
    for (int g = 0; g < x.groups; ++g) {
        if (g * GROUP % w.group == 0) panel.group(g * GROUP / w.group);
        // Weights are made unsigned by adding 128 to each.
        VecI part[R][2];
        for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = VecI{} - 128 * x.totals[(row + r) * x.groups + g];
#pragma GCC unroll 8
        for (int j = 0; j < GROUP / 4; ++j) {
            panel.load(g * GROUP + 4 * j);
            if constexpr (R >= AHEAD_ROWS) panel.ahead();
            const VecU low = panel.word_a ^ 0x80808080u, high = panel.word_b ^ 0x80808080u;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const uint32_t word = a[r * x.words_stride + g * (GROUP / 4) + j];
                part[r][0] = dot(part[r][0], low, word);
                part[r][1] = dot(part[r][1], high, word);
            }
        }
        for (int r = 0; r < R; ++r) {
            const float scale = x.scales[(row + r) * x.groups + g];
            sums[r][0] += __builtin_convertvector(part[r][0], Vec) * (panel.scale.a * scale);
            sums[r][1] += __builtin_convertvector(part[r][1], Vec) * (panel.scale.b * scale);
        }
    }
    for (int r = 0; r < R; ++r) sink(row + r, sums[r][0], sums[r][1]);
}

template <int R, int GROUP, class Sink>
inline void dot_uint4(const Weight& w, int p, const Rows& x, int row, const Sink& sink) {
    const uint32_t* a = x.words + row * x.words_stride;
    ReadUint4 panel(w, p);
    Vec sums[R][2] = {};
    for (int g = 0; g < x.groups; ++g) {
        if (g * GROUP % w.group == 0) panel.group(g * GROUP / w.group);
        VecI part[R][2] = {};
#pragma GCC unroll 4
        for (int j = 0; j < GROUP / 8; ++j) {
            panel.load(g * GROUP + 8 * j);
            if constexpr (R >= AHEAD_ROWS) panel.ahead();
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const VecU low = (panel.word_a >> (4 * half)) & 0x0f0f0f0fu;
                const VecU high = (panel.word_b >> (4 * half)) & 0x0f0f0f0fu;
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const uint32_t word = a[r * x.words_stride + g * (GROUP / 4) + 2 * j + half];
                    part[r][0] = dot(part[r][0], low, word);
                    part[r][1] = dot(part[r][1], high, word);
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            const int64_t at = int64_t(row + r) * x.groups + g;
            const float scale = x.scales[at], total = scale * float(x.totals[at]);
            sums[r][0] += __builtin_convertvector(part[r][0], Vec) * (panel.scale.a * scale) + panel.scale.least_a * total;
            sums[r][1] += __builtin_convertvector(part[r][1], Vec) * (panel.scale.b * scale) + panel.scale.least_b * total;
        }
    }
    for (int r = 0; r < R; ++r) sink(row + r, sums[r][0], sums[r][1]);
}

#endif

// Row `row` of the activations into words. Only where there are dots.
inline void to_words(const Weight& w, const Rows& x, int row) {
    const float* a = x.a + row * x.stride;
    auto* words = const_cast<uint32_t*>(x.words) + row * x.words_stride;
#if defined(__AVX512BF16__)
    if (w.format == BF16) return to_bf16_words(a, w.k, words);
#endif
#if defined(__AVX512VNNI__)
    const int group = w.k / x.groups;
    for (int g = 0; g < x.groups; ++g) {
        const int64_t at = int64_t(row) * x.groups + g;
        to_bytes(a + g * group, group, reinterpret_cast<int8_t*>(words) + g * group, const_cast<float*>(x.scales) + at,
                 const_cast<int32_t*>(x.totals) + at);
    }
#endif
    (void)w, (void)a, (void)words;
}

// Rows low to high - 1 times panel p; sink(row, Vec, Vec) gets the results. Only where there are dots.
template <class Sink>
inline void dot_panel(const Weight& w, int p, const Rows& x, int low, int high, const Sink& sink) {
#if defined(__AVX512BF16__)
    if (w.format == BF16) return in_pieces(low, high, [&]<int R>(int row) { dot_bf16<R>(w, p, x, row, sink); });
#endif
#if defined(__AVX512VNNI__)
    auto bytes = [&]<int GROUP>() {
        in_pieces<DOT_ROWS>(low, high, [&]<int R>(int row) {
            if (w.format == INT8)
                dot_int8<R, GROUP>(w, p, x, row, sink);
            else
                dot_uint4<R, GROUP>(w, p, x, row, sink);
        });
    };
    if (w.k / x.groups == 16)
        bytes.template operator()<16>();
    else
        bytes.template operator()<32>();
#endif
    (void)w, (void)p, (void)x, (void)low, (void)high, (void)sink;
}

}  // namespace octavo
