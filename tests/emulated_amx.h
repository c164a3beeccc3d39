// The tile instructions that native.c uses, as loops, for processors without AMX. Included before
// native.c, whose tile code is then compiled and run with all its accesses to memory.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_loadd
#undef _tile_release
#undef _tile_stored
#undef _tile_zero

#undef __AMX_INT8__
#undef __AMX_BF16__
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#define syscall(...) 0  // Linux lets this process use tiles

enum { N_TILES = 8, TILE_ROWS = 16, TILE_BYTES = 64 };

static __thread struct {
    int is_configured;
    unsigned char bytes[N_TILES][TILE_ROWS][TILE_BYTES];
} tiles;

static void emulate_loadconfig(const unsigned char config[64]) {
    if (config[0] != 1) __builtin_trap();
    for (int t = 0; t < N_TILES; t++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * t, sizeof bytes);
        if (bytes != TILE_BYTES || config[48 + t] != TILE_ROWS) __builtin_trap();
    }
    tiles.is_configured = 1;
}

static void *tile(int t) {
    if (!tiles.is_configured) __builtin_trap();
    return tiles.bytes[t];
}

static void emulate_loadd(int t, const void *from, int64_t stride) {
    for (int row = 0; row < TILE_ROWS; row++)
        memcpy((char *)tile(t) + TILE_BYTES * row, (const char *)from + stride * row, TILE_BYTES);
}

static void emulate_stored(int t, void *to, int64_t stride) {
    for (int row = 0; row < TILE_ROWS; row++)
        memcpy((char *)to + stride * row, (char *)tile(t) + TILE_BYTES * row, TILE_BYTES);
}

// sums[row][o] += Σ inputs[row][k][i] · weights[k][o][i], over groups k of four values i.
static void emulate_dpbssd(int sums, int inputs, int weights) {
    int32_t(*to)[16] = tile(sums);
    const int8_t(*x)[16][4] = tile(inputs), (*w)[16][4] = tile(weights);
    for (int row = 0; row < TILE_ROWS; row++)
        for (int o = 0; o < 16; o++)
            for (int k = 0; k < 16; k++)
                for (int i = 0; i < 4; i++) to[row][o] += x[row][k][i] * w[k][o][i];
}

// The same, over groups of two values.
static void emulate_dpbf16ps(int sums, int inputs, int weights) {
    float(*to)[16] = tile(sums);
    const uint16_t(*x)[16][2] = tile(inputs), (*w)[16][2] = tile(weights);
    for (int row = 0; row < TILE_ROWS; row++)
        for (int o = 0; o < 16; o++)
            for (int k = 0; k < 16; k++)
                for (int i = 0; i < 2; i++) {
                    const uint32_t wide[2] = {(uint32_t)x[row][k][i] << 16,
                                              (uint32_t)w[k][o][i] << 16};
                    float pair[2];
                    memcpy(pair, wide, sizeof pair);
                    to[row][o] += pair[0] * pair[1];
                }
}

#define _tile_loadconfig(config) emulate_loadconfig((const unsigned char *)(config))
#define _tile_release() (tiles.is_configured = 0)
#define _tile_zero(t) memset(tile(t), 0, sizeof tiles.bytes[t])
#define _tile_loadd emulate_loadd
#define _tile_stored emulate_stored
#define _tile_dpbssd emulate_dpbssd
#define _tile_dpbf16ps emulate_dpbf16ps
