/* Linear layers for fp32 rows, over weights that are laid out once for the way they are read.
 *
 * A weight of `outputs` rows and `inputs` columns is kept in tiles of 32 rows. A tile holds, column
 * by column, one number of each of its rows: fp32 numbers in order, or bf16 numbers in pairs, of
 * which row i is the lower half of word i and row i + 16 the upper half. Missing rows are zeros.
 *
 * Every output is the sum over the columns in their order, in fp32, whatever else is computed
 * beside it: its bits depend neither on the number of rows of x nor on the threads.
 */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define TILE (2 * LANES)
/* Memory is asked for so many vectors before they are multiplied, into the second cache: the first
 * has room for too few requests. */
#define AHEAD 128
#define FETCH(from) __builtin_prefetch((from) + 4 * LANES * AHEAD, 0, 2)

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

/* Rows of x at once: two vectors of sums for each must stay in registers. */
#if defined(__AVX512F__)
#define GROUP 12
#else
#define GROUP 2
#endif

/* One tile times `rows` rows of x, of which `rows` and `is_bf16` are known to the compiler. */
static inline __attribute__((always_inline)) void
multiply(float *out, const float *x, const char *tile, int64_t inputs, int64_t outputs,
         int64_t width, const int rows, const int is_bf16)
{
    floats low[GROUP], high[GROUP];
    for (int row = 0; row < rows; row++)
        low[row] = high[row] = (floats){0.0f};
    for (int64_t i = 0; i < inputs; i++, tile += is_bf16 ? 64 : 128) {
        floats first, second;
        FETCH(tile);
        if (is_bf16) {
            words pair;
            memcpy(&pair, tile, sizeof pair);
            first = (floats)(pair << 16);
            second = (floats)(pair & 0xffff0000u);
        } else {
            FETCH(tile + 64);
            memcpy(&first, tile, sizeof first);
            memcpy(&second, tile + 64, sizeof second);
        }
        for (int row = 0; row < rows; row++) {
            low[row] += first * x[row * inputs + i];
            high[row] += second * x[row * inputs + i];
        }
    }
    for (int row = 0; row < rows; row++, out += outputs) {
        float sums[TILE];
        memcpy(sums, &low[row], sizeof low[row]);
        memcpy(sums + LANES, &high[row], sizeof high[row]);
        if (width == TILE)
            memcpy(out, sums, sizeof sums);
        else
            memcpy(out, sums, (size_t)width * sizeof(float));
    }
}

#define ROWS(N)                                                                                    \
    case N:                                                                                        \
        multiply(out, x, tile, inputs, outputs, width, N, is_bf16);                                \
        break;

static inline __attribute__((always_inline)) void
multiply_rows(float *out, const float *x, const char *tile, int64_t rows, int64_t inputs,
              int64_t outputs, int64_t width, const int is_bf16)
{
    if (rows == 0)
        return;
    /* Groups of about one size: one of twelve rows and one of four take longer than two of eight. */
    const int64_t groups = (rows + GROUP - 1) / GROUP, each = (rows + groups - 1) / groups;
    for (; rows > 0; rows -= each, x += each * inputs, out += each * outputs)
        switch (rows < each ? rows : each) {
            ROWS(1)
#if GROUP > 2
            ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11)
#endif
        default:
            multiply(out, x, tile, inputs, outputs, width, GROUP, is_bf16);
        }
}

/* Reading a weight of so many numbers is worth a second thread. */
#define PARALLEL (1 << 17)

/* out = x times the weight, for x of rows x inputs and out of rows x outputs, by up to so many
 * threads. */
void linear(float *out, const float *x, const char *tiles, int64_t rows, int64_t inputs,
            int64_t outputs, int is_bf16, int threads)
{
    const int64_t count = (outputs + TILE - 1) / TILE;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)                                     \
    if (threads > 1 && inputs * outputs > PARALLEL)
    for (int64_t t = 0; t < count; t++) {
        const int64_t left = outputs - t * TILE, width = left < TILE ? left : TILE;
        if (is_bf16)
            multiply_rows(out + t * TILE, x, tiles + t * inputs * 64, rows, inputs, outputs, width,
                          1);
        else
            multiply_rows(out + t * TILE, x, tiles + t * inputs * 128, rows, inputs, outputs,
                          width, 0);
    }
}

/* Lay out a weight as fp32 tiles, or as bf16 tiles; returns 0 at a number that bf16 lacks. */
int pack_tiles(uint32_t *restrict tiles, const uint32_t *restrict weight, int64_t inputs,
               int64_t outputs, int is_bf16)
{
    uint32_t lost = 0;
    const int64_t tile_words = inputs * (is_bf16 ? LANES : TILE);
    for (int64_t start = 0; start < outputs; start += TILE, tiles += tile_words)
        for (int64_t lane = 0; lane < TILE; lane++) {
            const uint32_t *row = weight + (start + lane) * inputs;
            for (int64_t i = 0; i < inputs; i++) {
                const uint32_t bits = start + lane < outputs ? row[i] : 0;
                if (!is_bf16)
                    tiles[i * TILE + lane] = bits;
                else if (lane < LANES)
                    tiles[i * LANES + lane] = bits >> 16;
                else
                    tiles[i * LANES + lane - LANES] |= bits & 0xffff0000u;
                lost |= bits;
            }
        }
    return !is_bf16 || !(lost & 0xffffu);
}

/* Undo `pack_tiles`. */
void unpack_tiles(uint32_t *restrict weight, const uint32_t *restrict tiles, int64_t inputs,
                  int64_t outputs, int is_bf16)
{
    for (int64_t output = 0; output < outputs; output++) {
        const int64_t lane = output % TILE;
        const uint32_t *tile = tiles + output / TILE * inputs * (is_bf16 ? LANES : TILE);
        for (int64_t i = 0; i < inputs; i++) {
            if (!is_bf16)
                *weight++ = tile[i * TILE + lane];
            else if (lane < LANES)
                *weight++ = tile[i * LANES + lane] << 16;
            else
                *weight++ = tile[i * LANES + lane - LANES] & 0xffff0000u;
        }
    }
}
