// Products of float32 activations and weights of 4 or 8 bits, which stay packed in memory.
//
// Outputs are taken BLOCK at a time, inputs SPAN at a time: a span of a block is widened into the first-level
// cache, and each TILE rows of the activations are multiplied by PART of its outputs, with sums in registers.

#include <stdint.h>
#include <string.h>

// OpenMP's threads, which are torch's: its library is loaded for all.
extern void GOMP_parallel(void (*run)(void *), void *data, unsigned num_threads, unsigned flags);
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

// TILE: as many rows as leave the sums of a part in registers. LOOK_UP: the values of codes in a codebook.
#define VALUES(codebook) (*(const unaligned_floats *)(codebook))
#if defined(__AVX512F__)
#pragma GCC target("prefer-vector-width=512")
enum { VECTOR_BYTES = 64, TILE = 2 };
#define LOOK_UP(codebook, codes) PICK(VALUES(codebook), VALUES(codebook), codes)
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, TILE = 1 };
#define LOOK_UP(codebook, codes) PICK(VALUES(codebook), VALUES(codebook + LANES), codes)
#else
enum { VECTOR_BYTES = 16, TILE = 2 };
#define LOOK_UP(codebook, codes) \
    ((floats){codebook[(codes)[0]], codebook[(codes)[1]], codebook[(codes)[2]], codebook[(codes)[3]]})
#endif
#define VECTOR __attribute__((vector_size(VECTOR_BYTES)))
#define UNALIGNED __attribute__((aligned(4), may_alias))
#define INLINE static inline __attribute__((always_inline))
typedef float floats VECTOR;
typedef float unaligned_floats VECTOR UNALIGNED;
typedef int32_t ints VECTOR;
typedef int32_t unaligned_ints VECTOR UNALIGNED;

enum { CHUNK = 128, WORDS = 16, PLANES = CHUNK / WORDS, BLOCK = 16, PART = 8, MAX_ROWS = 64, ZERO_CODE = 8 };
enum { LANES = VECTOR_BYTES / sizeof(float), SPAN = 2 * CHUNK };
enum { FOUR_BITS, INT8, FP8 };
enum { FLOAT32, FLOAT16, BFLOAT16 };

typedef struct {
    int64_t kind, scale_dtype, minimum_dtype;
    int64_t n, k, group_size; // inputs of a scale of 4-bit codes
    const void *values, *scale, *minimum;
    const float *codebook; // of 16 values; null: codes are integers
} Weight;

typedef struct {
    int64_t begin, end; // outputs
    int64_t num_rows;   // of x, at most MAX_ROWS; 0: widen only
    const float *x;     // [rows, k to a multiple of WORDS], zero beyond k
    const float *bias;
    float *out; // [rows, n], or the widened weight [end - begin, k]
} Product;

typedef struct {
    const Weight *weight;
    const Product *product;
} Work;

// A span of a block in float32. Outputs begin in different sets of the cache.
typedef float Wide[BLOCK][SPAN + WORDS] __attribute__((aligned(64)));

// Lanes by number: those of `b` follow those of `a`.
#ifdef __clang__
INLINE floats PICK(floats a, floats b, ints places) {
    floats picked;
    for (int i = 0; i < LANES; i++) {
        int lane = places[i] & (LANES - 1);
        picked[i] = places[i] & LANES ? b[lane] : a[lane];
    }
    return picked;
}
#else
#define PICK __builtin_shuffle
#endif

typedef union {
    uint32_t bits;
    float value;
} Number;

INLINE float as_float(uint32_t bits) { return ((Number){.bits = bits}).value; }
INLINE uint32_t as_bits(float value) { return ((Number){.value = value}).bits; }

// The value of a float of 8 or 16 bits, computed without float32's subnormal numbers, which are slow.
INLINE float as_wide(uint32_t stored, int exponent_bits, int mantissa_bits) {
    uint32_t num_bits = exponent_bits + mantissa_bits, magnitude = stored & ((1u << num_bits) - 1);
    uint32_t least = 129 - (1u << (exponent_bits - 1)); // float32's exponent of the smallest normal number
    uint32_t is_subnormal = magnitude >> mantissa_bits ? 0 : ~0u;
    uint32_t bits = (magnitude << (23 - mantissa_bits)) + ((least - 1) << 23) + (is_subnormal & 1u << 23);
    float wide = as_float(bits) - as_float(is_subnormal & least << 23);
    return as_float(as_bits(wide) | stored >> num_bits << 31);
}

INLINE void convert(const void *from, int64_t dtype, int count, float *restrict out) {
    const uint16_t *halves = from;
    if (dtype == FLOAT32)
        memcpy(out, from, count * sizeof *out);
    else if (dtype == BFLOAT16)
        for (int i = 0; i < count; i++) out[i] = as_float((uint32_t)halves[i] << 16);
    else
        for (int i = 0; i < count; i++) out[i] = as_wide(halves[i], 5, 10);
}

// Read a block's scales or minimums in a chunk, for each plane of its codes.
static void read_numbers(
    const Weight *weight, const void *values, int64_t dtype, int64_t first, int count, int chunk,
    int num_planes, float out[PLANES][BLOCK]
) {
    int size = (int)weight->group_size;
    int planes_of_group = size < num_planes * WORDS ? size / WORDS : num_planes;
    int64_t at = chunk * CHUNK / size * weight->n + first, item_bytes = dtype == FLOAT32 ? 4 : 2;
    for (int begin = 0; begin < num_planes; begin += planes_of_group, at += weight->n) {
        const char *from = (const char *)values + at * item_bytes;
        float numbers[BLOCK];
        if (count == BLOCK) // a loop of constant length becomes vectors
            convert(from, dtype, BLOCK, numbers);
        else
            convert(from, dtype, count, numbers);
        for (int plane = begin; plane < begin + planes_of_group; plane++)
            memcpy(out[plane], numbers, sizeof numbers);
    }
}

// Products and sums are rounded one by one, as in the reference.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("fp-contract=off")))
#endif
static void widen_four_bits(
    const Weight *weight, int64_t first, int count, int chunk, float *wide, int64_t stride
) {
    static const float INTEGERS[] = {
        -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
    };
    const int32_t *codes_at = (const int32_t *)weight->values + (chunk * weight->n + first) * WORDS;
    int left = (int)weight->k - chunk * CHUNK, zero = weight->minimum ? 0 : ZERO_CODE;
    int num_planes = left < CHUNK ? (left + WORDS - 1) / WORDS : PLANES;
    const float *codebook = weight->codebook ? weight->codebook : INTEGERS + ZERO_CODE - zero;
    int looks_up = weight->codebook || LANES == (int)WORDS; // one instruction then
    float scale[PLANES][BLOCK] = {0}, minimum[PLANES][BLOCK] = {0};
    const void *minimums = weight->minimum;
    read_numbers(weight, weight->scale, weight->scale_dtype, first, count, chunk, num_planes, scale);
    if (minimums)
        read_numbers(weight, minimums, weight->minimum_dtype, first, count, chunk, num_planes, minimum);
    for (int output = 0; output < count; output++) {
        const unaligned_ints *words = (const unaligned_ints *)(codes_at + output * WORDS);
#pragma GCC unroll 8
        for (int plane = 0; plane < PLANES; plane++)
#pragma GCC unroll 4
            for (int part = 0; part < WORDS / LANES; part++) {
                ints codes = words[part] >> 4 * plane & 15;
                floats numbers;
                if (looks_up)
                    numbers = LOOK_UP(codebook, codes);
                else
                    numbers = __builtin_convertvector(codes - zero, floats);
                numbers *= scale[plane][output];
                numbers += minimum[plane][output];
                *(unaligned_floats *)&wide[output * stride + plane * WORDS + part * LANES] = numbers;
            }
    }
}

static void widen_eight_bits(
    const Weight *weight, int64_t first, int count, int chunk, float *wide, int64_t stride
) {
    int left = (int)weight->k - chunk * CHUNK;
    for (int output = 0; output < count; output++) {
        const int8_t *stored = (const int8_t *)weight->values + (first + output) * weight->k + chunk * CHUNK;
        float *restrict values = wide + output * stride;
        float scale = ((const float *)weight->scale)[first + output];
        int8_t part[CHUNK];
        if (left < CHUNK) {
            memset(part, 0, sizeof part);
            stored = memcpy(part, stored, left);
        }
        if (weight->kind == INT8)
            for (int i = 0; i < CHUNK; i++) values[i] = stored[i] * scale;
        else
            for (int i = 0; i < CHUNK; i++) {
                uint32_t code = (uint8_t)stored[i], nan = (code & 0x7f) == 0x7f ? 0x7fc00000 : 0;
                values[i] = as_float(as_bits(as_wide(code, 4, 3)) | nan) * scale;
            }
    }
}

// Widen whole chunks of a block from an input on. Outputs are `stride` apart.
static void widen(
    const Weight *weight, int64_t first, int count, int64_t begin, int64_t num_inputs, float *wide,
    int64_t stride
) {
    for (int64_t at = 0; at < num_inputs; at += CHUNK)
        (weight->kind == FOUR_BITS ? widen_four_bits : widen_eight_bits)(
            weight, first, count, (int)((begin + at) / CHUNK), wide + at, stride
        );
}

// Add the products of some rows and a part of a span to their sums.
INLINE void multiply_rows(
    int num_rows, int part, const float *x, int64_t stride, Wide wide, int num_inputs, floats sums[][BLOCK]
) {
    floats local[TILE][PART];
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 8
        for (int output = 0; output < PART; output++) local[row][output] = sums[row][part + output];
    for (int i = 0; i < num_inputs; i += LANES) {
#pragma GCC unroll 8
        for (int output = 0; output < PART; output++) {
            floats factor = *(const floats *)&wide[part + output][i];
#pragma GCC unroll 8
            for (int row = 0; row < num_rows; row++)
                local[row][output] += factor * *(const unaligned_floats *)&x[row * stride + i];
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 8
        for (int output = 0; output < PART; output++) sums[row][part + output] = local[row][output];
}

static const int32_t LANE_NUMBERS[WORDS] __attribute__((aligned(64))) = {
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
};

// Add lanes whose numbers differ by `step`: those of `a` where the bit is zero, of `b` where it is one.
INLINE floats folded(floats a, floats b, int step) {
    ints lane = *(const ints *)LANE_NUMBERS, from = ((lane & step) != 0) & LANES;
    return PICK(a, b, lane + from) + PICK(a, b, (lane ^ step) + from);
}

// Add up the lanes of each sum.
INLINE void add_lanes(const floats sums[PART], float out[PART]) {
    floats parts[PART];
    memcpy(parts, sums, sizeof parts);
#pragma GCC unroll 4
    for (int step = 1; step < PART && step < (int)LANES; step *= 2)
#pragma GCC unroll 4
        for (int i = 0; i < PART / (2 * step); i++) parts[i] = folded(parts[2 * i], parts[2 * i + 1], step);
    if (LANES > (int)PART) parts[0] += PICK(parts[0], parts[0], *(const ints *)LANE_NUMBERS ^ PART);
    memcpy(out, parts, PART * sizeof *out);
}

static void multiply(const Weight *weight, const Product *product, int64_t first, int count) {
    floats sums[MAX_ROWS][BLOCK];
    int64_t stride = (weight->k + WORDS - 1) / WORDS * WORDS, num_rows = product->num_rows;
    memset(sums, 0, num_rows * sizeof sums[0]);
    Wide wide;
    if (count < BLOCK) memset(wide, 0, sizeof wide);
    for (int64_t begin = 0; begin < stride; begin += SPAN) {
        int num_inputs = stride - begin < SPAN ? (int)(stride - begin) : SPAN;
        widen(weight, first, count, begin, num_inputs, wide[0], SPAN + WORDS);
        const float *x = product->x + begin;
        int64_t row = 0;
        for (; row + TILE <= num_rows; row += TILE, x += TILE * stride)
            for (int part = 0; part < BLOCK; part += PART)
                multiply_rows(TILE, part, x, stride, wide, num_inputs, &sums[row]);
        for (; row < num_rows; row++, x += stride)
            for (int part = 0; part < BLOCK; part += PART)
                multiply_rows(1, part, x, stride, wide, num_inputs, &sums[row]);
    }
    float bias[BLOCK] = {0};
    if (product->bias) memcpy(bias, product->bias + first, count * sizeof *bias);
    for (int64_t row = 0; row < num_rows; row++) {
        float sum[BLOCK], *out_at = product->out + row * weight->n + first;
        for (int part = 0; part < BLOCK; part += PART) add_lanes(&sums[row][part], &sum[part]);
        for (int output = 0; output < BLOCK; output++) sum[output] += bias[output];
        memcpy(out_at, sum, count * sizeof *sum);
    }
}

static void write_wide(const Weight *weight, const Product *product, int64_t first, int count) {
    float *out = product->out + (first - product->begin) * weight->k, last[BLOCK][CHUNK];
    int64_t left = weight->k % CHUNK, whole = weight->k - left;
    widen(weight, first, count, 0, whole, out, weight->k);
    if (left) widen(weight, first, count, whole, left, last[0], CHUNK);
    for (int output = 0; output < count; output++)
        memcpy(out + output * weight->k + whole, last[output], left * sizeof *out);
}

static void run_share(void *data) {
    const Work *work = data;
    const Product *product = work->product;
    int64_t num_blocks = (product->end - product->begin + BLOCK - 1) / BLOCK;
    int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    int64_t end = num_blocks * (thread + 1) / num_threads;
    for (int64_t block = num_blocks * thread / num_threads; block < end; block++) {
        int64_t first = product->begin + block * BLOCK;
        int count = product->end - first < BLOCK ? (int)(product->end - first) : BLOCK;
        (product->num_rows ? multiply : write_wide)(work->weight, product, first, count);
    }
}

void hearth_packed_product(const Weight *weight, const Product *product, unsigned num_threads) {
    Work work = {weight, product};
    GOMP_parallel(run_share, &work, num_threads, 0);
}
