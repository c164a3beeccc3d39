// GPT-2's forward pass: embedding, all layers and logits of some tokens in one call.
//
// Names are those of the papers: "Language Models are Unsupervised Multitask Learners" (Radford et
// al. 2019) and "Attention Is All You Need" (Vaswani et al. 2017). A pass reads M rows. A row is
// one token of one sequence, at one position: the decode step of a batch has a row for each
// sequence, a prompt and the verification of draft tokens have several rows of one sequence.
//
//   C channels, H heads, D = C / H head size, N positions, K inputs and O outputs of a product.
//
// Decoding a single token does almost nothing but read weights, so that memory bandwidth bounds it.
// Products of a few rows therefore read each weight once for all rows, and prefetch it line by line
// in the order of its addresses. In any other order the processor's own prefetching does not help,
// and reading takes almost twice as long. If several rows share a weight, so that more than reading
// has to be done for each line, prefetching into the level-2 cache is faster. Arithmetic bounds
// products of many rows, which are computed in another way.
//
// Activations are float32. The input of a product is rounded to bfloat16 or quantized if its
// weights are.
//
// Every function that `decode` calls is called by all threads of the team, which share its loops.
// A result does not depend on the number of threads, or of rows up to FEW.

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define PAUSE() _mm_pause()  // in a loop that waits
#else
#define PAUSE()
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// AMX multiplies tiles of 16 rows of 64 bytes.
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512VNNI__) && defined(__linux__)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>

// Whether Linux lets this process use tiles, for which it has to be asked.
static int has_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int known = -1;
    if (known < 0) known = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    return known;
}

// Gives all tiles of this thread their full size.
static void start_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = 16;
    _tile_loadconfig(&config);
}
static void stop_tiles(void) { _tile_release(); }
#else
static int has_tiles(void) { return 0; }
static void start_tiles(void) {}
static void stop_tiles(void) {}
#endif

// Vectors of float32. The compiler's vector types cover AVX-512, AVX2 and NEON alike, and become
// scalar code on a processor without any. Products of 8 and 16 bits have instructions of their own.

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef uint16_t bfloat16;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_bits __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t unaligned_half __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

typedef int8_t unaligned_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define UNROLL _Pragma("GCC unroll 16")  // so that the compiler keeps an array in registers
#define INLINE static inline __attribute__((always_inline))
#define TILE 4        // rows of a weight, and rows of activations, that are multiplied at a time
#define SIDE 16       // rows of a weight, and rows of activations, that AMX multiplies at a time
#define BLOCK 64      // activations that are quantized with one scale
#define LOW 256       // low terms of quantized activations to one of the high term
#define AHEAD 8192    // bytes from an int8 weight that is read to one that is prefetched
#define EVEN 10.0f    // times their mean, up to which magnitudes of a block need no low term
#define MOST_OUTLIERS 64  // of a product
#define FEW 16        // rows whose products are bound by reading the weights
#define CHUNK 256     // activations that are one index of a loop
#define STRIP 64      // outputs whose weights are read at a time, input by input
#define PARTS 3       // of a loop, for each thread; more are slower, as prefetching starts anew
#define ALIGNMENT 64  // bytes
#define ROUNDING 12582912.0f  // 1.5 · 2^23, whose addition rounds a float32 to an integer

INLINE vec load(const float *p) { return *(const unaligned_vec *)p; }
INLINE void store(float *p, vec x) { *(unaligned_vec *)p = x; }
INLINE vec broadcast(float x) { return x - (vec){0}; }
INLINE vec choose(bits mask, vec yes, vec no) {
    return (vec)((mask & (bits)yes) | (~mask & (bits)no));
}

// The larger and the smaller of two numbers; y, if one of them is NaN.
INLINE vec larger(vec x, vec y) {
#if defined(__AVX512F__)  // compilers take three instructions for the choice below
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return choose((bits)(x > y), x, y);
#endif
}
INLINE vec smaller(vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)x, (__m512)y);
#else
    return choose((bits)(x < y), x, y);
#endif
}

INLINE vec limit(vec x, float least, float most) {  // NaN stays NaN
    return smaller(broadcast(most), larger(broadcast(least), x));
}

INLINE vec magnitude(vec x) { return (vec)((bits)x & 0x7fffffff); }

INLINE vec load_bfloat16(const bfloat16 *p) {
#if defined(__AVX512F__)  // compilers take five instructions for the conversion below
    return (vec)((bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
#else
    return (vec)(__builtin_convertvector(*(const unaligned_half *)p, bits) << 16);
#endif
}

INLINE float to_float(bfloat16 x) {
    uint32_t wide = (uint32_t)x << 16;
    float y;
    memcpy(&y, &wide, sizeof y);
    return y;
}

// Rounds to nearest, ties to even.
INLINE void store_bfloat16(bfloat16 *p, vec x) {
    const bits wide = (bits)x, rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    const bits nan = (bits){0} + 0x7fc0;
    *(unaligned_half *)p =
        __builtin_convertvector((bits)choose((bits)(x == x), (vec)rounded, (vec)nan), half_bits);
}

INLINE bfloat16 to_bfloat16(float x) {
    bfloat16 rounded[LANES];
    store_bfloat16(rounded, broadcast(x));
    return rounded[0];
}

// The last byte of each element: the integer in a float32 that ROUNDING was added to.
INLINE void store_bytes(int8_t *p, vec x) {
#if defined(__AVX512F__)  // compilers do not find this instruction for the conversion below
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x));
#else
    *(unaligned_bytes *)p = __builtin_convertvector((bits)x, bytes);
#endif
}

INLINE float sum(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

INLINE float largest(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// exp(x) to about one unit in the last place: 2^n · e^r with |r| ≤ ln 2 / 2, and e^r by the
// polynomial of Cephes' expf. NaN stays NaN; |x| is limited to what a float32 can hold.
INLINE vec exponential(vec x) {
    x = limit(x, -87, 88);
    vec shifted = x * 1.44269504f + ROUNDING;
    vec n = shifted - ROUNDING;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)(((bits)shifted << 23) + 0x3f800000);
}

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

// The model. Python fills these structures in; `native.py` has the same fields in the same order.

enum type { FLOAT32, BFLOAT16, INT8 };
enum activation { GELU_TANH, GELU, QUICK_GELU, RELU, SILU, TANH };

typedef struct {
    const void *weight;  // (O, K) of the model's type
    const float *scale;  // (O,) of an int8 weight
    const float *bias;   // (O,) or NULL
    int64_t n_out, n_in;
    int64_t n_outliers;           // inputs that are multiplied in float32, and whose weights are 0
    const int64_t *outliers;      // their indices
    const float *outlier_weight;  // (n_outliers, O)
} Matrix;

typedef struct {
    const float *weight, *bias;  // (C,); the bias may be NULL
    float eps;
} Norm;

typedef struct {
    Norm ln_1, ln_2;
    Matrix c_attn, attn_proj, c_fc, mlp_proj;
    float scale;        // of attention scores
    int64_t activation;
} Block;

typedef struct {
    int64_t n_layer, n_head, n_embd, n_inner, n_positions;
    int64_t weights;     // type of the matrices
    int64_t stored;      // type of the embedding and the cache, FLOAT32 or BFLOAT16
    const void *wte, *wpe;
    const Block *h;
    Norm ln_f;
    Matrix lm_head;
} Model;

typedef struct {
    int64_t n_rows;                                     // M
    const int64_t *tokens, *sequences, *positions;      // (M,)
    void *kv;                                           // (L, 2, B, H, N, D)
    int64_t layer_stride, kv_stride, sequence_stride;   // of the cache, in elements
} Batch;

// The state of a loop that the threads share.
typedef struct {
    _Alignas(ALIGNMENT) int64_t next, done;  // the next index to take, and the number of those done
} Loop;

// BLOCK quantized activations, (high + low / LOW) · scale.
typedef struct {
    float scale;
    int32_t high, low;  // the sums of both terms
    int32_t has_low;    // whether any low term is not zero
} Terms;

// Activations of a pass, and the rounded or quantized input of a product. Each thread has a copy.
typedef struct {
    float *x, *normed, *qkv, *heads, *fc;  // (M, C), (M, C), (M, 3C), (M, C), (M, n_inner)
    float *scores;                         // of each thread: (N, LANES), and memory for queries
    bfloat16 *rounded;                     // (M, blocks of K, BLOCK), if weights are bfloat16
    int8_t *quantized;                     // (M, blocks of K, 2, BLOCK), in the same memory
    Terms *terms;                          // (M, blocks of K)
    int32_t *tiles;                        // (groups of M, blocks of K, 2, SIDE, SIDE), there too
    float *tile_scales;                    // (groups of M, blocks of K, 2, SIDE), there too
    float *offsets;                        // (M,): what OFFSET adds to a product
    float *outliers;                       // (M, outliers): inputs that are multiplied in float32
    int32_t has_tiles;
    Loop *loop;                            // the loop that this thread is in
    int64_t taken, threads;                // indices of its current part, and size of the team
} Scratch;

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t blocks(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

// Rows of quantized activations in a tile: few rows with both terms, or many with one of them.
INLINE int64_t rows_of_tile(int64_t rows) { return rows > FEW ? SIDE : SIDE / 2; }
INLINE int64_t row_groups(int64_t rows) {
    return (rows + rows_of_tile(rows) - 1) / rows_of_tile(rows);
}

static char *allot(char **free, int64_t bytes) {
    char *taken = *free;
    *free += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return taken;
}

// No more loops than a pass has: up to 17 in a layer, if its products quantize their input and have
// outliers.
INLINE int64_t loops(const Model *model) { return 17 * model->n_layer + 5; }

// Floats for attention in one thread: scores (N, LANES), queries (D, LANES) and keys (2 · TILE, D).
INLINE int64_t scores_size(const Model *model) {
    const int64_t D = model->n_embd / model->n_head;
    return (model->n_positions + D) * LANES + 2 * TILE * D;
}

static Scratch divide(char **free, const Model *model, int64_t rows, int64_t threads) {
    const int64_t C = model->n_embd, f = sizeof(float);
    const int64_t n = row_groups(rows) * SIDE * blocks(max(C, model->n_inner));
    Scratch s = {0};
    s.x = (float *)allot(free, rows * C * f);
    s.normed = (float *)allot(free, rows * C * f);
    s.qkv = (float *)allot(free, rows * 3 * C * f);
    s.heads = (float *)allot(free, rows * C * f);
    s.fc = (float *)allot(free, rows * model->n_inner * f);
    s.scores = (float *)allot(free, threads * scores_size(model) * f);
    s.quantized = (int8_t *)allot(free, n * 2 * BLOCK);
    s.rounded = (bfloat16 *)s.quantized;
    s.tiles = (int32_t *)s.quantized;
    s.terms = (Terms *)allot(free, n * (int64_t)sizeof(Terms));
    s.tile_scales = (float *)s.terms;
    s.offsets = (float *)allot(free, rows * f);
    s.outliers = (float *)allot(free, rows * MOST_OUTLIERS * f);
    s.loop = (Loop *)allot(free, loops(model) * (int64_t)sizeof(Loop));
    s.threads = threads;
    return s;
}

// Bytes of scratch memory for so many rows and threads; it has to be aligned to ALIGNMENT.
int64_t scratch_size(const Model *model, int64_t rows, int64_t threads) {
    char *end = NULL;
    divide(&end, model, rows, threads);
    return (int64_t)(end - (char *)NULL);
}

// SHARED_LOOP(s, i, count) { … } runs its body for every i below `count`, on all threads together.
// A thread takes one part of the loop after another, and goes on to the next loop when all parts
// are done. It does not wait for the other threads: one whose processor is busy with another
// program holds up the team only if that happens in the middle of a part.
#define SHARED_LOOP(s, i, count)                                                       \
    for (int64_t i = 0, end_of_##i = 0; take_part(s, count, &i, &end_of_##i); done(s)) \
        for (; i < end_of_##i; i++)

INLINE int take_part(Scratch *s, int64_t count, int64_t *start, int64_t *end) {
    const int64_t part = (count - 1) / (PARTS * s->threads) + 1;
    *start = __atomic_fetch_add(&s->loop->next, part, __ATOMIC_RELAXED);
    *end = min(*start + part, count);
    s->taken = *end - *start;
    if (*start < count) return 1;
    while (__atomic_load_n(&s->loop->done, __ATOMIC_ACQUIRE) < count) PAUSE();
    s->loop++;
    return 0;
}
INLINE void done(Scratch *s) { __atomic_fetch_add(&s->loop->done, s->taken, __ATOMIC_RELEASE); }

// Prefetches a line into the level-1 or the level-2 cache. (A constant is required in each call.)
INLINE void prefetch(const void *p, int level_2) {
    if (level_2) __builtin_prefetch(p, 0, 2);
    else __builtin_prefetch(p, 0, 3);
}

// Elements of float32 or bfloat16, by their index.
INLINE const void *element(enum type type, const void *p, int64_t at) {
    return (const char *)p + at * (type == FLOAT32 ? sizeof(float) : sizeof(bfloat16));
}
INLINE vec load_stored(enum type type, const void *p, int64_t at) {
    const void *from = element(type, p, at);
    return type == FLOAT32 ? load(from) : load_bfloat16(from);
}
INLINE float stored(enum type type, const void *p, int64_t at) {
    const void *from = element(type, p, at);
    return type == FLOAT32 ? *(const float *)from : to_float(*(const bfloat16 *)from);
}

// Sums of `n` rows of a weight (n, K) times `m` rows of activations (m, K). n and m are constants
// of at most TILE wherever these are inlined, and so is the type, so that the compiler keeps all
// sums in registers.

// Weights of float32 or bfloat16 by activations of the same type; also keys by queries. Rows of
// activations are `stride` elements apart.
INLINE void tile_floats(enum type type, const void *w, enum type inputs, const void *x,
                        int64_t stride, int64_t K, int n, int m, float out[TILE][TILE]) {
    vec sums[TILE][TILE];
    UNROLL for (int i = 0; i < n; i++)
        UNROLL for (int j = 0; j < m; j++) sums[i][j] = (vec){0};
    int64_t k = 0;
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    if (inputs == BFLOAT16)  // pairs of products
        for (; k < K; k += 2 * LANES) {
            const __mmask32 kept = ~0u >> (2 * LANES - min(2 * LANES, K - k));
            UNROLL for (int i = 0; i < n; i++) {
                prefetch(element(type, w, n * K + n * k + 2 * i * LANES), m > 2);
                const void *from = element(type, w, i * K + k);
                const __m512bh v = (__m512bh)_mm512_maskz_loadu_epi16(kept, from);
                UNROLL for (int j = 0; j < m; j++) {
                    const void *input = element(inputs, x, j * stride + k);
                    sums[i][j] = (vec)_mm512_dpbf16_ps((__m512)sums[i][j], v,
                                                       (__m512bh)_mm512_loadu_si512(input));
                }
            }
        }
#endif
    for (; k + LANES <= K; k += LANES) {
        UNROLL for (int i = 0; i < n; i++) {
            // The rows after these n, line by line in the order of their addresses.
            prefetch(element(type, w, n * K + n * k + i * LANES), m > 2);
            const vec v = load_stored(type, w, i * K + k);
            UNROLL for (int j = 0; j < m; j++)
                sums[i][j] += v * load_stored(inputs, x, j * stride + k);
        }
    }
    UNROLL for (int i = 0; i < n; i++)
        UNROLL for (int j = 0; j < m; j++) {
            out[i][j] = sum(sums[i][j]);
            for (int64_t l = k; l < K; l++)
                out[i][j] += stored(type, w, i * K + l) * stored(inputs, x, j * stride + l);
        }
}

// Integer products of a block: `dot` adds them to `from`, whose lanes then add up to the sum of all
// 64.

#if defined(__AVX512VNNI__)
#define OFFSET 128  // the instruction takes unsigned weights: q + 128, which is q ^ 0x80
typedef __m512i block;
INLINE block load_block(const int8_t *p) { return _mm512_loadu_si512(p); }
INLINE block load_weights(const int8_t *p) {
    return _mm512_xor_si512(load_block(p), _mm512_set1_epi8((char)0x80));
}
INLINE ints dot(block w, block x, ints from) {
    return (ints)_mm512_dpbusd_epi32((__m512i)from, w, x);
}
#else
#define OFFSET 0
typedef struct { const int8_t *values; } block;
INLINE block load_block(const int8_t *p) { return (block){p}; }
#define load_weights load_block
#if defined(__AVX2__)
// |w| · (x with the sign of w): two products fit 16 bits, as 127 is the largest value of both.
INLINE ints dot(block w, block x, ints from) {
    __m256i total = _mm256_setzero_si256();
    for (int half = 0; half < BLOCK; half += 32) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(w.values + half));
        __m256i b = _mm256_loadu_si256((const __m256i *)(x.values + half));
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
        total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
#if LANES == 16
    return from + (ints)_mm512_zextsi256_si512(total);
#else
    return from + (ints)total;
#endif
}
#elif defined(__ARM_FEATURE_DOTPROD)
INLINE ints dot(block w, block x, ints from) {
    int32x4_t total = (int32x4_t)from;
    for (int i = 0; i < BLOCK; i += 16)
        total = vdotq_s32(total, vld1q_s8(w.values + i), vld1q_s8(x.values + i));
    return (ints)total;
}
#else
INLINE ints dot(block w, block x, ints from) {
    int32_t total = 0;
    for (int i = 0; i < BLOCK; i++) total += (int32_t)w.values[i] * x.values[i];
    from[0] += total;
    return from;
}
#endif
#endif

// Adds the products of block b of a row of weights by m rows of activations.
INLINE void multiply_block(block w, const int8_t *x, const Terms *terms, int64_t n_blocks, int64_t b,
                           int m, vec sums[TILE]) {
    UNROLL for (int j = 0; j < m; j++) {
        const int64_t at = j * n_blocks + b;
        const block high = load_block(x + at * 2 * BLOCK);
        const block low = load_block(x + at * 2 * BLOCK + BLOCK);
        // LOW · high + low: 32 bits hold the sum of 64 such products.
        const ints total = dot(w, low, dot(w, high, (ints){0}) * LOW);
        sums[j] += __builtin_convertvector(total, vec) * terms[at].scale;
    }
}

// int8 weights by quantized activations, in units of the weights' scales.
INLINE void tile_int8(const int8_t *w, const int8_t *x, const Terms *terms, const float *offsets,
                      int64_t K, int n, int m, float out[TILE][TILE]) {
    const int64_t n_blocks = blocks(K), whole = K / BLOCK;
    vec sums[TILE][TILE];
    for (int i = 0; i < n; i++) {
        const int8_t *from = w + i * K;
        vec row[TILE];
        UNROLL for (int j = 0; j < m; j++) row[j] = (vec){0};
        for (int64_t b = 0; b < whole; b++) {
            if (m > 1) prefetch(from + b * BLOCK + AHEAD, 1);  // for one row, the processor does
            multiply_block(load_weights(from + b * BLOCK), x, terms, n_blocks, b, m, row);
        }
        if (whole < n_blocks) {
            int8_t rest[BLOCK] = {0};
            memcpy(rest, from + whole * BLOCK, (size_t)(K - whole * BLOCK));
            multiply_block(load_weights(rest), x, terms, n_blocks, whole, m, row);
        }
        UNROLL for (int j = 0; j < m; j++) sums[i][j] = row[j];
    }
    UNROLL for (int i = 0; i < n; i++)
        UNROLL for (int j = 0; j < m; j++) out[i][j] = sum(sums[i][j]) * (1.0f / LOW) - offsets[j];
}

// Quantizes BLOCK activations to (high + low / LOW) · scale, terms of 8 bits each. The scale is NaN
// if one of the activations is not finite. The low term is left out, as zeros, if no activation is
// larger than `even` times their mean magnitude.
INLINE Terms quantize_block(const float *x, float even, int8_t *q) {
    vec exact[BLOCK / LANES], most = {0}, magnitudes = {0}, highs = {0}, lows = {0};
    UNROLL for (int i = 0; i < BLOCK / LANES; i++) {
        exact[i] = load(x + i * LANES);
        most = larger(magnitude(exact[i]), most);
        magnitudes += magnitude(exact[i]);
    }
    const float scale = largest(most) / 127, total = sum(magnitudes);
    if (!(total < INFINITY)) return (Terms){NAN, 0, 0, 0};
    const float per_scale = scale > 1e-30f ? 1 / scale : 0;
    const int has_low = scale * 127 * BLOCK > even * total;
    UNROLL for (int i = 0; i < BLOCK / LANES; i++) {
        const vec high = exact[i] * per_scale + ROUNDING;
        highs += high - ROUNDING;
        store_bytes(q + i * LANES, high);
        exact[i] = (exact[i] * per_scale - (high - ROUNDING)) * (has_low ? (float)LOW : 0.0f);
    }
    UNROLL for (int i = 0; i < BLOCK / LANES; i++) {
        const vec low = limit(exact[i], -127, 127) + ROUNDING;
        lows += low - ROUNDING;
        store_bytes(q + BLOCK + i * LANES, low);
    }
    return (Terms){scale, (int32_t)sum(highs), (int32_t)sum(lows), has_low};
}

// Writes the terms of a block of row r into columns of tiles, four bytes in each row of a tile. One
// tile has both terms of SIDE / 2 rows, or there are two, of the high and the low terms of SIDE
// rows. What is not written has the scale 0.
INLINE void put_in_tiles(const int8_t *q, Terms terms, int64_t r, int64_t at_once, int64_t n_blocks,
                         int64_t b, Scratch *s) {
    const int64_t first = (r / at_once * n_blocks + b) * 2, both = at_once < SIDE;
    for (int64_t term = 0; term <= terms.has_low; term++) {
        const int64_t to = both ? first : first + term;
        const int64_t column = r % at_once + (both ? term * at_once : 0);
        for (int64_t i = 0; i < SIDE; i++)
            memcpy(s->tiles + (to * SIDE + i) * SIDE + column, q + term * BLOCK + 4 * i, 4);
        s->tile_scales[to * SIDE + column] = terms.scale * (term ? 1.0f / LOW : 1);
    }
}

// Quantizes row r of the activations, except for outliers.
static void quantize_row(const Matrix *w, float *row, int64_t r, int64_t rows, Scratch *s) {
    const int64_t K = w->n_in, n_blocks = blocks(K);
    const float even = rows > FEW ? EVEN : 0;
    float *outliers = s->outliers + r * w->n_outliers, total = 0;
    for (int64_t i = 0; i < w->n_outliers; i++) {
        outliers[i] = row[w->outliers[i]];
        row[w->outliers[i]] = 0;
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const float *in = row + b * BLOCK;
        float rest[BLOCK] = {0};
        if (K - b * BLOCK < BLOCK) in = memcpy(rest, in, (size_t)(K - b * BLOCK) * sizeof *in);
        const int64_t at = r * n_blocks + b;
        int8_t own[2 * BLOCK] = {0}, *q = s->has_tiles ? own : s->quantized + at * 2 * BLOCK;
        const Terms t = quantize_block(in, even, q);
        total += t.scale * ((float)t.high + (float)t.low * (1.0f / LOW));
        if (s->has_tiles) put_in_tiles(q, t, r, rows_of_tile(rows), n_blocks, b, s);
        else s->terms[at] = t;
    }
    s->offsets[r] = OFFSET * total;
    for (int64_t i = 0; i < w->n_outliers; i++) row[w->outliers[i]] = outliers[i];
}

// Quantizes activations (M, K): blocks of 64 with a scale each, so that a large one costs the
// precision of its own block only. The rows of a tile are left to one thread, as they share lines.
static void quantize(const Matrix *w, float *x, int64_t rows, Scratch *s) {
    const int64_t at_once = s->has_tiles ? rows_of_tile(rows) : 1;
    const int64_t scales = s->has_tiles ? 2 * SIDE * blocks(w->n_in) : 0;
    SHARED_LOOP(s, group, (rows + at_once - 1) / at_once) {
        memset(s->tile_scales + group * scales, 0, (size_t)scales * sizeof(float));
        for (int64_t r = group * at_once; r < min(rows, (group + 1) * at_once); r++)
            quantize_row(w, x + r * w->n_in, r, rows, s);
    }
}

// Adds the products of outliers to y (M, O).
static void add_outliers(const Matrix *w, int64_t rows, Scratch *s, float *y) {
    const int64_t O = w->n_out, n = w->n_outliers;
    SHARED_LOOP(s, strip, (O + STRIP - 1) / STRIP) {
        const int64_t start = strip * STRIP, end = min(start + STRIP, O);
        const float *weight = w->outlier_weight + start;
        for (int64_t r = 0; r < rows; r++) {
            const float *inputs = s->outliers + r * n;
            float *to = y + r * O + start;
            if (end - start < STRIP) {
                for (int64_t i = 0; i < n; i++)
                    for (int64_t o = 0; o < end - start; o++) to[o] += inputs[i] * weight[i * O + o];
                continue;
            }
            vec sums[STRIP / LANES];
            UNROLL for (int v = 0; v < STRIP / LANES; v++) sums[v] = load(to + v * LANES);
            for (int64_t i = 0; i < n; i++)
                UNROLL for (int v = 0; v < STRIP / LANES; v++)
                    sums[v] += inputs[i] * load(weight + i * O + v * LANES);
            UNROLL for (int v = 0; v < STRIP / LANES; v++) store(to + v * LANES, sums[v]);
        }
    }
}

// Rounds activations (M, K) to bfloat16, in blocks whose rest is zeros.
static void round_to_bfloat16(const float *x, int64_t rows, int64_t K, Scratch *s) {
    const int64_t stride = blocks(K) * BLOCK;
    SHARED_LOOP(s, r, rows)
        for (int64_t k = 0; k < stride; k += LANES) {
            const float *in = x + r * K + k;
            float rest[LANES] = {0};
            if (K - k < LANES) in = memcpy(rest, in, (size_t)max(0, K - k) * sizeof *in);
            store_bfloat16(s->rounded + r * stride + k, load(in));
        }
}

// Multiplies n rows of a weight, from row o on, by m rows of activations, from row r on.
INLINE void multiply(const Matrix *w, enum type type, const float *x, const Scratch *s, int64_t o,
                     int n, int64_t r, int m, float out[TILE][TILE]) {
    const int64_t K = w->n_in, b = blocks(K);
    if (type == INT8)
        tile_int8((const int8_t *)w->weight + o * K, s->quantized + r * b * 2 * BLOCK,
                  s->terms + r * b, s->offsets + r, K, n, m, out);
    else if (type == BFLOAT16)
        tile_floats(type, element(type, w->weight, o * K), type, s->rounded + r * b * BLOCK,
                    b * BLOCK, K, n, m, out);
    else
        tile_floats(type, element(type, w->weight, o * K), type, x + r * K, K, K, n, m, out);
}

// y (M, O) = x (M, K) · wᵀ + bias, added to y itself for a residual connection.
INLINE void matmul_of(const Matrix *w, enum type type, const float *x, int64_t rows, Scratch *s,
                      float *y, int residual) {
    SHARED_LOOP(s, group, (w->n_out + TILE - 1) / TILE) {
        const int64_t o = group * TILE, n = min(TILE, w->n_out - o);
        for (int64_t r = 0, m; r < rows; r += m) {
            float out[TILE][TILE];
            m = n == TILE ? min(TILE, rows - r) : 1;
            if (n < TILE)
                for (int64_t i = 0; i < n; i++) multiply(w, type, x, s, o + i, 1, r, 1, out + i);
            else if (m == 1) multiply(w, type, x, s, o, TILE, r, 1, out);
            else if (m == 2) multiply(w, type, x, s, o, TILE, r, 2, out);
            else if (m == 3) multiply(w, type, x, s, o, TILE, r, 3, out);
            else multiply(w, type, x, s, o, TILE, r, TILE, out);
            for (int64_t j = 0; j < m; j++)
                for (int64_t i = 0; i < n; i++) {
                    float value = out[i][j] * (type == INT8 ? w->scale[o + i] : 1.0f);
                    if (w->bias) value += w->bias[o + i];
                    float *to = y + (r + j) * w->n_out + o + i;
                    *to = residual ? *to + value : value;
                }
        }
    }
}

// Products of many rows: PANEL rows of a weight at a time are transposed, so that a vector has one
// group of 4 bytes, one float32 value, two of bfloat16 or four of int8, of 16 outputs. As many rows
// of activations are multiplied by them at a time as have their sums in registers.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define PANEL 32
#define ROWS 6
#define COLUMNS 48  // of 64 bytes: so much of a panel stays in the level-2 cache
#define SHORT 192  // groups in a sum, as sums of few products have small rounding errors
#define GROUPS 16  // in a column

typedef __m512i Panel[COLUMNS * GROUPS][PANEL / 16];
typedef int32_t Group __attribute__((may_alias));

#if defined(AMX)
#define MOST_ROWS 16  // of a tile
#else
#define MOST_ROWS ROWS
#endif

// Adds products of pairs of bfloat16 values.
INLINE vec add_pairs(vec from, __m512i w, __m512i x) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)from, (__m512bh)w, (__m512bh)x);
#else
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    from += (vec)_mm512_slli_epi32(w, 16) * (vec)_mm512_slli_epi32(x, 16);
    return from + (vec)_mm512_and_si512(w, high) * (vec)_mm512_and_si512(x, high);
#endif
}

// Transposes 16 x 16 groups.
INLINE void transpose(__m512i rows[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int half = 0; half < 16; half += 8)
        for (int i = half; i < half + 4; i++) {
            t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// Transposes `columns` columns of n rows of a weight into a panel, whose rest is zeros. A row has
// `size` bytes, of which `left` are from the first column on.
INLINE void arrange(const char *w, int64_t size, int64_t left, int64_t n, int64_t columns,
                    __m512i offset, Panel panel) {
    for (int64_t column = 0; column < columns; column++) {
        const __mmask64 kept = ~0ull >> (64 - min(64, left - 64 * column));
        for (int half = 0; half < PANEL / 16; half++) {
            __m512i rows[16];
            for (int i = 0; i < 16; i++) {
                const int64_t o = 16 * half + i;
                const char *from = w + o * size + 64 * column;
                prefetch(from + PANEL * size, 1);
                rows[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(o < n ? kept : 0, from), offset);
            }
            transpose(rows);
            for (int i = 0; i < GROUPS; i++) panel[column * GROUPS + i][half] = rows[i];
        }
    }
}

// Sums of a panel times m rows of activations, which are `row` groups apart. m is a constant of at
// most ROWS wherever these are inlined.
INLINE void panel_floats(enum type type, const Panel panel, int64_t groups, const Group *x,
                         int64_t row, int m, vec out[MOST_ROWS][2]) {
    vec sums[ROWS][2];
    UNROLL for (int j = 0; j < m; j++) sums[j][0] = sums[j][1] = (vec){0};
    for (int64_t k = 0; k < groups; k++)
        UNROLL for (int j = 0; j < m; j++) {
            const __m512i v = _mm512_set1_epi32(x[j * row + k]);
            UNROLL for (int half = 0; half < 2; half++)
                if (type == FLOAT32) sums[j][half] += (vec)panel[k][half] * (vec)v;
                else sums[j][half] = add_pairs(sums[j][half], panel[k][half], v);
        }
    UNROLL for (int j = 0; j < m; j++) out[j][0] = sums[j][0], out[j][1] = sums[j][1];
}

// In units of the weights' scales. The terms of a row are `stride` blocks from those of the next.
INLINE void panel_int8(const Panel panel, int64_t n_blocks, const Group *x, int64_t row,
                       const Terms *terms, int64_t stride, int m, vec out[MOST_ROWS][2]) {
    vec sums[ROWS][2];
    UNROLL for (int j = 0; j < m; j++) sums[j][0] = sums[j][1] = (vec){0};
    for (int64_t b = 0; b < n_blocks; b++) {
        int32_t has_low = 0;
        UNROLL for (int j = 0; j < m; j++) has_low |= terms[j * stride + b].has_low;
        for (int low = 0; low <= has_low; low++) {
            __m512i totals[ROWS][2];
            UNROLL for (int j = 0; j < m; j++) {
                const Terms *t = terms + j * stride + b;
                totals[j][0] = totals[j][1] = _mm512_set1_epi32(-OFFSET * (low ? t->low : t->high));
            }
            for (int k = 0; k < GROUPS; k++) {
                const __m512i w0 = panel[b * GROUPS + k][0], w1 = panel[b * GROUPS + k][1];
                UNROLL for (int j = 0; j < m; j++) {
                    const Group inputs = x[j * row + (2 * b + low) * GROUPS + k];
                    const __m512i v = _mm512_set1_epi32(inputs);
                    totals[j][0] = _mm512_dpbusd_epi32(totals[j][0], w0, v);
                    totals[j][1] = _mm512_dpbusd_epi32(totals[j][1], w1, v);
                }
            }
            UNROLL for (int j = 0; j < m; j++) {
                const float scale = terms[j * stride + b].scale * (low ? 1.0f / LOW : 1);
                sums[j][0] += (vec)_mm512_cvtepi32_ps(totals[j][0]) * scale;
                sums[j][1] += (vec)_mm512_cvtepi32_ps(totals[j][1]) * scale;
            }
        }
    }
    UNROLL for (int j = 0; j < m; j++) out[j][0] = sums[j][0], out[j][1] = sums[j][1];
}

#if defined(AMX)
// As `panel_floats`, for 16 rows of bfloat16.
INLINE void panel_bfloat16_tiles(const Panel panel, int64_t groups, const Group *x, int64_t row,
                                 vec out[MOST_ROWS][2]) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < groups; k += GROUPS) {
        _tile_loadd(2, x + k, row * (int64_t)sizeof *x);
        _tile_loadd(3, &panel[k][0], sizeof *panel);
        _tile_loadd(4, &panel[k][1], sizeof *panel);
        _tile_dpbf16ps(0, 2, 3);
        _tile_dpbf16ps(1, 2, 4);
    }
    _tile_stored(0, &out[0][0], sizeof *out);
    _tile_stored(1, &out[0][1], sizeof *out);
}
#endif

// As `matmul_of`.
INLINE void matmul_panels(const Matrix *w, enum type type, const float *x, int64_t rows,
                          Scratch *s, float *y, int residual) {
    const int64_t K = w->n_in, stride = blocks(K);
    const int64_t size = type == INT8 ? K : type == BFLOAT16 ? 2 * K : 4 * K;
    const Group *inputs = type == FLOAT32 ? (const Group *)x : (const Group *)s->quantized;
    const int64_t row = type == FLOAT32 ? K : stride * BLOCK / 2;  // groups
    const int tiles = s->has_tiles && type == BFLOAT16;
    const __m512i offset = _mm512_set1_epi8(type == INT8 ? (char)OFFSET : 0);
    SHARED_LOOP(s, group, (w->n_out + PANEL - 1) / PANEL) {
        Panel panel;
        const int64_t o = group * PANEL, n = min(PANEL, w->n_out - o);
        for (int64_t at = 0; at < size; at += 64 * COLUMNS) {
            const int64_t left = size - at, columns = min(COLUMNS, (left + 63) / 64);
            arrange((const char *)w->weight + o * size + at, size, left, n, columns, offset, panel);
            for (int64_t done = 0, m; done < rows; done += m) {
                const int64_t rest = rows - done;  // in equal parts; the last tiles overlap instead
                m = tiles ? min(MOST_ROWS, rest) : rest / ((rest + ROWS - 1) / ROWS);
                const int64_t height = tiles ? MOST_ROWS : m, skipped = height - m;
                const int64_t r = done - skipped;
                const int64_t from = at / 64 * GROUPS * (type == INT8 ? 2 : 1);  // int8: two terms
                const Group *in = inputs + r * row + from;
                const Terms *terms = s->terms + r * stride + at / 64;
                const int64_t groups = min(columns * GROUPS, (left + 3) / 4);
                const int64_t step = type == INT8 ? groups : SHORT;
                vec total[MOST_ROWS][2] = {{{0}}}, out[MOST_ROWS][2];
                for (int64_t k = 0; k < groups; k += step) {
#define SUMS(m)                                                                                 \
    if (type == INT8) panel_int8(panel, columns, in, row, terms, stride, m, total);             \
    else panel_floats(type, panel + k, min(step, groups - k), in + k, row, m, out);             \
    break;
                    switch (height) {
#if defined(AMX)
                        case MOST_ROWS:
                            panel_bfloat16_tiles(panel + k, min(step, groups - k), in + k, row,
                                                 out);
                            break;
#endif
                        case 1: SUMS(1)
                        case 2: SUMS(2)
                        case 3: SUMS(3)
                        case 4: SUMS(4)
                        case 5: SUMS(5)
                        default: SUMS(6)
                    }
                    for (int64_t j = 0; type != INT8 && j < height; j++)
                        for (int half = 0; half < 2; half++) total[j][half] += out[j][half];
                }
                for (int64_t j = skipped; j < height; j++)
                    for (int half = 0; half < PANEL / 16; half++) {
                        const int64_t i = o + 16 * half;
                        const __mmask16 kept = (__mmask16)~(~0u << max(0, min(16, o + n - i)));
                        float *to = y + (r + j) * w->n_out + i;
                        vec sum = total[j][half];
                        if (type == INT8) sum *= (vec)_mm512_maskz_loadu_ps(kept, w->scale + i);
                        if (w->bias && !at) sum += (vec)_mm512_maskz_loadu_ps(kept, w->bias + i);
                        if (residual || at) sum += (vec)_mm512_maskz_loadu_ps(kept, to);
                        _mm512_mask_storeu_ps(to, kept, (__m512)sum);
                    }
            }
        }
    }
}

#else
#define matmul_panels matmul_of
#endif

// As `matmul_of`, for int8 weights and any number of rows. The weights of SIDE outputs are tiles as
// they are in memory. They are multiplied by tiles with a row of activations in each column.
#if defined(AMX)
static void matmul_tiles(const Matrix *w, int64_t rows, Scratch *s, float *y, int residual) {
    const int64_t K = w->n_in, O = w->n_out, n_blocks = blocks(K), at_once = rows_of_tile(rows);
    SHARED_LOOP(s, group, (O + SIDE - 1) / SIDE) {
        const int64_t o = group * SIDE, n = min(SIDE, O - o);
        const int8_t *weight = (const int8_t *)w->weight + o * K;
        const __mmask16 kept = (__mmask16)(0xffff >> (SIDE - n));
        for (int64_t r = 0; r < rows; r += at_once) {
            vec sums[SIDE] = {{0}};  // of an output each, with a lane for each column
            for (int64_t b = 0; b < n_blocks; b++) {
                const int64_t size = min(BLOCK, K - b * BLOCK);
                int8_t rest[SIDE][BLOCK];
                if (n < SIDE || size < BLOCK) {
                    memset(rest, 0, sizeof rest);
                    for (int64_t i = 0; i < n; i++)
                        memcpy(rest[i], weight + i * K + b * BLOCK, (size_t)size);
                    _tile_loadd(0, rest, BLOCK);
                } else _tile_loadd(0, weight + b * BLOCK, K);
                for (int i = 0; r == 0 && i < SIDE; i++)  // the next outputs, in order
                    prefetch(weight + SIDE * K + (b * SIDE + i) * BLOCK, 1);
                const int64_t first = (r / at_once * n_blocks + b) * 2;
                for (int64_t t = first; t < first + 2; t++) {
                    const vec scale = load(s->tile_scales + t * SIDE);
                    if (!_mm512_test_epi32_mask((__m512i)scale, (__m512i)scale)) continue;
                    __m512i totals[SIDE];
                    _tile_zero(2);
                    _tile_loadd(1, s->tiles + t * SIDE * SIDE, SIDE * sizeof *s->tiles);
                    _tile_dpbssd(2, 0, 1);
                    _tile_stored(2, totals, sizeof *totals);
                    UNROLL for (int i = 0; i < SIDE; i++)
                        sums[i] += (vec)_mm512_cvtepi32_ps(totals[i]) * scale;
                }
            }
            transpose((__m512i *)sums);  // of a column each, with a lane for each output
            for (int64_t i = 0; i < min(at_once, rows - r); i++) {
                float *to = y + (r + i) * O + o;
                vec sum = at_once < SIDE ? sums[i] + sums[at_once + i] : sums[i];
                sum *= (vec)_mm512_maskz_loadu_ps(kept, w->scale + o);
                if (w->bias) sum += (vec)_mm512_maskz_loadu_ps(kept, w->bias + o);
                if (residual) sum += (vec)_mm512_maskz_loadu_ps(kept, to);
                _mm512_mask_storeu_ps(to, kept, (__m512)sum);
            }
        }
    }
}
#else
#define matmul_tiles(w, rows, s, y, residual)
#endif

static void matmul(const Matrix *w, enum type type, float *x, int64_t rows, Scratch *s, float *y,
                   int residual) {
    const int few = rows <= FEW;
    if (type == INT8) quantize(w, x, rows, s);
    if (type == BFLOAT16) round_to_bfloat16(x, rows, w->n_in, s);
    // The type is a constant in each call, so that each is compiled for one type.
    if (type == FLOAT32 && few) matmul_of(w, FLOAT32, x, rows, s, y, residual);
    else if (type == FLOAT32) matmul_panels(w, FLOAT32, x, rows, s, y, residual);
    else if (type == BFLOAT16 && few) matmul_of(w, BFLOAT16, x, rows, s, y, residual);
    else if (type == BFLOAT16) matmul_panels(w, BFLOAT16, x, rows, s, y, residual);
    else if (s->has_tiles) matmul_tiles(w, rows, s, y, residual);
    else if (few) matmul_of(w, INT8, x, rows, s, y, residual);
    else matmul_panels(w, INT8, x, rows, s, y, residual);
    if (w->n_outliers) add_outliers(w, rows, s, y);
}

// Layer normalization (Ba et al. 2016): (M, C) → (M, C).
static void layernorm(const Norm *norm, const float *x, int64_t rows, int64_t C, Scratch *s,
                      float *y) {
    SHARED_LOOP(s, r, rows) {
        const float *in = x + r * C;
        float *out = y + r * C, mean = 0, variance = 0;
        int64_t c = 0;
        vec total = {0};
        for (; c + LANES <= C; c += LANES) total += load(in + c);
        for (mean = sum(total); c < C; c++) mean += in[c];
        mean /= (float)C;
        vec squares = {0};
        for (c = 0; c + LANES <= C; c += LANES) {
            const vec centred = load(in + c) - mean;
            squares += centred * centred;
        }
        for (variance = sum(squares); c < C; c++) variance += (in[c] - mean) * (in[c] - mean);
        const float scale = 1.0f / sqrtf(variance / (float)C + norm->eps);
        for (c = 0; c < C; c++) {
            const float normed = (in[c] - mean) * scale * norm->weight[c];
            out[c] = norm->bias ? normed + norm->bias[c] : normed;
        }
    }
}

INLINE vec activate(enum activation kind, vec x) {
    if (kind == GELU_TANH)  // 0.5x(1 + tanh u) = x · sigmoid(2u), Hendrycks & Gimpel 2016
        return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    if (kind == QUICK_GELU) return x * sigmoid(1.702f * x);
    if (kind == SILU) return x * sigmoid(x);
    if (kind == RELU) return larger((vec){0}, x);
    for (int i = 0; i < LANES; i++)
        x[i] = kind == TANH ? tanhf(x[i]) : 0.5f * x[i] * (1 + erff(x[i] * 0.70710678f));
    return x;
}

static void activation(enum activation kind, const float *x, int64_t count, Scratch *s, float *y) {
    SHARED_LOOP(s, chunk, (count + CHUNK - 1) / CHUNK) {
        const int64_t start = chunk * CHUNK, end = min(start + CHUNK, count);
        int64_t i = start;
        for (; i + LANES <= end; i += LANES) store(y + i, activate(kind, load(x + i)));
        if (i < end) {
            float rest[LANES] = {0};
            memcpy(rest, x + i, (size_t)(end - i) * sizeof *rest);
            store(rest, activate(kind, load(rest)));
            memcpy(y + i, rest, (size_t)(end - i) * sizeof *rest);
        }
    }
}

// The cache of one head of one sequence: keys (N, D); values follow at a distance of `kv_stride`.
INLINE int64_t head_of(const Model *model, const Batch *batch, int64_t layer, int64_t row,
                       int64_t head) {
    const int64_t D = model->n_embd / model->n_head;
    return layer * batch->layer_stride + batch->sequences[row] * batch->sequence_stride +
           head * model->n_positions * D;
}

// Adds keys and values of all rows to the cache.
static void append(const Model *model, const Batch *batch, int64_t layer, Scratch *s) {
    const int64_t H = model->n_head, C = model->n_embd, D = C / H;
    SHARED_LOOP(s, i, batch->n_rows * H) {
        const int64_t row = i / H, head = i % H;
        const int64_t at = head_of(model, batch, layer, row, head) + batch->positions[row] * D;
        for (int64_t part = 0; part < 2; part++) {
            const float *from = s->qkv + row * 3 * C + (1 + part) * C + head * D;
            const int64_t to = at + part * batch->kv_stride;
            if (model->stored == FLOAT32)
                memcpy((float *)batch->kv + to, from, (size_t)D * sizeof *from);
            else
                for (int64_t d = 0; d < D; d++)
                    ((bfloat16 *)batch->kv)[to + d] = to_bfloat16(from[d]);
        }
    }
}

// Softmax of S scores, in place. The sum of the exponentials is applied to the result later.
static float softmax(float *scores, int64_t S) {
    float most = scores[0], total = 0;
    for (int64_t i = 1; i < S; i++) most = scores[i] > most ? scores[i] : most;
    int64_t j = 0;
    vec totals = {0};
    for (; j + LANES <= S; j += LANES) {
        const vec e = exponential(load(scores + j) - most);
        store(scores + j, e);
        totals += e;
    }
    for (total = sum(totals); j < S; j++) {
        scores[j] = exponential(broadcast(scores[j] - most))[0];
        total += scores[j];
    }
    return total;
}

// Scores (S,) of a query (D,) and keys (S, D).
INLINE void query_keys(enum type type, const void *kv, int64_t keys, const float *query, int64_t S,
                       int64_t D, float *scores) {
    float out[TILE][TILE];
    for (int64_t j = 0; j < S; j += TILE) {
        const int64_t n = min(TILE, S - j), at = keys + j * D;
        if (n == TILE)
            tile_floats(type, element(type, kv, at), FLOAT32, query, 0, D, TILE, 1, out);
        else
            for (int64_t i = 0; i < n; i++)
                tile_floats(type, element(type, kv, at + i * D), FLOAT32, query, 0, D, 1, 1,
                            out + i);
        for (int64_t i = 0; i < n; i++) scores[j + i] = out[i][0];
    }
}

// Mean of values (S, D), weighted by probabilities whose sum is `total`: `n` vectors of its D
// elements. n is a constant of at most TILE wherever this is inlined.
INLINE void mean_of_values(enum type type, const void *kv, int64_t values, const float *p,
                           float total, int64_t S, int64_t D, int n, float *out) {
    vec sums[TILE][TILE] = {0};  // of every fourth position, to hide the latency of the additions
    int64_t j = 0;
    for (; j + TILE <= S; j += TILE)
        UNROLL for (int i = 0; i < TILE; i++)
            UNROLL for (int c = 0; c < n; c++)
                sums[i][c] += p[j + i] * load_stored(type, kv, values + (j + i) * D + c * LANES);
    UNROLL for (int i = 0; i < TILE; i++)
        if (j + i < S)
            UNROLL for (int c = 0; c < n; c++)
                sums[i][c] += p[j + i] * load_stored(type, kv, values + (j + i) * D + c * LANES);
    UNROLL for (int c = 0; c < n; c++)
        store(out + c * LANES, ((sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c])) / total);
}

// Attention of one head of one row.
INLINE void attend(enum type type, const Model *model, const Batch *batch, int64_t layer,
                   int64_t row, int64_t head, float scale, Scratch *s) {
    const int64_t C = model->n_embd, D = C / model->n_head, S = batch->positions[row] + 1;
    const int64_t keys = head_of(model, batch, layer, row, head), values = keys + batch->kv_stride;
    float *query = s->qkv + row * 3 * C + head * D, *out = s->heads + row * C + head * D;
    float *p = s->scores;
    for (int64_t d = 0; d < D; d++) query[d] *= scale;
    query_keys(type, batch->kv, keys, query, S, D, p);
    const float total = softmax(p, S);
    int64_t d = 0;
    for (; d + TILE * LANES <= D; d += TILE * LANES)
        mean_of_values(type, batch->kv, values + d, p, total, S, D, TILE, out + d);
    for (; d + LANES <= D; d += LANES)
        mean_of_values(type, batch->kv, values + d, p, total, S, D, 1, out + d);
    for (; d < D; d++) {
        float value = 0;
        for (int64_t j = 0; j < S; j++) value += p[j] * stored(type, batch->kv, values + j * D + d);
        out[d] = value / total;
    }
}

// The same for a prompt, whose rows share their keys and values: a vector has LANES rows of a
// sequence, at positions one after the other.

// Scores of n keys (n, D) and LANES queries (D, LANES). n is a constant wherever this is inlined.
INLINE void queries_keys(enum type type, const void *kv, int64_t keys, const float *queries,
                         int64_t D, int n, float *memory, float *scores) {
    const float *key = memory;
    if (type == FLOAT32) key = (const float *)kv + keys;
    else for (int64_t d = 0; d < n * D; d++) memory[d] = stored(type, kv, keys + d);
    vec sums[2 * TILE] = {0};
    for (int64_t d = 0; d < D; d++)
        UNROLL for (int i = 0; i < n; i++) sums[i] += key[i * D + d] * load(queries + d * LANES);
    UNROLL for (int i = 0; i < n; i++) store(scores + i * LANES, sums[i]);
}

// The rows that attend to a position which is `after` positions after the first row: a lane each.
INLINE bits attended(int64_t after) {
    ints rows;
    for (int i = 0; i < LANES; i++) rows[i] = i;
    return (bits)(rows >= (int32_t)after);
}

// Softmax of scores (end, LANES), in place, over the positions up to that of each row; the first
// row is at `first`. The sums of the exponentials are applied to the result later.
static vec causal_softmax(float *scores, int64_t first, int64_t end) {
    vec most = load(scores), totals = {0};
    for (int64_t j = 1; j < end; j++) {
        const vec score = load(scores + j * LANES);
        most = choose(attended(j - first), larger(score, most), most);
    }
    for (int64_t j = 0; j < end; j++) {
        const vec e = exponential(load(scores + j * LANES) - most);
        const vec kept = choose(attended(j - first), e, (vec){0});
        store(scores + j * LANES, kept);
        totals += kept;
    }
    return totals;
}

// Means of values (end, D) for TILE rows, of which the first is at `first`: `n` vectors of their D
// elements. n is a constant of at most TILE wherever this is inlined.
INLINE void means_of_values(enum type type, const void *kv, int64_t values, const float *p,
                            int64_t first, int64_t end, int64_t D, int n, vec sums[TILE][TILE]) {
    UNROLL for (int q = 0; q < TILE; q++)
        UNROLL for (int c = 0; c < n; c++) sums[q][c] = (vec){0};
    int64_t j = 0;
    for (; j <= first; j++)
        UNROLL for (int c = 0; c < n; c++) {
            const vec v = load_stored(type, kv, values + j * D + c * LANES);
            UNROLL for (int q = 0; q < TILE; q++) sums[q][c] += p[j * LANES + q] * v;
        }
    for (; j < end; j++)
        UNROLL for (int q = 0; q < TILE; q++)
            if (j <= first + q)
                UNROLL for (int c = 0; c < n; c++)
                    sums[q][c] += p[j * LANES + q] *
                                  load_stored(type, kv, values + j * D + c * LANES);
}

// Attention of one head of up to LANES rows.
INLINE void attend_rows(enum type type, const Model *model, const Batch *batch, int64_t layer,
                        int64_t row, int64_t m, int64_t head, float scale, Scratch *s) {
    const int64_t C = model->n_embd, D = C / model->n_head, N = model->n_positions;
    const int64_t first = batch->positions[row], end = first + m;
    const int64_t keys = head_of(model, batch, layer, row, head), values = keys + batch->kv_stride;
    float *p = s->scores, *queries = p + N * LANES, *memory = queries + D * LANES;
    memset(queries, 0, (size_t)(D * LANES) * sizeof *queries);
    for (int64_t q = 0; q < m; q++)
        for (int64_t d = 0; d < D; d++)
            queries[d * LANES + q] = s->qkv[(row + q) * 3 * C + head * D + d] * scale;
    int64_t j = 0;
    for (; j + 2 * TILE <= end; j += 2 * TILE)
        queries_keys(type, batch->kv, keys + j * D, queries, D, 2 * TILE, memory, p + j * LANES);
    for (; j < end; j++)
        queries_keys(type, batch->kv, keys + j * D, queries, D, 1, memory, p + j * LANES);
    const vec totals = causal_softmax(p, first, end);
    for (int64_t q = 0; q < m; q += TILE) {
        const int64_t n_rows = min(TILE, m - q), last = first + q + n_rows;
        float *out = s->heads + (row + q) * C + head * D;
        vec sums[TILE][TILE];
        int64_t d = 0;
        for (; d + TILE * LANES <= D; d += TILE * LANES) {
            means_of_values(type, batch->kv, values + d, p + q, first + q, last, D, TILE, sums);
            for (int64_t i = 0; i < n_rows; i++)
                UNROLL for (int c = 0; c < TILE; c++)
                    store(out + i * C + d + c * LANES, sums[i][c] / totals[q + i]);
        }
        for (; d + LANES <= D; d += LANES) {
            means_of_values(type, batch->kv, values + d, p + q, first + q, last, D, 1, sums);
            for (int64_t i = 0; i < n_rows; i++) store(out + i * C + d, sums[i][0] / totals[q + i]);
        }
        for (; d < D; d++)
            for (int64_t i = 0; i < n_rows; i++) {
                float value = 0;
                for (j = 0; j <= first + q + i; j++)
                    value += p[j * LANES + q + i] * stored(type, batch->kv, values + j * D + d);
                out[i * C + d] = value / totals[q + i];
            }
    }
}

// Whether a row is of the sequence of the row before it, at the next position.
static int follows(const Batch *batch, int64_t row) {
    return batch->sequences[row] == batch->sequences[row - 1] &&
           batch->positions[row] == batch->positions[row - 1] + 1;
}

// Whether these are many rows, and some of them of one prompt.
static int has_prompt(const Batch *batch) {
    if (batch->n_rows <= FEW) return 0;
    for (int64_t row = 1; row < batch->n_rows; row++)
        if (follows(batch, row)) return 1;
    return 0;
}

// Attention of every row over the positions of its sequence up to its own.
static void attention(const Model *model, const Batch *batch, int64_t layer, float scale,
                      Scratch *s) {
    const int prompt = has_prompt(batch);
    const int64_t H = model->n_head, M = batch->n_rows;
    const int64_t at_once = prompt ? LANES : 1, groups = (M + at_once - 1) / at_once;
    SHARED_LOOP(s, i, H * groups) {
        const int64_t head = i / groups, first = i % groups * at_once;
        const int64_t end = min(first + at_once, M);
        for (int64_t row = first, next; row < end; row = next) {
            for (next = row + 1; next < end && follows(batch, next);) next++;
            if (prompt && model->stored == FLOAT32)
                attend_rows(FLOAT32, model, batch, layer, row, next - row, head, scale, s);
            else if (prompt)
                attend_rows(BFLOAT16, model, batch, layer, row, next - row, head, scale, s);
            else if (model->stored == FLOAT32)
                attend(FLOAT32, model, batch, layer, row, head, scale, s);
            else
                attend(BFLOAT16, model, batch, layer, row, head, scale, s);
        }
    }
}

static void embed(const Model *model, const Batch *batch, Scratch *s) {
    const int64_t C = model->n_embd;
    SHARED_LOOP(s, r, batch->n_rows)
        for (int64_t c = 0; c < C; c++)
            s->x[r * C + c] = stored(model->stored, model->wte, batch->tokens[r] * C + c) +
                           stored(model->stored, model->wpe, batch->positions[r] * C + c);
}

// One pre-norm layer. Its input and output are s->x (M, C), the residual stream.
static void block_forward(const Model *model, const Batch *batch, int64_t layer, Scratch *s) {
    const Block *h = &model->h[layer];
    const int64_t M = batch->n_rows, C = model->n_embd;
    const enum type type = (enum type)model->weights;
    layernorm(&h->ln_1, s->x, M, C, s, s->normed);
    matmul(&h->c_attn, type, s->normed, M, s, s->qkv, 0);
    append(model, batch, layer, s);
    attention(model, batch, layer, h->scale, s);
    matmul(&h->attn_proj, type, s->heads, M, s, s->x, 1);
    layernorm(&h->ln_2, s->x, M, C, s, s->normed);
    matmul(&h->c_fc, type, s->normed, M, s, s->fc, 0);
    activation((enum activation)h->activation, s->fc, M * model->n_inner, s, s->fc);
    matmul(&h->mlp_proj, type, s->fc, M, s, s->x, 1);
}

// Hidden states (M, C) of a batch, whose keys and values are added to the cache, and the logits
// (M, V) of the token after each row.
//
// Without a batch, the hidden states are read. Without logits, these are not computed. `memory` has
// `scratch_size(model, rows, threads)` bytes.
void decode(const Model *model, const Batch *batch, int64_t rows, float *hidden, float *logits,
            void *memory, int64_t threads) {
    char *free = (char *)memory;
    Scratch shared = divide(&free, model, rows, threads);
    shared.x = hidden;
    shared.has_tiles = (rows > FEW || model->weights == INT8) && has_tiles();
    memset(shared.loop, 0, (size_t)loops(model) * sizeof *shared.loop);
    int64_t started = 0;
#pragma omp parallel num_threads((int)threads)
    {
        Scratch s = shared;
        const int64_t thread = __atomic_fetch_add(&started, 1, __ATOMIC_RELAXED);
        s.scores += thread * scores_size(model);
        if (s.has_tiles) start_tiles();
        if (batch) {
            embed(model, batch, &s);
            for (int64_t layer = 0; layer < model->n_layer; layer++)
                block_forward(model, batch, layer, &s);
        }
        if (logits) {
            layernorm(&model->ln_f, s.x, rows, model->n_embd, &s, s.normed);
            matmul(&model->lm_head, (enum type)model->weights, s.normed, rows, &s, logits, 0);
        }
        if (s.has_tiles) stop_tiles();
    }
}

// Quantizes a weight to values (O, K) and scales (O,): each output has the scale that makes its
// largest value 127. A weight is read by outputs (O, K) or, as checkpoints have it, by inputs (K, O).
// Inputs with outliers have 0 instead of 1 in `kept` (K,), and become 0.
//
// A value that is not finite makes the scale NaN.
INLINE vec scale_of(vec largest, vec poison) {
    const vec scale = largest / 127.0f;
    return larger(broadcast(FLT_MIN), scale) + poison;
}

void quantize_by_outputs(const float *weight, const float *kept, int64_t K, int64_t O,
                         int8_t *values, float *scales) {
    for (int64_t o = 0; o < O; o++) {
        const float *row = weight + o * K;
        vec most = {0}, poison = {0};
        for (int64_t at = 0; at < K; at += LANES) {
            const int64_t i = min(at, K - LANES);  // the last ones overlap
            const vec x = load(row + i) * load(kept + i);
            most = larger(magnitude(x), most);
            poison += x * 0;
        }
        const vec scale = scale_of(broadcast(largest(most)), broadcast(sum(poison)));
        scales[o] = scale[0];
        for (int64_t at = 0; at < K; at += LANES) {
            const int64_t i = min(at, K - LANES);
            store_bytes(values + o * K + i, load(row + i) * load(kept + i) / scale + ROUNDING);
        }
    }
}

void quantize_by_inputs(const float *weight, const float *kept, int64_t K, int64_t O,
                        int8_t *values, float *scales) {
    for (int64_t start = 0; start < O; start += STRIP) {
        const int64_t o = min(start, O - STRIP);  // the last strips overlap
        vec most[STRIP / LANES] = {{0}}, poison[STRIP / LANES] = {{0}}, scale[STRIP / LANES];
        for (int64_t i = 0; i < K; i++) UNROLL for (int v = 0; v < STRIP / LANES; v++) {
            const vec x = load(weight + i * O + o + v * LANES) * kept[i];
            most[v] = larger(magnitude(x), most[v]);
            poison[v] += x * 0;
        }
        UNROLL for (int v = 0; v < STRIP / LANES; v++) {
            scale[v] = scale_of(most[v], poison[v]);
            store(scales + o + v * LANES, scale[v]);
        }
        for (int64_t first = 0; first < K; first += BLOCK) {
            const int64_t n = min(BLOCK, K - first);
            int8_t tile[BLOCK][STRIP];
            for (int64_t i = 0; i < n; i++) UNROLL for (int v = 0; v < STRIP / LANES; v++) {
                const vec x = load(weight + (first + i) * O + o + v * LANES) * kept[first + i];
                store_bytes(tile[i] + v * LANES, x / scale[v] + ROUNDING);
            }
            for (int64_t j = 0; j < STRIP; j++)
                for (int64_t i = 0; i < n; i++) values[(o + j) * K + first + i] = tile[i][j];
        }
    }
}

// Whether prompts are fast.
int32_t has_panels(void) {
#if defined(PANEL)
    return 1;
#else
    return 0;
#endif
}
