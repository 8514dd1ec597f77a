// Products of activations [M, K] in float32 with packed weights, one micro-kernel for all formats and row counts.
//
// Few rows: weights are decoded in registers on their way from memory, which is what such a product waits for. Many
// rows: a slab of a panel, DEPTH deep, is decoded into the first-level cache once and then used by all rows of a task.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "dots.h"
#include "simd.h"
#include "weights.h"

namespace octavo {

constexpr int DEPTH = 256;               // k in a slab: 32 KiB of float32 in panels of 32
constexpr int MANY = 2 * ROWS_MOST;      // from so many rows on a slab is decoded apart
constexpr int TASK_ROWS = 10 * ROWS_MOST;  // rows of a task, at most

// sums[r] += a[r, k0 .. k1) × panel. A row of sums is two vectors.
template <int R, class Reader>
inline void multiply(const float* a, int64_t stride, Reader& panel, int k0, int k1, Vec (&sums)[R][2]) {
    // Few rows are few chains of additions, each of which waits for the one before: more chains, summed at the end.
    constexpr int CHAINS = R == 1 ? 4 : R <= 3 ? 2 : 1;
    constexpr int BLOCK = Reader::BLOCK, STEP = std::max(BLOCK, 4);
    Vec part[CHAINS][R][2] = {};
    auto add = [&](int k, int i, int chain) {
        Vec x, y;
        panel.get(i, x, y);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            float v = a[r * stride + k + i];
            part[chain][r][0] += x * v;
            part[chain][r][1] += y * v;
        }
    };
    int k = k0;
    for (; k + STEP <= k1; k += STEP)
#pragma GCC unroll 8
        for (int i = 0; i < STEP; ++i) {
            if (i % BLOCK == 0) {
                panel.load(k + i);
                if constexpr (R >= AHEAD_ROWS) panel.ahead();
            }
            add(k + i / BLOCK * BLOCK, i % BLOCK, i % CHAINS);
        }
    for (; k < k1; k += BLOCK) {
        panel.load(k);
        for (int i = 0; i < std::min(BLOCK, k1 - k); ++i) add(k, i, 0);
    }
    for (int c = 0; c < CHAINS; ++c)
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < 2; ++v) sums[r][v] += part[c][r][v];
}

// R rows times one panel; what comes out goes to sink(row, two vectors).
template <int R, class Reader, class Sink>
inline void few_rows(const Weight& w, int p, const float* a, int64_t stride, int row, const Sink& sink) {
    Reader panel(w, p);
    Vec sums[R][2] = {};
    for (int g = 0, k = 0; k < w.k; ++g, k += w.group) {
        panel.group(g);
        multiply<R>(a + row * stride, stride, panel, k, std::min(k + w.group, w.k), sums);
    }
    for (int r = 0; r < R; ++r) sink(row + r, sums[r][0], sums[r][1]);
}

template <class Reader>
inline void decode(const Weight& w, int p, int k0, int k1, float* out) {
    Reader panel(w, p);
    for (int k = k0; k < k1;) {
        int end = std::min(k1, (k / w.group + 1) * w.group);
        panel.group(k / w.group);
        for (; k < end; k += Reader::BLOCK) {
            panel.load(k);
            for (int i = 0; i < Reader::BLOCK && k + i < end; ++i) {
                Vec x, y;
                panel.get(i, x, y);
                store(out + (k + i - k0) * PANEL, x);
                store(out + (k + i - k0) * PANEL + LANES, y);
            }
        }
    }
}

template <int R>
inline void slab_rows(const float* a, int64_t stride, const float* slab, int depth, float* kept, bool first) {
    ReadF32 panel(slab);
    Vec sums[R][2] = {};
    if (!first)
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < 2; ++v) sums[r][v] = load(kept + r * PANEL + v * LANES);
    multiply<R>(a, stride, panel, 0, depth, sums);
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) store(kept + r * PANEL + v * LANES, sums[r][v]);
}

template <class Reader, class Sink>
inline void many_rows(const Weight& w, int p, const float* a, int64_t stride, int low, int high, const Sink& sink) {
    alignas(64) float slab[(DEPTH + 8) * PANEL], kept[TASK_ROWS * PANEL];
    for (int k = 0; k < w.k; k += DEPTH) {
        int depth = std::min(DEPTH, w.k - k);
        const float* panel = slab;
        if constexpr (std::is_same_v<Reader, ReadF32>)
            panel = static_cast<const float*>(w.data) + (int64_t(p) * w.k + k) * PANEL;
        else
            decode<Reader>(w, p, k, k + depth, slab);
        in_pieces(low, high, [&]<int R>(int row) {
            slab_rows<R>(a + row * stride + k, stride, panel, depth, kept + (row - low) * PANEL, k == 0);
        });
    }
    for (int row = low; row < high; ++row)
        sink(row, load(kept + (row - low) * PANEL), load(kept + (row - low) * PANEL + LANES));
}

// Rows low to high - 1 (at most TASK_ROWS) of x [M, K] times panel p; sink(row, Vec, Vec) gets the results, with bias.
template <class Sink>
inline void multiply_panel(const Weight& w, int p, const Rows& x, int low, int high, const Sink& sink) {
    Vec bias_a{}, bias_b{};
    if (w.bias) {
        alignas(64) float padded[PANEL] = {};
        std::memcpy(padded, w.bias + p * PANEL, sizeof(float) * std::min(PANEL, w.n - p * PANEL));
        bias_a = load(padded), bias_b = load(padded + LANES);
    }
    auto add = [&](int row, Vec a, Vec b) { sink(row, a + bias_a, b + bias_b); };
    if (x.words) return dot_panel(w, p, x, low, high, add);
    with_reader(w, [&]<class Reader>() {
        if (high - low >= MANY)
            many_rows<Reader>(w, p, x.a, x.stride, low, high, add);
        else
            in_pieces(low, high, [&]<int R>(int row) { few_rows<R, Reader>(w, p, x.a, x.stride, row, add); });
    });
}

// Two vectors into out[row, first column of panel p ...], cut off at n.
inline void store_panel(float* row, int n, int p, Vec x, Vec y) {
    float* to = row + p * PANEL;
    if (n - p * PANEL >= PANEL) {
        store(to, x);
        store(to + LANES, y);
        return;
    }
    alignas(64) float both[PANEL];
    store(both, x);
    store(both + LANES, y);
    std::memcpy(to, both, sizeof(float) * (n - p * PANEL));
}

}  // namespace octavo
