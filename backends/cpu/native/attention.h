// Attention over the paged cache, which is read where it lies. The work of a step is cut into units of about equal
// size: a tile of queries of one sequence, one key/value head, a range of keys. Softmax is computed piece by piece
// (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135), and where a sequence's keys are cut
// into several ranges their results are merged (FlashDecoding), so one long sequence keeps all threads busy.
//
// A block holds, for each key/value head, keys as [D, block size] and values as [block size, D]: scores of neighbouring
// keys come out side by side, without sums across a register. In 8 bits each key and each value has a scale of its own,
// a float32 for each slot behind the numbers of the head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace octavo {

constexpr int KEYS = 128;       // keys of a piece
constexpr int TILE_ROWS = 4 * ROWS_MOST;  // queries × heads of a tile, about
constexpr int MOST_HEAD_DIM = 256;

inline Vec load_kv(const float* p) { return load(p); }
struct Bf16 { uint16_t bits; };
struct F16Bits { uint16_t bits; };
inline Vec load_kv(const Bf16* p) { return load_bf16(&p->bits); }
inline Vec load_kv(const F16Bits* p) { return load_half(&p->bits); }
inline Vec load_kv(const int8_t* p) {
    // Step by step: asked to widen more than twofold at once, GCC 12 converts number by number.
    auto wide = __builtin_convertvector((load_as<int8_t, Byte>(p)), Short);
    return __builtin_convertvector(__builtin_convertvector(wide, VecI), Vec);
}
inline void store_kv(float* p, float x) { *p = x; }
inline void store_kv(Bf16* p, float x) { p->bits = float_to_bf16(x); }
inline void store_kv(F16Bits* p, float x) { p->bits = float_to_half(x); }
inline void store_kv(int8_t* p, float x) { *p = int8_t(std::lrintf(x)); }

template <class T>
constexpr bool SCALED = std::is_same_v<T, int8_t>;

// Numbers that a head's part of a block takes, for `width` of them in each of `size` slots.
template <class T>
constexpr int64_t head_numbers(int width, int size) {
    return int64_t(width) * size + (SCALED<T> ? int64_t(sizeof(float)) * size : 0);
}

// The scales of a head's slots in a block, behind its numbers.
inline float* scales_of(const int8_t* head, int width, int size) {
    return reinterpret_cast<float*>(const_cast<int8_t*>(head) + int64_t(width) * size);
}

// Shared with Python: one layer's cache.
struct Cache {
    int32_t format;
    int32_t kv_heads, head_dim, block_size;
    void* keys;    // [blocks, kv_heads, head_dim, block_size], and scales
    void* values;  // [blocks, kv_heads, block_size, padded head_dim], and scales
};

// Values and their sums have rows of whole registers.
inline int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

// Shared with Python: what all layers of a step have in common.
struct Step {
    int32_t tokens, sequences, blocks;
    const int32_t* query_start;   // [sequences + 1]
    const int32_t* seq_lens;      // [sequences]
    const int32_t* block_tables;  // [sequences, blocks]
    const int32_t* slots;         // [tokens]
    const float* cos;             // [tokens, head_dim / 2]
    const float* sin;
};

struct Unit {
    int32_t sequence;
    int32_t query, count;  // its first query within the step, and how many
    int32_t low, high;     // keys, whole blocks but for the end
    int32_t splits;        // into how many ranges the tile's keys are cut; their units follow one another
    int64_t partial;        // where its result goes in the scratch of partial results, in rows of head 0; -1: none
};

struct Units {
    std::vector<Unit> units;
    int64_t partial_rows = 0;  // of one key/value head
};

inline Units plan_units(const Step& step, int group, int block_size, int kv_heads, int threads, int window) {
    Units plan;
    int tile = std::max(1, TILE_ROWS / group);
    auto first_key = [&](int position) {
        return window > 0 ? std::max(0, position - window + 1) / block_size * block_size : 0;
    };
    // f(sequence, first query within the step, queries, low, high) for each tile; some of its queries see keys low to
    // high - 1.
    auto for_tiles = [&](auto&& f) {
        for (int s = 0; s < step.sequences; ++s) {
            int start = step.query_start[s], count = step.query_start[s + 1] - start;
            for (int q = 0; q < count; q += tile) {
                int n = std::min(tile, count - q), position = step.seq_lens[s] - count + q;
                f(s, start + q, n, first_key(position), position + n);
            }
        }
    };
    int64_t work = 0;  // keys × rows
    for_tiles([&](int, int, int n, int low, int high) { work += int64_t(high - low) * n * group; });
    // Eight units a thread let a late thread be helped; a unit shorter than a few pieces costs more than it saves.
    int64_t each = std::max<int64_t>(work * kv_heads / (8 * threads), 1);
    for_tiles([&](int s, int query, int n, int low, int high) {
        int64_t span = std::max<int64_t>(each / (int64_t(n) * group), 4 * KEYS);
        int splits = threads == 1 ? 1 : int((high - low + span - 1) / span);
        int keys = ((high - low + splits - 1) / splits + KEYS - 1) / KEYS * KEYS;
        splits = (high - low + keys - 1) / keys;
        for (int i = 0; i < splits; ++i) {
            int64_t partial = splits > 1 ? plan.partial_rows : -1;
            plan.units.push_back({s, query, n, low + i * keys, std::min(low + (i + 1) * keys, high), splits, partial});
            if (splits > 1) plan.partial_rows += n * group;
        }
    });
    return plan;
}

// s[r, v] = q[r] · keys, V vectors of keys at a time; keys[v] + d * block_size are the numbers of dimension d.
template <int R, int V, class T>
inline void score(const float* q, const T* const* keys, int block_size, int dims, float* s, int stride) {
    Vec sums[R][V] = {};
    for (int d = 0; d < dims; ++d) {
        Vec k[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) k[v] = load_kv(keys[v] + int64_t(d) * block_size);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] += k[v] * q[r * dims + d];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(s + r * stride + v * LANES, sums[r][v]);
}

// out[r, V vectors] += weights[r, j] × values[j], j from low to high - 1 of one block.
template <int R, int V, class T>
inline void gather(const float* weights, int stride, const T* values, int dims, int low, int high, float* out) {
    Vec sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = load(out + r * dims + v * LANES);
    for (int j = low; j < high; ++j) {
        Vec x[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) x[v] = load_kv(values + int64_t(j) * dims + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] += x[v] * weights[r * stride + j];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(out + r * dims + v * LANES, sums[r][v]);
}

// x[i] *= factors[i]
inline void times(float* x, const float* factors, int n) {
    for (int i = 0; i < n; i += LANES) store(x + i, load(x + i) * load(factors + i));
}

// Result of a unit for one head: rows of D weighted sums, with the largest score and the sum of weights of each.
struct Partial {
    float* sums;
    float* peak;
    float* total;
};

// One unit for one key/value head.
//
// q: the step's queries, [tokens, stride], head h at h × D. scale: of the scores. Rows of out.sums are padded.
template <class T>
void attend(const Step& step, const Cache& cache, const Unit& unit, int head, int group, const float* q, int64_t stride,
            float scale, int window, Partial out) {
    const int dims = cache.head_dim, wide = padded(dims), size = cache.block_size, rows = unit.count * group;
    const int32_t* table = step.block_tables + int64_t(unit.sequence) * step.blocks;
    const int shift = step.seq_lens[unit.sequence] - step.query_start[unit.sequence + 1];  // from token to position
    const int64_t key_size = head_numbers<T>(dims, size), value_size = head_numbers<T>(wide, size);
    const T* keys = static_cast<const T*>(cache.keys) + head * key_size;
    const T* values = static_cast<const T*>(cache.values) + head * value_size;
    const int64_t block_stride = key_size * cache.kv_heads, value_stride = value_size * cache.kv_heads;
    const float infinity = std::numeric_limits<float>::infinity();

    thread_local std::vector<float> queries, scores;
    queries.resize(size_t(rows) * dims);
    scores.resize(size_t(rows) * (KEYS + size));
    const int width = KEYS + size;
    for (int r = 0; r < rows; ++r) {
        const float* from = q + (unit.query + r / group) * stride + (head * group + r % group) * dims;
        for (int d = 0; d < dims; ++d) queries[size_t(r) * dims + d] = from[d] * scale;
    }
    std::fill(out.sums, out.sums + int64_t(rows) * wide, 0.0f);
    std::fill(out.peak, out.peak + rows, -infinity);
    std::fill(out.total, out.total + rows, 0.0f);

    for (int begin = unit.low; begin < unit.high; begin += KEYS) {
        const int end = std::min(begin + KEYS, unit.high), blocks = (end - begin + size - 1) / size;
        // Scores, a few vectors of keys at a time, over the borders of blocks.
        const T* columns[(KEYS + 128) / LANES + 4];
        int vectors = 0;
        for (int b = 0; b < blocks; ++b)
            for (int v = 0; v < size / LANES; ++v)
                columns[vectors++] = keys + table[begin / size + b] * block_stride + v * LANES;
        in_pieces(0, rows, [&]<int R>(int row) {
            constexpr int V = R <= ROWS_MOST / 2 ? 4 : 2;  // few rows: more vectors, so that no sum waits for itself
            int v = 0;
            for (; v + V <= vectors; v += V)
                score<R, V>(&queries[size_t(row) * dims], columns + v, size, dims, &scores[row * width + v * LANES], width);
            for (; v < vectors; ++v)
                score<R, 1>(&queries[size_t(row) * dims], columns + v, size, dims, &scores[row * width + v * LANES], width);
        });
        if constexpr (SCALED<T>)
            for (int b = 0; b < blocks; ++b) {
                const float* scales = scales_of(keys + table[begin / size + b] * block_stride, dims, size);
                for (int r = 0; r < rows; ++r) times(&scores[size_t(r) * width + b * size], scales, size);
            }
        // Weights. What a row does not see gets none; its score may be anything, NaN included.
        int seen_low = end, seen_high = begin;
        for (int r = 0; r < rows; ++r) {
            const int position = unit.query + r / group + shift;
            const int low = std::clamp(window > 0 ? position - window + 1 : 0, begin, end) - begin;
            const int high = std::clamp(position + 1, begin, end) - begin;
            float* s = &scores[size_t(r) * width];
            if (low >= high) {
                std::fill(s, s + (end - begin), 0.0f);
                continue;
            }
            seen_low = std::min(seen_low, begin + low), seen_high = std::max(seen_high, begin + high);
            std::fill(s, s + low, -infinity);
            const int padded = (end - begin + LANES - 1) / LANES * LANES;
            std::fill(s + high, s + padded, -infinity);
            Vec peaks = splat(-infinity);
            for (int j = 0; j < padded; j += LANES) peaks = max(peaks, load(s + j));
            const float before = out.peak[r], peak = std::max(before, highest(peaks));
            Vec sums{};
            for (int j = 0; j < padded; j += LANES) {
                Vec e = exp(load(s + j) - peak);
                store(s + j, e);
                sums += e;
            }
            const float shrink = std::exp(before - peak);
            out.total[r] = out.total[r] * shrink + sum(sums);
            out.peak[r] = peak;
            if (shrink != 1.0f) {
                float* o = out.sums + int64_t(r) * wide;
                for (int d = 0; d < wide; ++d) o[d] *= shrink;
            }
        }
        // Values of keys that some row sees; beyond them may be anything.
        for (int b = 0; b < blocks; ++b) {
            const int base = begin + b * size;
            const int low = std::max(seen_low - base, 0), high = std::min(seen_high - base, size);
            if (low >= high) continue;
            const T* block = values + table[base / size] * value_stride;
            if constexpr (SCALED<T>)
                for (int r = 0; r < rows; ++r) times(&scores[size_t(r) * width + b * size], scales_of(block, wide, size), size);
            in_pieces(0, rows, [&]<int R>(int row) {
                constexpr int V = R <= ROWS_MOST / 2 ? 4 : 2;
                const float* weights = &scores[size_t(row) * width + b * size];
                float* o = out.sums + int64_t(row) * wide;
                int d = 0;
                for (; d + V * LANES <= wide; d += V * LANES)
                    gather<R, V>(weights, width, block + d, wide, low, high, o + d);
                for (; d < wide; d += LANES) gather<R, 1>(weights, width, block + d, wide, low, high, o + d);
            });
        }
    }
}

// `numbers` of x at p, `stride` apart; where they are scaled, divided by what makes the largest of them 127, and that.
template <class T>
inline float put(T* p, int64_t stride, const float* x, int numbers) {
    float inverse = 1, scale = 1;
    if constexpr (SCALED<T>) {
        float peak = 0;
        for (int d = 0; d < numbers; ++d) peak = std::max(peak, std::fabs(x[d]));
        // Of numbers that are infinite or none at all nothing can be kept; attention then sees that by the scale.
        scale = peak / 127.0f, inverse = peak > 0 && std::isfinite(peak) ? 127.0f / peak : 0.0f;
    }
    for (int d = 0; d < numbers; ++d) store_kv(p + d * stride, x[d] * inverse);
    return scale;
}

// Keys and values of one token into its slot.
template <class T>
inline void write_token(const Cache& cache, int slot, const float* k, const float* v) {
    const int dims = cache.head_dim, size = cache.block_size, at = slot % size, wide = padded(dims);
    const int64_t first = int64_t(slot / size) * cache.kv_heads;
    for (int h = 0; h < cache.kv_heads; ++h) {
        T* keys = static_cast<T*>(cache.keys) + (first + h) * head_numbers<T>(dims, size);
        T* values = static_cast<T*>(cache.values) + (first + h) * head_numbers<T>(wide, size);
        const float key_scale = put(keys + at, size, k + h * dims, dims);
        const float value_scale = put(values + int64_t(at) * wide, 1, v + h * dims, dims);
        if constexpr (SCALED<T>) {
            scales_of(keys, dims, size)[at] = key_scale;
            scales_of(values, wide, size)[at] = value_scale;
        }
    }
}

// Calls f with a null pointer of the cache's number type.
template <class F>
inline void with_kv(int32_t format, F&& f) {
    switch (format) {
        case F32: return f(static_cast<float*>(nullptr));
        case BF16: return f(static_cast<Bf16*>(nullptr));
        case F16: return f(static_cast<F16Bits*>(nullptr));
        case INT8: return f(static_cast<int8_t*>(nullptr));
    }
}

}  // namespace octavo
