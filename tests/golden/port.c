/* GPT-2 in C, with plain loops and float sums, and with faults to switch on.

   cc -O2 -o port port.c -lm
   ./port model.safetensors golden.safetensors FOLDER N_LAYER N_HEAD FAULT

   It reads the weights from model.safetensors and the ids from golden.safetensors, and writes every
   tap to FOLDER as a .npy file. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *fault;
static const char *folder;
static int is(const char *name) { return strcmp(fault, name) == 0; }

/* A safetensors file: the length of the header in 8 bytes, the header in JSON, the data. */
typedef struct { char *header; char *data; } File;

static File open_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) { perror(path); exit(1); }
    uint64_t length;
    if (fread(&length, 8, 1, f) != 1) exit(1);
    fseek(f, 0, SEEK_END);
    long size = ftell(f) - 8 - (long)length;
    fseek(f, 8, SEEK_SET);
    File file = {malloc(length + 1), malloc(size)};
    if (fread(file.header, 1, length, f) != length) exit(1);
    if (fread(file.data, 1, size, f) != (size_t)size) exit(1);
    file.header[length] = 0;
    fclose(f);
    return file;
}

/* Where the data of a tensor begins; its shape in `shape`. */
static void *tensor(File file, const char *name, long *shape) {
    char key[128];
    const char *entry = NULL;
    const char *prefixes[] = {"", "transformer."};
    for (int p = 0; p < 2 && !entry; p++) {
        snprintf(key, sizeof key, "\"%s%s\":", prefixes[p], name);
        entry = strstr(file.header, key);
    }
    if (!entry) { fprintf(stderr, "no tensor %s\n", name); exit(1); }
    const char *text = strchr(strstr(entry, "\"shape\""), '[');
    for (int n = 0; *text != ']'; n++) shape[n] = strtol(text + 1, (char **)&text, 10);
    text = strchr(strstr(entry, "\"data_offsets\""), '[');
    return file.data + strtol(text + 1, NULL, 10);
}

static File model;
static long shape[8];
static float *weight(const char *format, int layer) {
    char name[128];
    snprintf(name, sizeof name, format, layer);
    return tensor(model, name, shape);
}

/* NumPy's format: magic, version 1.0, the length of a Python dictionary, the data. */
static void save(const char *name, const float *x, const char *shape, long count) {
    char path[512], header[256];
    snprintf(path, sizeof path, "%s/%s.npy", folder, name);
    FILE *f = fopen(path, "wb");
    if (!f) { perror(path); exit(1); }
    int n = snprintf(header, sizeof header,
                     "{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }", shape);
    while ((10 + n + 1) % 64) header[n++] = ' ';
    header[n++] = '\n';
    uint16_t length = n;
    fwrite("\x93NUMPY\x01\x00", 1, 8, f);
    fwrite(&length, 2, 1, f);
    fwrite(header, 1, n, f);
    fwrite(x, 4, count, f);
    fclose(f);
}

static int B, T, C, H, L;

static void tap(int layer, const char *name, const float *x, int width) {
    char full[64], dims[64];
    if (layer < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "h.%d.%s", layer, name);
    snprintf(dims, sizeof dims, "%d, %d, %d", B, T, width);
    save(full, x, dims, (long)B * T * width);
}

static void layer_norm(float *y, const float *x, const float *w, const float *b) {
    float eps = is("eps") ? 1e-6f : 1e-5f;
    for (int n = 0; n < B * T; n++) {
        const float *row = x + n * C;
        float mean = 0, var = 0;
        for (int c = 0; c < C; c++) mean += row[c];
        mean /= C;
        if (is("rms")) mean = 0;
        for (int c = 0; c < C; c++) var += (row[c] - mean) * (row[c] - mean);
        var /= is("unbiased") ? C - 1 : C;
        float scale = 1 / sqrtf(var + eps);
        for (int c = 0; c < C; c++)
            y[n * C + c] = (row[c] - mean) * scale * w[c] + (is("no shift") ? 0 : b[c]);
    }
}

/* y (B·T, out) = x (B·T, in) · w (in, out) + b */
static void linear(float *y, const float *x, const float *w, const float *b, int in, int out,
                   int transposed) {
    for (int n = 0; n < B * T; n++) {
        float *row = y + (long)n * out;
        for (int o = 0; o < out; o++) row[o] = b ? b[o] : 0;
        if (transposed)
            for (int o = 0; o < out; o++)
                for (int k = 0; k < in; k++) row[o] += x[(long)n * in + k] * w[(long)o * in + k];
        else
            for (int k = 0; k < in; k++)
                for (int o = 0; o < out; o++) row[o] += x[(long)n * in + k] * w[(long)k * out + o];
    }
}

static void attention(float *heads, const float *q, const float *k, const float *v, int layer) {
    int D = C / H;
    float scale = is("no scale") ? 1 : is("scale by width") ? 1 / sqrtf(C) : 1 / sqrtf(D);
    float *probs = calloc((long)B * H * T * T, 4);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int t = 0; t < T; t++) {
                float *p = probs + (((long)b * H + h) * T + t) * T;
                int last = is("no mask") ? T - 1 : is("mask sees one more") && t + 1 < T ? t + 1 : t;
                float max = -INFINITY, sum = 0;
                for (int s = 0; s <= last; s++) {
                    p[s] = 0;
                    for (int d = 0; d < D; d++)
                        p[s] += q[(b * T + t) * C + h * D + d] * k[(b * T + s) * C + h * D + d];
                    p[s] *= scale;
                    if (p[s] > max) max = p[s];
                }
                for (int s = 0; s <= last; s++) sum += p[s] = expf(p[s] - max);
                for (int s = 0; s <= last; s++) p[s] /= sum;
                for (int d = 0; d < D; d++) {
                    float total = 0;
                    for (int s = 0; s <= last; s++) total += p[s] * v[(b * T + s) * C + h * D + d];
                    long merged = (long)(b * T + t) * C + h * D + d;
                    long unmerged = ((long)(b * H + h) * T + t) * D + d;
                    heads[is("not merged") ? unmerged : merged] = total;
                }
            }
    char name[64], dims[64];
    snprintf(name, sizeof name, "h.%d.probs", layer);
    snprintf(dims, sizeof dims, "%d, %d, %d, %d", B, H, T, T);
    save(name, probs, dims, (long)B * H * T * T);
    free(probs);
}

static float gelu(float x) {
    if (is("erf")) return 0.5f * x * (1 + erff(x / sqrtf(2)));
    if (is("relu")) return x > 0 ? x : 0;
    return 0.5f * x * (1 + tanhf(sqrtf(2 / M_PI) * (x + 0.044715f * x * x * x)));
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    model = open_file(argv[1]);
    File golden = open_file(argv[2]);
    folder = argv[3], L = atoi(argv[4]), H = atoi(argv[5]), fault = argv[6];
    int64_t *ids = tensor(golden, "input_ids", shape);
    B = shape[0], T = shape[1];
    float *wte = weight("wte.weight", 0);
    int V = shape[0];
    C = shape[1];
    float *wpe = weight("wpe.weight", 0);
    long size = (long)B * T * C;
    float *x = malloc(size * 4), *y = malloc(size * 4), *heads = malloc(size * 4);
    float *q = malloc(size * 4), *k = malloc(size * 4), *v = malloc(size * 4);
    float *wide = malloc(size * 16), *act = malloc(size * 16);
    for (int n = 0; n < B * T; n++)
        for (int c = 0; c < C; c++)
            x[n * C + c] = wte[ids[n] * C + c] + wpe[(n % T + is("offset")) * C + c];
    tap(-1, "embed", x, C);
    for (int i = 0; i < L; i++) {
        layer_norm(y, x, weight("h.%d.ln_1.weight", i), weight("h.%d.ln_1.bias", i));
        tap(i, "ln_1", y, C);
        linear(wide, y, weight("h.%d.attn.c_attn.weight", i), weight("h.%d.attn.c_attn.bias", i), C,
               3 * C, 0);
        float *parts[] = {q, is("swapped") ? v : k, is("swapped") ? k : v};
        for (int n = 0; n < B * T; n++)
            for (int part = 0; part < 3; part++)
                memcpy(parts[part] + n * C, wide + (n * 3 + part) * C, C * 4);
        tap(i, "q", q, C), tap(i, "k", k, C), tap(i, "v", v, C);
        attention(heads, q, k, v, i);
        tap(i, "heads", heads, C);
        linear(y, heads, weight("h.%d.attn.c_proj.weight", i),
               is("no bias") ? NULL : weight("h.%d.attn.c_proj.bias", i), C, C, is("transposed"));
        tap(i, "attn", y, C);
        for (long n = 0; n < size; n++) x[n] = (is("no residual") ? 0 : x[n]) + y[n];
        tap(i, "resid_mid", x, C);
        layer_norm(y, x, weight("h.%d.ln_2.weight", i), weight("h.%d.ln_2.bias", i));
        tap(i, "ln_2", y, C);
        linear(wide, y, weight("h.%d.mlp.c_fc.weight", i), weight("h.%d.mlp.c_fc.bias", i), C,
               4 * C, 0);
        tap(i, "fc", wide, 4 * C);
        for (long n = 0; n < 4 * size; n++) act[n] = gelu(wide[n]);
        tap(i, "act", act, 4 * C);
        linear(y, act, weight("h.%d.mlp.c_proj.weight", i), weight("h.%d.mlp.c_proj.bias", i),
               4 * C, C, 0);
        tap(i, "mlp", y, C);
        for (long n = 0; n < size; n++) x[n] += y[n];
        tap(i, "out", x, C);
    }
    if (!is("no ln_f")) layer_norm(x, x, weight("ln_f.weight", 0), weight("ln_f.bias", 0));
    tap(-1, "ln_f", x, C);
    float *logits = malloc((long)B * T * V * 4);
    linear(logits, x, wte, NULL, C, V, 1);
    tap(-1, "logits", logits, V);
    return 0;
}
