/* Pairs of documents: in how many places their signatures agree, and who is dropped for whom. */

#include "arrays.h"

#define AT_ONCE 128

/* For each pair of rows of `size` bytes, how many places are equal. */
int64_t milldam_agreements(const uint8_t *rows, int64_t bytes, int64_t size, const int64_t *first, int64_t pairs,
                           const int64_t *second, int64_t second_count, int64_t *equal, int64_t equal_count) {
    NEEDS(size > 0 && second_count == pairs && equal_count == pairs);
    NEEDS(are_below(first, pairs, bytes / size) && are_below(second, pairs, bytes / size));
    for (int64_t pair = 0; pair < pairs; pair++) {
        const uint8_t *a = rows + first[pair] * size, *b = rows + second[pair] * size;
        int64_t found = 0, at = 0;
        for (; at + AT_ONCE <= size; at += AT_ONCE) { /* a byte is enough to count so many: the compiler takes 16 */
            uint8_t some = 0;
            for (int k = 0; k < AT_ONCE; k++) some += a[at + k] == b[at + k];
            found += some;
        }
        for (; at < size; at++) found += a[at] == b[at];
        equal[pair] = found;
    }
    return pairs;
}

/* Edges in the order of the second: a document is dropped when the first of one of its edges stays. */
int64_t milldam_drop(const int64_t *first, int64_t edges, const int64_t *second, int64_t second_count, uint8_t *dropped,
                     int64_t documents) {
    NEEDS(second_count == edges && are_below(first, edges, documents) && are_below(second, edges, documents));
    for (int64_t edge = 0; edge < edges; edge++) dropped[second[edge]] |= !dropped[first[edge]];
    return edges;
}
