// Kernels of the forward pass for CPUs, called through ctypes by native.py; torch forms of the same are in linear.py,
// quant.py and attention.py. Every element of a result is one chain of operations whose order depends on its own row
// alone: not on the batch, on how a prompt was cut, or on the number of threads. Bits do not change with company.
//
// All arrays are contiguous. Sizes are in elements. "Panel": 16 outputs of a matrix, [inputs][16], tails filled with 0.
//
// Threads: a function that takes a Team is run by all threads of a parallel region, with equal arguments. They share the
// turns of its loops and go on when all are done.
//
// Nothing here allocates, so that nothing here fails: what is computed in is the caller's to give.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t PANEL = 16;
constexpr int64_t ROWS = 96;             // of the left side at once: what is read again for each panel stays in L2
constexpr int64_t WORTH = 1 << 15;       // elements below which waking threads costs more than it saves
constexpr int SPINS = 2000;              // of one who waits for others, some tens of microseconds, before it yields
constexpr auto PATIENCE = std::chrono::milliseconds(1);  // before it sleeps: who is awaited so long lacks a processor
constexpr auto NAP = std::chrono::microseconds(20);
std::atomic<int> threads{1};

// Places of scratch memory; none shares a line of the cache with another.
enum Place { PACKED, NORMED, QKV, ATTENDED, ADDED, GATE_UP, GATED, KEPT, SCORED, PLACES };
int64_t whole_lines(int64_t count) { return (count + 15) / 16 * 16; }

// ---- Threads. Not by `omp for`: its barriers send a thread to sleep almost at once where a process has more threads in
// all its pools than there are processors, as a server has that computes in one and loads in another. To wake one takes
// longer than most of these loops.
class Team {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> arrived{0}, round{0};

    static int size() {
#ifdef _OPENMP
        return omp_get_num_threads();  // 1 outside of a region
#else
        return 1;
#endif
    }

    void wait(int now) const {
        const auto open = [&] { return round.load(std::memory_order_acquire) == now; };
#if defined(__x86_64__)
        for (int times = 0; times < SPINS && open(); times++) __builtin_ia32_pause();
#endif
        if (!open()) return;
        const auto begun = std::chrono::steady_clock::now();
        while (open()) {
            if (std::chrono::steady_clock::now() - begun < PATIENCE)
                std::this_thread::yield();  // to whoever needs the processor, perhaps the one that is waited for
            else
                std::this_thread::sleep_for(NAP);
        }
    }

    void meet() {
        const int now = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
            next.store(0, std::memory_order_relaxed), arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
        }
        wait(now);
    }

public:
    static int number() {  // of this thread
#ifdef _OPENMP
        return omp_get_thread_num();
#else
        return 0;
#endif
    }

    // turn(i) for all i below count: runs of them, shorter and shorter, so that nobody waits long for one who was held up.
    template <class Turn>
    void each(int64_t count, Turn turn) {
        const int team = size();
        if (team == 1) {
            for (int64_t i = 0; i < count; i++) turn(i);
            return;
        }
        int64_t begin = next.load(std::memory_order_relaxed), end;
        while (begin < count) {
            end = begin + std::max<int64_t>(1, (count - begin) / (2 * team));
            if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            for (; begin < end; begin++) turn(begin);
            begin = next.load(std::memory_order_relaxed);
        }
        meet();
    }
};

// So many threads do `work`, or this one alone where to wake others costs more than it saves.
template <class Work>
void together(int count, bool worth, Work work) {
    Team team;
#pragma omp parallel num_threads(count) if (count > 1 && worth)
    work(team);
}

// ---- Eight lanes: AVX2, or loops that a compiler turns into what the machine has.
#if defined(__AVX2__) && defined(__FMA__)
using V = __m256;
using I = __m256i;
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void save(float* p, V v) { _mm256_storeu_ps(p, v); }
inline V all(float x) { return _mm256_set1_ps(x); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V div(V a, V b) { return _mm256_div_ps(a, b); }
inline V largest(V a, V b) { return _mm256_max_ps(a, b); }  // b where either is a NaN; so does `least`
inline V least(V a, V b) { return _mm256_min_ps(a, b); }
inline I all_pairs(int32_t two) { return _mm256_set1_epi32(two); }
inline I pairs(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline I add_products(I sum, I a, I b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
inline void save(int32_t* p, I v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
inline V widened(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline V nearest(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V power_of_two(V whole) {
    const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
// The sums of eight vectors as one vector.
inline V sums(V a, V b, V c, V d, V e, V f, V g, V h) {
    const V low = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    const V high = _mm256_hadd_ps(_mm256_hadd_ps(e, f), _mm256_hadd_ps(g, h));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
#else
struct V { float at[8]; };
struct I { int32_t at[8]; };  // each holds two 16-bit numbers, or a sum
template <class F> inline V each(F f) { V r; for (int i = 0; i < 8; i++) r.at[i] = f(i); return r; }
inline float fma1(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
inline V load(const float* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
inline void save(float* p, V v) { std::memcpy(p, &v, sizeof v); }
inline V all(float x) { return each([&](int) { return x; }); }
inline V fma(V a, V b, V c) { return each([&](int i) { return fma1(a.at[i], b.at[i], c.at[i]); }); }
inline V mul(V a, V b) { return each([&](int i) { return a.at[i] * b.at[i]; }); }
inline V add(V a, V b) { return each([&](int i) { return a.at[i] + b.at[i]; }); }
inline V div(V a, V b) { return each([&](int i) { return a.at[i] / b.at[i]; }); }
inline V largest(V a, V b) { return each([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; }); }
inline V least(V a, V b) { return each([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; }); }
inline I all_pairs(int32_t two) { I r; for (int i = 0; i < 8; i++) r.at[i] = two; return r; }
inline I pairs(const int8_t* p) {
    I r;
    for (int i = 0; i < 8; i++) {
        const int16_t two[2] = {p[2 * i], p[2 * i + 1]};
        std::memcpy(&r.at[i], two, 4);
    }
    return r;
}
inline I add_products(I sum, I a, I b) {
    for (int i = 0; i < 8; i++) {
        int16_t x[2], y[2];
        std::memcpy(x, &a.at[i], 4);
        std::memcpy(y, &b.at[i], 4);
        sum.at[i] += int32_t(x[0]) * y[0] + int32_t(x[1]) * y[1];
    }
    return sum;
}
inline void save(int32_t* p, I v) { std::memcpy(p, &v, sizeof v); }
inline V widened(const int8_t* p) { return each([&](int i) { return float(p[i]); }); }
inline V nearest(V x) { return each([&](int i) { return std::nearbyint(x.at[i]); }); }
inline V power_of_two(V whole) {
    return each([&](int i) { return std::isnan(whole.at[i]) ? whole.at[i] : std::ldexp(1.0f, int(whole.at[i])); });
}
inline float total(V v) {
    return ((v.at[0] + v.at[1]) + (v.at[2] + v.at[3])) + ((v.at[4] + v.at[5]) + (v.at[6] + v.at[7]));
}
inline V sums(V a, V b, V c, V d, V e, V f, V g, V h) {
    return {total(a), total(b), total(c), total(d), total(e), total(f), total(g), total(h)};
}
#endif

// ---- A panel's sixteen lanes: one register of AVX-512, or two of eight. A lane's operations are the same in both.
#if defined(__AVX2__) && defined(__FMA__) && defined(__AVX512F__) && defined(__AVX512BW__)
using W = __m512;
using WI = __m512i;
constexpr int TALL = 12;  // rows of a tile of sums. More than the latency of a product asks for; 16 and 24 were no faster
constexpr int TALL_INT8 = 12;
inline W wide(const float* p) { return _mm512_loadu_ps(p); }
inline W wide(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline W wide_all(float x) { return _mm512_set1_ps(x); }
inline W fma(W a, W b, W c) { return _mm512_fmadd_ps(a, b, c); }
inline void save(float* p, W v) { _mm512_storeu_ps(p, v); }
inline WI wide_pairs(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline WI wide_all_pairs(int32_t two) { return _mm512_set1_epi32(two); }
inline WI add_products(WI sum, WI a, WI b) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
inline void save(int32_t* p, WI v) { _mm512_storeu_si512(p, v); }
#else
struct W { V low, high; };
struct WI { I low, high; };
constexpr int TALL = 6;       // 6 x 16 sums fill 12 of the 16 vector registers of AVX2
constexpr int TALL_INT8 = 5;  // a product needs a register of its own; 6 rows would put sums into memory
inline V lanes(const float* p) { return load(p); }
inline V lanes(const int8_t* p) { return widened(p); }
template <class Number> inline W wide(const Number* p) { return {lanes(p), lanes(p + 8)}; }
inline W wide_all(float x) { return {all(x), all(x)}; }
inline W fma(W a, W b, W c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
inline void save(float* p, W v) { save(p, v.low), save(p + 8, v.high); }
inline WI wide_pairs(const int8_t* p) { return {pairs(p), pairs(p + 16)}; }
inline WI wide_all_pairs(int32_t two) { return {all_pairs(two), all_pairs(two)}; }
inline WI add_products(WI sum, WI a, WI b) {
    return {add_products(sum.low, a.low, b.low), add_products(sum.high, a.high, b.high)};
}
inline void save(int32_t* p, WI v) { save(p, v.low), save(p + 8, v.high); }
#endif

inline float sum_of(V v) {
    float at[8];
    save(at, v);
    return ((at[0] + at[1]) + (at[2] + at[3])) + ((at[4] + at[5]) + (at[6] + at[7]));
}
inline float largest_of(V v) {
    float at[8];
    save(at, v);
    return *std::max_element(at, at + 8);
}

// e^x to 2 units in the last place: 2^n times the polynomial of e^r, |r| <= ln 2 / 2. Beyond its range: its ends. A NaN
// stays one.
inline V exponential(V x) {
    x = least(all(88.0f), largest(all(-87.0f), x));
    const V n = nearest(mul(x, all(1.44269504f)));
    const V r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));  // ln 2 in two parts, so that r is exact
    V p = all(1.9875691500e-4f);  // Cephes' expf
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, all(c));
    return mul(add(fma(mul(p, r), r, r), all(1.0f)), power_of_two(n));
}

// What one step of an 8-bit integer is worth for these numbers; quant.py does the same. A NaN if one of them is.
inline float step_of(const float* x, int64_t count) {
    int32_t most = 0;  // magnitudes stand in the order of their bits, NaNs above all
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        most = std::max(most, bits & INT32_MAX);
    }
    float step;
    std::memcpy(&step, &most, sizeof step);
    step /= 127.0f;
    return step == 0.0f ? 1.0f : step;
}
// -127 for a NaN.
inline V integers(V x, float step) { return least(largest(nearest(div(x, all(step))), all(-127.0f)), all(127.0f)); }

// ---- Products. A kind says what the left side is packed into, how a tile of R x 16 sums is made, and what becomes of it.
// The sums are named, not an array: compilers keep arrays of vectors in memory.
#define EACH_ROW(DO) \
    DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)

// What the next panel holds is asked for while this one is computed with, a share of it in each of its tiles.
struct Ahead {
    const char* at;
    int64_t pace;  // bytes a step
    void fetch() {
        __builtin_prefetch(at, 0, 2);
        at += pace;
    }
};

// Weights in float32, or in 8 bits that become float32 on their way into a register.
template <class Number>
struct Floats {
    using Left = float;  // [input][R]
    using Right = Number;
    using Sum = float;
    static constexpr int64_t DEPTH = 1;  // inputs that one step of the innermost loop takes
    static constexpr int TILE = TALL;

    template <int R>
    static void tile(const float* a, const Number* b, int64_t steps, float (*out)[PANEL], Ahead ahead) {
#define START(i) W sum##i = wide_all(0.0f);
        EACH_ROW(START)
        for (int64_t k = 0; k < steps; k++, a += R, b += PANEL) {
            const W found = wide(b);
            if constexpr (R > 1) ahead.fetch();  // one row is a plain stream, which the hardware foresees
#define STEP(i) \
    if constexpr (R > i) sum##i = fma(wide_all(a[i]), found, sum##i);
            EACH_ROW(STEP)
        }
#define END(i) \
    if constexpr (R > i) save(out[i], sum##i);
        EACH_ROW(END)
#undef STEP
#undef START
    }
    static void pack(const float* x, int64_t inputs, int64_t rows, float* to, float*) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < inputs; k++) to[k * rows + r] = x[r * inputs + k];
    }
    static float value(float sum, float, float column_scale) { return sum * column_scale; }
};

// Inputs by twos: products of 8-bit numbers are summed in 32 bits, which 66,000 inputs cannot overflow.
struct Int8 {
    using Left = int32_t;  // [input / 2][R], each two 16-bit numbers of -127..127
    using Right = int8_t;  // [input / 2][16][2]
    using Sum = int32_t;
    static constexpr int64_t DEPTH = 2;
    static constexpr int TILE = TALL_INT8;

    template <int R>
    static void tile(const int32_t* a, const int8_t* b, int64_t steps, int32_t (*out)[PANEL], Ahead ahead) {
#define START(i) WI sum##i = wide_all_pairs(0);
        EACH_ROW(START)
        for (int64_t k = 0; k < steps; k++, a += R, b += 2 * PANEL) {
            const WI found = wide_pairs(b);
            if constexpr (R > 1) ahead.fetch();  // one row is a plain stream, which the hardware foresees
#define STEP(i) \
    if constexpr (R > i) sum##i = add_products(sum##i, wide_all_pairs(a[i]), found);
            EACH_ROW(STEP)
        }
        EACH_ROW(END)
#undef STEP
#undef START
#undef END
    }
    static void pack(const float* x, int64_t inputs, int64_t rows, int32_t* to, float* scales) {
        float filled[8] = {};
        for (int64_t r = 0; r < rows; r++) {
            const float* row = x + r * inputs;
            scales[r] = step_of(row, inputs);
            for (int64_t k = 0; k < inputs; k += 8) {
                const int64_t here = std::min<int64_t>(8, inputs - k);
                if (here < 8) std::fill(std::copy(row + k, row + inputs, filled), filled + 8, 0.0f);
                float whole[8];
                save(whole, integers(load(here < 8 ? filled : row + k), scales[r]));
                for (int64_t i = 0; i < here; i += 2) {
                    const int16_t two[2] = {int16_t(whole[i]), int16_t(whole[i + 1])};
                    std::memcpy(&to[(k + i) / 2 * rows + r], two, 4);
                }
            }
        }
    }
    static float value(int32_t sum, float row_scale, float column_scale) {
        return float(sum) * (row_scale * column_scale);
    }
};

template <class Kind>
using Tile = void (*)(const typename Kind::Left*, const typename Kind::Right*, int64_t, typename Kind::Sum (*)[PANEL],
                      Ahead);

// The tile of so many rows, 1 to Kind::TILE.
template <class Kind, int... R>
Tile<Kind> tile_of(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr Tile<Kind> tiles[] = {Kind::template tile<R + 1>...};
    return tiles[rows - 1];
}

struct Matrix {
    int64_t kind, inputs, outputs;  // kind: of KINDS
    const void* panels;
    const float *scales, *bias;  // by output; both may be null
};

// Elements that `product` packs its rows into.
int64_t packed_size(int64_t rows, int64_t inputs) { return std::min(rows, ROWS) * (inputs + 2); }

bool worth_sharing(const Matrix& m, int64_t rows) { return std::max(m.inputs, rows) * m.outputs > WORTH; }

// out [rows, outputs] = x [rows, inputs] times the panels, scaled by column, plus bias.
template <class Kind>
void product(Team& team, float* out, const float* x, int64_t rows, const Matrix& m, float* packed) {
    static_assert(sizeof(typename Kind::Left) == sizeof(float));
    const int64_t steps = (m.inputs + Kind::DEPTH - 1) / Kind::DEPTH, count = (m.outputs + PANEL - 1) / PANEL;
    const int64_t bytes = steps * Kind::DEPTH * PANEL * int64_t(sizeof(typename Kind::Right));
    const auto* const panels = static_cast<const typename Kind::Right*>(m.panels);
    auto* const left = reinterpret_cast<typename Kind::Left*>(packed);
    float* const row_scales = packed + std::min(rows, ROWS) * (m.inputs + 1);
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t here = std::min(ROWS, rows - first), tiles = (here + Kind::TILE - 1) / Kind::TILE;
        // Tiles of equal height: two of four rows are faster than one of six and one of two.
        const auto begin = [&](int64_t t) { return t * here / tiles; };
        team.each(tiles, [&](int64_t t) {
            const int64_t r = begin(t);
            Kind::pack(x + (first + r) * m.inputs, m.inputs, begin(t + 1) - r, left + r * steps, row_scales + r);
        });
        team.each(count, [&](int64_t panel) {
            const auto* const right = panels + panel * steps * Kind::DEPTH * PANEL;
            const int64_t column = panel * PANEL, width = std::min(PANEL, m.outputs - column);
            for (int64_t t = 0; t < tiles; t++) {
                typename Kind::Sum found[Kind::TILE][PANEL];
                const int64_t r = begin(t), height = begin(t + 1) - r;
                const auto* const next = reinterpret_cast<const char*>(right) + bytes + t * bytes / tiles;
                const auto tile = tile_of<Kind>(height, std::make_integer_sequence<int, Kind::TILE>());
                tile(left + r * steps, right, steps, found, {next, bytes / steps / tiles});
                for (int64_t i = 0; i < height; i++) {
                    float* const to = out + (first + r + i) * m.outputs + column;
                    for (int64_t j = 0; j < width; j++) {
                        const float scale = m.scales ? m.scales[column + j] : 1.0f;
                        const float bias = m.bias ? m.bias[column + j] : 0.0f;
                        to[j] = Kind::value(found[i][j], row_scales[r + i], scale) + bias;
                    }
                }
            }
        });
    }
}

void product(Team& team, float* out, const float* x, int64_t rows, const Matrix& m, float* packed) {
    using Product = decltype(&product<Int8>);
    static constexpr Product KINDS[] = {product<Floats<float>>, product<Floats<int8_t>>, product<Int8>};
    KINDS[m.kind](team, out, x, rows, m, packed);
}

// ---- Attention.

// Scores of one query to `count` keys [count, dim]; eight keys at once.
inline void scores(const float* query, const float* keys, int64_t count, int64_t dim, float* to) {
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) {
        const float* k = keys + j * dim;
        V a = all(0), b = all(0), c = all(0), d = all(0), e = all(0), f = all(0), g = all(0), h = all(0);
        int64_t i = 0;
        for (; i + 8 <= dim; i += 8, k += 8) {
            const V q = load(query + i);
            a = fma(q, load(k), a), b = fma(q, load(k + dim), b);
            c = fma(q, load(k + 2 * dim), c), d = fma(q, load(k + 3 * dim), d);
            e = fma(q, load(k + 4 * dim), e), f = fma(q, load(k + 5 * dim), f);
            g = fma(q, load(k + 6 * dim), g), h = fma(q, load(k + 7 * dim), h);
        }
        save(to + j, sums(a, b, c, d, e, f, g, h));
        for (; i < dim; i++)
            for (int64_t n = 0; n < 8; n++) to[j + n] += query[i] * keys[(j + n) * dim + i];
    }
    for (; j < count; j++) {
        V sum = all(0);
        int64_t i = 0;
        for (; i + 8 <= dim; i += 8) sum = fma(load(query + i), load(keys + j * dim + i), sum);
        to[j] = sum_of(sum);
        for (; i < dim; i++) to[j] += query[i] * keys[j * dim + i];
    }
}

// to [dim] += shares [count] times values [count, dim]; 64 dimensions at once.
inline void gather(const float* shares, const float* values, int64_t count, int64_t dim, float* to) {
    int64_t i = 0;
    for (; i + 64 <= dim; i += 64) {
        V a = load(to + i), b = load(to + i + 8), c = load(to + i + 16), d = load(to + i + 24);
        V e = load(to + i + 32), f = load(to + i + 40), g = load(to + i + 48), h = load(to + i + 56);
        for (int64_t j = 0; j < count; j++) {
            const V s = all(shares[j]);
            const float* v = values + j * dim + i;
            a = fma(s, load(v), a), b = fma(s, load(v + 8), b), c = fma(s, load(v + 16), c);
            d = fma(s, load(v + 24), d), e = fma(s, load(v + 32), e), f = fma(s, load(v + 40), f);
            g = fma(s, load(v + 48), g), h = fma(s, load(v + 56), h);
        }
        save(to + i, a), save(to + i + 8, b), save(to + i + 16, c), save(to + i + 24, d);
        save(to + i + 32, e), save(to + i + 40, f), save(to + i + 48, g), save(to + i + 56, h);
    }
    for (; i + 8 <= dim; i += 8) {
        V sum = load(to + i);
        for (int64_t j = 0; j < count; j++) sum = fma(all(shares[j]), load(values + j * dim + i), sum);
        save(to + i, sum);
    }
    for (; i < dim; i++)
        for (int64_t j = 0; j < count; j++) to[i] += shares[j] * values[j * dim + i];
}

// Scores become shares of 1; `values` is filled up to a multiple of 8.
inline void softmax(float* values, int64_t count) {
    const int64_t filled = (count + 7) / 8 * 8;
    std::fill(values + count, values + filled, -INFINITY);
    V most = all(-INFINITY), sum = all(0.0f);
    for (int64_t j = 0; j < filled; j += 8) most = largest(most, load(values + j));
    const V shift = all(-largest_of(most));
    for (int64_t j = 0; j < filled; j += 8) save(values + j, exponential(add(load(values + j), shift)));
    std::fill(values + count, values + filled, 0.0f);
    for (int64_t j = 0; j < filled; j += 8) sum = add(sum, load(values + j));
    const V share = all(1.0f / sum_of(sum));
    for (int64_t j = 0; j < filled; j += 8) save(values + j, mul(load(values + j), share));
}

// `count` rows of one head in the pool as float32: themselves, or made so in `place`.
inline const float* rows_of(const float* pool, const float*, int64_t first, int64_t, int64_t dim, float*) {
    return pool + first * dim;
}
inline const float* rows_of(const int8_t* pool, const float* scales, int64_t first, int64_t count, int64_t dim,
                            float* place) {
    for (int64_t j = 0; j < count; j++) {
        const int8_t* from = pool + (first + j) * dim;
        float* to = place + j * dim;
        const V scale = all(scales[first + j]);
        int64_t i = 0;
        for (; i + 8 <= dim; i += 8) save(to + i, mul(widened(from + i), scale));
        for (; i < dim; i++) to[i] = float(from[i]) * scales[first + j];
    }
    return place;
}

struct Geometry {
    int64_t heads, kv_heads, dim, block_size, num_blocks;
};

template <class Number>
inline void foresee(const Number* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(Number))) __builtin_prefetch(from + i);
}

// Elements between one head's scores of so many keys and the next head's.
inline int64_t stride_of(int64_t keys) { return (keys + 7) / 8 * 8 + 8; }

// Elements that a thread attends in where tables have `width` blocks.
int64_t attending_size(const Geometry& g, int64_t width) {
    return whole_lines(g.heads / g.kv_heads * (g.dim + stride_of(width * g.block_size)) + g.block_size * g.dim);
}

// One KV head's queries of one row over the keys [first, position].
template <class Number>
void attend_row(float* out, const float* queries, const Number* pool, const float* scales, const Geometry& g,
                const int32_t* table, int64_t first, int64_t position, int64_t kv_head, float* scratch) {
    const int64_t group = g.heads / g.kv_heads, half = g.num_blocks * g.kv_heads * g.block_size;
    const int64_t begin = first / g.block_size * g.block_size;  // keys before `first` in its block are passed over
    const int64_t count = position + 1 - first, stride = stride_of(position + 1 - begin);
    float *query = scratch, *place = query + group * g.dim, *score = place + g.block_size * g.dim;
    const float scale = 1.0f / std::sqrt(float(g.dim));
    for (int64_t i = 0; i < group * g.dim; i++) query[i] = queries[i] * scale;
    const auto row_of = [&](int64_t kind, int64_t at) {
        return kind * half + (int64_t(table[at / g.block_size]) * g.kv_heads + kv_head) * g.block_size;
    };
    const auto blocks = [&](int64_t kind, auto use) {
        for (int64_t at = begin; at <= position; at += g.block_size) {
            const int64_t skip = std::max<int64_t>(first - at, 0), next = at + g.block_size;
            const int64_t here = std::min(g.block_size, position + 1 - at) - skip;
            // Blocks lie anywhere, so that the hardware foresees none: after the last keys come the first values.
            if (next <= position || kind == 0)
                foresee(pool + (next <= position ? row_of(kind, next) : row_of(1, begin)) * g.dim,
                        g.block_size * g.dim);
            const float* found = rows_of(pool, scales, row_of(kind, at) + skip, here, g.dim, place);
            for (int64_t h = 0; h < group; h++) use(h, score + h * stride + (at + skip - first), found, here);
        }
    };
    blocks(0, [&](int64_t h, float* to, const float* keys, int64_t here) {
        scores(query + h * g.dim, keys, here, g.dim, to);
    });
    for (int64_t h = 0; h < group; h++) softmax(score + h * stride, count);
    std::fill(out, out + group * g.dim, 0.0f);
    blocks(1, [&](int64_t h, float* shares, const float* values, int64_t here) {
        gather(shares, values, here, g.dim, out + h * g.dim);
    });
}

// The rows of a step: where they stand, the slots (block · block_size + offset) of their keys, whose table is theirs.
struct Rows {
    int64_t count;
    const int64_t *positions, *slots;
    const int32_t* tables;
    int64_t width;
    const int32_t* table_of_row;
};

// out [rows, heads, dim]: each row's queries over the keys of its table up to its position, `window` of them or all.
// scratch: of all threads, an attending_size each.
template <class Number>
void attend(Team& team, float* out, const float* qkv, const Number* pool, const float* scales, const Geometry& g,
            const Rows& rows, int64_t window, float* scratch) {
    const int64_t group = g.heads / g.kv_heads;
    float* const own = scratch + Team::number() * attending_size(g, rows.width);
    team.each(rows.count * g.kv_heads, [&](int64_t item) {
        const int64_t row = item / g.kv_heads, kv_head = item % g.kv_heads, position = rows.positions[row];
        const int64_t first = window ? std::max<int64_t>(position + 1 - window, 0) : 0;
        attend_row(out + (row * g.heads + kv_head * group) * g.dim,
                   qkv + (row * (g.heads + 2 * g.kv_heads) + kv_head * group) * g.dim, pool, scales, g,
                   rows.tables + rows.table_of_row[row] * rows.width, first, position, kv_head, own);
    });
}

inline void normalise(float* to, const float* x, const float* weight, int64_t size, float eps) {
    V sum = all(0.0f);
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) sum = fma(load(x + i), load(x + i), sum);
    float squares = sum_of(sum);
    for (; i < size; i++) squares += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(squares / float(size) + eps);
    for (i = 0; i < size; i++) to[i] = x[i] * scale * weight[i];
}

inline void put(float* to, float*, const float* x, int64_t dim) { std::copy(x, x + dim, to); }
inline void put(int8_t* to, float* scale, const float* x, int64_t dim) {
    *scale = step_of(x, dim);
    int64_t i = 0;
    for (; i + 8 <= dim; i += 8) {
        float whole[8];
        save(whole, integers(load(x + i), *scale));
        for (int64_t j = 0; j < 8; j++) to[i + j] = int8_t(whole[j]);
    }
    for (; i < dim; i++) to[i] = int8_t(std::min(std::max(-127.0f, std::nearbyint(x[i] / *scale)), 127.0f));
}

// Norms of heads and rotation of qkv [rows, heads + 2 kv_heads, dim] in place; keys and values into a layer's pool.
template <class Number>
void store(Team& team, float* qkv, Number* pool, float* scales, const Geometry& g, const Rows& rows,
           const float* cos, const float* sin, const float* q_norm, const float* k_norm, float eps) {
    const int64_t across = g.heads + 2 * g.kv_heads, half = g.dim / 2;
    team.each(rows.count, [&](int64_t row) {
        const float *c = cos + rows.positions[row] * g.dim, *s = sin + rows.positions[row] * g.dim;
        for (int64_t head = 0; head < across; head++) {
            float* x = qkv + (row * across + head) * g.dim;
            if (head < g.heads + g.kv_heads) {
                const float* norm = head < g.heads ? q_norm : k_norm;
                if (norm) normalise(x, x, norm, g.dim, eps);
                for (int64_t i = 0; i < half; i++) {
                    const float a = x[i], b = x[i + half];
                    x[i] = a * c[i] + b * s[i];
                    x[i + half] = b * c[i + half] + a * s[i + half];
                }
            }
            if (head < g.heads) continue;
            const int64_t kind = (head - g.heads) / g.kv_heads, kv_head = (head - g.heads) % g.kv_heads;
            const int64_t block = kind * g.num_blocks + rows.slots[row] / g.block_size;
            const int64_t at = (block * g.kv_heads + kv_head) * g.block_size + rows.slots[row] % g.block_size;
            put(pool + at * g.dim, scales ? scales + at : nullptr, x, g.dim);
        }
    });
}

// A KV pool [layers, 2, num_blocks, kv_heads, block_size, dim], or one layer's; scales, of int8: the same without dim.
struct Pool {
    void* numbers;
    float* scales;  // null for float32
    Geometry sizes;

    Pool of(int64_t layer) const {
        const int64_t places = layer * 2 * sizes.num_blocks * sizes.kv_heads * sizes.block_size;
        const int64_t bytes = places * sizes.dim * (scales ? 1 : sizeof(float));
        return {static_cast<char*>(numbers) + bytes, scales ? scales + places : nullptr, sizes};
    }
};

void store(Team& team, float* qkv, const Pool& to, const Rows& rows, const float* cos, const float* sin,
           const float* q_norm, const float* k_norm, float eps) {
    if (to.scales)
        store(team, qkv, static_cast<int8_t*>(to.numbers), to.scales, to.sizes, rows, cos, sin, q_norm, k_norm, eps);
    else
        store(team, qkv, static_cast<float*>(to.numbers), to.scales, to.sizes, rows, cos, sin, q_norm, k_norm, eps);
}

void attend(Team& team, float* out, const float* qkv, const Pool& from, const Rows& rows, int64_t window,
            float* scratch) {
    const auto [numbers, scales, sizes] = from;
    if (scales)
        attend(team, out, qkv, static_cast<const int8_t*>(numbers), scales, sizes, rows, window, scratch);
    else
        attend(team, out, qkv, static_cast<const float*>(numbers), scales, sizes, rows, window, scratch);
}

// Of x [rows, size], or of total += x.
void norm(Team& team, float* out, const float* x, float* total, const float* weight, int64_t rows, int64_t size,
          float eps) {
    team.each(rows, [&](int64_t r) {
        const float* from = x + r * size;
        if (total) {
            float* const sum = total + r * size;
            for (int64_t i = 0; i < size; i++) sum[i] += from[i];
            from = sum;
        }
        normalise(out + r * size, from, weight, size, eps);
    });
}

// out [rows, size] = silu(gate) * up, of x [rows, 2, size].
void gate(Team& team, float* out, const float* x, int64_t rows, int64_t size) {
    team.each(rows, [&](int64_t r) {
        const float *gate = x + 2 * r * size, *up = gate + size;
        float* to = out + r * size;
        const V one = all(1.0f), negative = all(-1.0f);
        int64_t i = 0;
        for (; i + 8 <= size; i += 8) {
            const V g = load(gate + i);
            save(to + i, mul(div(g, add(one, exponential(mul(g, negative)))), load(up + i)));
        }
        for (; i < size; i++) to[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    });
}

void pick(Team& team, float* out, const float* x, const int64_t* which, int64_t count, int64_t size) {
    team.each(count, [&](int64_t r) { std::copy(x + which[r] * size, x + (which[r] + 1) * size, out + r * size); });
}

struct Layer {
    const float *attention_norm, *q_norm, *k_norm, *ffn_norm;  // those of heads may be null
    Matrix qkv, out, gate_up, down;
};

struct Stack {
    const Layer* layers;
    int64_t count, hidden;
    const float* norm;  // after the last
    float eps;
};

// What a step is computed with beside the layers.
struct Context {
    Pool pool;
    Rows rows;
    const float *cos, *sin;
    const int64_t* windows;  // by layer: keys that a query sees, or 0 for all
    const int64_t* kept;     // rows that anything is wanted of after the last layer
    int64_t kept_count;      // -1: all
};

struct Places {
    float* of[PLACES];
};

// out [kept, hidden]: x [rows, hidden] through all layers and the last norm; model.py's `hidden` says the same in parts.
void pass(Team& team, float* out, float* x, const Stack& stack, const Context& with, const Places& places) {
    const auto& [packed, normed, qkv, attended, added, gate_up, gated, kept, scored] = places.of;
    const int64_t size = stack.hidden;
    int64_t rows = with.rows.count;
    norm(team, normed, x, nullptr, stack.layers[0].attention_norm, rows, size, stack.eps);
    for (int64_t n = 0; n < stack.count; n++) {
        const Layer& layer = stack.layers[n];
        const Pool pool = with.pool.of(n);
        const bool last = n + 1 == stack.count;
        product(team, qkv, normed, rows, layer.qkv, packed);
        store(team, qkv, pool, with.rows, with.cos, with.sin, layer.q_norm, layer.k_norm, stack.eps);
        attend(team, attended, qkv, pool, with.rows, with.windows[n], scored);
        const float* found = attended;
        if (last && with.kept_count >= 0) {  // what follows serves only the rows that are kept
            rows = with.kept_count;
            pick(team, kept, x, with.kept, rows, size);
            pick(team, qkv, attended, with.kept, rows, layer.out.inputs);
            x = kept, found = qkv;
        }
        product(team, added, found, rows, layer.out, packed);
        norm(team, normed, added, x, layer.ffn_norm, rows, size, stack.eps);
        product(team, gate_up, normed, rows, layer.gate_up, packed);
        gate(team, gated, gate_up, rows, layer.down.inputs);
        product(team, added, gated, rows, layer.down, packed);
        const float* const weight = last ? stack.norm : stack.layers[n + 1].attention_norm;
        norm(team, last ? out : normed, added, x, weight, rows, size, stack.eps);
    }
}

// Products, and attention's look at keys, which small models have more of.
bool worth_sharing(const Layer& layer, const Rows& rows, const Geometry& g) {
    return worth_sharing(layer.gate_up, rows.count) || rows.count * rows.width * g.block_size * g.kv_heads > WORTH;
}

void product_alone(float* out, const float* x, int64_t rows, const Matrix& m, float* packed) {
    together(threads, worth_sharing(m, rows), [&](Team& team) { product(team, out, x, rows, m, packed); });
}

}  // namespace

extern "C" {

void set_threads(int count) { threads = count; }

// Elements of `packed` for the products below.
int64_t product_scratch(int64_t rows, int64_t inputs) { return packed_size(rows, inputs); }

void product_float32(float* out, const float* x, int64_t rows, int64_t inputs, int64_t outputs, const float* panels,
                     const float* bias, float* packed) {
    product_alone(out, x, rows, {0, inputs, outputs, panels, nullptr, bias}, packed);
}

void product_weights8(float* out, const float* x, int64_t rows, int64_t inputs, int64_t outputs, const int8_t* panels,
                      const float* scales, const float* bias, float* packed) {
    product_alone(out, x, rows, {1, inputs, outputs, panels, scales, bias}, packed);
}

void product_int8(float* out, const float* x, int64_t rows, int64_t inputs, int64_t outputs, const int8_t* panels,
                  const float* scales, const float* bias, float* packed) {
    product_alone(out, x, rows, {2, inputs, outputs, panels, scales, bias}, packed);
}

// Into one layer's pool; scales: null for float32.
void store_rows(float* qkv, void* pool, float* scales, const Geometry* g, int64_t count, const int64_t* positions,
                const int64_t* slots, const float* cos, const float* sin, const float* q_norm, const float* k_norm,
                float eps) {
    const Rows rows = {count, positions, slots, nullptr, 0, nullptr};
    const bool worth = count * (g->heads + 2 * g->kv_heads) * g->dim > WORTH;
    together(threads, worth,
             [&](Team& team) { store(team, qkv, {pool, scales, *g}, rows, cos, sin, q_norm, k_norm, eps); });
}

// These two return 0, or how many elements of scratch they need: then nothing is done.
int64_t attend_rows(float* out, const float* qkv, void* pool, float* scales, const Geometry* g, int64_t count,
                    const int64_t* positions, const int32_t* tables, int64_t width, const int32_t* table_of_row,
                    int64_t window, float* scratch, int64_t given) {
    const Rows rows = {count, positions, nullptr, tables, width, table_of_row};
    const int team_size = threads;
    const int64_t needed = team_size * attending_size(*g, width);
    if (needed > given) return needed;
    together(team_size, count * g->kv_heads > 1,
             [&](Team& team) { attend(team, out, qkv, {pool, scales, *g}, rows, window, scratch); });
    return 0;
}

// x changes. out: of all rows, or of those that are kept.
int64_t all_layers(float* out, float* x, const Stack* stack, const Context* with, float* scratch, int64_t given) {
    const Layer& first = stack->layers[0];
    const Geometry& g = with->pool.sizes;
    const int64_t rows = with->rows.count, widest = std::max({stack->hidden, first.out.inputs, first.down.inputs});
    const int team_size = threads;
    int64_t sizes[PLACES], needed = 0;
    sizes[PACKED] = packed_size(rows, widest);
    sizes[QKV] = rows * first.qkv.outputs;
    sizes[ATTENDED] = rows * first.out.inputs;
    sizes[GATE_UP] = rows * first.gate_up.outputs;
    sizes[GATED] = rows * first.down.inputs;
    sizes[NORMED] = sizes[ADDED] = sizes[KEPT] = rows * stack->hidden;
    sizes[SCORED] = team_size * attending_size(g, with->rows.width);
    for (const int64_t size : sizes) needed += whole_lines(size);
    if (needed > given) return needed;
    Places places;
    for (int place = 0; place < PLACES; scratch += whole_lines(sizes[place++])) places.of[place] = scratch;
    const bool worth = worth_sharing(first, with->rows, g);
    together(team_size, worth, [&](Team& team) { pass(team, out, x, *stack, *with, places); });
    return 0;
}

void rms_norm(float* out, const float* x, const float* weight, int64_t rows, int64_t size, float eps) {
    together(threads, rows * size > WORTH, [&](Team& team) { norm(team, out, x, nullptr, weight, rows, size, eps); });
}

void silu_mul(float* out, const float* x, int64_t rows, int64_t size) {
    together(threads, rows * size > WORTH, [&](Team& team) { gate(team, out, x, rows, size); });
}
}
