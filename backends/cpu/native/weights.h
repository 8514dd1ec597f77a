// How a weight matrix [N, K] is packed: panels of PANEL columns of the product, that is rows of the matrix. In a panel
// the weights that meet the same activation lie side by side, so a product reads its weights once and in order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

#define PANEL (2 * LANES)

namespace octavo {

// A packed matrix. The struct is shared with Python.
struct Weight {
    int32_t format;
    int32_t n, k;
    int32_t group;        // weights in a row that share a scale (and a least value, in UINT4); k: one for the row
    const void* data;     // panel by panel
    const uint16_t* scales;  // float16, panel by panel, group by group: PANEL scales, then in UINT4 PANEL least values
    const float* bias;    // [n] or null

    int panels() const { return (n + PANEL - 1) / PANEL; }
    int groups() const { return (k + group - 1) / group; }
};

// Each reader walks over one panel. `group` is called before the first k of a group, `load` before each BLOCK of k,
// `get` gives the weights of k + i. A BLOCK may reach beyond K: buffers are padded, and what is beyond is not asked for.

struct ReadF32 {
    static constexpr int BLOCK = 4;
    const float* at;
    const float* here = nullptr;

    ReadF32(const Weight& w, int panel) : at(static_cast<const float*>(w.data) + int64_t(panel) * w.k * PANEL) {}
    explicit ReadF32(const float* buffer) : at(buffer) {}
    void group(int) {}
    void load(int k) { here = at + int64_t(k) * PANEL; }
    void get(int i, Vec& a, Vec& b) const {
        a = octavo::load(here + i * PANEL);
        b = octavo::load(here + i * PANEL + LANES);
    }
};

// Columns j and j + LANES alternate, so that one register is taken apart by a shift and a mask.
struct ReadBF16 {
    static constexpr int BLOCK = 4;
    const uint16_t* at;
    const uint16_t* here = nullptr;

    ReadBF16(const Weight& w, int panel) : at(static_cast<const uint16_t*>(w.data) + int64_t(panel) * w.k * PANEL) {}
    void group(int) {}
    void load(int k) { here = at + int64_t(k) * PANEL; }
    void get(int i, Vec& a, Vec& b) const {
        VecU both = load_as<uint16_t, VecU>(here + i * PANEL);
        a = (Vec)(both << 16);
        b = (Vec)(both & 0xffff0000u);
    }
};

struct ReadF16 {
    static constexpr int BLOCK = 4;
    const uint16_t* at;
    const uint16_t* here = nullptr;

    ReadF16(const Weight& w, int panel) : at(static_cast<const uint16_t*>(w.data) + int64_t(panel) * w.k * PANEL) {}
    void group(int) {}
    void load(int k) { here = at + int64_t(k) * PANEL; }
    void get(int i, Vec& a, Vec& b) const {
        a = load_half(here + i * PANEL);
        b = load_half(here + i * PANEL + LANES);
    }
};

struct ReadInt8 {
    static constexpr int BLOCK = 4;
    const int8_t* at;
    const uint16_t* scales;
    const int8_t* here = nullptr;
    Vec scale_a{}, scale_b{};

    ReadInt8(const Weight& w, int panel)
        : at(static_cast<const int8_t*>(w.data) + int64_t(panel) * w.k * PANEL),
          scales(w.scales + int64_t(panel) * w.groups() * PANEL) {}
    void group(int g) {
        scale_a = load_half(scales + g * PANEL);
        scale_b = load_half(scales + g * PANEL + LANES);
    }
    void load(int k) { here = at + int64_t(k) * PANEL; }
    void get(int i, Vec& a, Vec& b) const {
        a = load_int8(here + i * PANEL) * scale_a;
        b = load_int8(here + i * PANEL + LANES) * scale_b;
    }
};

// Eight k of a column are the nibbles of one 32-bit word, the first in the lowest.
struct ReadUint4 {
    static constexpr int BLOCK = 8;
    const uint32_t* at;
    const uint16_t* scales;
    VecU word_a{}, word_b{};
    Vec scale_a{}, scale_b{}, least_a{}, least_b{};

    ReadUint4(const Weight& w, int panel)
        : at(static_cast<const uint32_t*>(w.data) + int64_t(panel) * (w.k / 8) * PANEL),
          scales(w.scales + int64_t(panel) * w.groups() * 2 * PANEL) {}
    void group(int g) {
        const uint16_t* s = scales + int64_t(g) * 2 * PANEL;
        scale_a = load_half(s);
        scale_b = load_half(s + LANES);
        least_a = load_half(s + PANEL);
        least_b = load_half(s + PANEL + LANES);
    }
    void load(int k) {
        const uint32_t* p = at + int64_t(k / 8) * PANEL;
        word_a = load_as<uint32_t, VecU>(p);
        word_b = load_as<uint32_t, VecU>(p + LANES);
    }
    static Vec number(VecU bits) {
#if LANES == 16
        // A permutation looks at the lowest four bits of each lane only, so nothing has to be masked or converted.
        const Vec numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return __builtin_shuffle(numbers, (VecI)bits);
#else
        return __builtin_convertvector((VecI)(bits & 15), Vec);
#endif
    }
    void get(int i, Vec& a, Vec& b) const {
        a = number(word_a >> (4 * i)) * scale_a + least_a;
        b = number(word_b >> (4 * i)) * scale_b + least_b;
    }
};

// Calls f with the type of the weight's reader, as f.template operator()<Reader>().
template <class F>
inline void with_reader(const Weight& w, F&& f) {
    switch (w.format) {
        case F32: return f.template operator()<ReadF32>();
        case BF16: return f.template operator()<ReadBF16>();
        case F16: return f.template operator()<ReadF16>();
        case INT8: return f.template operator()<ReadInt8>();
        case UINT4: return f.template operator()<ReadUint4>();
    }
}

}  // namespace octavo
