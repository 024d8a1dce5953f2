/* Sorted sets of hashes, compared. */

#include <stdint.h>

/* For each pair of sets of `values` (ascending, each value once): how many values up to the pair's bound are in both,
   and how many are in one or both. A set is a start and a count. */
int64_t milldam_compare_sets(const uint32_t *values, const int64_t *starts, const int64_t *counts, const int64_t *first,
                          const int64_t *second, const uint32_t *bounds, int64_t pairs, int64_t *common,
                          int64_t *either) {
    for (int64_t pair = 0; pair < pairs; pair++) {
        const uint32_t *a = values + starts[first[pair]], *a_end = a + counts[first[pair]];
        const uint32_t *b = values + starts[second[pair]], *b_end = b + counts[second[pair]];
        const uint32_t bound = bounds[pair];
        while (a_end > a && a_end[-1] > bound) a_end--;
        while (b_end > b && b_end[-1] > bound) b_end--;
        const int64_t total = (a_end - a) + (b_end - b);
        int64_t both = 0;
        while (a < a_end && b < b_end) { /* no branch to guess wrong: all three are additions of a comparison */
            const uint32_t x = *a, y = *b;
            both += x == y;
            a += x <= y;
            b += y <= x;
        }
        common[pair] = both;
        either[pair] = total - both;
    }
    return pairs;
}
