// Runs every path of native.c on models of odd sizes, in memory that ends where the data ends, so
// that the compiler's sanitizers see every access beyond it. Prints the logits of each model.

#include NATIVE_C

#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 1;

static float draw(void) {  // between -0.5 and 0.5
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 16777216.0f - 0.5f;
}

static float *floats(int64_t n, float around) {
    float *made = malloc((size_t)n * sizeof *made);
    for (int64_t i = 0; i < n; i++) made[i] = draw() + around;
    return made;
}

static void *values(enum type type, int64_t n) {
    float *exact = floats(n, 0);
    if (type == FLOAT32) return exact;
    char *made = malloc((size_t)n * (type == INT8 ? 1 : 2));
    for (int64_t i = 0; i < n; i++) {
        if (type == INT8) ((int8_t *)made)[i] = (int8_t)(exact[i] * 254);
        else ((bfloat16 *)made)[i] = to_bfloat16(exact[i]);
    }
    free(exact);
    return made;
}

static Matrix matrix(enum type type, int64_t n_out, int64_t n_in, int bias) {
    float *scale = NULL;
    if (type == INT8) {
        scale = malloc((size_t)n_out * sizeof *scale);
        for (int64_t i = 0; i < n_out; i++) scale[i] = 1 / 254.0f;
    }
    Matrix m = {values(type, n_out * n_in), scale, bias ? floats(n_out, 0) : NULL, n_out, n_in,
                0, NULL, NULL};
    if (type == INT8 && n_in > 40) {
        int64_t *outliers = malloc(2 * sizeof *outliers);
        outliers[0] = 7, outliers[1] = n_in - 1;
        m.n_outliers = 2, m.outliers = outliers, m.outlier_weight = floats(2 * n_out, 0);
    }
    return m;
}

static Norm norm(int64_t C, int bias) {
    return (Norm){floats(C, 1), bias ? floats(C, 0) : NULL, 1e-5f};
}

static void free_matrix(Matrix m) {
    free((void *)m.weight), free((void *)m.scale), free((void *)m.bias);
    free((void *)m.outliers), free((void *)m.outlier_weight);
}

static void free_norm(Norm n) { free((void *)n.weight), free((void *)n.bias); }

// A prompt of M tokens, then a batch of three sequences at positions of their own.
static void run(enum type weights, enum type stored, int64_t kind, int64_t M, int64_t C, int64_t H,
                int64_t inner, int bias) {
    const int64_t L = 2, N = M + 2, V = 31, B = 3, size = stored == FLOAT32 ? 4 : 2;
    Block h[2];
    for (int l = 0; l < L; l++)
        h[l] = (Block){norm(C, bias), norm(C, bias), matrix(weights, 3 * C, C, bias),
                       matrix(weights, C, C, bias), matrix(weights, inner, C, bias),
                       matrix(weights, C, inner, bias), 0.3f, kind};
    Model model = {L, H, C, inner, N, weights, stored, values(stored, V * C), values(stored, N * C),
                   h, norm(C, bias), matrix(weights, V, C, 0)};
    void *kv = calloc((size_t)(L * 2 * B * N * C), (size_t)size);
    float *x = malloc((size_t)(M * C) * sizeof *x), *logits = malloc((size_t)(B * V) * sizeof *x);
    int64_t tokens[40], one[40], prompt[40];
    for (int64_t i = 0; i < M; i++) tokens[i] = 7 * i % V, one[i] = 1, prompt[i] = i;
    const int64_t all[] = {0, 1, 2}, last[] = {N - 1, M, 2};
    void *memory = NULL;
    if (posix_memalign(&memory, ALIGNMENT, (size_t)scratch_size(&model, M, 2))) exit(1);
    Batch batch = {M, tokens, one, prompt, kv, 2 * B * N * C, B * N * C, N * C};
    decode(&model, &batch, M, x, NULL, memory, 2);
    batch.n_rows = B, batch.sequences = all, batch.positions = last;
    decode(&model, &batch, B, x, logits, memory, 1);
    printf("%d %d %d", weights, stored, (int)kind);
    for (int64_t i = 0; i < B * V; i++) printf(" %.6g", logits[i]);
    printf("\n");
    for (int l = 0; l < L; l++) {
        free_norm(h[l].ln_1), free_norm(h[l].ln_2), free_matrix(h[l].c_attn);
        free_matrix(h[l].attn_proj), free_matrix(h[l].c_fc), free_matrix(h[l].mlp_proj);
    }
    free((void *)model.wte), free((void *)model.wpe), free_norm(model.ln_f);
    free_matrix(model.lm_head), free(kv), free(x), free(logits), free(memory);
}

// Quantizes a weight (K, O) and its transpose, which must agree.
static void run_quantize(int64_t K, int64_t O) {
    float *weight = floats(K * O, 0), *transposed = floats(K * O, 0), *kept = floats(K, 1);
    float *scales = floats(2 * O, 0);
    int8_t *found = malloc((size_t)(2 * K * O));
    for (int64_t i = 0; i < K; i++) {
        kept[i] = i % 9 != 5;
        for (int64_t o = 0; o < O; o++) transposed[o * K + i] = weight[i * O + o];
    }
    quantize_by_inputs(weight, kept, K, O, found, scales);
    quantize_by_outputs(transposed, kept, K, O, found + K * O, scales + O);
    if (memcmp(found, found + K * O, (size_t)(K * O))) exit(2);
    if (memcmp(scales, scales + O, (size_t)O * sizeof *scales)) exit(3);
    free(weight), free(transposed), free(kept), free(scales), free(found);
}

int main(void) {
    for (int weights = FLOAT32; weights <= INT8; weights++)
        for (int stored = FLOAT32; stored <= BFLOAT16; stored++) {
            run(weights, stored, GELU_TANH, 3, 96, 2, 384, 1);
            run(weights, stored, GELU, 3, 42, 6, 67, 0);
            run(weights, stored, GELU_TANH, 40, 96, 2, 67, 1);
            run(weights, stored, SILU, 19, 42, 6, 2001, 0);
        }
    for (int kind = QUICK_GELU; kind <= TANH; kind++)
        run(FLOAT32, FLOAT32, kind, 3, 26, 2, 50, 1);
    run(FLOAT32, FLOAT32, GELU_TANH, 3, 3, 1, 5, 1);
    run(INT8, FLOAT32, GELU_TANH, 17, 3, 1, 5, 1);
    run_quantize(64, 64), run_quantize(67, 101), run_quantize(128, 200);
    return 0;
}
