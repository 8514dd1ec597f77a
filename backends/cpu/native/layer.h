// The two halves of a decoder layer as a few phases each, and the products at the ends of a model.
#pragma once

#include <cmath>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "team.h"

namespace octavo {

// Shared with Python.
struct Model {
    int32_t hidden, heads, kv_heads, head_dim, intermediate;
    int32_t activation;  // 0 silu, 1 gelu, 2 gelu with tanh
    float eps, scale;
};

// Shared with Python: a layer's parameters. q, k and v are one matrix, or, where their formats differ, three; of gate and
// up, panels alternate.
struct Layer {
    const float* attn_norm;
    Weight qkv[3];  // n is 0 for none
    Weight out;
    const float* mlp_norm;
    Weight gate_up, down;
};

// Memory that grows and is never given back: after the largest step nothing is allocated.
class Buffer {
public:
    float* get(int64_t floats) {
        if (int64_t(data_.size()) < floats + 16) data_.resize(floats + 16);
        return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(data_.data()) + 63) / 64 * 64);
    }

private:
    std::vector<float> data_;
};

struct Engine {
    Engine(int threads, int spins) : team(threads, spins) {}
    Team team;
    Units units;
    Buffer normed, qkv, attended, hidden, sums, peaks, totals, words, group_scales, group_totals;
};

// x / sqrt(mean(x²) + eps) × weight (arXiv 1910.07467).
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    Vec squares{};
    int i = 0;
    for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < n; ++i) total += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(total / float(n) + eps);
    for (i = 0; i + LANES <= n; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

// Calls f(low, high) for pieces of the rows; where they are few, at once: a phase costs about a microsecond.
template <class F>
inline void for_rows(Team& team, int rows, int piece, const F& f) {
    int count = rows <= piece ? 1 : (rows + piece - 1) / piece;
    team.run(count, [&](int i) { f(i * piece, std::min((i + 1) * piece, rows)); });
}

inline void norm_rows(Team& team, const float* x, const float* weight, int rows, int n, float eps, float* out) {
    for_rows(team, rows, 8, [&](int low, int high) {
        for (int r = low; r < high; ++r) rms_norm(x + int64_t(r) * n, weight, n, eps, out + int64_t(r) * n);
    });
}

// Rows of a layer's input, normalized; valid until the next call.
inline const float* normed(Engine& e, const float* x, const float* weight, int rows, const Model& m) {
    float* out = e.normed.get(int64_t(rows) * m.hidden);
    norm_rows(e.team, x, weight, rows, m.hidden, m.eps, out);
    return out;
}

// Every panel (of `panels`) for every piece of the rows: task(panel, low, high). Rows vary slowest, so that threads work
// on the same activations at a time.
template <class F>
inline void for_panels(Team& team, int panels, int rows, const F& task) {
    int pieces = (rows + TASK_ROWS - 1) / TASK_ROWS;
    int each = ((rows + pieces - 1) / std::max(pieces, 1) + ROWS_MOST - 1) / ROWS_MOST * ROWS_MOST;
    pieces = (rows + each - 1) / each;
    team.run(panels * pieces, [&](int i) {
        int piece = i / panels;
        task(i % panels, piece * each, std::min((piece + 1) * each, rows));
    });
}

// Activations a [rows, k] for products with this matrix. They are valid until the next call.
inline Rows activations(Engine& e, const Weight& w, const float* a, int rows) {
    Rows x{a, w.k};
    if (!has_dots(w)) return x;
    const int group = dot_group(w);
    x.words_stride = group ? w.k / 4 : w.blocks(2);
    x.words = reinterpret_cast<const uint32_t*>(e.words.get(rows * x.words_stride));
    if (group) {
        x.groups = w.k / group;
        x.scales = e.group_scales.get(int64_t(rows) * x.groups);
        x.totals = reinterpret_cast<const int32_t*>(e.group_totals.get(int64_t(rows) * x.groups));
    }
    for_rows(e.team, rows, 8, [&](int low, int high) {
        for (int r = low; r < high; ++r) to_words(w, x, r);
    });
    return x;
}

// out [rows, stride] = a [rows, k] × w [n], plus `added` of the same shape unless that is null.
inline void linear(Engine& e, const Weight& w, const float* a, int rows, float* out, int64_t stride, const float* added) {
    const Rows x = activations(e, w, a, rows);
    for_panels(e.team, w.panels(), rows, [&](int p, int low, int high) {
        multiply_panel(w, p, x, low, high, [&](int row, Vec sum_a, Vec sum_b) {
            if (added) {
                const float* from = added + row * stride + p * PANEL;
                alignas(64) float both[PANEL] = {};
                std::memcpy(both, from, sizeof(float) * std::min(PANEL, w.n - p * PANEL));
                sum_a += load(both), sum_b += load(both + LANES);
            }
            store_panel(out + row * stride, w.n, p, sum_a, sum_b);
        });
    });
}

// Rotates the pairs (i, i + D / 2) of each head.
inline void rotate(float* x, int heads, int dims, const float* cos, const float* sin) {
    const int half = dims / 2;
    for (int h = 0; h < heads; ++h, x += dims)
        for (int i = 0; i < half; ++i) {
            float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = b * cos[i] + a * sin[i];
        }
}

// The ranges of a tile's keys into one result for one head; `parts` are all partial results.
inline void merge(const Units& plan, const Model& m, int first, int head, Partial parts, float* out, int64_t stride) {
    const int group = m.heads / m.kv_heads, dims = m.head_dim;
    const Unit& unit = plan.units[first];
    for (int r = 0; r < unit.count * group; ++r) {
        auto at = [&](int i) { return head * plan.partial_rows + plan.units[first + i].partial + r; };
        float peak = -std::numeric_limits<float>::infinity(), total = 0;
        for (int i = 0; i < unit.splits; ++i) peak = std::max(peak, parts.peak[at(i)]);
        float* o = out + (unit.query + r / group) * stride + (head * group + r % group) * dims;
        std::fill(o, o + dims, 0.0f);
        for (int i = 0; i < unit.splits; ++i) {
            const float weight = std::exp(parts.peak[at(i)] - peak);
            if (weight == 0) continue;
            total += parts.total[at(i)] * weight;
            const float* from = parts.sums + at(i) * padded(dims);
            for (int d = 0; d < dims; ++d) o[d] += from[d] * weight;
        }
        for (int d = 0; d < dims; ++d) o[d] /= total;
    }
}

// How the attention of layers with this window is cut in this step.
inline void plan_attention(Engine& e, const Model& m, const Step& step, int block_size, int window) {
    e.units = plan_units(step, m.heads / m.kv_heads, block_size, m.kv_heads, e.team.threads(), window);
}

// q [tokens, stride] → out [tokens, heads × head_dim], for keys and values in the cache.
inline void attention(Engine& e, const Model& m, const Step& step, const Cache& cache, const float* q, int64_t stride,
                      int window, float* out) {
    const int group = m.heads / m.kv_heads, dims = m.head_dim;
    const int64_t width = int64_t(m.heads) * dims;
    Units& plan = e.units;
    const int wide = padded(dims);
    float* sums = e.sums.get(plan.partial_rows * m.kv_heads * wide);
    float* peaks = e.peaks.get(plan.partial_rows * m.kv_heads);
    float* totals = e.totals.get(plan.partial_rows * m.kv_heads);
    const int count = int(plan.units.size());
    // Tokens of no sequence are padding: any finite value will do.
    const int real = step.query_start[step.sequences];
    std::fill(out + real * width, out + step.tokens * width, 0.0f);
    e.team.run(count * m.kv_heads, [&](int i) {
        const Unit& unit = plan.units[i / m.kv_heads];
        const int head = i % m.kv_heads, rows = unit.count * group;
        thread_local std::vector<float> own;
        Partial part;
        if (unit.splits > 1) {
            const int64_t at = head * plan.partial_rows + unit.partial;
            part = {sums + at * wide, peaks + at, totals + at};
        } else {
            own.resize(size_t(rows) * (wide + 2));
            part = {own.data(), own.data() + size_t(rows) * wide, own.data() + size_t(rows) * (wide + 1)};
        }
        with_kv(cache.format, [&](auto* kind) {
            attend<std::remove_pointer_t<decltype(kind)>>(step, cache, unit, head, group, q, stride, m.scale, window, part);
        });
        if (unit.splits > 1) return;
        for (int r = 0; r < rows; ++r) {
            float* o = out + (unit.query + r / group) * width + (head * group + r % group) * dims;
            for (int d = 0; d < dims; ++d) o[d] = part.sums[r * wide + d] / part.total[r];
        }
    });
    if (plan.partial_rows == 0) return;
    std::vector<int> firsts;
    for (int i = 0; i < count; i += plan.units[i].splits)
        if (plan.units[i].splits > 1) firsts.push_back(i);
    e.team.run(int(firsts.size()) * m.kv_heads, [&](int i) {
        merge(plan, m, firsts[i / m.kv_heads], i % m.kv_heads, {sums, peaks, totals}, out, width);
    });
}

// out = x + output(attention(norm(x))); x and out are [tokens, hidden], and may be the same. Keys and values go into the cache.
inline void attention_block(Engine& e, const Model& m, const Layer& layer, const Step& step, const Cache& cache,
                            int window, const float* x, float* out) {
    const int dims = m.head_dim, tokens = step.tokens;
    const int64_t width = int64_t(m.heads + 2 * m.kv_heads) * dims;
    const float* input = normed(e, x, layer.attn_norm, tokens, m);
    float* qkv = e.qkv.get(tokens * width);
    float* part = qkv;
    for (const Weight& w : layer.qkv) {
        if (w.n) linear(e, w, input, tokens, part, width, nullptr);
        part += w.n;
    }
    for_rows(e.team, tokens, 4, [&](int low, int high) {
        for (int t = low; t < high; ++t) {
            float* row = qkv + t * width;
            const float* k = row + int64_t(m.heads) * dims;
            rotate(row, m.heads + m.kv_heads, dims, step.cos + t * (dims / 2), step.sin + t * (dims / 2));
            with_kv(cache.format, [&](auto* kind) {
                write_token<std::remove_pointer_t<decltype(kind)>>(cache, step.slots[t], k, k + int64_t(m.kv_heads) * dims);
            });
        }
    });
    float* attended = e.attended.get(int64_t(tokens) * m.heads * dims);
    attention(e, m, step, cache, qkv, width, window, attended);
    linear(e, layer.out, attended, tokens, out, m.hidden, x);
}

inline Vec activate(Vec gate, int kind) {
    if (kind == 0) return gate / (exp(-gate) + 1.0f);
    Vec inner = gate * 0.7071067811865476f;
    if (kind == 2) {
        // tanh(z) = 1 - 2 / (e^2z + 1)
        Vec z = (gate + gate * gate * gate * 0.044715f) * 0.7978845608028654f;
        return gate * (1.0f - 1.0f / (exp(z * 2.0f) + 1.0f));
    }
    for (int i = 0; i < LANES; ++i) inner[i] = std::erf(inner[i]);
    return gate * (inner * 0.5f + 0.5f);
}

// out = x + down(activation(gate(norm(x))) × up(norm(x))); x and out may be the same.
inline void mlp_block(Engine& e, const Model& m, const Layer& layer, int rows, const float* x, float* out) {
    float* hidden = e.hidden.get(int64_t(rows) * m.intermediate);
    const Weight& both = layer.gate_up;
    const Rows h = activations(e, both, normed(e, x, layer.mlp_norm, rows, m), rows);
    for_panels(e.team, both.panels() / 2, rows, [&](int p, int low, int high) {
        alignas(64) float gates[TASK_ROWS * PANEL];
        multiply_panel(both, 2 * p, h, low, high, [&](int row, Vec x, Vec y) {
            store(gates + (row - low) * PANEL, activate(x, m.activation));
            store(gates + (row - low) * PANEL + LANES, activate(y, m.activation));
        });
        multiply_panel(both, 2 * p + 1, h, low, high, [&](int row, Vec x, Vec y) {
            const float* gate = gates + (row - low) * PANEL;
            store_panel(hidden + int64_t(row) * m.intermediate, m.intermediate, p, x * load(gate), y * load(gate + LANES));
        });
    });
    linear(e, layer.down, hidden, rows, out, m.hidden, x);
}

// All layers, one after the other, in place: x is [tokens, hidden].
inline void decoder(Engine& e, const Model& m, const Layer* layers, const Cache* caches, const int32_t* windows, int count,
                    const Step& step, float* x) {
    for (int i = 0; i < count; ++i) {
        if (i == 0 || windows[i] != windows[i - 1]) plan_attention(e, m, step, caches[i].block_size, windows[i]);
        attention_block(e, m, layers[i], step, caches[i], windows[i], x, x);
        mlp_block(e, m, layers[i], step.tokens, x, x);
    }
}

}  // namespace octavo
