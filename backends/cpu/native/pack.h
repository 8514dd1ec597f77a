// Rows of a matrix into panels and back, with quantization to the nearest value where the format has few.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "weights.h"

namespace octavo {

// Number i of a source in float32, bfloat16 or float16.
inline float read_source(const void* p, int32_t kind, int64_t i) {
    if (kind == F32) return static_cast<const float*>(p)[i];
    uint16_t bits = static_cast<const uint16_t*>(p)[i];
    return kind == BF16 ? bf16_to_float(bits) : half_to_float(bits);
}

// Where row i of a part of a matrix stands in the whole: after `first` rows, or, if `alternate` is 1 or 2, in every
// other panel, the first or the second of each pair.
inline int64_t placed(int64_t i, int64_t first, int32_t alternate) {
    if (alternate == 0) return first + i;
    return ((i / PANEL) * 2 + (alternate - 1)) * PANEL + i % PANEL;
}

// Bits of number k of a row into the word that it shares with its neighbours (see ReadWords).
inline void put_bits(const Weight& w, int64_t row, int k, uint32_t bits, int block, int shift, uint32_t mask) {
    auto* words = static_cast<uint32_t*>(const_cast<void*>(w.data));
    uint32_t& word = words[(row / PANEL * w.blocks(block) + k / block) * PANEL + row % PANEL];
    word = (word & ~(mask << shift)) | (bits & mask) << shift;
}

inline void put_number(const Weight& w, int64_t row, int k, int number) {
    if (w.format == INT8)
        put_bits(w, row, k, uint32_t(number), 4, 8 * (k % 4), 255);
    else
        put_bits(w, row, k, uint32_t(number), 8, uint4_shift(k % 8), 15);
}

inline void put_scale(const Weight& w, int64_t row, int g, uint16_t scale, uint16_t least) {
    auto* scales = const_cast<uint16_t*>(w.scales);
    const int64_t panel = row / PANEL, column = row % PANEL;
    if (w.format == INT8) {
        scales[(panel * w.groups() + g) * PANEL + column] = scale;
    } else {
        scales[(panel * w.groups() + g) * 2 * PANEL + column] = scale;
        scales[((panel * w.groups() + g) * 2 + 1) * PANEL + column] = least;
    }
}

// INT8: symmetric, the largest magnitude is 127 steps. UINT4: from the least to the largest value in 15 steps.
inline void quantize_group(const Weight& w, int64_t row, int g, const float* values, int count) {
    float low = values[0], high = values[0];
    for (int i = 1; i < count; ++i) low = std::min(low, values[i]), high = std::max(high, values[i]);
    uint16_t scale_bits, least_bits = 0;
    int most, fewest;
    if (w.format == INT8) {
        scale_bits = float_to_half(std::max(high, -low) / 127.0f);
        most = 127, fewest = -127;
    } else {
        least_bits = float_to_half(low);
        scale_bits = float_to_half((high - half_to_float(least_bits)) / 15.0f);
        most = 15, fewest = 0;
    }
    const float scale = half_to_float(scale_bits), least = half_to_float(least_bits);
    put_scale(w, row, g, scale_bits, least_bits);
    for (int i = 0; i < count; ++i) {
        int number = scale > 0 ? int(std::lrintf((values[i] - least) / scale)) : 0;
        put_number(w, row, g * w.group + i, std::clamp(number, fewest, most));
    }
}

// Row `row` of the whole from `row[0 .. k)` of a source.
inline void pack_row(const Weight& w, int64_t row, const void* source, int32_t kind, int64_t offset) {
    if (w.format == INT8 || w.format == UINT4) {
        thread_local std::vector<float> values;
        values.resize(w.k);
        for (int k = 0; k < w.k; ++k) values[k] = read_source(source, kind, offset + k);
        for (int g = 0; g < w.groups(); ++g)
            quantize_group(w, row, g, values.data() + g * w.group, std::min(w.group, w.k - g * w.group));
        return;
    }
    void* data = const_cast<void*>(w.data);
    const int64_t base = row / PANEL * w.k * PANEL + row % PANEL;
    for (int k = 0; k < w.k; ++k) {
        if (w.format == F32) {
            static_cast<float*>(data)[base + int64_t(k) * PANEL] = read_source(source, kind, offset + k);
            continue;
        }
        uint16_t bits;
        if (w.format == kind) {
            bits = static_cast<const uint16_t*>(source)[offset + k];
        } else {
            float x = read_source(source, kind, offset + k);
            bits = w.format == BF16 ? float_to_bf16(x) : float_to_half(x);
        }
        if (w.format == BF16)
            put_bits(w, row, k, bits, 2, 16 * (k % 2), 0xffff);
        else
            static_cast<uint16_t*>(data)[base + int64_t(k) * PANEL] = bits;
    }
}

// Row `row` from numbers that were made elsewhere: numbers [k], a scale and (in UINT4) a least value for each group.
inline void pack_numbers(const Weight& w, int64_t row, const int8_t* numbers, const uint16_t* scales, const uint16_t* least) {
    for (int k = 0; k < w.k; ++k) put_number(w, row, k, numbers[k]);
    for (int g = 0; g < w.groups(); ++g) put_scale(w, row, g, scales[g], least ? least[g] : 0);
}

// Row `row` as float32 [k]. Of a panel only its own column is read.
inline void unpack_row(const Weight& w, int64_t row, float* out) {
    const int64_t panel = row / PANEL, column = row % PANEL;
    auto word = [&](int block, int k) {
        return static_cast<const uint32_t*>(w.data)[(panel * w.blocks(block) + k / block) * PANEL + column];
    };
    auto scale = [&](int g, int parts, int part) {
        return half_to_float(w.scales[((panel * w.groups() + g) * parts + part) * PANEL + column]);
    };
    auto groups = [&](auto&& number) {
        for (int g = 0; g < w.groups(); ++g) {
            const int parts = w.format == UINT4 ? 2 : 1;
            const float step = scale(g, parts, 0), least = parts == 2 ? scale(g, 2, 1) : 0;
            for (int k = g * w.group; k < std::min((g + 1) * w.group, w.k); ++k) out[k] = number(k) * step + least;
        }
    };
    if (w.format == INT8) return groups([&](int k) { return float(int8_t(word(4, k) >> 8 * (k % 4))); });
    if (w.format == UINT4) return groups([&](int k) { return float(word(8, k) >> uint4_shift(k % 8) & 15); });
    for (int k = 0; k < w.k; ++k)
        out[k] = w.format == BF16 ? bf16_to_float(uint16_t(word(2, k) >> 16 * (k % 2)))
                                  : read_source(w.data, w.format, (panel * w.k + k) * PANEL + column);
}

}  // namespace octavo
