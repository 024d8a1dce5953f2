/* Sorted sets of hashes, compared. */

#include "arrays.h"

#include <string.h>

typedef uint32_t four __attribute__((vector_size(16)));

/* Whether sets, each a start and a count, lie within so many values. */
static int sets_within(const int64_t *starts, const int64_t *counts, int64_t sets, int64_t values) {
    int beyond = 0;
    for (int64_t k = 0; k < sets; k++)
        beyond |= starts[k] < 0 || counts[k] < 0 || counts[k] > values || starts[k] > values - counts[k];
    return !beyond;
}

/* For each pair of sets of `values` (ascending, each value once): how many values up to the pair's bound are in both,
   and how many are in one or both. A set is a start and a count. */
int64_t milldam_compare_sets(const uint32_t *values, int64_t values_count, const int64_t *starts, int64_t sets,
                             const int64_t *counts, int64_t counts_count, const int64_t *first, int64_t pairs,
                             const int64_t *second, int64_t second_count, const uint32_t *bounds, int64_t bounds_count,
                             int64_t *common, int64_t common_count, int64_t *either, int64_t either_count) {
    NEEDS(counts_count == sets && sets_within(starts, counts, sets, values_count));
    NEEDS(second_count == pairs && bounds_count == pairs && common_count == pairs && either_count == pairs);
    NEEDS(are_below(first, pairs, sets) && are_below(second, pairs, sets));
    for (int64_t pair = 0; pair < pairs; pair++) {
        const uint32_t *a = values + starts[first[pair]], *a_end = a + counts[first[pair]];
        const uint32_t *b = values + starts[second[pair]], *b_end = b + counts[second[pair]];
        const uint32_t bound = bounds[pair];
        while (a_end > a && a_end[-1] > bound) a_end--;
        while (b_end > b && b_end[-1] > bound) b_end--;
        const int64_t total = (a_end - a) + (b_end - b);
        four same = {0, 0, 0, 0};
        while (a_end - a >= 4 && b_end - b >= 4) { /* four with four; those whose last is the smaller are done */
            four some;
            memcpy(&some, a, sizeof some);
            same += (four)((some == b[0]) | (some == b[1]) | (some == b[2]) | (some == b[3]));
            const uint32_t x = a[3], y = b[3];
            a += 4 * (x <= y);
            b += 4 * (y <= x);
        }
        int64_t both = (uint32_t)-(same[0] + same[1] + same[2] + same[3]); /* true is all bits: minus one */
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
