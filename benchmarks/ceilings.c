/* What this machine can do at most: ceilings MIB... prints one JSON line each for read bandwidth over arrays of that
 * many MiB, and one for float32 multiply-adds in registers. Threads are OpenMP's.
 *     cc -O3 -march=native -ffp-contract=fast -fopenmp ceilings.c -o ceilings && OMP_NUM_THREADS=2 ./ceilings 128 512 */
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PASSES = 9, STREAMS = 4, CHAINS = 12, ROUNDS = 20000000 };

/* As wide as the registers that -march=native has. */
#if defined(__AVX512F__)
typedef float vec __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef float vec __attribute__((vector_size(32)));
#else
typedef float vec __attribute__((vector_size(16)));
#endif

/* Sums a part of an array; several streams keep more lines in flight. */
static long sum(const long *from, size_t words) {
    size_t part = words / STREAMS;
    long total[STREAMS] = {0};
    for (size_t i = 0; i < part; i++)
        for (int s = 0; s < STREAMS; s++) total[s] += from[s * part + i];
    return total[0] + total[1] + total[2] + total[3];
}

static void read_bandwidth(size_t mib) {
    size_t words = mib << 17;
    long *array = aligned_alloc(2 << 20, words * sizeof *array), check = 0;
    if (!array) exit(1);
    madvise(array, words * sizeof *array, MADV_HUGEPAGE);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < words; i++) array[i] = (long)i;
    double best = 1e30;
    for (int pass = 0; pass < PASSES; pass++) {
        double start = omp_get_wtime();
#pragma omp parallel reduction(+ : check)
        check += sum(array + words / omp_get_num_threads() * omp_get_thread_num(), words / omp_get_num_threads());
        double took = omp_get_wtime() - start;
        if (took < best) best = took;
    }
    printf("{\"what\": \"read\", \"mib\": %zu, \"threads\": %d, \"gb_s\": %.2f, \"check\": %ld}\n", mib,
           omp_get_max_threads(), words * 8 / best / 1e9, check);
    free(array);
}

static void multiply_adds(void) {
    double best = 1e30;
    float check = 0;
    for (int pass = 0; pass < 3; pass++) {
        double start = omp_get_wtime();
#pragma omp parallel reduction(+ : check)
        {
            vec chain[CHAINS], by = (vec){} + 0.999f, plus = (vec){} + 0.001f;
            for (int c = 0; c < CHAINS; c++) chain[c] = (vec){} + (float)c;
            for (long round = 0; round < ROUNDS; round++)
                for (int c = 0; c < CHAINS; c++) chain[c] = chain[c] * by + plus;
            for (int c = 0; c < CHAINS; c++) check += chain[c][0];
        }
        double took = omp_get_wtime() - start;
        if (took < best) best = took;
    }
    double flops = 2.0 * sizeof(vec) / 4 * CHAINS * ROUNDS * omp_get_max_threads();
    printf("{\"what\": \"float32 multiply-add\", \"threads\": %d, \"gflop_s\": %.1f, \"check\": %f}\n",
           omp_get_max_threads(), flops / best / 1e9, (double)check);
}

int main(int count, char **arguments) {
    for (int i = 1; i < count; i++) read_bandwidth(strtoul(arguments[i], 0, 10));
    multiply_adds();
    return 0;
}
